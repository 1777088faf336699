r"""Several hosts as one: the processes of a mesh are started on the hosts of their ranks.

`JobPlace` is a place among the hosts of a job. It has one host, and its successor after a loss:

    launch --> place --> host, alive
                    \--> host, lost --replace--> the job starts another agent there --> launch

HP-1 A process is started on the host that is at the place when it is requested. If that host is lost, the launch waits
     for the next one, and fails if there is none.
HP-2 One replacement is under way at a time; all launches that wait for it get the same host.
HP-3 Processes of a lost host stay with it: their reports and links are not looked up on the next one.
HP-4 When `replace` returns, each process of the old host is known to be gone: none of them answers a later call.

`HostRoster` holds all hosts of one job, to which more can be added while its block is open:

    places 0 .. n-1 --grow(k): started, joined--> places 0 .. n+k-1

HR-1 Growing is all or nothing: the new hosts join at one moment, when processes can be started on all of them.
HR-2 One growth at a time; the existing places stay as they are, and so do the host meshes that show them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.hosts.remote_host import SessionPipe
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.job_hosts import HostCode, share_hosts
from trimesh._runtime.life.ownership import OwnedHost
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.block import Block, run_block
from trimesh._runtime.meshes.member import Member
from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.peers.host import HostChild, LaunchRequest
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface import Link
from trimesh._transport.native.transport import NativeTransport
from trimesh._transport.relay import (
    OpenedChannel,
    Relay,
    Session,
    SessionDown,
    SessionEnding,
    SessionEvent,
    SessionInterrupted,
)
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.ids import ProcId


class Successors(Protocol):
    """Starts successors of lost hosts, and additional hosts."""

    @property
    def spares(self) -> int:
        """Number of spare hosts; an agent restarted on a lost host does not count."""
        ...

    async def succeed(self, lost: JobHost) -> JobHost:
        """Start the successor of a lost host at its place; a cancel leaves nothing of it.

        Raises:
            SpawnError: The host could not be started.
        """
        ...

    def give_up(self, host: JobHost) -> None:
        """Give up a live host, with all processes there."""
        ...

    async def grow(self, count: int, first: int) -> Sequence[JobHost]:
        """Start more hosts, all or none; may take as long as a scheduler's queue; a cancel leaves nothing of it.

        Args:
            first: Place of the first new host; the others follow.

        Raises:
            SpawnError: The job has no more hosts.
            MeshErrorGroup: Some of them could not be started.
        """
        ...


class JobPlace:
    """Place of a job's host, which can be replaced there; see `JobHost`.

    Args:
        host: The first one.
        successors: Starts the next hosts.
        members: Child processes of the program, by id.
        on_lost: Called for each loss that no mesh has reported, and that no spare host will repair.
    """

    def __init__(
        self,
        host: JobHost,
        successors: Successors,
        members: Mapping[ProcId, Member],
        on_lost: Callable[[HostLoss], None],
    ) -> None:
        self.host = host
        self._members = members
        self._started = set[ProcId]()
        self._successors = successors
        self._on_lost = on_lost
        self._replacing = trio.Lock()
        self._is_given_up = False
        self._codes = dict[str, HostCode]()
        self._watch()

    @property
    def name(self) -> str:
        return self.host.name

    def code_of(self, kind: str) -> HostCode | None:
        """Return the code that `hosts.sync` or `hosts.install` (`kind`) has brought to the present host, or None."""
        return self._codes.get(kind)

    def set_code(self, kind: str, code: HostCode | None) -> None:
        """Set the code of `kind`; processes started from now on get it, beside the code of other kinds."""
        self._codes.pop(kind, None)
        if code is not None:
            self._codes[kind] = code
        found = list(self._codes.values())
        self.host.code = None
        if found:
            paths = tuple(path for one in found for path in one.paths)
            packages = tuple(path for one in found for path in one.packages)
            env = {name: value for one in found for name, value in one.env.items()}
            self.host.code = HostCode(paths, env, packages)

    def _watch(self) -> None:
        host = self.host
        host.on_lost = self._lost
        if host.loss is not None:
            self._lost(host.loss)

    def _lost(self, loss: HostLoss) -> None:
        is_made_good = self._is_given_up or self._successors.spares > 0
        if not self.host.is_loss_taken and not is_made_good:
            self._on_lost(loss)

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        host = await self._living()
        try:
            return await self._launch(request, on_exit)
        except SpawnError:
            if host.loss is None:
                raise
        await self._living()  # the host was lost meanwhile, with all processes of the launch
        return await self._launch(request, on_exit)

    async def _launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        started = self._started
        started.intersection_update(self._members)
        host = self.host
        if request.prepare is not None:
            request = await request.prepare(request, host)
        child = await host.launch(request, on_exit)
        started.add(request.proc_id)
        return child

    async def _living(self) -> JobHost:
        while self.host.loss is not None:
            before = self.host
            async with self._replacing:
                if self.host is before:
                    await self._succeed()
        return self.host

    async def replace(self) -> None:
        """Replace the host at this place; the present one is given up, with all its processes.

        Raises:
            SpawnError: The job has no other host, or could not start it.
        """
        async with self._replacing:
            if self.host.loss is None:
                self._is_given_up = True
                self._successors.give_up(self.host)
            for member in [self._members[one] for one in self._started if one in self._members]:
                await member.gone.wait()
            await self._succeed()

    async def _succeed(self) -> None:
        self.host = await self._successors.succeed(self.host)
        self._is_given_up = False
        self._codes.clear()
        self._watch()

    async def connect(self, target: ProcId) -> Link:
        return await self.host.connect(target)

    async def exit_of(self, target: ProcId) -> ExitReport:
        return await self.host.exit_of(target)

    async def flush_output(self) -> None:
        """Wait until the output written there is shown; see `Host.flush_output`."""
        await self.host.flush_output()


# ---- all hosts of one job, to which more can be added while its block is open ----------------------------------------


class HostRoster:
    """The places of a job's hosts; see `JobPlace` for its arguments.

    Attributes:
        all: The present hosts.
    """

    def __init__(
        self,
        hosts: Sequence[JobHost],
        successors: Successors,
        members: Mapping[ProcId, Member],
        on_lost: Callable[[HostLoss], None],
    ) -> None:
        self._successors = successors
        self._members = members
        self._on_lost = on_lost
        self._growing = trio.Lock()
        self.all = ManyHosts(self._places(hosts), self)

    def _places(self, hosts: Sequence[JobHost]) -> tuple[JobPlace, ...]:
        return tuple(JobPlace(host, self._successors, self._members, self._on_lost) for host in hosts)

    async def grow(self, count: int) -> ManyHosts:
        """Add hosts after the present ones, and return all.

        Raises:
            ValueError: There would be too many.
            SpawnError, MeshErrorGroup: They could not be started, see `Successors.grow`.
        """
        async with self._growing:
            first = len(self.all.hosts)
            if first + count > limits.JOB_HOSTS_MAX:
                raise ValueError(
                    f"a job must have at most limits.JOB_HOSTS_MAX ({limits.JOB_HOSTS_MAX}) hosts, got {count} more "
                    f"than its {first}"
                )
            more = await self._successors.grow(count, first)
            self.all = ManyHosts((*self.all.hosts, *self._places(more)), self)
            return self.all


# ---- host group ------------------------------------------------------------------------------------------------------

OnExit = Callable[[ExitReport], None]


class ManyHosts(msgspec.Struct, frozen=True):
    """Hosts in the order of a mesh, whose first dimensions are theirs; see `Host`.

    Attributes:
        roster: All hosts of the job; None if these are selected ones, to start processes on.
        is_by_rank: Whether there is one for each process, by rank; else each has equally many.
    """

    hosts: tuple[JobPlace, ...]
    roster: HostRoster | None = None
    is_by_rank: bool = False

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(host.name for host in self.hosts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the machines, in order."""
        return tuple(host.name for host in self.hosts)

    def codes(self, kind: str) -> tuple[HostCode | None, ...]:
        """Return the code that `hosts.sync` or `hosts.install` (`kind`) has brought to each host, in order."""
        return tuple(host.code_of(kind) for host in self.hosts)

    def set_code(self, kind: str, ranks: Sequence[int], codes: Sequence[HostCode | None]) -> None:
        """Set the code of `kind` on the hosts at some ranks."""
        for rank, code in zip(ranks, codes, strict=True):
            self.hosts[rank].set_code(kind, code)

    async def replace(self, rank: int) -> None:
        await self.hosts[rank].replace()

    async def grow(self, count: int) -> ManyHosts:
        """Add hosts, and return all of the job; see `HostRoster.grow`."""
        assert self.roster is not None
        return await self.roster.grow(count)

    def select(self, ranks: Sequence[int], *, is_by_rank: bool = False) -> ManyHosts:
        return ManyHosts(tuple(self.hosts[rank] for rank in ranks), is_by_rank=is_by_rank)

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        index = request.rank
        if not self.is_by_rank:
            index = index * len(self.hosts) // request.whole.base.nelements
        return await self.hosts[index].launch(request, on_exit)

    async def connect(self, target: ProcId) -> Link:
        for host in as_set(self.hosts):
            try:
                return await host.connect(target)
            except SpawnError:
                continue
        raise SpawnError(f"no host of {self.name} knows process {target:x}")

    async def exit_of(self, target: ProcId) -> ExitReport:
        report = ExitReport.unknown(target)
        for host in as_set(self.hosts):
            report = await host.exit_of(target)
            if report.is_known:
                break
        return report

    def retire(self) -> None:
        """Do nothing: agents stay for as long as their job."""

    async def flush_output(self) -> None:
        """Wait until the output of processes on all of them is shown."""
        async with trio.open_nursery() as nursery:
            for host in as_set(self.hosts):
                nursery.start_soon(host.flush_output)


