"""Execution context of the running code: its process and, inside an actor, its mesh, coordinates and call.

One operating system process can hold several `Proc` objects (simulation): a context variable, set in all tasks of a
simulated process, takes precedence over the `Proc` of the Trio run. `life/current.py` looks them up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

import trio

from trimesh._runtime.system.forks import forked_here
from trimesh._runtime.values.endpoint_spec import class_of
from trimesh._wire.messages import CallerPlace, SentView
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.metrics import MemberMetrics
    from trimesh._runtime.system.records import HostShare
    from trimesh._runtime.values.endpoint_spec import MeshInfo

proc_of_task: ContextVar[Proc | None] = ContextVar("trimesh_proc", default=None)
proc_of_run: trio.lowlevel.RunVar[Proc | None] = trio.lowlevel.RunVar("trimesh_proc", default=None)
_runs: dict[trio.lowlevel.TrioToken, None] = {}
context_of_code: ContextVar[ExecutionContext | None] = ContextVar("trimesh_context", default=None)
_has_forgotten: ContextVar[bool] = ContextVar("trimesh_has_forgotten", default=False)
_message: ContextVar[tuple[SentView | None, CallerPlace | None]] = ContextVar("trimesh_message", default=(None, None))


class OwnMeshes:
    """Meshes that an actor or a `setup` function belongs to.

    Attributes:
        actors: Its actor mesh at the time of its creation; None for `setup`.
        cls: Class of the actors, or `Box[int]`; None for `setup`.
        procs: Mesh of its process; None if it has none, as in the controller.
        share: Share of the host that a placement gives its process; None without one.
        handles: Handles that a higher package made of them.
    """

    __slots__ = ("actors", "cls", "handles", "procs", "share")

    def __init__(
        self, actors: MeshInfo | None, cls: Any, procs: MeshInfo | None, share: HostShare | None = None
    ) -> None:
        self.actors = actors
        self.cls = cls
        self.procs = procs
        self.share = share
        self.handles: dict[str, Any] = {}


class ExecutionContext:
    """Context of running user code.

    Attributes:
        point: Own coordinates in the mesh as spawned.
        mesh: Name of the actor mesh (of the process mesh, in `setup`).
        actor: The actor object, or None outside of one.
        endpoint: Name of the endpoint that runs, or None in `__init__`, `lifespan` and `setup`.
        incarnation: 0 for the first process at this point, one more for each restart.
        home: The meshes that it belongs to.
        place: Its place, as sent with the calls that it makes.
        metrics: Series of its actor, once it has logged; see `_runtime/metrics.py`.
    """

    __slots__ = ("actor", "endpoint", "home", "incarnation", "mesh", "metrics", "place", "point")

    def __init__(
        self,
        point: Point,
        mesh: str,
        actor: Any = None,
        endpoint: str | None = None,
        incarnation: int = 0,
        home: OwnMeshes | None = None,
    ) -> None:
        self.point = point
        self.mesh = mesh
        self.actor = actor
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.home = home
        self.metrics: MemberMetrics | None = None
        cls = None if home is None or home.cls is None else class_of(home.cls).__qualname__
        extent = point.extent
        self.place = CallerPlace(mesh, cls, endpoint, extent.labels, extent.sizes, point.rank, incarnation)


def execution_context() -> ExecutionContext:
    """Return the context of the running code.

    Raises:
        RuntimeError: The caller is not part of an actor or worker process.
    """
    found = context_of_code.get()
    if found is None:
        raise RuntimeError(
            "context() must be called inside an endpoint, __init__, lifespan or setup function of a mesh, got code "
            "outside of a mesh: the program that spawned it has no point in it"
        )
    return found


def caller_here() -> CallerPlace | None:
    """Return the caller's place to send with a call; None outside of actors and `setup`."""
    found = context_of_code.get()
    return None if found is None else found.place


def message_here() -> tuple[SentView | None, CallerPlace | None]:
    """Return the target view and caller place that the running message's sender stated."""
    return _message.get()


def current_point() -> Point:
    """Return the coordinates of the running member, in the extent of its mesh as spawned."""
    return execution_context().point


def current_rank() -> int:
    """Return the row-major rank of the running member in its mesh as spawned."""
    return execution_context().point.rank


def current_size(dim: str | None = None) -> int:
    """Return the number of members of the running member's mesh as spawned, or its size along `dim`.

    Raises:
        ShapeError: `dim` is not a dimension of the mesh.
    """
    point = execution_context().point
    return point.extent.nelements if dim is None else point.size(dim)


def set_proc_of_run(proc: Proc | None) -> None:
    """Set the `Proc` of this Trio run; None when the run is over."""
    proc_of_run.set(proc)
    token = trio.lowlevel.current_trio_token()
    if proc is None:
        _runs.pop(token, None)
    else:
        _runs[token] = None


def runs_with_meshes() -> Sequence[trio.lowlevel.TrioToken]:
    """Return the Trio runs of this process in which meshes are open, oldest first; from any thread."""
    return tuple(_runs)


def _forget_in_child() -> None:
    """Clear the context in a forked child: code there, and tasks that it starts, belong to no `Proc`."""
    if not _runs:
        return
    _runs.clear()
    proc_of_task.set(None)
    _has_forgotten.set(True)
    if trio.lowlevel.in_trio_task():
        proc_of_run.set(None)
    forked_here()


def refuse_if_forked() -> None:
    """Refuse to use meshes of the process that the running code was forked from.

    Raises:
        RuntimeError: The running code is in a forked child.
    """
    if _has_forgotten.get():
        raise RuntimeError(
            "this process was forked from one with meshes, whose handles do not work here: open a block here, use the "
            "handle in the process that has it, or start this process by the method 'spawn' or 'forkserver' and pass "
            "it values"
        )


os.register_at_fork(after_in_child=_forget_in_child)


def set_proc_of_task(proc: Proc) -> Token[Proc | None]:
    """Set the `Proc` of the running task and of all tasks that it will start."""
    return proc_of_task.set(proc)


def set_context(value: ExecutionContext | None) -> None:
    """Set the execution context of the running task."""
    context_of_code.set(value)


def set_message(view: SentView | None, caller: CallerPlace | None) -> None:
    """Set the view and caller stated by the sender of the message that runs in this context."""
    _message.set((view, caller))
