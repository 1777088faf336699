"""Entry points that open process meshes, actor meshes and warm hosts.

Each is an async context manager with a block of its own, or is adopted by the block of the mesh it is spawned on.

Other processes may spawn actors on a process mesh that is shared, and share actors by name. In the same way
(`lend_hosts`) they start processes on the hosts of a job that are shared:

    borrower                                    owner of the processes
    --------                                    ----------------------
    open_borrowed() -- lend(...) ------------>  open_actors() in a block of its own, inside that of the processes
                    <-- MeshInfo -------------  ready
       its block is left -- give_back() ----->  drains and stops them
                    <-- end, or what failed --

LN-1 The owner's agent finds a mesh by its number among the shared ones: requests for any other mesh are refused.
     Processes lent to one borrower count as shared with it alone.
LN-2 What is lent ends with the borrower's call: by its end, its cancel, or the death of its process; or earlier, with
     the block of the processes, or of the hosts.
LN-3 The owner's policy handles failures of the processes; failures of the actors go to the borrower. Failures of
     processes on lent hosts go to the borrower, too, under the policy that it names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from functools import partial
from typing import Any, cast

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import Kept, make_asked
from trimesh._runtime.actors.reports import log_line
from trimesh._runtime.calls.membership import Membership, family_of
from trimesh._runtime.life.controller import check_mode, lease_proc
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.actor_members import ActorMembers
from trimesh._runtime.meshes.block import Block, Owned, run_block
from trimesh._runtime.meshes.changes import gone_of
from trimesh._runtime.meshes.proc_members import ProcMembers
from trimesh._runtime.peers.host import Host
from trimesh._runtime.spawner.proc_options import ProcOptions
from trimesh._runtime.system.cpu_binding import CpuBinding, machine_here, own_cpus, simulated_machine
from trimesh._runtime.tasks.interrupt import run_to_end
from trimesh._runtime.values.endpoint_spec import MemberInfo, MeshInfo, class_of
from trimesh._supervision.policy import FailFast, Policy, Restart, is_healing, replaces_all, units_of
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshErrorGroup, MeshStopped, ShapeError, SpawnError
from trimesh.ids import AGENT, MeshId, ProcId
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


class OwnedProcs:
    """A process mesh, with the rights of its owner.

    Attributes:
        proc: The owner's process.
        block: Adopts actors that are awaited, not entered.
        members: The child processes; None for the mesh of this very process.
        named: Actors on it that are shared by name.
        borrower: The process that has requested them from this one; 0 for none.
        function_actors: Actors that run functions on all processes, by how many functions each runs at once.
        is_stopping: Whether its block has begun to stop.
    """

    def __init__(self, proc: Proc, block: Block | None, whole: Region, members: ProcMembers | None) -> None:
        self.proc = proc
        self.block = block
        self._whole = whole
        self.members = members
        self.named = NamedActors(self)
        self.borrower = ProcId(0)
        self.function_actors = FunctionActors(self)

    @property
    def whole(self) -> Region:
        """All of it, at its present size."""
        return self._whole if self.members is None else self.members.present

    def fix_size(self, why: str) -> None:
        """Refuse later changes of its size; `why` goes into their error."""
        if self.members is not None:
            self.members.fixed_by = why

    @property
    def info(self) -> MeshInfo:
        """Description sent in references."""
        if self.members is not None:
            return self.members.info
        member = MemberInfo(self.proc.proc_id, self.proc.host_name, self.proc.pid)
        family = family_of(self.proc)
        return MeshInfo(AGENT, "this_proc", None, self.whole, (member,), self.proc.proc_id, family=family)

    @property
    def is_stopping(self) -> bool:
        """True once its block has begun to stop."""
        return self.members is not None and self.members.is_stopping

    def checked(self, region: Region) -> Region:
        """Return the view that another process has sent, if it is one of this mesh.

        Raises:
            RuntimeError: It is a view of another mesh.
        """
        if region.mesh != self.whole.mesh or not set(region.table) <= set(self.whole.ranks()):
            raise RuntimeError(f"actors on {self.info.name} need a view of {self.info.name}, got one of another mesh")
        return region

    def may_lend(self, borrower: ProcId) -> bool:
        """Return whether another process may spawn actors on it."""
        return borrower == self.borrower or (self.members is not None and self.members.options.shared)

    def lend(
        self,
        leases: Leases,
        key: tuple[ProcId, int],
        region: Region,
        name: str,
        kept: Kept,
        policy: Policy | None,
    ) -> AsyncGenerator[MeshInfo, None]:
        """Spawn actors for another process; yield them once, and end them when this call ends.

        Args:
            leases: All leases of this process.
            key: The borrower, and the number that it has given the actors.
            kept: Class and arguments.
            policy: What a failure of an actor does; None for the policy of the processes.
        """
        assert self.block is not None
        cls, args, kwargs = make_asked(self.proc.values, name, kept)
        plan = ActorPlan(self, self.checked(region), policy, name, cls, args, kwargs, key[0])
        return lend(leases, key, self.block, open_actors(plan), f"the processes of {name}")


class OwnedHost:
    """A warm host, or hosts of a job, with the rights of their owner.

    Attributes:
        shared_as: Number of hosts that are shared, see `share_hosts`; 0 if they are not.
    """

    def __init__(self, proc: Proc, block: Block, host: Host) -> None:
        self.proc = proc
        self.block = block
        self.host = host
        self.shared_as = 0


def check_per_host(per_host: Mapping[str, int]) -> Extent:
    """Return `per_host` as an extent.

    Raises:
        ShapeError: A size is not positive, or there are too many processes.
        TypeError: It is not a mapping.
    """
    if not isinstance(per_host, Mapping):
        raise TypeError(f"spawn_procs takes a mapping of labels to sizes, as in {{'gpus': 4}}, got {per_host!r}")
    extent = Extent(per_host)
    if extent.nelements > limits.LINKS_MAX:
        raise ShapeError(
            f"a mesh has at most limits.LINKS_MAX ({limits.LINKS_MAX}) processes on a host, got {extent.nelements}"
        )
    return extent


def _proc_members(
    proc: Proc, host: Host, block: Block, name: str, extent: Extent, options: ProcOptions, policy: Policy
) -> ProcMembers:
    whole = Region(extent, mesh=MeshId(proc.new_id()))
    if options.bind is not None:
        machine = simulated_machine(len(whole)) if proc.is_simulated else machine_here()
        try:
            options = msgspec.structs.replace(options, binding=CpuBinding(options.bind, len(whole), machine))
        except SpawnError as error:
            raise MeshErrorGroup(f"{name} could not be started", [error], mesh=name) from None
    elif family_of(proc) != proc.proc_id and not proc.is_simulated:
        options = msgspec.structs.replace(options, binding=own_cpus())
    return ProcMembers(proc, host, block, name, whole, options, policy)


def _owned(proc: Proc, block: Block, members: ProcMembers, borrower: ProcId = ProcId(0)) -> OwnedProcs:  # noqa: B008 - a number
    """Return started processes with their owner's rights; offer them for lending if they are shared or lent."""
    owned = OwnedProcs(proc, block, members.whole, members)
    owned.borrower = borrower
    if (members.options.shared or borrower) and not members.is_stopping:
        mesh = MeshId(cast("int", members.whole.mesh))
        proc.shared[mesh] = owned
        members.on_stopped = partial(proc.shared.pop, mesh, None)
    return owned


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _open_host(
    name: str, preload: tuple[str, ...], *, pickled: bool | None
) -> AsyncGenerator[tuple[Proc, Host], None]:
    """Lease this process and this machine's host; a failed start raises `MeshErrorGroup`, as all of them do (X1)."""
    async with AsyncExitStack() as stack:
        try:
            proc, family = await stack.enter_async_context(lease_proc(pickled, for_host=True))
            host = await stack.enter_async_context(family.host(preload))
        except SpawnError as error:
            raise MeshErrorGroup(f"{name} could not be started", [error], mesh=name) from None
        yield proc, host


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_procs(
    name: str,
    extent: Extent,
    options: ProcOptions,
    policy: Policy,
    warm: OwnedHost | None,
    borrower: ProcId = ProcId(0),  # noqa: B008 - a number
) -> AsyncGenerator[OwnedProcs, None]:
    """Start processes in a block of their own, on a warm host or on one that is opened for them.

    Args:
        borrower: The process that has requested them from this one; 0 for none.
    """
    if warm is not None:
        check_mode(warm.proc, options.pickled)
    async with (
        nullcontext((warm.proc, warm.host)) if warm else _open_host(name, options.preload, pickled=options.pickled) as (
            proc,
            host,
        )
    ):
        block = Block(proc, name, options.grace)
        members = _proc_members(proc, host, block, name, extent, options, policy)
        if warm is None and proc.family is not None:
            members.on_last_exit = partial(proc.family.retire, host)
        with warm.block.entering() if warm is not None and borrower else nullcontext():
            await members.start()
        block.adopt(members)
        async with run_block(block):
            yield _owned(proc, block, members, borrower)