def as_set(hosts: Sequence[JobPlace]) -> Sequence[JobPlace]:
    """Return the hosts without duplicates."""
    return list(dict.fromkeys(hosts))


# ---- one host of a job -----------------------------------------------------------------------------------------------


class JobHost(Protocol):
    """One host of a job, real or simulated; see `RemoteHost` and `Host`."""

    name: str
    loss: HostLoss | None
    is_loss_taken: bool
    on_lost: Callable[[HostLoss], None]
    code: HostCode | None

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild: ...

    async def connect(self, target: ProcId) -> Link: ...

    async def exit_of(self, target: ProcId) -> ExitReport: ...

    async def flush_output(self) -> None:
        """Wait until the output written there is shown."""


# ---- hosts of one job in the controller: their sessions, and the block that owns processes on them -------------------


class HostSessions:
    """Sessions of one process, and callbacks for their events.

    Attributes:
        on_down: Called when a session is over, just before its pipe is lost.
        on_interrupted: Called when a session has lost its connection.
    """

    def __init__(self) -> None:
        self._pipes: dict[Session, SessionPipe] = {}
        self.on_down: Callable[[SessionDown], None] = lambda _: None
        self.on_interrupted: Callable[[SessionInterrupted], None] = lambda _: None

    def begin(
        self, relay: Relay, peer: ProcId, *, is_dialler: bool, lease_seconds: float, session_id: int = 0
    ) -> SessionPipe:
        """Begin a session, and return the pipe that carries records over it."""
        pipe, control = SessionPipe.pair()
        pipe.session = relay.open_session(
            control, peer=peer, is_dialler=is_dialler, lease_seconds=lease_seconds, session_id=session_id
        )
        self._pipes[pipe.session] = pipe
        return pipe

    def end(self, pipe: SessionPipe) -> None:
        """End a session and its pipe at once; no more callbacks follow."""
        self._pipes.pop(pipe.session, None)
        pipe.session.abort()
        pipe.close()

    def take(self, event: SessionEvent) -> None:
        pipe = self._pipes.get(event.session)
        if pipe is None:
            return
        match event:
            case OpenedChannel(_, channel, purpose):
                pipe.opened(channel, purpose)
            case SessionDown(session, ending, reason):
                del self._pipes[session]
                self.on_down(event)
                pipe.lose(f"{ending.value}: {reason}", is_orderly=ending is SessionEnding.BYE)
            case SessionInterrupted():
                self.on_interrupted(event)
            case _:
                pass


