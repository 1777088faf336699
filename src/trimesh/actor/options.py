"""Options of a call, passed beside its arguments (rule C6); `per_rank`; errors for misspelt names."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Final, Literal, TypeVar, cast, get_args, overload

import msgspec
from msgspec.structs import force_setattr

from trimesh import limits
from trimesh._runtime.channels import Port
from trimesh._runtime.values import EndpointKind, EndpointSpec
from trimesh._supervision.policy import Backoff
from trimesh._wire.exceptions.tracebacks import without_own_frames
from trimesh.errors import ProcDied, ShapeError, place_name
from trimesh.plain_numbers import plain_real, plain_whole, real_number, suggestion, whole_number
from trimesh.shape.extent import Point
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh

_F = TypeVar("_F", bound=Callable[..., Any])

Merge = Literal["fail_fast", "collect"]
"""Effect of a failed member on the others."""

Members = Literal["seen", "follow"]
"""Members to call of a resized mesh: those that the handle shows, or the current ones."""


def _types(on: Any) -> tuple[type[Exception], ...]:
    found: list[Any] = [*on] if isinstance(on, tuple) else [on]
    if not found or not all(isinstance(one, type) and issubclass(one, Exception) for one in found):
        raise TypeError(f"Retry needs on= one or more exception classes, got {on!r}")
    return tuple(found)


class _Attempts(msgspec.Struct, frozen=True):
    """The fields of `Retry` that may be positional."""

    max: int
    on: tuple[type[Exception], ...] = (ProcDied,)
    backoff: float | Backoff | Callable[[int], float] = 0.0


class Retry(_Attempts, frozen=True, kw_only=True):
    """Retry rule for calls of an idempotent endpoint: number of attempts and errors to retry.

    Attributes:
        max: Maximum number of retries, at least 1.
        on: Exception classes to retry after.
        backoff: Delay before a retry: seconds, a `Backoff`, or a function from the number of the failed attempt (from
            1) to seconds.
        whole: Whether `call` calls all ranks again, not only those that failed: ranks that meet in a collective need
            it. None: only if the policy of the mesh is `Restart("one_for_all")`, which restarts all of them.

    Raises:
        ValueError: `max` is no positive whole number, or `backoff` is negative or no number.
        TypeError: `on` has no exception class, or something else.

    Example:
        >>> Retry(2, on=(ProcDied, ConnectionError), backoff=Backoff(0.1, cap=5)).delay(2)
        0.2
    """

    whole: bool | None = None

    def __post_init__(self) -> None:
        found = plain_whole(self.max)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ValueError(f"Retry needs max >= 1, the number of further attempts, got {found!r}")
        backoff = plain_real(self.backoff)
        if not isinstance(backoff, Backoff) and not callable(backoff):
            _check_seconds(backoff)
        force_setattr(self, "max", found)
        force_setattr(self, "on", _types(self.on))
        force_setattr(self, "backoff", backoff)

    def wants(self, error: Exception, attempt: int) -> bool:
        """Return whether to retry a call whose attempt number `attempt`, from 1, failed with `error`."""
        return attempt <= self.max and isinstance(error, self.on)

    def delay(self, attempt: int, luck: float = 0.0) -> float:
        """Return the seconds to wait after the failure of attempt number `attempt`; `luck`, 0 to 1, sets the jitter."""
        if isinstance(self.backoff, Backoff):
            return self.backoff.delay(attempt, luck)
        return _check_seconds(self.backoff(attempt)) if callable(self.backoff) else self.backoff


def _check_seconds(seconds: Any) -> float:
    found = real_number(seconds)
    if found is None or not 0 <= found < math.inf:
        raise ValueError(f"the backoff of a Retry must be a number of seconds >= 0, got {seconds!r}")
    return found


class Options(msgspec.Struct, frozen=True):
    """Arguments of `Endpoint.options`; None where omitted.

    Attributes:
        merge: For `stream` and `map`.
        window: For `stream` and `map`.
        retry: For the verbs that have one result for each message.
        abandon_after: For all verbs that wait for results.
        choose: For `stream`.
        reply_to: For `broadcast`.
        members: For all verbs.
    """

    merge: Merge | None = None
    window: int | None = None
    retry: Retry | None = None
    abandon_after: float | None = None
    choose: bool | None = None
    reply_to: Port[Any] | None = None
    members: Members | None = None

    def check(self, spec: EndpointSpec) -> None:
        """Check that the options apply to an endpoint.

        Raises:
            TypeError: A value has the wrong type, or the endpoint must not be retried.
            ValueError: A value is outside its bounds.
        """
        if self.merge is not None and self.merge not in get_args(Merge):
            raise ValueError(f'merge must be "fail_fast" or "collect", got {self.merge!r}')
        if self.members is not None and self.members not in get_args(Members):
            raise ValueError(f'members must be "seen" or "follow", got {self.members!r}')
        if self.window is not None:
            check_window(self.window)
        if self.abandon_after is not None:
            _check_abandon_after(self.abandon_after)
        if not isinstance(self.choose, bool | None):
            raise TypeError(f"choose must be True or False, got {self.choose!r}")
        if not isinstance(self.reply_to, Port | None):
            raise TypeError(f"reply_to must be a trimesh.Port, got {self.reply_to!r}")
        if self.retry is None:
            return
        if not isinstance(self.retry, Retry):
            raise TypeError(f"retry must be a trimesh.Retry, got {self.retry!r}")
        if spec.kind is EndpointKind.GENERATOR:
            raise TypeError(
                f"retry= is for calls with one result, and {spec.name} is an async generator, whose items cannot be "
                "taken back: leave it out"
            )
        if not spec.idempotent:
            raise TypeError(
                f"only an endpoint that may run twice can be retried: if {spec.name} may, "
                "mark it with @endpoint(idempotent=True)"
            )

    def check_verb(self, name: str, verb: str) -> None:
        """Check that the options apply to a verb.

        Raises:
            TypeError: An option is set that does not apply to the verb.
        """
        known = _OPTIONS_OF.get(verb, ())
        for option in self.__struct_fields__:
            if option not in known and option != "members" and getattr(self, option) is not None:
                verbs = ", ".join(one for one, options in _OPTIONS_OF.items() if option in options)
                raise TypeError(f"the option {option} of {name} means nothing for {verb}; it is for: {verbs}")

    @property
    def is_fail_fast(self) -> bool:
        """True if the first failure cancels the others."""
        return self.merge != "collect"


_OPTIONS_OF = {
    "call": ("retry", "abandon_after"),
    "call_settled": ("abandon_after",),
    "call_reduced": ("abandon_after",),
    "call_one": ("retry", "abandon_after"),
    "choose": ("retry", "abandon_after"),
    "stream": ("merge", "window", "abandon_after", "choose"),
    "map": ("merge", "window", "retry", "abandon_after"),
    "broadcast": ("reply_to",),
}
"""Options by verb; `broadcast_nowait` has none."""

NO_OPTIONS = Options()


def _check_abandon_after(seconds: Any) -> None:
    found = real_number(seconds)
    if found is None:
        raise TypeError(f"abandon_after must be a number of seconds, got {seconds!r}")
    if not 0 <= found < math.inf:
        raise ValueError(
            f"abandon_after must be at least 0 seconds and finite, got {seconds!r}: leave it out for "
            f"limits.CANCEL_ACK_SECONDS ({limits.CANCEL_ACK_SECONDS:g})"
        )


def check_window(window: Any) -> int:
    """Return `window` after checking it.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below 1 or above `limits.STREAM_WINDOW_MAX`.
    """
    found = whole_number(window)
    if found is None:
        raise TypeError(f"window must be a whole number of items, got {window!r}")
    if not 1 <= found <= limits.STREAM_WINDOW_MAX:
        raise ValueError(
            f"window must be at least 1 and at most limits.STREAM_WINDOW_MAX ({limits.STREAM_WINDOW_MAX}), got {window}"
        )
    return found


def suggests_keywords(function: _F) -> _F:
    """Decorate a function of many keywords: its error for an unknown one suggests the nearest.

    Tracebacks of its errors leave out its own frames.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            text = misspelt(function, error)
            if text is None:
                without_own_frames(error)
                raise
        raise TypeError(text)

    return cast("_F", call)