@trio.lowlevel.enable_ki_protection
async def adopt_procs(owner: OwnedHost, name: str, extent: Extent, options: ProcOptions, policy: Policy) -> OwnedProcs:
    """Start processes in the block of a warm host."""
    check_mode(owner.proc, options.pickled)
    with owner.block.entering():
        members = _proc_members(owner.proc, owner.host, owner.block, name, extent, options, policy)
        await members.start()
        await _adopt(owner.block, members)
    return _owned(owner.proc, owner.block, members)


@trio.lowlevel.enable_ki_protection
async def stop_procs(owner: OwnedProcs, grace: float | None) -> None:
    """End a process mesh, with the actors on it, before its block is left. Idempotent."""
    members, block = owner.members, owner.block
    assert members is not None
    assert block is not None
    await trio.lowlevel.checkpoint()
    if members.is_stopping:
        await members.stopped.wait()
        return
    if grace is not None:
        members.grace = grace
    # Another mesh may be opened in this block and need the spawner, which is retired when the block is left.
    members.on_last_exit = None
    with block.entering():
        errors = await block.stop_early([members, *members.actors], members.grace)
    if errors:
        raise MeshErrorGroup(f"{members.name} failed", errors, mesh=members.name)


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_warm_host(
    preload: tuple[str, ...], grace: float, *, pickled: bool | None = None
) -> AsyncGenerator[OwnedHost, None]:
    """Keep this machine's host open for many meshes."""
    async with _open_host("this host", preload, pickled=pickled) as (proc, host):
        await trio.lowlevel.checkpoint()  # the host may have been open already (K01)
        block = Block(proc, host.name, grace)
        async with run_block(block):
            yield OwnedHost(proc, block, host)


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_part(owned: OwnedHost, name: str) -> AsyncGenerator[OwnedHost, None]:
    """Own processes on a host in a block of their own, inside that of the host."""
    block = Block(owned.proc, name, owned.block.grace)
    async with run_block(block):
        yield OwnedHost(owned.proc, block, owned.host)