@asynccontextmanager
async def open_hosts_proc(*, pickled: bool | None = None) -> AsyncGenerator[Proc, None]:
    """Lease the controller's process for a job.

    Raises:
        SpawnError: This process is a worker, or simulated; neither can have jobs.
    """
    async with lease_proc(pickled) as (proc, family):
        if family.siblings is None or not isinstance(proc.transport, NativeTransport):
            raise SpawnError(
                "a job can be entered only in the controller process, not in a worker or a simulation: enter it there, "
                "and pass meshes to your actors"
            )
        yield proc


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def own_hosts(
    proc: Proc, name: str, hosts: Sequence[JobHost], grace: float, successors: Successors, *, shared: bool = False
) -> AsyncGenerator[tuple[OwnedHost, ManyHosts], None]:
    """Run a block that owns the processes spawned on hosts.

    The block fails when a host is lost on which no mesh has a process, and which no spare host can replace.

    Args:
        proc: The controller.
        hosts: The hosts, in the order of the mesh.
        successors: See `JobPlace`.
        shared: Whether other processes of the family may spawn on the hosts.
    """
    block = Block(proc, name, grace)

    def lost(loss: HostLoss) -> None:
        if not block.is_stopping:
            block.fail(loss())

    group = HostRoster(hosts, successors, proc.members, lost).all
    owned = OwnedHost(proc, block, group)
    async with run_block(block):
        with share_hosts(owned, group) if shared else nullcontext():
            yield owned, group
