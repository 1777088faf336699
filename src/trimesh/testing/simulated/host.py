"""Simulated host: every process of a mesh is a task tree in this process, joined by in-memory links.

The same runtime runs on it as over real processes. Under Trio's `MockClock` a test never waits in real time.
"""

from __future__ import annotations

import contextvars
import random
import signal
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimesh import config, limits
from trimesh._runtime.actors.agent import run_with_agent
from trimesh._runtime.actors.context import set_proc_of_task
from trimesh._runtime.life.family import Family
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.life.worker import serve_owner
from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.peers.host import LaunchRequest, NoLinkError, ProcessState
from trimesh._runtime.sites import Sites
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.seeds import ProcSeeds
from trimesh._runtime.tasks.interrupt import forget_blocks
from trimesh._transport.in_memory.transport import Delivery, Fate, MemoryLink, MemoryNetwork, MemoryTransport
from trimesh._transport.interface import DownReason, Lane, Link, LinkDown
from trimesh.errors import SpawnError, place_name
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent
from trimesh.testing.plans.fault import Heal, Place
from trimesh.testing.plans.link_faults import DisturbedWire
from trimesh.testing.simulated.tasks import drop_tasks

if TYPE_CHECKING:
    from trimesh.testing.simulated.job_host import HostCut, SimJobHost
    from trimesh.testing.simulated.simulation import Simulation


@attrs.define(eq=False)
class SimChild:
    """A simulated process.

    Attributes:
        pid: Number that no process of the machine has.
        proc_id: Its id.
        link: The owner's end of the link.
        task: Root of its task tree, once it runs.
        report: Its exit report, or None while it lives.
        place: Its process mesh and rank, the same for all incarnations.
        label: Its name, as `mesh[gpus=2]`.
        host: Its host of a job, or None for that of the controller.
        children: Processes that it started, alive or not.
    """

    world: World
    pid: int
    proc_id: ProcId
    on_exit: Callable[[ExitReport], None]
    owner: SimChild | None
    host: SimJobHost | None = None
    link: Link = attrs.field(init=False)
    place: Place = None
    label: str = ""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    task: trio.lowlevel.Task | None = None
    report: ExitReport | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)
    children: list[SimChild] = attrs.field(factory=list["SimChild"])

    @property
    def host_name(self) -> str:
        return "simulated" if self.host is None else self.host.name

    @property
    def loss(self) -> HostLoss | None:
        """The loss of its host; None if its owner is on the same host, or the host is not lost."""
        return self.host.loss if self.host is not None and self.is_far else None

    @property
    def is_far(self) -> bool:
        """True if its owner is on another host."""
        return self.host is not None and self.owner is None

    @property
    def lease(self) -> str:
        """Name of the limit that is its lease."""
        return "FAR_LINK_LEASE_SECONDS" if self.is_far else "LEASE_SECONDS"

    @property
    def report_seconds(self) -> float:
        return limits.FAR_EXIT_REPORT_SECONDS if self.is_far else limits.EXIT_REPORT_SECONDS

    async def spawner_state(self) -> str | None:
        """See `HostChild.spawner_state`: there is none."""
        await trio.lowlevel.checkpoint()
        return None

    async def kernel_state(self, record: str = "") -> ProcessState | None:
        """See `HostChild.kernel_state`: a simulated process sleeps."""
        del record
        await trio.lowlevel.checkpoint()
        return ProcessState("S")

    def signal(self, signum: int) -> None:
        """End the process: SIGTERM and SIGKILL both end it at once, without clean-up."""
        self.die(signum=signum)

    def kill(self) -> None:
        """End the process at once, as its lifeline would."""
        self.die(signum=signal.SIGKILL)

    def die(
        self,
        *,
        signum: int | None = None,
        code: int | None = None,
        oom_killed: bool = False,
        last_words: str = "",
    ) -> None:
        """End the process as a signal or `os._exit` would, at once and without clean-up; its children end with it."""
        if self.report is None:
            self._end(code, signum, oom_killed=oom_killed, last_words=last_words)
            self._drop()

    def leave(self) -> None:
        """Record that the process has run to its end."""
        if self.report is None:
            self._end(0, None)

    def _end(self, code: int | None, signum: int | None, *, oom_killed: bool = False, last_words: str = "") -> None:
        self.report = ExitReport(
            proc_id=self.proc_id,
            pid=self.pid,
            exit_code=code,
            signal=signum,
            oom_killed=oom_killed,
            stderr_tail=last_words,
            ended_at=0,
        )
        if self.world.watcher is not None:
            self.world.watcher.ended(self)
        self.world.sever(self.proc_id)
        for child in self.children:
            child.die(signum=signal.SIGKILL)
        self.ended.set()
        self.on_exit(self.report)

    def _drop(self) -> None:
        """Stop all tasks of the process without clean-up, as a kill does to a real one."""
        if self.task is not None and drop_tasks(self.task, self.world.proc(self.proc_id).cells.values()):
            forget_blocks(self.world.proc(self.proc_id))
            self.world.transport(self.proc_id).close()
        self.scope.cancel(reason=f"simulated process {self.pid} has ended")