def own_process(proc: Proc) -> OwnedProcs:
    """Return the mesh of this very process, which has one member and no owner."""
    return OwnedProcs(proc, None, Region(Extent(), mesh=MeshId(proc.proc_id)), None)


class ActorPlan(msgspec.Struct, frozen=True):
    """Request of `ProcMesh.spawn`.

    Attributes:
        procs: The processes; None for this very process.
        region: The view of them; None for all.
        policy: What a failure of an actor does; None for the policy of the processes.
        cls, args, kwargs: Class of the actors and its arguments.
        borrower: The process that has requested them from this one; 0 for none.
    """

    procs: OwnedProcs | None
    region: Region | None
    policy: Policy | None
    name: str
    cls: Any  # a class, or Box[int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    borrower: ProcId = ProcId(0)

    def members(self, procs: OwnedProcs, block: Block) -> ActorMembers:
        """Return the members, none of them started."""
        return _actor_members(procs, self.region or procs.whole, block, self)


def _actor_members(procs: OwnedProcs, region: Region, block: Block, plan: ActorPlan) -> ActorMembers:
    # The actor mesh is as large as the view of the processes that it was spawned on; missing members stay missing.
    mesh = MeshId(procs.proc.new_id())
    proc_ranks = region.table
    # On all processes, a point of either mesh is a point of the other: `actors.exclude(coords(group))` takes both.
    key = procs.whole.mesh if region == procs.whole else mesh
    full = Region(region.extent, mesh=key)
    whole = full.exclude_ranks(rank for rank, base in enumerate(proc_ranks) if base not in region)
    inherited = procs.members.policy if procs.members is not None else FailFast()
    policy = plan.policy or inherited
    living = procs.info
    members = tuple(msgspec.structs.replace(living.members[base], incarnation=0) for base in proc_ranks)
    info = MeshInfo(
        mesh, plan.name, class_of(plan.cls).__qualname__, whole, members, procs.proc.proc_id,
        is_healing(policy) or living.is_healing, family_of(procs.proc), borrower=plan.borrower,
        replaces_all=replaces_all(policy) or living.replaces_all,
    )  # fmt: skip
    membership = procs.proc.memberships[mesh] = Membership(procs.proc, info)
    ranks = list(whole.ranks())
    units = partial(_units, policy, procs, is_inherited=plan.policy is None)
    labels = region.base.labels[:1] if region.base == procs.whole.base and procs.members is not None else ()
    view = region if any(region.spans(label) for label in labels) else None
    others = () if procs.members is None else procs.members.actors
    if any(other.info.name == plan.name and not {*other.proc_ranks}.isdisjoint(proc_ranks) for other in others):
        text = f"two meshes of actors named {plan.name!r} live in the same processes"
        log_line(procs.proc, f"{text}: errors, logs and tables cannot tell them apart; give one another name")
    return ActorMembers(procs.proc, block, membership, ranks, procs.members, proc_ranks, policy, units, view)


