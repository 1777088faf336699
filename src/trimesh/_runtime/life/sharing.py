"""What other processes may have done on a process mesh of this one: spawn actors there, and share actors by name.

    borrower                                    owner of the processes
    --------                                    ----------------------
    open_borrowed() -- lend(...) ------------>  open_actors() in a block of its own, inside that of the processes
                    <-- MeshInfo -------------  ready
       its block is left -- give_back() ----->  drains and stops them
                    <-- end, or what failed --

LN-1 the right is looked up here, by the number of the mesh: what is not shared is refused, whoever asks.
LN-2 what is lent ends with the borrower's call: by its end, its cancel, or the death of its process; and, before that,
     with the block of the processes.
LN-3 what processes do is the owner's business, by their policy; what the actors fail by is the borrower's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.agent import agent_endpoint
from trimesh._runtime.actors.cell import Kept, keep, make_asked
from trimesh._runtime.calls.invocation import Err, Ok, Request, encode_request, invoke, is_news, results_of, value_of
from trimesh._runtime.calls.membership import Membership, family_of
from trimesh._runtime.calls.outgoing_stream import OutgoingStream
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.ownership import ActorPlan, OwnedProcs, adopt_actors, open_actors, shared_procs
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.block import Block, run_block
from trimesh._runtime.peers.peer import Target
from trimesh._runtime.tasks.interrupt import run_to_end
from trimesh._runtime.values.endpoint_spec import EndpointKind, MeshInfo
from trimesh._supervision.policy import Policy
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshErrorGroup, MeshStopped, Origin, set_origin
from trimesh.ids import AGENT, MeshId, ProcId
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.meshes.actor_members import ActorMembers


class Leases:
    """What a process lends now, by borrower and number."""

    def __init__(self) -> None:
        self.lent: dict[tuple[ProcId, int], Lent] = {}


def _leases_of(proc: Proc) -> dict[tuple[ProcId, int], Lent]:
    found = proc.above.get(Leases)
    if not isinstance(found, Leases):
        found = proc.above[Leases] = Leases()
    return found.lent


class Lent:
    """Actors that another process has asked for, as the block of the processes owns them.

    Attributes:
        scope: Around their block.
        given_back: Set when the borrower's block is being left.
        ended: Set when they have ended.
    """

    def __init__(self, members: ActorMembers) -> None:
        self.members = members
        self.scope = trio.CancelScope()
        self.given_back = trio.Event()
        self.ended = trio.Event()

    @property
    def info(self) -> MeshInfo:
        return self.members.info

    def cancel_background(self, reason: str) -> None:
        self.members.cancel_background(reason)

    async def drain(self) -> list[Exception]:
        """Nothing: what the borrower has sent is drained as its block is left."""
        return []

    async def stop(self, deadline: float) -> list[Exception]:
        """End them; what fails is told to the borrower, and the processes are killed when the grace is over."""
        del deadline
        self.scope.cancel(reason=f"the block that owns the processes of {self.info.name} is being left")
        await self.ended.wait()
        return []

    def abandon(self) -> None:
        """Nothing: the borrower may go on until they are stopped."""

    def kill_now(self) -> None:
        """Nothing: the processes are killed by their own block."""


def _shared(proc: Proc, mesh: MeshId, what: str) -> OwnedProcs:
    """Return a mesh on which others may spawn.

    Raises:
        RuntimeError: It is not shared.
        MeshStopped: It is being stopped.
    """
    procs = shared_procs(proc).get(mesh)
    if procs is None or procs.block is None:
        raise RuntimeError(
            f"{what} must be asked of a mesh of processes that is shared, and this one is not, or has been stopped: "
            "its owner writes spawn_procs(..., shared=True)"
        )
    if procs.is_stopping or procs.block.is_stopping:
        raise MeshStopped(f"{procs.info.name} is being stopped and takes no new actors")
    return procs


async def lend(
    agent: Any, borrower: ProcId, lease: int, mesh: MeshId, region: Region, name: str, kept: Kept, policy: Any
) -> AsyncGenerator[MeshInfo, None]:
    """Spawn actors on a shared mesh for another process; yield them once, and end them when this call ends.

    Args:
        agent: Of the process that owns the mesh.
        borrower: Who asks: messages of it run to their end.
        lease: Its number for them.
        mesh: Number of the mesh of processes.
        kept: Class and arguments.
        policy: What a failure of an actor does; None for the policy of the processes.
    """
    proc: Proc = agent.proc
    procs = _shared(proc, mesh, "spawn")
    assert procs.block is not None
    cls, args, kwargs = make_asked(proc.values, name, kept)
    plan = ActorPlan(procs, _checked_region(procs, region), policy, name, cls, args, kwargs, borrower)
    lent: Lent | None = None
    key = borrower, lease
    scope = trio.CancelScope()
    try:
        with scope:
            async with open_actors(plan) as members:
                lent = _leases_of(proc)[key] = Lent(members)
                lent.scope = scope
                procs.block.adopt(lent)
                yield members.info
                await lent.given_back.wait()
    finally:
        if lent is not None:
            del _leases_of(proc)[key]
            procs.block.disown(lent)
            lent.ended.set()
    if scope.cancelled_caught:
        raise MeshStopped(f"the block that owns the processes of {name} is being left")


async def give_back(agent: Any, borrower: ProcId, lease: int) -> None:
    """Let what was lent be drained and stopped; the call of `lend` ends when it is."""
    proc: Proc = agent.proc
    lent = _leases_of(proc).get((borrower, lease))
    if lent is not None:
        lent.given_back.set()


async def get_shared(agent: Any, mesh: MeshId, region: Region, name: str, kept: Kept) -> MeshInfo:
    """Return the actor of a name on a shared mesh; see `NamedActors.get`."""
    proc: Proc = agent.proc
    procs = _shared(proc, mesh, "get_or_spawn")
    cls, args, kwargs = make_asked(proc.values, name, kept)
    return (await named_of(procs).get(_checked_region(procs, region), name, cls, args, kwargs)).info


agent_endpoint(lend, EndpointKind.GENERATOR)
agent_endpoint(give_back)
agent_endpoint(get_shared)


def _checked_region(procs: OwnedProcs, region: Region) -> Region:
    if region.mesh != procs.whole.mesh or not set(region.table) <= set(procs.whole.ranks()):
        raise RuntimeError(f"a view of {procs.info.name} must show its own processes")
    return region


# ---- actors by name ------------------------------------------------------------------------------------------


class _Entry:
    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.members: ActorMembers | None = None
        self.ready = trio.Event()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and nothing will take its place."""
        if self.members is None:
            return False
        membership: Membership = self.members.membership
        [rank] = self.members.ranks
        return not membership.is_live(rank) and not membership.may_return(rank)


