"""Base of handles without `await`, and methods that are derived from those of the Trio handle inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial, wraps
from types import FunctionType, TracebackType
from typing import Any, Concatenate, Generic, Never, ParamSpec, Self, TypeGuard, TypeVar, cast

from trimesh._wire.exceptions.tracebacks import shortens_tracebacks
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.blocking.work import AnyBody, Each, FacedBody, body_of, wait, wait_now
from trimesh.events import Event, MembershipView
from trimesh.shape.extent import Extent
from trimesh.shape.value_mesh import Shaped

P = ParamSpec("P")
S = TypeVar("S")
ObjectT = TypeVar("ObjectT")
InnerT = TypeVar("InnerT", bound=Shaped)
T = TypeVar("T")


class EventStream(Each[Event]):
    """What one reader reads: `for event in events`. It ends when the mesh has stopped."""


class MembershipViews(Each[MembershipView]):
    """Who is in a mesh, as one reader reads it: `for view in views`. It ends when the mesh has stopped."""


class ClosedByBlock(ABC):
    """Something that is closed, and closed as well by the end of a `with` block around it."""

    @abstractmethod
    def close(self, /) -> None:
        """Close it."""

    def __enter__(self) -> Self:
        """Return it; the end of the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class FacedObject(Generic[ObjectT]):
    """An object of `trimesh` without `await`. Sent to an actor it is that object."""

    def __init_subclass__(cls) -> None:
        """Shorten tracebacks of all its methods: a cell of a notebook has no block that does."""
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, shortens_tracebacks(method))

    def __init__(self, inner: ObjectT, home: AnyBody | None = None) -> None:
        self._inner = inner
        self._home = home

    def _wait(self, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        return wait(bound(function, args, kwargs), self._home)

    def _now(self, function: Callable[[], T]) -> T:
        return wait_now(function, self._home)

    def _seen(self, inner: ObjectT) -> Self:
        return type(self)(inner, self._home)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> Any:
        return self._inner.__reduce__()


# ---- methods of the objects inside: `kill = waits(proc_mesh.ProcMesh.kill)` ------------------------------------------

# Signature and docstring are those of the method that is given. In a generic class, methods whose types have parameters
# of the class are written out instead: pyright takes such parameters for Any in the calls below.


class Attribute(Generic[ObjectT, T]):
    """An attribute of the object inside: `files = Attribute[Synced, int](lambda synced: synced.files)`."""

    def __init__(self, read: Callable[[ObjectT], T]) -> None:
        self._read = read

    def __get__(self, instance: FacedObject[Any] | None, owner: object = None) -> T:
        return cast("T", self) if instance is None else self._read(instance._inner)  # noqa: SLF001

    def __set__(self, instance: object, value: Never) -> None:
        raise AttributeError("attributes of handles cannot be set")


def waits(method: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that waits for an async one of the object inside."""
    return mirrored(method, lambda self, call: wait(call, self._home))


def calls_in_trio(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls a plain one in the thread of Trio."""
    return mirrored(method, lambda self, call: wait_now(call, self._home))


def calls_here(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls a plain one in this thread."""
    return mirrored(method, lambda _, call: call())


def returns_face(method: Callable[Concatenate[Any, P], object]) -> Callable[Concatenate[S, P], S]:
    """Return a method that returns the result of another in the class of its object: a view, a clone."""

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._seen(method(self, *args, **kwargs))

    return cast("Callable[Concatenate[S, P], S]", call)


def enters(
    method: Callable[Concatenate[Any, P], AbstractAsyncContextManager[T]], what: str
) -> Callable[Concatenate[Any, P], AbstractContextManager[T]]:
    """Return a method whose block is entered by `with`; `what` names it in errors, `{0}` is the object."""
    return mirrored(method, lambda self, call: body_of(call(), what.format(self), self._home))


def mirrored(
    method: Callable[Concatenate[Any, P], Any], act: Callable[[FacedObject[Any], partial[Any]], T]
) -> Callable[Concatenate[Any, P], T]:
    """Return a method with the name and docstring of another; `act` gets the object, and a call of the one inside."""
    name = method.__name__

    @wraps(method)
    def call(self: FacedObject[Any], /, *args: Any, **kwargs: Any) -> Any:
        return act(self, bound(getattr(self._inner, name), args, kwargs))

    call.__doc__ = (method.__doc__ or "").replace("async ", "").replace("await ", "")
    return call


class FacedHandle(FacedObject[InnerT]):
    """A mesh without `await`. Sent to an actor it is the handle of `trimesh`."""

    name = Attribute[Any, str](lambda mesh: str(mesh.name))
    extent = Attribute[Shaped, Extent](lambda mesh: mesh.extent)
    size = calls_here(Shaped.size)
    points = calls_here(Shaped.points)
    slice = returns_face(calls_here(Shaped.slice))
    flatten = returns_face(calls_here(Shaped.flatten))
    split = returns_face(calls_here(Shaped.split))
    rename = returns_face(calls_here(Shaped.rename))
    exclude = returns_face(calls_here(Shaped.exclude))
    alive = returns_face(calls_in_trio(Shaped.alive))
    statistics = calls_in_trio(ProcMesh.statistics)

    def __len__(self) -> int:
        """Return the number of members that are not missing."""
        return len(self._inner)

    def events(self) -> AbstractContextManager[EventStream]:
        """Read what happens to the members: `with mesh.events() as events: for event in events`."""
        mesh: Any = self._inner
        body = body_of(mesh.events(), f"the events of {self.name}", self._home)
        return FacedBody(body, lambda events: EventStream(events, self._home))

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the members that live. A block that has failed is told by the next call."""

        async def show() -> str:
            return self._inner._repr_html_()

        return wait(show)


def itself(value: T) -> T:
    """Return what it is given: what a message puts an object together by that stands for another one."""
    return value


def _is_faced(value: Any) -> TypeGuard[FacedObject[Any]]:
    return isinstance(value, FacedObject)


def inner_of(value: Any) -> Any:
    """Return what an argument of a call stands for, if it stands for something of `trimesh`."""
    return value._inner if _is_faced(value) else value  # noqa: SLF001


def home_of(value: Any) -> AnyBody | None:
    """Return the block that a handle belongs to, if it is one of this library."""
    return value._home if _is_faced(value) else None  # noqa: SLF001


def bound(function: Callable[..., T], args: Iterable[Any], kwargs: Mapping[str, Any]) -> partial[T]:
    """Return a call with what its arguments stand for."""
    return partial(function, *map(inner_of, args), **{name: inner_of(value) for name, value in kwargs.items()})