def _units(
    policy: Policy,
    procs: OwnedProcs,
    whole: Region,
    proc_ranks: Sequence[int],
    *,
    is_inherited: bool,
) -> Sequence[Sequence[int]]:
    """Return the actors that restart together: under a policy of the processes, those of one unit."""
    if not isinstance(policy, Restart):
        return ()
    if not is_inherited:
        return units_of(whole, policy.along)
    ranks = {base: rank for rank, base in enumerate(proc_ranks) if rank in whole}
    places = procs.whole if procs.members is None else procs.members.whole
    units = ([ranks[base] for base in unit if base in ranks] for unit in units_of(places, policy.along))
    return [unit for unit in units if unit]


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_actors(plan: ActorPlan) -> AsyncGenerator[ActorMembers, None]:
    """Spawn actors in a block of their own; without processes, in this very process."""
    async with lease_proc() as (proc, _):
        procs = plan.procs or own_process(proc)
        grace = procs.block.grace if procs.block is not None else limits.GRACE_SECONDS
        block = Block(procs.proc, plan.name, grace)
        with nullcontext() if procs.block is None else procs.block.entering():
            await _settle(procs, plan)
            members = plan.members(procs, block)
            await members.start(plan.cls, plan.args, plan.kwargs)
        block.adopt(members)
        async with run_block(block):
            yield members


@trio.lowlevel.enable_ki_protection
async def adopt_actors(plan: ActorPlan) -> ActorMembers:
    """Spawn actors in the block of the processes.

    Raises:
        RuntimeError: The processes have no block, or it has begun to stop.
    """
    procs = plan.procs
    if procs is None or procs.block is None:
        raise RuntimeError(
            "this_proc() has no block that could adopt actors: write `async with this_proc().spawn(...)`"
        )
    with procs.block.entering():
        await _settle(procs, plan)
        members = plan.members(procs, procs.block)
        await members.start(plan.cls, plan.args, plan.kwargs)
        await _adopt(procs.block, members)
    return members


async def _settle(procs: OwnedProcs, plan: ActorPlan) -> None:
    """Wait until restarting processes serve again (rule M2).

    Raises:
        RuntimeError: The processes have been stopped.
        MeshErrorGroup: Some have left the mesh.
    """
    if procs.is_stopping:
        raise RuntimeError(f"{procs.info.name} has been stopped and takes no new actors")
    if procs.members is not None:
        ranks = (plan.region or procs.whole).ranks()
        await procs.members.wait_settled(ranks)
        if not procs.members.absent.isdisjoint(ranks):
            gone = gone_of(procs.members, ranks)
            raise MeshErrorGroup(f"{plan.name} could not be spawned", [gone], mesh=plan.name)


async def _adopt(block: Block, owned: Owned) -> None:
    """Hand a started mesh to a block, which may have begun to stop meanwhile."""
    if not block.is_stopping:
        block.adopt(owned)
        return
    await run_to_end(lambda: owned.stop(trio.current_time() + block.grace))
    block.check_open()


# ---- what is lent to other processes: actors on processes of this one, processes on its hosts ------------------------


