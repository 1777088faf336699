"""`per_rank`: an argument of which each member of a view gets its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeVar, cast, overload

import msgspec

from trimesh.errors import ShapeError, place_name
from trimesh.shape.extent import Point
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh

T = TypeVar("T")

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one call: positional, and by keyword."""


class PerRank:
    """Stands for an argument until it is known which members are called.

    Attributes:
        values: As `per_rank` takes them.
    """

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values

    def of(self, region: Region, what: str) -> Sequence[Any]:
        """Return the value of each member of a view, in its order.

        Raises:
            ShapeError: There is not one for each member, or one for another.
        """
        values, points = self.values, [*region.points()]
        if isinstance(values, ValueMesh | Mapping):
            given = cast("Mapping[Point, Any]", values)
            found = {_key(point): value for point, value in given.items()}
            wanted = [_key(point) for point in points]
            if found.keys() != set(wanted):
                text = f"per_rank needs a value for each member of {what}, {_list(points)}"
                raise ShapeError(f"{text}; got {_list(point for point, _ in given.items()) or 'none'}")
            return [found[key] for key in wanted]
        if isinstance(values, Sized):
            if len(values) != len(points):
                text = f"per_rank needs a value for each of the {len(points)} members of {what}"
                raise ShapeError(f"{text}, got {len(values)}")
            return [*cast("Sequence[Any]", values)]
        return [values(point) for point in points]

    def __reduce__(self) -> Any:
        raise TypeError(
            "per_rank(...) must be an argument of an endpoint by itself, got one inside of another value: "
            "build the whole argument for each member, and give per_rank those"
        )


@overload
def per_rank(values: ValueMesh[T], /) -> T: ...
@overload
def per_rank(values: Mapping[Point, T], /) -> T: ...
@overload
def per_rank(values: Sequence[T], /) -> T: ...
@overload
def per_rank(values: Callable[[Point], T], /) -> T: ...
def per_rank(values: Any, /) -> Any:
    """Give each member that is called an argument of its own: `await mesh.load.call(trimesh.per_rank(shards))`.

    For every verb that calls members: `call`, `call_settled`, `call_one`, `choose`, `broadcast`, `stream`. What it
    returns goes where the argument goes, by position or by keyword, beside others that all members get; for type
    checkers it is such an argument. Each value is encoded once, for its member alone.

    Args:
        values: One for each member of the view that is called: a `ValueMesh` or a mapping by point, a sequence in the
            order of the view, or a function of the point. Points are those of the view.

    Raises:
        TypeError: It is none of these. (A wrong number of values is a `ShapeError` where the endpoint is called.)

    Example:
        >>> sizes = per_rank([10, 20, 30, 40])
        >>> names = per_rank(lambda point: f"rank {point['gpus']}")
    """
    is_text = isinstance(values, str | bytes | bytearray)
    is_sequence = isinstance(values, Sized) and hasattr(type(values), "__getitem__")
    if is_text or not (isinstance(values, ValueMesh | Mapping) or is_sequence or callable(values)):
        raise TypeError(
            f"per_rank needs a ValueMesh, a mapping by point, a sequence, or a function of the point, got {values!r}"
        )
    return PerRank(values)


class Spread(msgspec.Struct, frozen=True):
    """Arguments of which some differ from member to member.

    Attributes:
        of_rank: Those of each member, by base rank.
    """

    of_rank: Mapping[int, Call]


def spread(region: Region, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spread:
    """Return the arguments for each member of a view.

    Raises:
        ShapeError: A `per_rank` among them does not fit the view.
    """
    by_place = [_column(arg, region, what) for arg in args]
    by_name = {name: _column(arg, region, what) for name, arg in kwargs.items()}
    return Spread(
        {
            rank: (tuple(column[index] for column in by_place), {name: by_name[name][index] for name in by_name})
            for index, rank in enumerate(region.ranks())
        }
    )


def _column(arg: Any, region: Region, what: str) -> Sequence[Any]:
    return arg.of(region, what) if type(arg) is PerRank else [arg] * len(region)


def _key(given: Any) -> frozenset[tuple[str, int]]:
    if not isinstance(given, Mapping):
        raise ShapeError(f"per_rank takes a mapping by point, as mesh.points() gives them, got the key {given!r}")
    return frozenset(cast("Mapping[str, int]", given).items())


def _list(points: Iterable[Mapping[str, int]]) -> str:
    return ", ".join(place_name("", point) for point in points)
