"""Agent: the built-in actor of every process, which its owner calls to spawn and stop the other actors.

A spawn is therefore an ordinary call: it has a deadline, can be cancelled, and fails with coordinates.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh._runtime.actors.cell import ActorSpec, Cell, Kept, make_asked, make_from
from trimesh._runtime.actors.context import ExecutionContext, OwnMeshes, set_context
from trimesh._runtime.actors.server import LocatedError
from trimesh._runtime.calls.membership import Place
from trimesh._runtime.tasks.background import split_cancelled
from trimesh._runtime.values.endpoint_spec import AGENT_ENDPOINTS, ENDPOINTS, EndpointKind, EndpointSpec, MeshInfo
from trimesh.errors import MeshStopped, Origin
from trimesh.ids import AGENT, MeshId, ProcId
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.life.ownership import Lent, OwnedProcs
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer

_UNLIMITED: Final = 2**31
"""Slots of the agent: it serves only its owner, which bounds its own requests."""


class Agent:
    """Spawns, drains and stops actors of this process on behalf of their owners.

    Attributes:
        stack_fd: Descriptor that the main thread's stack is written to on request; -1 for a simulated process.
        lent: Current loans of this process, by borrower and its number for the loan.
        exit_requested: Set when the owner requests that the process end.
    """

    def __init__(self, proc: Proc, stack_fd: int = -1) -> None:
        self.proc = proc
        self.stack_fd = stack_fd
        self.exit_requested = trio.Event()
        self.lent: dict[tuple[ProcId, int], Lent] = {}

    async def setup(self, function: Callable[[], Any] | None, info: MeshInfo) -> int:
        """Run the user's `setup` function, sync or async; the reply means that the process is ready.

        Args:
            function: Function to run, or None.

        Returns:
            The descriptor that the process writes its stack to.
        """
        assert self.proc.family is not None
        self.proc.family.own_mesh = info
        if function is not None:
            rank = self._rank_in(info)
            point = info.whole.point(rank)
            incarnation = info.members[rank].incarnation
            home = OwnMeshes(None, None, info, self.proc.share)
            set_context(ExecutionContext(point, info.name, incarnation=incarnation, home=home))
            with _located(Origin(point, info.name, host=self.proc.host_name, pid=self.proc.pid)):
                result = function()
                if inspect.isawaitable(result):
                    await result
        return self.stack_fd

    @trio.lowlevel.enable_ki_protection
    async def spawn(
        self,
        info: MeshInfo,
        cls: Any,  # a class, or Box[int]
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_held: bool = False,  # noqa: FBT001, FBT002 - travels as an argument
    ) -> None:
        """Create an actor; return when it serves. A cancel unwinds its partial set-up (C08)."""
        rank, mesh = self._rank_in(info), info.mesh
        make = partial(cls, *args, **kwargs)
        owner, family = self.proc.peer(info.owner), self.proc.family
        procs = None if family is None or owner is self.proc.me else family.own_mesh
        home = OwnMeshes(info, cls, procs, self.proc.share)
        point, incarnation = info.whole.point(rank), info.members[rank].incarnation
        cell = Cell(self.proc, ActorSpec(mesh, info.name, cls, make, point, incarnation, is_held, home), owner)
        before = self.proc.cells.get(mesh)
        self.proc.cells[mesh] = cell
        self.proc.early.made(mesh)
        for call in before.take_held() if before is not None else ():
            cell.deliver(call)
        try:
            await self.proc.actors.start(cell.run)
        except BaseException:
            if before is None:
                cell.release()
                if self.proc.cells.get(mesh) is cell:  # a concurrent `stop` may have removed it
                    self.proc.end_cell(mesh)
            raise

    @trio.lowlevel.enable_ki_protection
    async def spawn_kept(
        self,
        info: MeshInfo,
        kept: Kept,
        is_held: bool,  # noqa: FBT001 - travels as an argument
    ) -> None:
        """Create an actor from the class and arguments that its owner kept, encoded, from the first spawn."""
        cls, args, kwargs = make_from(self.proc.values, info.name, kept)
        await self.spawn(info, cls, args, kwargs, is_held)

    def _rank_in(self, info: MeshInfo) -> int:
        return next(rank for rank, member in enumerate(info.members) if member.proc_id == self.proc.proc_id)

    @trio.lowlevel.enable_ki_protection
    async def replacement(self, mesh: MeshId, rank: int, incarnation: int) -> Place | None:
        """Return, as the owner of a mesh, the replacement of an ended incarnation; wait until it is decided."""
        owned = self.proc.owners.get(mesh)
        return None if owned is None else await owned.membership.answer(rank, incarnation)

    @trio.lowlevel.enable_ki_protection
    async def current_info(self, mesh: MeshId) -> MeshInfo | None:
        """Return, as the owner of a mesh, its current state; None for a stopped mesh."""
        owned = self.proc.owners.get(mesh)  # the table of members lives as long as a handle
        return None if owned is None else owned.info

    @trio.lowlevel.enable_ki_protection
    async def cancel_background(self, mesh: MeshId, reason: str) -> None:
        """Cancel an actor's work that has no caller: its owning block has been cancelled."""
        cell = self.proc.cells.get(mesh)
        if cell is not None:
            cell.cancel_background(reason)

    @trio.lowlevel.enable_ki_protection
    async def drain(self, mesh: MeshId, grace: float) -> None:
        """Let an actor finish the calls accepted from its owner; cancelled calls have `grace` seconds."""
        cell = self.proc.cells.get(mesh)
        if cell is not None:
            await cell.drain(grace)

    @trio.lowlevel.enable_ki_protection
    async def stop(self, mesh: MeshId, grace: float, by: str = "other", hold: bool = False) -> None:  # noqa: FBT001, FBT002
        """End an actor; raise errors of its clean-up. With `hold`, messages wait for its successor."""
        cell = self.proc.cells.get(mesh)
        if cell is not None:
            try:
                with _located(cell.origin(None)):
                    await cell.stop(grace, by, hold=hold)
            finally:
                if not hold:
                    cell.release()
                    self.proc.end_cell(mesh)
        elif not hold:  # it was never created here: refuse early calls to it
            self.proc.end_cell(mesh)

    @trio.lowlevel.enable_ki_protection
    async def exit(self) -> None:
        """Request that the process end, once items that its actors sent to channels have left."""
        await self.proc.channels.flush()
        self.exit_requested.set()

    # ---- meshes of processes, and hosts, that are shared -----------------------------------------------------

    def lend(
        self,
        borrower: ProcId,
        lease: int,
        mesh: MeshId,
        region: Region,
        name: str,
        kept: Kept,
        policy: Any,
    ) -> AsyncGenerator[MeshInfo, None]:
        """Spawn actors for another process; see `OwnedProcs.lend`."""
        procs = self._shared(mesh, "spawn", borrower)
        return procs.lend(self.lent, (borrower, lease), region, name, kept, policy)

    def lend_hosts(
        self,
        borrower: ProcId,
        lease: int,
        number: int,
        ranks: Any,
        name: str,
        extent: Extent,
        options: Any,
        policy: Any,
    ) -> AsyncGenerator[MeshInfo, None]:
        """Start processes for another process; see `SharedHosts.lend`."""
        hosts = self.proc.shared_hosts.get(number)
        if hosts is None:
            raise MeshStopped("the block of these hosts has been left: no process can be started on them")
        return hosts.lend(self.lent, (borrower, lease), ranks, name, extent, options, policy)

    async def give_back(self, borrower: ProcId, lease: int) -> None:
        """Drain and stop what is lent; the call of `lend` or `lend_hosts` ends when that is done."""
        lent = self.lent.get((borrower, lease))
        if lent is not None:
            lent.given_back.set()

    async def get_shared(self, borrower: ProcId, mesh: MeshId, region: Region, name: str, kept: Kept) -> MeshInfo:
        """Get or create a named actor; see `NamedActors.get`."""
        procs = self._shared(mesh, "get_or_spawn", borrower)
        cls, args, kwargs = make_asked(self.proc.values, name, kept)
        return (await procs.named.get(procs.checked(region), name, cls, args, kwargs)).info

    def _shared(self, mesh: MeshId, what: str, borrower: ProcId) -> OwnedProcs:
        """Return a mesh on which another process may spawn.

        Raises:
            RuntimeError: It is not shared.
            MeshStopped: It is being stopped.
        """
        procs = self.proc.shared.get(mesh)
        if procs is None or procs.block is None or not procs.may_lend(borrower):
            raise RuntimeError(
                f"{what} from another process needs a shared mesh of processes, got one that is not shared or has been "
                "stopped: its owner must write spawn_procs(..., shared=True)"
            )
        if procs.is_stopping or procs.block.is_stopping:
            raise MeshStopped(f"{procs.info.name} is being stopped: no actor can be spawned on it")
        return procs


