"""One simulated run: its world, faults, oracles and trace.

It hooks the sites of every simulated process (`received`, `dispatch`), observes every start, link and end, and injects
planned faults.

Checks due at a time of the virtual clock: expired budgets, delivered cancels.

    callee   budget or cancel has come --TICK--> the call is cancelled, or has ended
    caller   deadline has passed, or cancelled --TICK--> it gives the call up --its patience--> it has left

The patience is `limits.CANCEL_ACK_SECONDS`, or the value of `options(abandon_after=...)`.

One task makes all checks of a run, and starts with the first: a run without deadlines pays nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import signal
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.actors.context import set_context
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.system.seeds import ProcSeeds
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec
from trimesh._transport.in_memory.transport import MemoryLink
from trimesh._transport.interface import Link
from trimesh._wire import messages
from trimesh.errors import place_name
from trimesh.ids import AGENT, ProcId
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.disk_faults import FaultyDisk, Operation, ProcessKilled, Touch
from trimesh.testing.plans.endpoint_faults import lose_link, watched
from trimesh.testing.plans.fault import ActiveFaults, Heal, MessageCount, Place, all_healed
from trimesh.testing.plans.name_faults import FaultyResolver, Lookup, virtual_address
from trimesh.testing.plans.plan import FaultPlan, Planned
from trimesh.testing.simulated.guards import is_in_actor, own_pid, refused, replaced, with_copies
from trimesh.testing.simulated.host import Hold, Jitter, SimChild, SimWire, Wired, World
from trimesh.testing.simulated.job_host import SimJobHost
from trimesh.testing.simulated.oracles import HANG_SECONDS, Oracles, Trace
from trimesh.testing.simulated.random import SimRandom
from trimesh.testing.simulated.tasks import SimFiles, SimThreads
from trimesh.testing.simulated.time import SimTime, virtual_dates

TICK: Final = 1e-3
"""Virtual seconds from an event to its check: tasks of the same moment run in any order."""


@attrs.define(eq=False)
class Deadlines:
    """Watches the budgets and cancels of one run.

    Attributes:
        oracles: Records breaches.
        proc: Function that returns a simulated process.
        drifts: Function that returns whether the clock of a process, and its budgets, run or ran at another rate.
        start_soon: Function that starts a task of the simulation.
    """

    oracles: Oracles
    proc: Callable[[ProcId], Proc]
    drifts: Callable[[ProcId], bool]
    start_soon: Callable[..., None]
    _due: list[tuple[float, int, Callable[[], None]]] = attrs.field(factory=list[tuple[float, int, Callable[[], None]]])
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)
    _news: trio.Event | None = None
    _expiries: dict[tuple[ProcId, ProcId, int], float] = attrs.field(factory=dict[tuple[ProcId, ProcId, int], float])

    # ---- events ----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, message: messages.Message) -> None:
        """Handle a message that arrived at `proc`, before it is read there."""
        if isinstance(message, messages.Call) and message.budget is not None:
            expiry = trio.current_time() + message.budget
            self._expiries[peer.proc_id, proc.proc_id, message.call] = expiry
            self._at(expiry + TICK, lambda: self._look_at_callee(proc, peer, message.call, "its budget has expired"))
            self._watch_caller(self.proc(peer.proc_id), message.call)
        elif isinstance(message, messages.Cancel):
            now = trio.current_time()
            self._at(now + TICK, lambda: self._look_at_callee(proc, peer, message.call, "its caller cancelled it"))
            caller = self.proc(peer.proc_id)
            call = caller.calls.get(message.call)
            if call is not None:
                self._look_at_caller(caller, call)

    def _watch_caller(self, proc: Proc, number: int) -> None:
        call = proc.calls.get(number)
        if call is not None and call.budget is not None:
            self._at(call.started_at + call.budget + TICK, lambda: self._look_at_caller(proc, call))

    def started(self, proc_id: ProcId, call: IncomingCall) -> None:
        """Check the start of an endpoint, in its task."""
        expiry = self._expiries.get((call.peer.proc_id, proc_id, call.call_id), math.inf)
        if expiry == math.inf or self.drifts(proc_id):
            return
        if trio.current_time() > expiry:
            self.oracles.breach("OR-5", f"{call.spec.name} started after its budget had expired")
        if trio.current_effective_deadline() > expiry + TICK:
            self.oracles.breach("OR-5", f"{call.spec.name} may run longer than its budget")

    # ---- checks ----------------------------------------------------------------------------------------------

    def _look_at_callee(self, proc: Proc, peer: Peer, number: int, why: str) -> None:
        call = peer.inbound.get(number)
        if call is None or call.ended or proc.proc_id in self.oracles.exited:
            return
        if call.is_cancelled or self.drifts(proc.proc_id):
            return
        self.oracles.breach("OR-5", f"call {number} of {call.spec.name} goes on although {why}")

    def _look_at_caller(self, proc: Proc, call: OutgoingCall) -> None:
        # If one task waits for several calls, abandoned ones are released only when it inspects them.
        if type(call) is OutgoingCall and call.is_given_up and proc.calls.get(call.call_id) is call:
            chosen = call.request.abandon_after
            due = trio.current_time() + (limits.CANCEL_ACK_SECONDS if chosen is None else chosen) + TICK
            self._at(due, lambda: self._look_whether_left(proc, call))

    def _look_whether_left(self, proc: Proc, call: OutgoingCall) -> None:
        if proc.calls.get(call.call_id) is call and proc.proc_id not in self.oracles.exited:
            text = f"call {call.call_id} of {call.what} was abandoned, and its caller did not leave within the bound"
            self.oracles.breach("OR-5", text)

    # ---- time ------------------------------------------------------------------------------------------------

    def _at(self, time: float, check: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._numbers), check))
        if self._news is None:
            self._news = trio.Event()
            self.start_soon(self._run)
        elif self._due[0][0] == time:
            self._news.set()

    async def _run(self) -> None:
        while True:
            while self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[2]()
            self._news = trio.Event()
            with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf):
                await self._news.wait()


# ---- simulation ------------------------------------------------------------------------------------------------------

TRANSFERS: Final = (1e-6, 1e-6, 0.001, 0.05)
"""Longest times of a transfer of a buffer, or of a chunk of a large one, in seconds; the seed of a run selects one. 0
is not among them: a loop of reads would stop the clock."""


@attrs.define(eq=False, init=False)
class Simulation:
    """One run under one seed.

    Attributes:
        seed: Seed of everything random.
        trace: Record of events.
        plan: Planned and fired faults.
        oracles: Invariants.
        world: The processes.
        wire: The links between them.
        faults: Faults that have begun at the sites of the processes.
        time: The clocks of the processes.
        hosts: Hosts of the job of this run, if it has one.
        arrivals: Messages that the controller has received.
        passing: Messages that any process has received.
    """

    hits_starts: ClassVar = True
    seed: int
    trace: Trace
    plan: FaultPlan
    oracles: Oracles
    world: World
    wire: SimWire
    _deadlines: Deadlines
    faults: ActiveFaults
    numbers: SimRandom
    time: SimTime
    _files: SimFiles
    _resolver: FaultyResolver
    _threads: SimThreads
    _moves: random.Random
    _move_seconds: float
    _heard: set[ProcId]
    _severed: set[frozenset[ProcId]]
    _killed: bool
    _felled: set[ProcId]
    _helpers: list[trio.CancelScope]
    hosts: list[SimJobHost]
    arrivals: MessageCount
    passing: MessageCount

    def __init__(self, seed: int, *, left_out: frozenset[str] = frozenset()) -> None:
        self.seed = seed
        self.trace = Trace(seed)
        self.plan = FaultPlan(left_out=left_out)
        self.oracles = Oracles()
        self._deadlines = Deadlines(self.oracles, self._proc, self._drifts, self.start_soon)
        self.faults = ActiveFaults(self.fire, self._name_of, self._kill, spend=self._spend)
        self.time = SimTime(self.place_of, self._sleep)
        self._files = SimFiles(FaultyDisk(is_in_actor, self._touch, self._compute, self._kill_running))
        self._resolver = FaultyResolver(is_in_actor, self._resolving, self._compute, virtual_address)
        self._threads = SimThreads(stream(seed, "threads"), self.time)
        self.numbers = SimRandom(seed, self.time.wall)
        self._moves = stream(seed, "transfers")
        self._move_seconds = self._moves.choice(TRANSFERS)
        self._heard = set()
        self._severed = set()
        self._killed = False
        self._felled = set()
        self._helpers = []
        self.hosts = []
        self.arrivals = MessageCount()
        self.passing = MessageCount()

    def prepare(self, world: World) -> None:
        """Connect the simulation to a world that has no process yet."""
        self.world = world
        world.sites, world.watcher = self, self
        self.wire = SimWire(Jitter(stream(self.seed, "wire")), self.place_of, self.start_soon)
        world.network.delivery = self.wire
        world.network.memory.chunk_seconds = self._move_seconds

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start a task of the simulation itself, which is no task of any process."""
        scope = trio.CancelScope()
        self._helpers.append(scope)

        async def run_helper() -> None:
            with scope:
                await function(*args)
            self._helpers.remove(scope)

        self.world.nursery.start_soon(run_helper)

    def calm(self) -> None:
        """Heal the wires and end the tasks of the simulation itself."""
        self.wire.release_all()
        for scope in self._helpers:
            scope.cancel()

    def note(self, site: str, where: str, what: str) -> None:
        """Put an entry into the trace."""
        self.trace.add(trio.current_time(), site, where, what)

    @contextmanager
    def surroundings(self) -> Generator[None, None, None]:
        """Patch the standard library for actors, by `guards.TABLE`, inside the block."""
        changes = [*refused(), own_pid()]
        for one in (self.time, self._threads, self.numbers, self._files, self._resolver):
            changes += one.changes()
        with self.numbers.lent(), replaced(with_copies(changes)), virtual_dates(self.time.wall), closing(self._files):
            yield

    def _sleep(self, place: Place, seconds: float) -> None:
        self.stick((place,), seconds)

    # ---- disk and resolver of the running process ------------------------------------------------------------

    def _touch(self, operation: Operation) -> Touch | None:
        place = self.place_of(current_proc().proc_id)
        if place in self.wire.silenced:
            raise ProcessKilled("it was killed in the middle of a write")
        return self.faults.touching(place, operation)

    def _resolving(self, name: str) -> list[Lookup]:
        return self.faults.resolving(self.place_of(current_proc().proc_id), name)

    def _compute(self, seconds: float) -> None:
        self._spend(self.place_of(current_proc().proc_id), seconds)

    def _spend(self, place: Place, seconds: float) -> float:
        seconds = min(seconds, 2 * HANG_SECONDS)
        if self.time.in_thread is not None:
            self.time.in_thread += seconds
        else:
            self.time.spend(place, seconds)
        return seconds

    def _kill_running(self) -> None:
        self._kill(self.place_of(current_proc().proc_id))

    def _kill(self, place: Place) -> None:
        """Let nothing out of the process of a place any more, and kill it once the running code waits."""
        if place in self.wire.silenced:
            return
        self.wire.silenced.add(place)
        (child,) = self.living_at((place,))
        self.fell(child)

        async def kill() -> None:
            set_context(None)  # of the code that is killed
            child.die(signum=signal.SIGKILL, last_words="simulated")
            self.wire.silenced.discard(place)

        self.start_soon(kill)

    # ---- names -----------------------------------------------------------------------------------------------

    def place_of(self, proc_id: ProcId) -> Place:
        child = self.world.children.get(proc_id)
        return None if child is None else child.place

    def label_of(self, proc_id: ProcId) -> str:
        """Return the name of a process in traces."""
        child = self.world.children.get(proc_id)
        return "controller" if child is None else child.label

    # ---- sites -----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, link: Link, message: messages.Message) -> bool:
        self.note("receive", self.label_of(proc.proc_id), f"{_describe(message)} from {self.label_of(peer.proc_id)}")
        self.passing.add()
        if proc.proc_id == self.controller:
            self.arrivals.add()
        if not self.faults.received(self.place_of(proc.proc_id), proc, peer, message):
            lose_link(proc, link)
            return False
        self.oracles.received(proc, peer, message)
        self._deadlines.received(proc, peer, message)
        return True

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        spec = call.spec
        if call.mesh == AGENT:
            return spec
        return watched(spec, lambda: self._begin(cell, call, self._without_thread(spec)))

    def answered(self, call: IncomingCall) -> None:
        if call.mesh != AGENT and self.faults.active:
            self.faults.answered(self.place_of(call.peer.proc.proc_id))

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Let a transfer take its time, or disturb it; see `Sites.moving`."""
        disturbed = self.faults.moving(self.place_of(proc_id))
        return disturbed or partial(trio.sleep, self._moves.uniform(1e-6, self._move_seconds))

    def operating(self, proc_id: ProcId) -> AbstractContextManager[Any] | None:
        """Disturb operators of a rank; see `Sites.operating`."""
        return self.faults.operating(self.place_of(proc_id))

    def _without_thread(self, spec: EndpointSpec) -> EndpointSpec:
        """Return an endpoint that runs inline, not in a thread, which would run in real time."""
        if spec.kind is not EndpointKind.THREAD:
            return spec

        async def inline(*args: Any, **kwargs: Any) -> Any:
            return await self._threads.run(lambda: spec.fn(*args, **kwargs))

        return msgspec.structs.replace(spec, fn=inline, kind=EndpointKind.ASYNC)

    def _begin(self, cell: Cell, call: IncomingCall, spec: EndpointSpec) -> EndpointSpec:
        where = place_name(cell.spec.name, cell.spec.point)
        self.note("dispatch", where, f"{spec.name} for {self.label_of(call.peer.proc_id)}")
        self.oracles.started(cell, call)
        self._deadlines.started(cell.proc.proc_id, call)
        place = self.place_of(cell.proc.proc_id)
        self.time.spend(place, self.faults.computing(place))
        before = len(self.plan.log)
        chosen = self.faults.dispatch(place, cell, call, spec)
        for fired in self.plan.log[before:]:
            if fired.fault.fails_call:
                self.oracles.injected(cell, call)
            if fired.fault.loses_link:
                self._severed.add(frozenset((call.peer.proc_id, cell.proc.proc_id)))
        drift = self.time.drift(place)
        if drift:
            now = trio.current_time()
            call.set_deadline(now + (call.deadline - now) / (1 + drift))
        return chosen

    def _proc(self, proc_id: ProcId) -> Proc:
        return self.world.proc(proc_id)

    def _drifts(self, proc_id: ProcId) -> bool:
        return self.time.has_drifted(self.place_of(proc_id))

    def _name_of(self, place: Place) -> str:
        """Return the name of a place in the log of faults."""
        where = [child.label for child in self.world.children.values() if place is not None and child.place == place]
        return where[-1] if where else "controller"

    def fire(self, index: int, site: str, where: str) -> None:
        """Record that a planned fault happens now."""
        fired = self.plan.fire(index, trio.current_time(), site, where)
        self.note("fault", where, str(fired.fault))

    # ---- processes -------------------------------------------------------------------------------------------

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        self.oracles.launched((request.whole.mesh, request.rank), request.incarnation)
        return self.faults.launching(request)

    def linking(self, owner: ProcId) -> None:
        """Apply faults before a process makes its end of a link."""
        self.faults.linking(self.place_of(owner))

    def started(self, child: SimChild, seeds: ProcSeeds) -> None:
        """Register a new process with the seeds of its random numbers."""
        self.numbers.start(child.proc_id, seeds)
        self.note("spawn", child.label, "starts")

    def linked(self, owner: ProcId, peer: ProcId, link: MemoryLink) -> None:
        """Register one end of a new link."""
        proc, child = self.world.proc(owner), self.world.children.get(peer)
        if owner not in self._heard:
            self._heard.add(owner)
            proc.on_gone.append(lambda gone: self._gone(owner, gone))
        # Only the owner of a process holds a lease on it.
        starter = None if child is None else child.owner
        owns = child is not None and (starter.proc_id if starter is not None else self.controller) == owner
        lease = "LEASE_SECONDS" if child is None else child.lease
        self.wire.add(Wired(owner, peer, link, (lambda down: proc.link_down(link, down)) if owns else None, lease))

    @property
    def controller(self) -> ProcId:
        """The process that the test runs in."""
        return ProcId(1)

    def ended(self, child: SimChild) -> None:
        """Record the end of a process."""
        assert child.report is not None
        self.oracles.exited.add(child.proc_id)
        self.faults.ended(child.place)
        self._severed.update(frozenset((child.proc_id, other)) for other in self.wire.unheard_with(child.proc_id))
        self._killed = self._killed or child.report.exit_code != 0 or child.proc_id in self._felled
        self._files.ended(child.proc_id, is_killed=child.report.exit_code != 0 or child.proc_id in self._felled)
        self.note("exit", child.label, child.report.describe())

    def _gone(self, owner: ProcId, peer: Peer) -> None:
        child = self.world.children.get(peer.proc_id)
        if child is None or child.report is None:
            self._severed.add(frozenset((owner, peer.proc_id)))  # the link was lost, not the process

    @property
    def has_killed(self) -> bool:
        """True if a process was ended from outside, so that calls to it unwind after its end."""
        return self._killed

    def judge_loads(self) -> None:
        """Check the loads that the processes count as under way, while the mesh still exists."""
        living = [child.proc_id for child in self.world.children.values() if child.report is None]
        for proc_id in (self.controller, *living):
            self.oracles.judge_loads(self.world.proc(proc_id))
        quiet = self.world.quiet_pairs()
        for one, other in quiet:
            if not {one, other} & self.oracles.exited and frozenset((one, other)) not in self._severed:
                sender, receiver = self.world.proc(one), self.world.proc(other)
                self.oracles.judge_sent(sender, receiver)
                if (other, one) in quiet:
                    self.oracles.judge_credits(sender, receiver)

    def _has_lived(self, child: SimChild) -> bool:
        return child.report is None or (child.report.exit_code == 0 and child.proc_id not in self._felled)

    def judge(self) -> None:
        """Judge the run: breaches of the oracles first, then planned faults that have not fired."""
        lived = [self.controller]
        lived += [child.proc_id for child in self.world.children.values() if self._has_lived(child)]
        self.oracles.judge_calls(lived, self._severed)
        alive = [child.label for child in self.world.children.values() if child.report is None]
        if alive:
            self.oracles.breach("OR-8", f"processes are left: {alive}")
        if len(self.world.nursery.child_tasks) > 1:
            tasks = sorted(task.name for task in self.world.nursery.child_tasks)
            self.oracles.breach("OR-8", f"tasks are left: {tasks}")
        self.oracles.judge_tables(self.world.proc(self.controller), is_over=True)
        self.oracles.check()
        self.plan.check()

    # ---- faults ----------------------------------------------------------------------------------------------

    def execute(self, planned: Planned) -> Heal:
        return planned.fault.simulated(self, planned)

    def begin(self, planned: Planned) -> Heal:
        """Begin a fault at the sites of all processes; return a function that ends it."""
        return self.faults.begin(planned.index, planned.fault)

    def draw(self, purpose: str, planned: Planned) -> random.Random:
        """Return the random numbers of a planned fault."""
        return stream(self.seed, purpose, planned.index)

    def is_alive(self, place: Place) -> bool:
        return bool(self.living_at((place,)))

    def living_at(self, places: Sequence[Place]) -> list[SimChild]:
        """Return the processes at some places that have not ended."""
        return [child for child in self.world.children.values() if child.report is None and child.place in places]

    def fell(self, child: SimChild) -> None:
        """Record that a process ends by a fault."""
        self._felled.add(child.proc_id)

    def hold(
        self, sources: Sequence[Place] | None, targets: Sequence[Place] | None, *, ends_lease: bool = True
    ) -> Heal:
        """Hold messages from some places to others, None for all; return a function that releases them."""
        source, target = (None if places is None else frozenset(places) for places in (sources, targets))
        return self.wire.hold(Hold(source, target, ends_lease))

    def stick(self, places: Sequence[Place], seconds: float) -> Heal:
        """Block the loops of some places for a while; their owners are notified of the stall."""
        stuck = [self.world.transport(child.proc_id) for child in self.living_at(places)]
        for transport in stuck:
            transport.lag(seconds)
        return all_healed(self.freeze(places, seconds), *(transport.stop_lagging for transport in stuck))

    def freeze(self, places: Sequence[Place], seconds: float | None) -> Heal:
        """Hold all messages to and from some places: for good (None), or for some seconds, as by a blocked loop."""
        stops = seconds is None
        heal = all_healed(
            self.hold(places, None, ends_lease=stops),
            self.hold(None, places, ends_lease=stops),
        )
        if seconds is not None:
            self.start_soon(_heal_after, seconds, heal)
        return heal


async def _heal_after(seconds: float, heal: Heal) -> None:
    await trio.sleep(seconds)
    heal()


def _describe(message: messages.Message) -> str:
    """Return kind and number of a message; no id, no size, no payload."""
    fields: Mapping[str, Any] = {name: getattr(message, name, None) for name in ("endpoint", "call")}
    return " ".join([type(message).__name__, *(str(value) for value in fields.values() if value)])