@attrs.define(eq=False)
class World:
    """All simulated processes of one family.

    Attributes:
        network: Their links.
        nursery: Nursery in which they run.
        pickled: Whether values are pickled.
        children: Every process that was started, by id.
        seed: Seed of all ids.
        sites, watcher: Hooks by which a test observes and injects faults.
        host_of: Host of each place that is on a host of a job.
    """

    nursery: trio.Nursery
    seed: int = 0
    sites: Sites | None = None
    watcher: Simulation | None = None
    pickled: bool = True
    network: MemoryNetwork = attrs.field(factory=MemoryNetwork)
    children: dict[ProcId, SimChild] = attrs.field(factory=dict[ProcId, SimChild])
    host_of: dict[Place, SimJobHost] = attrs.field(factory=dict["Place", "SimJobHost"])
    _ends: dict[ProcId, list[tuple[ProcId, MemoryLink]]] = attrs.field(
        factory=dict["ProcId", "list[tuple[ProcId, MemoryLink]]"]
    )
    _procs: dict[ProcId, Proc] = attrs.field(factory=dict[ProcId, Proc])
    _next_pid: int = 10_000_000

    def make_proc(self, proc_id: ProcId, parent: ProcId | None) -> Proc:
        transport = self.network.transport(proc_id)
        proc = Proc(proc_id, transport, seed=(self.seed << 64) | proc_id, pickled=self.pickled)
        proc.sites, proc.host_name, proc.pid = self.sites, "simulated", self._next_pid
        host = SimHost(self, proc)
        root = next(iter(self._procs), None)
        proc.family = Family(proc, lambda _: nullcontext(host), parent, host, root)
        self._procs[proc_id] = proc
        return proc

    def connect(self, one: ProcId, other: ProcId) -> tuple[MemoryLink, MemoryLink]:
        """Make a link between two processes; the caller puts its ends into service."""
        near, far = self.network.connect(self.transport(one), self.transport(other))
        self._ends.setdefault(one, []).append((other, near))
        self._ends.setdefault(other, []).append((one, far))
        if self.watcher is not None:
            self.watcher.linked(one, other, near)
            self.watcher.linked(other, one, far)
        return near, far

    def transport(self, proc_id: ProcId) -> MemoryTransport:
        """Return the links of a simulated process."""
        transport = self._procs[proc_id].transport
        assert isinstance(transport, MemoryTransport)
        return transport

    def proc(self, proc_id: ProcId) -> Proc:
        return self._procs[proc_id]

    def living(self) -> Iterator[tuple[str, Proc]]:
        """Yield the label and the `Proc` of every live process, the controller first."""
        for proc_id, proc in self._procs.items():
            child = self.children.get(proc_id)
            if child is None or child.report is None:
                yield ("controller" if child is None else child.label), proc

    def kill_all(self) -> None:
        """End every process but the controller."""
        for child in list(self.children.values()):
            child.kill()

    def sever(self, proc_id: ProcId) -> None:
        """Cut every link of a process, as its end does: peers see EOF, and can no longer reach its memory."""
        for _, link in self._ends.get(proc_id, ()):
            link.abort()
        self.transport(proc_id).end()

    def links_to(self, there: Collection[ProcId]) -> list[tuple[ProcId, MemoryLink]]:
        """Return the other ends of links to some processes, each with its owner, which is not one of them."""
        return [
            (owner, link)
            for owner, ends in self._ends.items()
            for peer, link in ends
            if peer in there and owner not in there and not link.is_down
        ]

    def quiet_pairs(self) -> list[tuple[ProcId, ProcId]]:
        """Return the pairs (sender, receiver) whose links are up and carry no message of the sender."""
        found: dict[tuple[ProcId, ProcId], bool] = {}
        for sender, ends in self._ends.items():
            for receiver, link in ends:
                found[sender, receiver] = found.get((sender, receiver), True) and not link.outgoing.depth and link.is_up
        return [pair for pair, is_quiet in found.items() if is_quiet]

    def new_pid(self) -> int:
        self._next_pid += 1
        return self._next_pid