# ---- `per_rank`: an argument with a value for each member of a view --------------------------------------------------

T = TypeVar("T")

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one call: positional, and by keyword."""


class PerRank:
    """Placeholder of an argument until the called members are known.

    Attributes:
        values: Argument of `per_rank`.
    """

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values

    def of(self, region: Region, what: str) -> Sequence[Any]:
        """Return the value of each member of a view, in its order.

        Raises:
            ShapeError: The values are not exactly one for each member.
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
            "per_rank(...) must be a whole argument of an endpoint, got one inside another value: build the argument "
            "of each member, and pass per_rank all of them"
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
    """Give each called member its own value of an argument: `await mesh.load.call(trimesh.per_rank(shards))`.

    For every verb that calls members: `call`, `call_settled`, `call_one`, `choose`, `broadcast`, `stream`. Pass the
    result in place of the argument, by position or by keyword; its type for checkers is that of one value. Each value
    is encoded once, for its member alone.

    Args:
        values: One for each member of the view that is called: a `ValueMesh` or a mapping by point, a sequence in the
            order of the view, or a function of the point. Points are those of the view.

    Raises:
        TypeError: It is none of these. A wrong number of values raises a `ShapeError` when the endpoint is called.

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
    """Arguments that differ between members.

    Attributes:
        of_rank: Arguments of each member, by base rank.
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


