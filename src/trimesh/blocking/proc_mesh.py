"""`ProcMesh`: a mesh of processes, without `await`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Self, TypeVar, cast

from trimesh._supervision.policy import Policy
from trimesh.actor import proc_mesh
from trimesh.actor.actor import Actor
from trimesh.actor.procs import current
from trimesh.blocking.actor_mesh import ActorMesh
from trimesh.blocking.body import AnyBody, FacedBody, body_of
from trimesh.blocking.handle import FacedHandle, MembershipViews, inner_of
from trimesh.blocking.spawning import Spawning
from trimesh.events import OnFailure

P = ParamSpec("P")
A = TypeVar("A", bound=Actor)
M = TypeVar("M")


class ProcMesh(FacedHandle[proc_mesh.ProcMesh]):
    """A mesh of processes, or a view of some of them; see `trimesh.ProcMesh`."""

    def spawn(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> type[A]:
        """Spawn an actor in every process of this mesh, or view, and wait until all are ready.

        The block of the processes owns them; see `trimesh.ProcMesh.spawn`.
        """
        return self._spawning(name, cls, args, kwargs).adopt()

    def spawning(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> Spawning[type[A]]:
        """Return what spawns actors that have a block of their own: `with procs.spawning("name", Cls) as mesh:`."""
        return self._spawning(name, cls, args, kwargs)

    def _spawning(self, name: str, cls: Callable[..., A], args: Any, kwargs: Any) -> Spawning[type[A]]:
        given = [inner_of(value) for value in args]
        named = {key: inner_of(value) for key, value in kwargs.items()}
        return Spawning(
            f"spawn({name!r}, {getattr(cls, '__qualname__', cls)})",
            lambda: self._inner.spawn(name, cls, *given, **named),
            _actors,
            self._home,
        )

    def get_or_spawn(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> type[A]:
        """Return the one actor of this name on these processes; see `trimesh.ProcMesh.get_or_spawn`."""
        given = [inner_of(value) for value in args]
        named = {key: inner_of(value) for key, value in kwargs.items()}
        make = cast("Any", self._inner).get_or_spawn
        return cast("type[A]", _actors(self._wait(make, name, cls, *given, **named), self._home))

    def on_failure(self, handler: OnFailure) -> AbstractContextManager[None]:
        """Ask a function of yours of each failure before the policy: `with procs.on_failure(handler):`.

        It runs in the thread of Trio, which must not wait; see `trimesh.ProcMesh.on_failure`.
        """
        body = body_of(self._inner.on_failure(handler), f"the failures of {self.name}", self._home)
        return FacedBody(body, lambda nothing: nothing)

    def supervised(self, policy: Policy) -> Self:
        """Return the same processes, with another policy for the actor meshes that are spawned on them."""
        return self._seen(self._inner.supervised(policy))

    def replace(self, points: Iterable[Mapping[str, int]]) -> None:
        """Start new processes in place of some, dead or alive; see `trimesh.ProcMesh.replace`."""
        self._wait(self._inner.replace, points)

    def resize(self, **sizes: int) -> Self:
        """Let this mesh grow or shrink along its first dimension; see `trimesh.ProcMesh.resize`."""
        return self._seen(self._wait(self._inner.resize, **sizes))

    def membership(self) -> AbstractContextManager[MembershipViews]:
        """Read who is in this mesh: `with procs.membership() as views: for view in views: ...`."""
        body = body_of(self._inner.membership(), f"the members of {self.name}", self._home)
        return FacedBody(body, lambda views: MembershipViews(views, self._home))

    def kill(self, points: Iterable[Mapping[str, int]]) -> None:
        """End some processes at once by SIGKILL; see `trimesh.ProcMesh.kill`."""
        self._wait(self._inner.kill, points)

    def stop(self, *, grace: float | None = None) -> None:
        """End all processes of this mesh now, rather than when its block is left; see `trimesh.ProcMesh.stop`."""
        self._wait(self._inner.stop, grace=grace)

    def settled(self) -> None:
        """Wait until no process of this view is being restarted; see `trimesh.ProcMesh.settled`."""
        self._wait(self._inner.settled)

    def close(self) -> None:
        """End a mesh that was opened: everything that it owns is joined, in order. A second call does nothing.

        Raises:
            MeshErrorGroup: What has failed, if no call has raised it.
            RuntimeError: What was opened on it is still open, or a `with` block owns it.
        """
        if self._home is None or self._home.owns is not self._inner:
            raise RuntimeError(f"{self!r} has no block of its own: close what it belongs to, or shows a part of")
        self._home.close()


def current_view(mesh: M) -> M:
    """Return a handle on all of a mesh as it is now; see `trimesh.current_view`."""
    if not isinstance(mesh, FacedHandle):
        raise TypeError(f"current_view takes a mesh of processes or of actors, got {mesh!r}")
    handle = cast("FacedHandle[Any]", mesh)
    return cast("M", handle._seen(handle._wait(current.current_view, handle._inner)))  # noqa: SLF001 - of its kind


def _actors(inner: Any, home: AnyBody | None) -> Any:
    return cast("Any", ActorMesh(inner, home))
