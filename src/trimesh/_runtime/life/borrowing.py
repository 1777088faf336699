"""Actors and processes of a local block that another process runs, because it owns and shares what they run on.

`ownership` has the owner's side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import keep
from trimesh._runtime.calls.invocation import Err, Ok, Request, encode_request, invoke, is_news, results_of, value_of
from trimesh._runtime.calls.membership import family_of
from trimesh._runtime.calls.outgoing_stream import OutgoingStream
from trimesh._runtime.life.controller import check_mode, lease_proc
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.block import Block, run_block
from trimesh._runtime.peers.peer import Target
from trimesh._runtime.spawner.proc_options import ProcOptions
from trimesh._runtime.tasks.background import without_consequences
from trimesh._runtime.tasks.interrupt import run_to_end
from trimesh._runtime.values.endpoint_spec import HostsInfo, MeshInfo
from trimesh._supervision.policy import Policy
from trimesh._wire.memory import DefinitionId
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshErrorGroup, MeshStopped, Origin, set_origin
from trimesh.ids import AGENT, ProcId
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


class BorrowPlan(msgspec.Struct, frozen=True):
    """Request of `ProcMesh.spawn` on a mesh reference.

    Attributes:
        procs: The shared processes, as described by their owner.
        policy: What a failure of an actor does; None for the policy of the processes.
        name, cls, args, kwargs: As in an `ActorPlan`.
    """

    procs: MeshInfo
    region: Region
    policy: Policy | None
    name: str
    cls: Any  # as in an `ActorPlan`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class HostsPlan(msgspec.Struct, frozen=True):
    """Request of `HostMesh.spawn_procs` on a reference.

    Attributes:
        hosts: The shared hosts, as described by their owner.
        region: The shown hosts.
        extent: Of all processes; the first dimensions are those of the hosts.
        policy: What the end of a process does; None for `FailFast()`.
    """

    hosts: HostsInfo
    region: Region
    name: str
    extent: Extent
    options: ProcOptions
    policy: Policy | None


class Borrowed:
    """A mesh that another process runs for a block of this one.

    Args:
        name: Name of the mesh.
        lender: Name of what it is spawned on.
        owner: The process that owns that.

    Attributes:
        block: The block that owns the mesh.
        home: Borrowed processes that it runs on, owned by the same block; None if others own these.
        is_stopping: Whether that block has begun to stop.
        info: Description sent in references, once it serves.
    """

    info: MeshInfo
    home: BorrowedProcs | None = None

    def __init__(self, proc: Proc, block: Block, name: str, lender: str, owner: ProcId) -> None:
        self.proc = proc
        self.block = block
        block.borrows = True
        self.is_stopping = False
        self._name = name
        self._lender = lender
        self._lease = proc.new_id()
        self._target = Target(proc.peer(owner), AGENT)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._errors: list[Exception] = []
        self._stream: OutgoingStream | None = None

    # ---- start -----------------------------------------------------------------------------------------------

    async def begin(self, endpoint: str, *args: Any, definitions: Sequence[DefinitionId] = ()) -> None:
        """Request the mesh from the owner of what it is spawned on; return when all of it serves.

        Args:
            endpoint: Endpoint of the owner's agent, which takes this process, the number of the loan, and `args`.

        Raises:
            MeshErrorGroup: It could not be spawned.
        """
        proc, name = self.proc, self._name
        request = _request(self._lender, endpoint, proc.proc_id, self._lease, *args)
        request = msgspec.structs.replace(request, definitions=definitions)
        assert proc.family is not None
        await proc.family.connect([self._target.peer])
        call_id = proc.new_call_id()
        parcel = encode_request(proc, request, call_id, AGENT, None, window=1)
        self._stream = OutgoingStream(proc, call_id, request, [self._target], fail_fast=True, window=1)
        self._stream.start(parcel)
        try:
            item = await self._stream.next()
        except BaseException:
            _, interrupt = await run_to_end(lambda: self._close("the spawn was cancelled"))
            if interrupt is not None:
                raise interrupt from None
            raise
        if item is None:
            await self._close("it has ended")
            errors = self._failures() or [MeshStopped(f"{self._lender} has ended")]
            raise MeshErrorGroup(f"{name} could not be spawned", errors, mesh=name)
        found = value_of(self._stream, item, 0)
        if isinstance(found, Err):
            await self._close("it could not be read")
            raise MeshErrorGroup(f"{name} could not be spawned", [found.error], mesh=name)
        self.info = found.value
        proc.nursery.start_soon(self._watch)

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        """Wait until the mesh has ended, for any reason; report the cause to the block."""
        assert self._stream is not None
        with self._scope:
            await self._stream.next()
        with trio.CancelScope(shield=True):
            await self._close(f"the block of {self._name} is being left")
        self._errors = self._failures()
        if self.home is not None:  # which reports why both have ended
            self._errors = [rest for error in self._errors if (rest := without_consequences(error)) is not None]
        if not self.is_stopping and (self._errors or self.home is None):
            stopped = MeshStopped(f"{self._name} has been stopped by the owner of {self._lender}")
            set_origin(stopped, self._stream.request.origin(0))
            for error in self._errors or [stopped]:
                self.block.fail(error)
            self._errors = []
        self._ended.set()

    async def _close(self, reason: str) -> None:
        assert self._stream is not None
        await self._stream.close(reason)

    def _failures(self) -> list[Exception]:
        assert self._stream is not None
        where = self._stream.request.origin(0)
        found: list[Exception] = []
        for result in results_of(self._stream):
            if isinstance(result, Err) and (not self.is_stopping or is_news(result, where)):
                error = result.error
                found += error.failures if isinstance(error, MeshErrorGroup) else [error]
        return found

    async def give_back(self) -> None:
        """Let the owner end the mesh as at the end of a block; wait for that. Cancellable."""
        request = _request(self._lender, "give_back", self.proc.proc_id, self._lease)
        [result] = await invoke(self.proc, [self._target], request, fail_fast=False)
        if isinstance(result, Ok):
            await self._ended.wait()

    # ---- interface to the block: see `Owned` -------------------------------------------------------------------

    def cancel_background(self, reason: str) -> None:
        """Do nothing: the borrowed mesh is cancelled as a whole right after this."""

    async def drain(self) -> list[Exception]:
        raise NotImplementedError

    async def stop(self, deadline: float) -> list[Exception]:
        """End it now; the owner bounds the clean-up."""
        del deadline
        self.is_stopping = True
        self._scope.cancel(reason=f"the block of {self._name} is being left")
        await self._ended.wait()
        return self._errors

    def abandon(self) -> None:
        self.is_stopping = True

    def kill_now(self) -> None:
        """Do nothing: only their owner kills the processes."""


class BorrowedActors(Borrowed):
    """Actors on processes of another owner."""

    async def start(self, plan: BorrowPlan) -> None:
        """Request the actors from the owner of the processes; see `begin`."""
        recipe = keep(self.proc.values, plan.name, plan.cls, plan.args, plan.kwargs)
        args = (plan.procs.whole.mesh, plan.region, plan.name, recipe.value, plan.policy)
        await self.begin("lend", *args, definitions=recipe.definitions)

    async def drain(self) -> list[Exception]:
        """Let the actors finish accepted messages of this process and end; wait for that. Cancellable."""
        await self.give_back()
        errors, self._errors = self._errors, []
        return errors


class BorrowedProcs(Borrowed):
    """Processes on hosts of another owner."""

    _may_drain = False

    async def start(self, plan: HostsPlan) -> None:
        """Request the processes from the owner of the hosts; see `begin`."""
        from trimesh._runtime.life.job_hosts import lent_options  # noqa: PLC0415 - it imports what owners need

        options = lent_options(plan.options, Region(plan.extent))
        ranks = tuple(plan.region.ranks())
        await self.begin("lend_hosts", plan.hosts.number, ranks, plan.name, plan.extent, options, plan.policy)

    async def drain(self) -> list[Exception]:
        """Note that the block is left in peace: the processes drain in `stop`, when all actors on them have ended."""
        self._may_drain = True
        return []

    async def stop(self, deadline: float) -> list[Exception]:
        """End them; see `Borrowed.stop`."""
        self.is_stopping = True
        if self._may_drain and not self._ended.is_set():
            with trio.move_on_at(deadline):
                await self.give_back()
        return await super().stop(deadline)


def _request(lender: str, endpoint: str, *args: Any) -> Request:
    return Request(lender, endpoint, args, {}, lambda _: Origin(None, lender, endpoint=endpoint))


def check_family(proc: Proc, owner: MeshInfo | HostsInfo, name: str) -> None:
    """Refuse processes or hosts of another program.

    Raises:
        RuntimeError: They belong to another program.
    """
    if owner.family != family_of(proc):
        raise RuntimeError(f"{name} belongs to another program: spawn processes in this program for your actors")


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_borrowed(plan: BorrowPlan) -> AsyncGenerator[BorrowedActors, None]:
    """Spawn actors on shared processes, owned by a block of their own in this process."""
    async with lease_proc() as (proc, _):
        check_family(proc, plan.procs, plan.procs.name)
        block = Block(proc, plan.name, limits.GRACE_SECONDS)
        borrowed = BorrowedActors(proc, block, plan.name, plan.procs.name, plan.procs.owner)
        await borrowed.start(plan)
        block.adopt(borrowed)
        async with run_block(block):
            yield borrowed


@trio.lowlevel.enable_ki_protection
async def adopt_borrowed(procs: BorrowedProcs, plan: BorrowPlan) -> BorrowedActors:
    """Spawn actors on borrowed processes, owned by the block of these.

    Raises:
        RuntimeError: The block has begun to stop.
    """
    block = procs.block
    borrowed = BorrowedActors(procs.proc, block, plan.name, plan.procs.name, plan.procs.owner)
    borrowed.home = procs
    with block.entering():
        await borrowed.start(plan)
        if not block.is_stopping:
            block.adopt(borrowed)
            return borrowed
        await run_to_end(lambda: borrowed.stop(trio.current_time()))
    block.check_open()
    raise AssertionError("a block that has begun to stop takes no meshes")


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_borrowed_procs(plan: HostsPlan) -> AsyncGenerator[BorrowedProcs, None]:
    """Start processes on shared hosts, owned by a block of their own in this process."""
    async with lease_proc() as (proc, _):
        check_mode(proc, plan.options.pickled)
        check_family(proc, plan.hosts, "the job of these hosts")
        block = Block(proc, plan.name, plan.options.grace)
        borrowed = BorrowedProcs(proc, block, plan.name, "hosts", plan.hosts.owner)
        await borrowed.start(plan)
        block.adopt(borrowed)
        async with run_block(block):
            yield borrowed


async def get_borrowed(plan: BorrowPlan) -> MeshInfo:
    """Return the named actor on shared processes; see `ownership.NamedActors`.

    Raises:
        TypeError: It has another class.
        RuntimeError: The processes are not shared, or belong to another program.
        MeshErrorGroup: It could not be spawned.
    """
    async with lease_proc() as (proc, family):
        check_family(proc, plan.procs, plan.procs.name)
        recipe = keep(proc.values, plan.name, plan.cls, plan.args, plan.kwargs)
        target = Target(proc.peer(plan.procs.owner), AGENT)
        await family.connect([target.peer])
        args = (proc.proc_id, plan.procs.whole.mesh, plan.region, plan.name, recipe.value)
        request = _request(plan.procs.name, "get_shared", *args)
        request = msgspec.structs.replace(request, definitions=recipe.definitions)
        [result] = await invoke(proc, [target], request, fail_fast=False)
    if isinstance(result, Err):
        raise result.error
    if not isinstance(result, Ok):
        raise MeshStopped(f"{plan.procs.name} has ended")
    info: MeshInfo = result.value
    return info
