"""What handles without `await` have in common: the handle of Trio inside, the block, shape and views."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeGuard, TypeVar

from trimesh._wire.exceptions.frames import shortens_tracebacks
from trimesh.blocking.body import AnyBody, FacedBody, body_of
from trimesh.blocking.work import Each, wait, wait_now
from trimesh.events.membership import MembershipView
from trimesh.events.records import Event
from trimesh.shape.shaped import Shaped

if TYPE_CHECKING:
    from builtins import slice as Slice  # noqa: N812
    from contextlib import AbstractContextManager

    from trimesh._runtime.watch import MeshStatistics
    from trimesh.shape.extent import Extent
    from trimesh.shape.point import Point

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
    def close(self) -> None:
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
        return wait(lambda: function(*args, **kwargs), self._home)

    def _now(self, function: Callable[[], T]) -> T:
        return wait_now(function, self._home)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> Any:
        return self._inner.__reduce__()


class FacedHandle(FacedObject[InnerT]):
    """A mesh without `await`. Sent to an actor it is the handle of `trimesh`."""

    @property
    def name(self) -> str:
        """Name given at spawn."""
        return str(self._any.name)

    @property
    def extent(self) -> Extent:
        """Labels and sizes of this view, missing members included."""
        return self._inner.extent

    def size(self, dim: str | None = None) -> int:
        """Return the size along `dim`, or the number of points of the extent; see `Shaped.size`."""
        return self._inner.size(dim)

    def __len__(self) -> int:
        """Return the number of members that are not missing."""
        return len(self._inner)

    def points(self) -> Iterator[Point]:
        """Yield the coordinates, in this view, of its members."""
        return self._inner.points()

    def slice(self, **selection: int | Slice) -> Self:
        """Return a part: an int removes its dimension, a slice keeps it; see `Shaped.slice`."""
        return self._seen(self._inner.slice(**selection))

    def flatten(self, label: str) -> Self:
        """Return the members along one dimension called `label`."""
        return self._seen(self._inner.flatten(label))

    def split(self, **parts: Sequence[str] | int) -> Self:
        """Return the members with a dimension split in two or more; see `Shaped.split`."""
        return self._seen(self._inner.split(**parts))

    def rename(self, **labels: str) -> Self:
        """Return the members with other labels."""
        return self._seen(self._inner.rename(**labels))

    def exclude(self, points: Iterable[Mapping[str, int]]) -> Self:
        """Return the members without some; see `Shaped.exclude`."""
        return self._seen(self._inner.exclude(points))

    def alive(self) -> Self:
        """Return the view without the members whose end is known here."""
        return self._seen(self._now(self._any.alive))

    def statistics(self) -> MeshStatistics:
        """Return what this process knows of the members of this view; see `trimesh.ProcMesh.statistics`."""
        found: MeshStatistics = self._now(self._any.statistics)
        return found

    def events(self) -> AbstractContextManager[EventStream]:
        """Read what happens to the members: `with mesh.events() as events: for event in events`."""
        body = body_of(self._any.events(), f"the events of {self.name}", self._home)
        return FacedBody(body, lambda events: EventStream(events, self._home))

    @property
    def _any(self) -> Any:
        return self._inner

    def _seen(self, inner: InnerT) -> Self:
        return type(self)(inner, self._home)

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
