"""Actors of a local block on processes that another process owns and shares; `ownership` is the owner's side."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import keep
from trimesh._runtime.calls.invocation import Err, Ok, Request, encode_request, invoke, is_news, results_of, value_of
from trimesh._runtime.calls.membership import family_of
from trimesh._runtime.calls.outgoing_stream import OutgoingStream
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.block import Block, run_block
from trimesh._runtime.peers.peer import Target
from trimesh._runtime.tasks.interrupt import run_to_end
from trimesh._runtime.values.endpoint_spec import MeshInfo
from trimesh._supervision.policy import Policy
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshErrorGroup, MeshStopped, Origin, set_origin
from trimesh.ids import AGENT
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


class BorrowedActors:
    """Actors that another process runs for a block of this one.

    Attributes:
        block: The block that owns them.
        is_stopping: Whether that block has begun to stop.
        info: Description sent in references, once they serve.
    """

    info: MeshInfo

    def __init__(self, proc: Proc, block: Block, plan: BorrowPlan) -> None:
        self.proc = proc
        self.block = block
        self.is_stopping = False
        self._plan = plan
        self._lease = proc.new_id()
        self._target = Target(proc.peer(plan.procs.owner), AGENT)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._errors: list[Exception] = []
        self._stream: OutgoingStream | None = None

    # ---- start -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Request the actors from the owner of the processes; return when all serve.

        Raises:
            MeshErrorGroup: They could not be spawned.
        """
        plan, proc = self._plan, self.proc
        recipe = keep(proc.values, plan.name, plan.cls, plan.args, plan.kwargs)
        args = (proc.proc_id, self._lease, plan.procs.whole.mesh, plan.region, plan.name, recipe.value, plan.policy)
        request = _request(plan.procs, "lend", *args)
        request = msgspec.structs.replace(request, definitions=recipe.definitions)
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
            errors = self._failures() or [MeshStopped(f"{plan.procs.name} has ended")]
            raise MeshErrorGroup(f"{plan.name} could not be spawned", errors, mesh=plan.name)
        found = value_of(self._stream, item, 0)
        if isinstance(found, Err):
            await self._close("it could not be read")
            raise MeshErrorGroup(f"{plan.name} could not be spawned", [found.error], mesh=plan.name)
        self.info = found.value
        proc.nursery.start_soon(self._watch)

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        """Wait until the actors have ended, for any reason; report the cause to the block."""
        assert self._stream is not None
        with self._scope:
            await self._stream.next()
        with trio.CancelScope(shield=True):
            await self._close(f"the block of {self._plan.name} is being left")
        self._errors = self._failures()
        if not self.is_stopping:
            stopped = MeshStopped(f"{self._plan.name} has been stopped by the owner of its processes")
            set_origin(stopped, self._plan.procs.origin(0, "lend"))
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

    # ---- interface to the block: see `Owned` -------------------------------------------------------------------

    def cancel_background(self, reason: str) -> None:
        """Do nothing: the borrowed actors are cancelled as a whole right after this."""

    async def drain(self) -> list[Exception]:
        """Let the actors finish accepted messages of this process and end; wait for that. Cancellable."""
        request = _request(self._plan.procs, "give_back", self.proc.proc_id, self._lease)
        [result] = await invoke(self.proc, [self._target], request, fail_fast=False)
        if isinstance(result, Ok):
            await self._ended.wait()
        errors, self._errors = self._errors, []
        return errors

    async def stop(self, deadline: float) -> list[Exception]:
        """End the actors now; the owner of their processes bounds the clean-up."""
        del deadline
        self.is_stopping = True
        self._scope.cancel(reason=f"the block of {self._plan.name} is being left")
        await self._ended.wait()
        return self._errors

    def abandon(self) -> None:
        self.is_stopping = True

    def kill_now(self) -> None:
        """Do nothing: only their owner kills the processes."""


def _request(procs: MeshInfo, endpoint: str, *args: Any) -> Request:
    return Request(procs.name, endpoint, args, {}, lambda _: _where(procs, endpoint))


def _where(procs: MeshInfo, endpoint: str) -> Origin:
    return Origin(None, procs.name, endpoint=endpoint)


def check_family(proc: Proc, procs: MeshInfo) -> None:
    """Refuse processes of another program.

    Raises:
        RuntimeError: They belong to another program.
    """
    if procs.family != family_of(proc):
        raise RuntimeError(f"{procs.name} belongs to another program: spawn processes in this program for your actors")


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_borrowed(plan: BorrowPlan) -> AsyncGenerator[BorrowedActors, None]:
    """Spawn actors on shared processes, owned by a block of their own in this process."""
    async with lease_proc() as (proc, _):
        check_family(proc, plan.procs)
        block = Block(proc, plan.name, limits.GRACE_SECONDS)
        borrowed = BorrowedActors(proc, block, plan)
        await borrowed.start()
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
        check_family(proc, plan.procs)
        recipe = keep(proc.values, plan.name, plan.cls, plan.args, plan.kwargs)
        target = Target(proc.peer(plan.procs.owner), AGENT)
        await family.connect([target.peer])
        args = (plan.procs.whole.mesh, plan.region, plan.name, recipe.value)
        request = msgspec.structs.replace(_request(plan.procs, "get_shared", *args), definitions=recipe.definitions)
        [result] = await invoke(proc, [target], request, fail_fast=False)
    if isinstance(result, Err):
        raise result.error
    if not isinstance(result, Ok):
        raise MeshStopped(f"{plan.procs.name} has ended")
    info: MeshInfo = result.value
    return info