@attrs.define(eq=False)
class SimHost:
    """The host as one simulated process sees it."""

    world: World
    proc: Proc

    @property
    def name(self) -> str:
        return "simulated"

    async def launch(
        self, request: LaunchRequest, on_exit: Callable[[ExitReport], None], machine: SimJobHost | None = None
    ) -> SimChild:
        """Start a simulated process; see `Host.launch`. It is on its owner's host unless `machine` is given."""
        await trio.lowlevel.checkpoint()
        watcher = self.world.watcher
        point = request.whole.point(request.rank)
        label = place_name(request.mesh, point)
        try:
            self._take_resources(self.proc.proc_id)
        except OSError as error:
            raise SpawnError(f"{label}: no link to the new process could be made: {error}") from error
        child_proc = self.world.make_proc(request.proc_id, self.proc.proc_id)
        owner = self.world.children.get(self.proc.proc_id)
        machine = machine or (None if owner is None else owner.host)
        child = SimChild(self.world, self.world.new_pid(), request.proc_id, on_exit, owner, machine)
        child.place, child.label = (request.whole.mesh, request.rank), label
        if machine is not None:
            child_proc.host_name, self.world.host_of[child.place] = machine.name, machine
        child_proc.pid, child_proc.share = child.pid, request.share
        self.world.children[request.proc_id] = child
        if owner is not None:
            owner.children.append(child)
        child.link, far = self.world.connect(self.proc.proc_id, request.proc_id)
        if watcher is not None:
            watcher.started(child, ProcSeeds.of(request.seed, request.mesh, request.rank, request.incarnation))
        if request.entry is not None:  # the only planned entry ends before its first message
            self.world.nursery.start_soon(_end_unheard, child)
            return child

        async def live() -> None:
            if child.report is not None:
                child_proc.transport.close()
                return
            child.task = trio.lowlevel.current_task()
            set_proc_of_task(child_proc)
            config.choose(request.settings)
            with child.scope:
                owner = child_proc.adopt_link(self.proc.proc_id, far)
                assert child_proc.family is not None
                await serve_owner(child_proc, child_proc.family, owner, point, child.kill)
            child.leave()
            child_proc.transport.close()

        contextvars.Context().run(self.world.nursery.start_soon, live)
        return child

    async def connect(self, target: ProcId) -> Link:
        await trio.lowlevel.checkpoint()
        child = self.world.children.get(target)
        if child is not None and child.report is not None:
            raise SpawnError("there is no such process any more")
        try:
            self._take_resources(self.proc.proc_id)
        except OSError as error:
            raise NoLinkError(f"no link to process {target} could be made: {error}") from error
        near, far = self.world.connect(self.proc.proc_id, target)
        try:
            self._take_resources(target)
        except OSError:  # as on a real host, this side only sees the end of the link
            far.abort()
        else:
            self.world.proc(target).adopt_link(self.proc.proc_id, far)
        return near

    def _take_resources(self, owner: ProcId) -> None:
        if self.world.watcher is not None:
            self.world.watcher.linking(owner)

    async def exit_of(self, target: ProcId) -> ExitReport:
        """Wait for the end of any simulated process; see `Host.exit_of`."""
        child = self.world.children.get(target)
        if child is None:
            await trio.lowlevel.checkpoint()
            return ExitReport.unknown(target, ended_at=0)
        await child.ended.wait()
        assert child.report is not None
        return child.report

    def retire(self) -> None:
        """Do nothing: a simulated host is no process."""

    async def flush_output(self) -> None:
        """Do nothing: a simulated process writes to the streams of the test itself."""