class NamedActors:
    """The actors that are shared by name on one mesh of processes, at its owner."""

    def __init__(self, procs: OwnedProcs) -> None:
        self._procs = procs
        self._entries: dict[str, _Entry] = {}

    async def get(
        self, region: Region, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorMembers:
        """Return the actor of a name; spawn it, in the block of the processes, where there is none that lives.

        Who asks while it is being spawned waits; when that fails, one who waits tries again.

        Raises:
            TypeError: It is of another class.
            MeshErrorGroup: It could not be made.
        """
        await trio.lowlevel.checkpoint()
        while True:
            entry = self._entries.get(name)
            if entry is None or entry.is_gone:
                return await self._spawn(region, name, cls, args, kwargs)
            if entry.cls is not cls:
                raise TypeError(
                    f"the actor {name!r} of {self._procs.info.name} is of class {entry.cls.__qualname__}, got "
                    f"{cls.__qualname__}: give another class another name"
                )
            if entry.members is not None:
                return entry.members
            await entry.ready.wait()

    async def _spawn(
        self, region: Region, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorMembers:
        entry = self._entries[name] = _Entry(cls)
        try:
            plan = ActorPlan(self._procs, self._place(region), None, name, cls, args, kwargs)
            entry.members = await adopt_actors(plan)
        except BaseException:
            if self._entries.get(name) is entry:
                del self._entries[name]
            raise
        finally:
            entry.ready.set()
        return entry.members

    def _place(self, region: Region) -> Region:
        """Return the first process of a view that lives, as a view of one."""
        members = self._procs.members
        ranks = list(region.ranks())
        living = [rank for rank in ranks if members is None or members.is_live(rank)] or ranks
        if not living:
            raise MeshStopped(f"{self._procs.info.name} has no process for an actor: the view is empty")
        point = self._procs.whole.point(living[0])
        return self._procs.whole.slice(**dict(point))


def named_of(procs: OwnedProcs) -> NamedActors:
    """Return the actors that are shared by name on a mesh."""
    if procs.named is None:
        procs.named = NamedActors(procs)
    assert isinstance(procs.named, NamedActors)
    return procs.named


# ---- borrowing -------------------------------------------------------------------------------------------------------

# Actors of this process's block on processes of another owner, who shares them; `sharing` is the other side.


class BorrowPlan(msgspec.Struct, frozen=True):
    """What `ProcMesh.spawn` of a reference was asked for.

    Attributes:
        procs: The processes, as their owner has told of them.
        policy: What a failure of an actor does; None for the policy of the processes.
        name, cls, args, kwargs: As in an `ActorPlan`.
    """

    procs: MeshInfo
    region: Region
    policy: Policy | None
    name: str
    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BorrowedActors:
    """Actors that another process keeps for a block of this one.

    Attributes:
        block: Who owns them.
        is_stopping: Whether its block has begun to stop.
        info: What travels of them, once they serve.
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
        self._request: Request | None = None

    # ---- start -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Have them spawned; return when all serve.

        Raises:
            MeshErrorGroup: They could not be made.
        """
        plan, proc = self._plan, self.proc
        recipe = keep(proc.values, plan.name, plan.cls, plan.args, plan.kwargs)
        args = (proc.proc_id, self._lease, plan.procs.whole.mesh, plan.region, plan.name, recipe.value, plan.policy)
        self._request = request = _request(plan.procs, "lend", *args)
        request = msgspec.structs.replace(request, definitions=recipe.definitions)
        assert proc.family is not None
        await proc.family.connect([self._target.peer])
        call_id = proc.new_call_id()
        parcel = encode_request(proc, request, call_id, AGENT, None, window=1)
        self._stream = OutgoingStream(proc, call_id, request, [self._target], fail_fast=True, window=1)
        proc.begin(self._stream, parcel)
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
        found = value_of(proc, item, request, 0)
        if isinstance(found, Err):
            await self._close("it could not be read")
            raise MeshErrorGroup(f"{plan.name} could not be spawned", [found.error], mesh=plan.name)
        self.info = found.value
        proc.nursery.start_soon(self._watch)

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        """Wait until they have ended, however; tell the block what they have ended by."""
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
        assert self._request is not None
        where = self._request.origin(0)
        found: list[Exception] = []
        for result in results_of(self.proc, self._stream, self._request, cancelled=False):
            if isinstance(result, Err) and (not self.is_stopping or is_news(result, where)):
                error = result.error
                found += error.failures if isinstance(error, MeshErrorGroup) else [error]
        return found

    # ---- as the block owns it ----------------------------------------------------------------------------------

    def cancel_background(self, reason: str) -> None:
        """See `Owned`: what is lent is cancelled as a whole, right after this."""

    async def drain(self) -> list[Exception]:
        """Let them run what they have accepted from here, and end; cancellable."""
        request = _request(self._plan.procs, "give_back", self.proc.proc_id, self._lease)
        [result] = await invoke(self.proc, [self._target], request, fail_fast=False)
        if isinstance(result, Ok):
            await self._ended.wait()
        errors, self._errors = self._errors, []
        return errors

    async def stop(self, deadline: float) -> list[Exception]:
        """End them now; their processes' owner bounds their clean-up."""
        del deadline
        self.is_stopping = True
        self._scope.cancel(reason=f"the block of {self._plan.name} is being left")
        await self._ended.wait()
        return self._errors

    def abandon(self) -> None:
        self.is_stopping = True

    def kill_now(self) -> None:
        """See `Owned`: the processes are their owner's."""


def _request(procs: MeshInfo, endpoint: str, *args: Any) -> Request:
    return Request(procs.name, endpoint, args, {}, lambda _: _where(procs, endpoint))


def _where(procs: MeshInfo, endpoint: str) -> Origin:
    return Origin(None, procs.name, endpoint=endpoint)


def check_family(proc: Proc, procs: MeshInfo) -> None:
    """Refuse processes of another program.

    Raises:
        RuntimeError: They are.
    """
    if procs.family != family_of(proc):
        raise RuntimeError(f"{procs.name} belongs to another program: spawn processes here")


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_borrowed(plan: BorrowPlan) -> AsyncGenerator[BorrowedActors, None]:
    """Have actors spawned on shared processes, in a block of their own here."""
    async with lease_proc() as (proc, _):
        check_family(proc, plan.procs)
        block = Block(proc, plan.name, limits.GRACE_SECONDS)
        borrowed = BorrowedActors(proc, block, plan)
        await borrowed.start()
        block.adopt(borrowed)
        async with run_block(block):
            yield borrowed


async def get_borrowed(plan: BorrowPlan) -> MeshInfo:
    """Return the actor of a name on shared processes; see `sharing.NamedActors`.

    Raises:
        TypeError: It is of another class.
        RuntimeError: The processes are not shared.
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