# ---- errors for names that handles and actor classes do not have: misspelt ones, and those of other libraries --------

_UNEXPECTED: Final = r"got an unexpected keyword argument '(?P<name>\w+)'$"
"""Text of Python's error without a suggestion; from 3.13 on it suggests a near name itself."""

_VERBS: Final = (
    "call", "call_one", "call_settled", "call_reduced", "choose", "broadcast", "broadcast_nowait", "stream", "map",
    "options",
)  # fmt: skip

_ELSEWHERE: Final = frozenset(("get", "remote", "result", "rref", "submit"))
"""Names of endpoints, tasks and futures in Ray, Monarch and `concurrent.futures`."""


def no_attribute(cls: type, name: str) -> AttributeError:
    """Return the error for an attribute that actor classes have in Ray but not here."""
    return AttributeError(
        f"an actor class has no {name!r}: write `await procs.spawn('name', {cls.__name__}, ...)`, in a block "
        "`async with this_host().spawn_procs(...) as procs:`",
        name=name,
    )


def no_endpoint(cls: type, name: str, known: Iterable[str], attributes: Iterable[str]) -> AttributeError:
    """Return the error for an endpoint that a mesh of `cls` does not have.

    Args:
        cls: The actor class.
        name: The attribute that was used.
        known: Endpoints of the class.
        attributes: Other names that a mesh has.
    """
    if inspect.isfunction(getattr(cls, name, None)):
        text = f"{cls.__qualname__}.{name} is no endpoint: write @endpoint above its `def` to call it on a mesh"
    else:
        near = suggestion(name, [*known, *attributes])
        names = ", ".join(sorted(known)) or "none"
        text = f"{cls.__qualname__} has no endpoint {name!r}{near}; its endpoints are: {names}"
    return AttributeError(text, name=name)  # without it Python adds a suggestion of its own


def no_verb(endpoint: str, name: str) -> AttributeError:
    """Return the error for an unknown verb, written after `endpoint`."""
    if name in _ELSEWHERE:
        text = (
            f"an endpoint has no {name!r}: write `await {endpoint}.call(...)` for all members, .call_one for a mesh of "
            "one, .choose for any one, or .call.start(...) to await later"
        )
    else:
        text = f"an endpoint has no verb {name!r}{suggestion(name, _VERBS)}; its verbs are: {', '.join(_VERBS)}"
    return AttributeError(text, name=name)


def misspelt(function: Callable[..., Any], error: Exception) -> str | None:
    """Return the text for a keyword that a function does not have; None for any other error."""
    is_of_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
    found = re.search(_UNEXPECTED, str(error)) if is_of_call and isinstance(error, TypeError) else None
    if found is None:
        return None
    keywords = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"{error}{suggestion(found['name'], keywords)}: there are {', '.join(keywords)}"