async def _end_unheard(child: SimChild) -> None:
    await trio.lowlevel.checkpoint()
    child.die(code=1, last_words="simulated: it ended before its first word")
    child.world.proc(child.proc_id).transport.close()


@asynccontextmanager
async def open_world(
    prepare: Callable[[World], None] | None = None, *, seed: int = 0, pickled: bool = True
) -> AsyncGenerator[World, None]:
    """Make the running task the controller of a simulated family.

    Args:
        prepare: Called with the world before it has any process.
        seed: Seed of all ids.
        pickled: Whether values are pickled in it.
    """
    async with trio.open_nursery() as nursery:
        world = World(nursery, seed, pickled=pickled)
        if prepare is not None:
            prepare(world)
        proc = world.make_proc(ProcId(1), None)
        with proc_of_task(proc):
            await nursery.start(run_with_agent, proc, proc.me, Extent().point(0))
            try:
                yield world
            finally:
                nursery.cancel_scope.cancel(reason="the simulated family has ended")


@contextmanager
def proc_of_task(proc: Proc) -> Generator[None, None, None]:
    """Make `proc` the process of the running task, inside the block."""
    token = set_proc_of_task(proc)
    try:
        yield
    finally:
        token.var.reset(token)


# ---- the wires of a simulated family: seeded delays, and the faults of links -----------------------------------------

# Links are reliable, here as over real transports. So a lost message ends the whole link; a damaged or repeated message
# breaks the protocol, which ends the link, too; other faults only delay. A *held* place receives nothing. When the
# heartbeats of a child have been held for `limits.LEASE_SECONDS`, its owner gives it up, as the native library does.


@attrs.frozen(eq=False)
class Hold:
    """Hold on messages between two sets of processes.

    Attributes:
        sources, targets: Messages from one set to the other are held; None for all.
        ends_lease: Whether heartbeats are held, too.
    """

    sources: frozenset[Place] | None
    targets: frozenset[Place] | None
    ends_lease: bool = True

    def covers(self, source: Place, target: Place) -> bool:
        return (self.sources is None or source in self.sources) and (self.targets is None or target in self.targets)


@attrs.define(eq=False)
class Wired:
    """One end of one link.

    Attributes:
        owner, peer: The processes at this end and at the other.
        link: The end.
        on_lease: Called when the peer's lease expires; None if the owner holds no lease.
        lease: Name of the limit of the lease.
    """

    owner: ProcId
    peer: ProcId
    link: MemoryLink
    on_lease: Callable[[LinkDown], None] | None = None
    lease: str = "LEASE_SECONDS"
    silent_since: float | None = None


STILL: Final = 0.2
"""Probability with which a seed delays no message."""

LATE: Final = 0.25
"""Probability with which any other seed delays a message."""

LATE_SECONDS: Final = (1 / 16, 1 / 4)
"""Longest delays of a message; the seed selects one."""

LATE_BITS: Final = 20
"""Bits of a delay: as binary fractions they add up exactly, so tests may compare sums with whole seconds."""


