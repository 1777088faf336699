"""`context()`: coordinates, caller and meshes of the running code."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast, overload

import attrs

from trimesh._runtime.actors import OwnMeshes, execution_context, message_here
from trimesh._runtime.system import HostShare
from trimesh._runtime.values import endpoints_of
from trimesh._wire.messages import CallerPlace, SentView
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.proc_mesh import ProcMesh, refer_procs
from trimesh.actor.view import MeshView
from trimesh.errors import Origin
from trimesh.shape.extent import Point

A = TypeVar("A", bound=Actor)


@attrs.frozen
class Context(Generic[A]):
    """Coordinates, caller and meshes of a running endpoint.

    Attributes:
        point: Own coordinates in the mesh as spawned.
        mesh: Name of the actor mesh (of the process mesh, in `setup`).
        actor: The actor object, or None outside of one.
        endpoint: Name of the endpoint that runs, or None in `__init__`, `lifespan` and `setup`.
        incarnation: 0 for the first process at this point, one more for each restart.
    """

    point: Point
    mesh: str
    actor: A
    endpoint: str | None
    incarnation: int
    _home: OwnMeshes = attrs.field(alias="home", repr=False, eq=False)
    _view: SentView | None = attrs.field(alias="view", repr=False, eq=False)
    _caller: CallerPlace | None = attrs.field(alias="caller", repr=False, eq=False)

    @property
    def message_rank(self) -> Point:
        """The point of this actor in the view that the sender of the message called; `.rank` is its number there.

        `mesh.slice(gpus=slice(2, 4)).step.call()` reaches the actor at `{"gpus": 2/8}` as `{"gpus": 0/2}`. Outside of
        a message it is `point`.
        """
        return self.point if self._view is None else self._view.point_of(self.point)

    @property
    def caller(self) -> Origin | None:
        """The actor that sent the message: its point, mesh, class and endpoint; None if the sender is not an actor.

        The sender states it itself: use it for logs or look-ups, not to decide permissions.
        """
        return None if self._caller is None else self._caller.origin

    @property
    def actors(self) -> A:
        """The mesh of this actor, as a reference: to call its other members, or to send it on.

        A call to all of it waits for this actor, too: use `exclude([context().point])`, or give the endpoint slots of
        its own.

        Raises:
            RuntimeError: `setup` is running, before any actor.
        """
        home = self._home
        if home.actors is None or home.cls is None:
            raise RuntimeError(
                "context().actors is the mesh of the running actor, and setup runs before any: use context().procs"
            )
        found = home.handles.get("actors")
        if found is None:
            info = home.actors
            found = home.handles["actors"] = ActorMesh(MeshView(info, info.whole, endpoints_of(home.cls)), home.cls)
        return cast("A", found)

    @property
    def share(self) -> HostShare | None:
        """GPUs, CPUs and memory that a placement has reserved for this process; None without one."""
        return self._home.share

    @property
    def procs(self) -> ProcMesh:
        """The mesh of this process, as a reference; `this_proc()` if it belongs to none."""
        info = self._home.procs
        found: ProcMesh | None = self._home.handles.get("procs")
        if found is None:
            found = ProcMesh(None, None) if info is None else refer_procs(info, info.whole)
            self._home.handles["procs"] = found
        return found


@overload
def context() -> Context[Any]: ...
@overload
def context(actor: A, /) -> Context[A]: ...
def context(actor: Any = None, /) -> Context[Any]:
    """Return the context of the running endpoint, `__init__`, `lifespan` or `setup`.

    Args:
        actor: `self`, for type checkers: `context(self).actors` then has the endpoints of its class.

    Raises:
        RuntimeError: The caller is not part of an actor or worker process.
        ValueError: `actor` is not the running actor.
    """
    found = execution_context()
    if actor is not None and actor is not found.actor:
        raise ValueError(
            f"context(actor) takes the running actor, which is {found.actor!r}, got {actor!r}: write context(self) or "
            "context()"
        )
    home = found.home or OwnMeshes(None, None, None)
    view, caller = message_here()
    return Context[Any](
        found.point, found.mesh, found.actor, found.endpoint, found.incarnation, home=home, view=view, caller=caller
    )