@contextmanager
def _located(where: Origin) -> Generator[None, None, None]:
    """Give errors of user code their own coordinates instead of the agent's."""
    try:
        yield
    except BaseException as error:
        if split_cancelled(error)[1] is None:
            raise
        raise LocatedError(error, where) from None


def _add_endpoint(function: Callable[..., Any], kind: EndpointKind = EndpointKind.ASYNC) -> None:
    whole = inspect.signature(function)
    signature = whole.replace(parameters=list(whole.parameters.values())[1:])  # without self
    name = function.__name__
    AGENT_ENDPOINTS[name] = EndpointSpec(
        name, function, kind, _UNLIMITED, group=None, idempotent=False, signature=signature
    )


for _name in (
    "setup",
    "spawn",
    "spawn_kept",
    "replacement",
    "current_info",
    "cancel_background",
    "drain",
    "stop",
    "exit",
    "give_back",
    "get_shared",
):
    _add_endpoint(getattr(Agent, _name))
_add_endpoint(Agent.lend, EndpointKind.GENERATOR)
_add_endpoint(Agent.lend_hosts, EndpointKind.GENERATOR)
setattr(Agent, ENDPOINTS, AGENT_ENDPOINTS)


@trio.lowlevel.enable_ki_protection
async def run_with_agent(
    proc: Proc,
    owner: Peer,
    point: Point,
    stack_fd: int = -1,
    *,
    task_status: trio.TaskStatus[Agent] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `proc` with its agent, which obeys `owner`, until cancelled."""
    agent = Agent(proc, stack_fd)
    cell = Cell(proc, ActorSpec(AGENT, "agent", Agent, lambda: agent, point), owner)
    # Created before the first frame is read: the owner does not wait for this process to be ready.
    proc.cells[AGENT] = cell
    await proc.run(cell, lambda: task_status.started(agent))
