"""What the items of a channel are, where nothing is pickled: the T of `open_channel(T)`, which travels with each port.

    T      = any | none | rest | class, module, name | of, T, T ... | or, T, T ...          each a tuple of its parts

IT-1 It names classes as all values do (TY-1), and makes nothing of them but containers, unions and ports.
IT-2 It is put together when the first item is sent, so a port can pass through a process that has not got the class.
"""

from __future__ import annotations

import types
import typing
from typing import Any, Final, TypeGuard

from trimesh import limits
from trimesh._wire.typed.annotations import ABSTRACT, CONTAINERS, Field, field_of
from trimesh._wire.typed.kinds import DecodeSource, kind_meant
from trimesh._wire.typed.known_kinds import name_of, thing_named
from trimesh.errors import PayloadError, ProtocolError

WHAT: Final = "an item of a channel"

_SIMPLE: Final[dict[Any, str]] = {Any: "any", object: "any", types.NoneType: "none", None: "none", ...: "rest"}
_MADE: Final[dict[str, Any]] = {"any": Any, "none": types.NoneType, "rest": ...}


class ItemType:
    """The T of one channel, in one process.

    Attributes:
        described: As it travels.
        may_import: Whether whoever has sent it may let this process import modules.
    """

    __slots__ = ("_field", "described", "may_import")

    def __init__(self, described: tuple[Any, ...], *, may_import: bool = False, field: Field | None = None) -> None:
        self.described = described
        self.may_import = may_import
        self._field = field

    @property
    def field(self) -> Field:
        """How items travel.

        Raises:
            PayloadError: The type cannot be had in this process.
        """
        if self._field is None:
            try:
                self._field = field_of(WHAT, _put_together(self.described, DecodeSource(self.may_import)))
            except (TypeError, ValueError) as error:
                raise PayloadError(f"the type of the items of a channel cannot be had: {error}") from error
        return self._field


def item_type_of(annotation: Any) -> ItemType:
    """Return the T of a channel that is opened here.

    Raises:
        TypeError: Nothing of this type can travel, or it has no name elsewhere; the text says why.
    """
    described = _take_apart(annotation, limits.ITEM_TYPE_DEPTH)
    return ItemType(described, field=field_of(WHAT, annotation))


def item_type_described(described: Any, *, may_import: bool) -> ItemType:
    """Return the T of a channel as a peer has described it.

    Raises:
        ProtocolError: This describes none.
    """
    _check(described, limits.ITEM_TYPE_DEPTH)
    return ItemType(described, may_import=may_import)


def _take_apart(annotation: Any, depth: int) -> tuple[Any, ...]:
    if not depth:
        raise TypeError(f"the items of a channel may be nested {limits.ITEM_TYPE_DEPTH} types deep at most")
    parts = typing.get_args(annotation)
    origin: Any = typing.get_origin(annotation)
    if origin is not None:
        inner = [_take_apart(part, depth - 1) for part in parts]
        if origin in (typing.Union, types.UnionType):
            return "or", *inner
        if _is_container(origin):
            return "of", _take_apart(origin, depth - 1), *inner
    elif isinstance(annotation, type | types.EllipsisType | None) or annotation is Any:
        simple = _SIMPLE.get(annotation)
        return (
            (simple,) if simple is not None else ("class", *name_of(annotation, "the type of the items of a channel"))
        )
    raise TypeError(
        f"the items of a channel must be of a class, a union of classes or a container of them with pickle='off', "
        f"got {annotation!r}: make a class that holds it"
    )


def _is_container(origin: Any) -> bool:
    return origin in CONTAINERS | ABSTRACT or (isinstance(origin, type) and kind_meant(origin) is not None)


def _is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _check(described: object, depth: int) -> None:
    if not (depth and _is_tuple(described) and described):
        raise ProtocolError(f"the type of the items of a channel must be described by tuples, got {described!r:.100}")
    head, *parts = described
    if head in ("of", "or") and parts:
        for part in parts:
            _check(part, depth - 1)
    elif not (
        (isinstance(head, str) and head in _MADE and not parts)
        or (head == "class" and len(parts) == 2 and all(isinstance(part, str) for part in parts))
    ):
        raise ProtocolError(f"the type of the items of a channel must be described, got {described!r:.100}")


def _put_together(described: tuple[Any, ...], source: DecodeSource) -> Any:
    head, *parts = described
    if head in _MADE:
        return _MADE[head]
    if head == "class":
        found = thing_named(source, *parts)
        if not isinstance(found, type):
            raise TypeError(f"{parts[0]}.{parts[1]} must be a class, got a {type(found).__qualname__}")
        return found
    made = [_put_together(part, source) for part in parts]
    if head == "or":
        return typing.Union[tuple(made)]  # noqa: UP007 - made from a tuple
    origin, *inner = made
    if not _is_container(origin):
        raise TypeError(f"{origin!r} is no container")
    return origin[tuple(inner)]