class Lent:
    """Actors or processes lent to another process, as owned by the block of what they were spawned on.

    Attributes:
        scope: Around their block.
        given_back: Set when the borrower's block is being left.
        ended: Set when they have ended.
    """

    def __init__(self, members: ActorMembers | ProcMembers, scope: trio.CancelScope) -> None:
        self.members = members
        self.scope = scope
        self.given_back = trio.Event()
        self.ended = trio.Event()

    @property
    def info(self) -> MeshInfo:
        return self.members.info

    def cancel_background(self, reason: str) -> None:
        self.members.cancel_background(reason)

    async def drain(self) -> list[Exception]:
        """Do nothing: messages of the borrower are drained when its block is left."""
        return []

    async def stop(self, deadline: float) -> list[Exception]:
        """End them; failures are reported to the borrower, and the processes are killed when the grace is over."""
        del deadline
        self.scope.cancel(reason=f"the block that owns the processes of {self.info.name} is being left")
        await self.ended.wait()
        return []

    def abandon(self) -> None:
        """Do nothing: the borrower may use the actors until they are stopped."""

    def kill_now(self) -> None:
        """Do nothing: the processes are killed by their own block."""


Leases = dict[tuple[ProcId, int], Lent]


async def lend(
    leases: Leases,
    key: tuple[ProcId, int],
    block: Block,
    opened: AbstractAsyncContextManager[ActorMembers | ProcMembers],
    what: str,
) -> AsyncGenerator[MeshInfo, None]:
    """Open a mesh for another process; yield it once, and end it when this call ends.

    Args:
        block: Owns what it is spawned on; when that is left, the mesh ends.
        what: What `block` owns, for the error.
    """
    lent: Lent | None = None
    scope = trio.CancelScope()
    try:
        with scope:
            async with opened as members:
                lent = leases[key] = Lent(members, scope)
                block.adopt(lent)
                yield members.info
                await lent.given_back.wait()
    finally:
        if lent is not None:
            del leases[key]
            block.disown(lent)
            lent.ended.set()
    if scope.cancelled_caught:
        raise MeshStopped(f"the block that owns {what} is being left")


class FunctionActors:
    """Actors that run functions of `ProcMesh.call` and `map`, spawned in the block of the processes at first use."""

    def __init__(self, procs: OwnedProcs) -> None:
        self._procs = procs
        self._lock = trio.Lock()
        self._members: dict[type, ActorMembers] = {}

    async def get(self, name: str, cls: type) -> ActorMembers | None:
        """Return the actors of a class on all processes; None if some have ended before; a checkpoint."""
        async with self._lock:
            found = self._members.get(cls)
            if found is None:
                members = self._procs.members
                if members is not None and not all(map(members.is_live, self._procs.whole.ranks())):
                    return None
                plan = ActorPlan(self._procs, self._procs.whole, None, name, cls, (), {})
                found = self._members[cls] = await adopt_actors(plan)
            return found


class _Entry:
    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.members: ActorMembers | None = None
        self.ready = trio.Event()

    @property
    def is_gone(self) -> bool:
        """True if the actor has ended and will not be replaced."""
        if self.members is None:
            return False
        membership = self.members.membership
        [rank] = self.members.ranks
        return not membership.is_live(rank) and not membership.may_return(rank)


class NamedActors:
    """Actors shared by name on one process mesh, at its owner."""

    def __init__(self, procs: OwnedProcs) -> None:
        self._procs = procs
        self._entries: dict[str, _Entry] = {}

    async def get(
        self, region: Region, name: str, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorMembers:
        """Return the named actor; spawn it in the block of the processes if none is alive.

        Concurrent requests wait for the same spawn; when that fails, one of them tries again.

        Raises:
            TypeError: It has another class.
            MeshErrorGroup: It could not be spawned.
        """
        await trio.lowlevel.checkpoint()
        cls = self._procs.proc.values.sent_class(cls)
        while True:
            entry = self._entries.get(name)
            if entry is None or entry.is_gone:
                return await self._spawn(region, name, cls, args, kwargs)
            if entry.cls != cls:
                other, wanted = (one.__qualname__ if isinstance(one, type) else str(one) for one in (entry.cls, cls))
                raise TypeError(
                    f"the actor {name!r} of {self._procs.info.name} is of class {other}, got {wanted}: "
                    "give another class another name"
                )
            if entry.members is not None:
                return entry.members
            await entry.ready.wait()

    async def _spawn(
        self, region: Region, name: str, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        """Return the first live process of a view, as a view of one."""
        members = self._procs.members
        ranks = list(region.ranks())
        living = [rank for rank in ranks if members is None or members.is_live(rank)] or ranks
        if not living:
            raise MeshStopped(f"{self._procs.info.name} has no process for an actor: the view is empty")
        point = self._procs.whole.point(living[0])
        return self._procs.whole.slice(**dict(point))
