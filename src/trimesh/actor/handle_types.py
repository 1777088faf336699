"""Mesh attributes of actor classes for type checkers; never imported at run time.

Type checkers see a handle of `trimesh` as an object of the actor class, and one of `trimesh.blocking` as the class
itself: only these two types have the endpoints of that class. So the other mesh attributes are declared for both.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from builtins import slice as Slice  # noqa: N812

    from trimesh._runtime.watch import EventStream, MeshStatistics
    from trimesh.blocking import calls as blocking
    from trimesh.shape.extent import Extent, Point

    P = ParamSpec("P")
    T = TypeVar("T")
    A = TypeVar("A")

    class Attribute(Generic[T]):
        """An attribute with the same type on both."""

        def __init__(self, function: Callable[[Any], T]) -> None: ...

        def __get__(self, instance: object, owner: Any = None) -> T: ...

    class Method(Generic[P, T]):
        """A method with the same type on both."""

        def __init__(self, function: Callable[Concatenate[Any, P], T]) -> None: ...

        def __get__(self, instance: object, owner: Any = None) -> Callable[P, T]: ...

    class View(Generic[P]):
        """A method that returns a view of the mesh."""

        def __init__(self, function: Callable[Concatenate[Any, P], object]) -> None: ...

        @overload
        def __get__(self, instance: None, owner: type[A]) -> Callable[P, type[A]]: ...
        @overload
        def __get__(self, instance: A, owner: type[A]) -> Callable[P, A]: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...

    class Events:
        """The method `events`."""

        @overload
        def __get__(self, instance: None, owner: Any) -> Callable[[], AbstractContextManager[blocking.EventStream]]: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> Callable[[], AbstractAsyncContextManager[EventStream]]: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...

    class HandleType(ABCMeta):
        """Metaclass of actor classes, for `len` of a handle of `trimesh.blocking`."""

        def __len__(cls) -> int: ...

    class HandleAttributes(metaclass=HandleType):
        """Attributes of a mesh besides its endpoints."""

        @Attribute
        def extent(self) -> Extent:
            """See `ActorMesh.extent`."""
            ...

        @Attribute
        def name(self) -> str:
            """See `ActorMesh.name`."""
            ...

        def __len__(self) -> int:
            """See `ActorMesh.__len__`."""
            ...

        @Method
        def size(self, dim: str | None = None) -> int:
            """See `ActorMesh.size`."""
            ...

        @Method
        def points(self) -> Iterator[Point]:
            """See `ActorMesh.points`."""
            ...

        @View
        def slice(self: Any, /, **selection: int | Slice) -> object:
            """See `ActorMesh.slice`."""
            ...

        @View
        def flatten(self, label: str) -> object:
            """See `ActorMesh.flatten`."""
            ...

        @View
        def split(self: Any, /, **parts: Sequence[str] | int) -> object:
            """See `ActorMesh.split`."""
            ...

        @View
        def rename(self: Any, /, **labels: str) -> object:
            """See `ActorMesh.rename`."""
            ...

        @View
        def exclude(self, points: Iterable[Mapping[str, int]]) -> object:
            """See `ActorMesh.exclude`."""
            ...

        @View
        def alive(self) -> object:
            """See `ActorMesh.alive`."""
            ...

        @Method
        def statistics(self) -> MeshStatistics:
            """See `ActorMesh.statistics`."""
            ...

        events = Events()
        """See `ActorMesh.events`."""