class Jitter:
    """Random delays of messages under one seed: most messages pass at once.

    A late message is overtaken by all that the others cause meanwhile: orders that are improbable where each is late.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._share = 0.0 if draw.random() < STILL else LATE
        self._longest = draw.choice(LATE_SECONDS)

    def delay(self) -> float:
        if self._draw.random() >= self._share:
            return 0.0
        return self._draw.getrandbits(LATE_BITS) / 2**LATE_BITS * self._longest


@attrs.define(eq=False)
class SimWire(Delivery):
    """All wires of one simulated family.

    Attributes:
        jitter: Random delays of messages.
        place_of: Function from a process to its place.
        start_soon: Function that starts a task of the simulation.
        silenced: Places whose messages are lost, and their links with the first: they are killed once their code waits.
    """

    jitter: Jitter
    place_of: Callable[[ProcId], Place]
    start_soon: Callable[..., None]
    _wired: list[Wired] = attrs.field(factory=list[Wired])
    _holds: list[Hold | HostCut] = attrs.field(factory=list["Hold | HostCut"])
    silenced: set[Place] = attrs.field(factory=set[Place])
    _disturbed: list[DisturbedWire] = attrs.field(factory=list[DisturbedWire])

    def fate(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> Fate:
        """Return the fate of a message under the faults of this link."""
        del lane
        if self.silenced and self.place_of(source) in self.silenced:
            return Fate.LOST
        for disturbance in self._on(source, target):
            fate = disturbance.fate((source, target), size)
            if fate is not Fate.ARRIVES:
                return fate
        return Fate.ARRIVES

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        """Return the seeded delay, plus those of faults."""
        del lane
        delay = self.jitter.delay()
        for disturbance in self._on(source, target):
            delay += disturbance.delay((source, target), size)
        return delay

    def _on(self, source: ProcId, target: ProcId) -> Sequence[DisturbedWire]:
        if not self._disturbed:
            return ()
        ends = self.place_of(source), self.place_of(target)
        return [one for one in self._disturbed if one.covers(*ends)]

    def disturb(self, one: DisturbedWire) -> Heal:
        """Begin a fault of links; return a function that ends it."""
        self._disturbed.append(one)
        return lambda: self._disturbed.remove(one) if one in self._disturbed else None

    # ---- holding ---------------------------------------------------------------------------------------------

    def add(self, wired: Wired) -> None:
        """Add one end of a new link."""
        self._wired = [one for one in self._wired if not one.link.is_down]
        self._wired.append(wired)
        self._look(wired)

    def hold(self, hold: Hold | HostCut) -> Heal:
        """Hold messages; return a function that releases them."""
        self._holds.append(hold)
        self._look_at_all()

        def release() -> None:
            if hold in self._holds:
                self._holds.remove(hold)
                self._look_at_all()

        return release

    def unheard_with(self, proc_id: ProcId) -> list[ProcId]:
        """Return the processes that have messages to or from this one held or on their way, which will not arrive."""
        mine = [wired for wired in self._wired if proc_id in (wired.owner, wired.peer)]
        unheard = [wired for wired in mine if wired.link.incoming.is_held or wired.link.incoming.depth]
        return [wired.peer if wired.owner == proc_id else wired.owner for wired in unheard]

    def release_all(self) -> None:
        self._holds.clear()
        self._disturbed.clear()
        self._look_at_all()

    def _look_at_all(self) -> None:
        for wired in self._wired:
            self._look(wired)

    def _look(self, wired: Wired) -> None:
        source, target = self.place_of(wired.peer), self.place_of(wired.owner)
        holds = [hold for hold in self._holds if hold.covers(source, target)]
        if wired.link.incoming.is_held != bool(holds):
            wired.link.hold(held=bool(holds))
        if not any(hold.ends_lease for hold in holds):
            wired.silent_since = None
        elif wired.silent_since is None and wired.on_lease is not None:
            wired.silent_since = trio.current_time()
            self.start_soon(self._expire, wired, wired.silent_since)

    async def _expire(self, wired: Wired, since: float) -> None:
        await trio.sleep(getattr(limits, wired.lease))
        if wired.silent_since == since and not wired.link.is_down and wired.on_lease is not None:
            wired.link.abort()
            wired.on_lease(LinkDown(DownReason.LEASE))
