"""Run a test body once over real processes of this machine, with the same faults that simulated ones can have.

Endpoints raise, are late, lose their link; processes get real signals, exit, hold the GIL, have their clocks set; their
links and what the system gives them are disturbed by the table of the native library (`real_links.py`). With hosts,
those are agents in network namespaces, and the kernel disturbs the network between them.
"""

from __future__ import annotations

import io
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from itertools import islice
from typing import Any, Final, overload

import attrs
import trio

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.life.current import current_proc, dump
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Parcel, Peer
from trimesh._runtime.values.codec import place_payload
from trimesh._runtime.values.endpoint_spec import EndpointSpec
from trimesh._transport.interface import Link
from trimesh._transport.native.fault_table import FaultTable
from trimesh._transport.native.transport import NativeTransport
from trimesh._wire import messages
from trimesh.actor.host_mesh import this_host
from trimesh.errors import ShapeError
from trimesh.ids import ProcId
from trimesh.testing.plans.armed import ARMED
from trimesh.testing.plans.chaos import Chaos
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.disturbances import FailingStarts, FailingTransfers, ProcClock
from trimesh.testing.plans.faults import Faults, UnsupportedFault
from trimesh.testing.plans.plan import FaultPlan, Planned
from trimesh.testing.plans.vocabulary import (
    MOMENTS,
    SIGNALS,
    ClockFault,
    Death,
    Direction,
    EndpointFault,
    Fired,
    HostFault,
    LinkFault,
    LoopLag,
    LostCall,
    Moment,
    Partition,
    Place,
    ProcessorFault,
    ResourceFault,
    SpawnFault,
    TransferFault,
    parse_how,
)
from trimesh.testing.real.host_network import open_host_network
from trimesh.testing.real.network_job import NetworkJob
from trimesh.testing.simulated.seeded_run import HangError, SeededOptions

# Makes faults of links and of resources happen between real processes, by the table of the native library.
#
# Each direction of each link is a fault of its own, which happens at the receiver. What has happened stands in the
# table; it is looked at when the test looks, and at the end: a fault is noted once for each direction.

Heal = Callable[[], None]

OnFired = Callable[[Planned, float, str, str], None]
"""Called with the fault, how many seconds ago it has happened, the site, and where."""

JITTERED_LINKS_MAX: Final = 512
"""Directions of links whose messages are late by jitter: half of the rows of the table, so that faults have theirs."""

LINK: Final = "link"
RESOURCES: Final = "resources"


@attrs.frozen(eq=False)
class LiveLog(Sequence[Fired]):
    """The fixture `fault_log`: what has happened until it is looked at.

    Attributes:
        log: What has been noted.
        look: Notes what has happened since.
    """

    log: list[Fired]
    look: Callable[[], None]

    def __len__(self) -> int:
        self.look()
        return len(self.log)

    @overload
    def __getitem__(self, index: int) -> Fired: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Fired]: ...
    def __getitem__(self, index: int | slice) -> Fired | Sequence[Fired]:
        self.look()
        return self.log[index]


@attrs.frozen
class _Watched:
    """A row of the table that has not been seen to happen."""

    planned: Planned
    site: str
    where: str


@attrs.define(eq=False)
class RealLinks:
    """The faults of one test.

    Attributes:
        table: Where they are planned.
        own: The process of the test.
        seed: Of what happens by chance.
        on_fired: Told of what has happened.
    """

    table: FaultTable
    own: ProcId
    seed: int
    on_fired: OnFired
    _watched: dict[int, _Watched] = attrs.field(factory=dict[int, _Watched])

    def disturb(self, planned: Planned, fault: LinkFault) -> Heal:
        """Begin a fault of links; return what ends it."""
        draw = stream(self.seed, "link", planned.index)
        where = f"{fault.a.text} - {fault.b.text}"
        rows: list[int] = []
        for source, target in self._pairs(fault.a.places, fault.b.places, fault.direction):
            row = self.table.disturb(fault.kind, source, target, fault.amount, draw.getrandbits(64))
            self._watched[row] = _Watched(planned, LINK, where)
            rows.append(row)
        return lambda: self._heal(rows)

    def jitter(self, places: Sequence[Place], seconds: float) -> None:
        """Make each message between these places late by up to so much, as the seed says, until the test ends."""
        draw = stream(self.seed, "jitter", "links")
        pairs = islice(self._pairs(places, places, "both"), JITTERED_LINKS_MAX)
        for source, target in pairs:
            self.table.disturb("reorder", source, target, seconds, draw.getrandbits(64))

    def partition(self, fault: Partition) -> Heal:
        """Let nothing pass; return what lets it pass again."""
        pairs = self._pairs(fault.a.places, fault.b.places, fault.direction)
        rows = [self.table.disturb("hold", source, target) for source, target in pairs]
        return lambda: self._heal(rows)

    def refuse(self, planned: Planned, fault: ResourceFault) -> Heal:
        """Refuse memory or descriptors; return what ends it."""
        rows: list[int] = []
        for place in fault.where.places:
            row = self.table.refuse(fault.error, self._id_of(place), fault.nth, fault.times)
            self._watched[row] = _Watched(planned, RESOURCES, fault.where.text)
            rows.append(row)
        return lambda: self._heal(rows)

    def _heal(self, rows: list[int]) -> None:
        for row in rows:
            self.table.heal(row)
        self.harvest()
        for row in rows:
            self._watched.pop(row, None)
        rows.clear()  # their numbers may be those of others from now on

    def harvest(self) -> None:
        """Note what has happened since the last look."""
        found = [(ago, row) for row in self._watched if (ago := self.table.ago_of(row)) is not None]
        for ago, row in sorted(found, reverse=True):
            watched = self._watched.pop(row)
            self.on_fired(watched.planned, ago, watched.site, watched.where)

    def _id_of(self, place: Place) -> ProcId:
        return self.own if place is None else ProcId(place[1])

    def _pairs(self, a: Iterable[Place], b: Iterable[Place], direction: Direction) -> Iterator[tuple[ProcId, ProcId]]:
        """Yield who sends to whom over the links that are meant, each once."""
        seen: set[tuple[ProcId, ProcId]] = set()
        ends = [(self._id_of(one), self._id_of(other)) for one in a for other in b]
        for one, other in ends:
            forth, back = [(one, other)], [(other, one)]
            wanted = forth if direction == "a_to_b" else back if direction == "b_to_a" else forth + back
            for pair in wanted:
                if pair[0] != pair[1] and pair not in seen:
                    seen.add(pair)
                    yield pair


# ---- run -------------------------------------------------------------------------------------------------------------

REAL_SECONDS: Final = 60.0
"""A test over real processes that has not ended by then hangs."""

IDLE_SECONDS: Final = 0.5
"""A process that is to end with its next endpoint is killed after so long without one: a call takes milliseconds."""

_MESH: Final = "real processes"
"""Key of all places here: a process is named by its id, so a fault is for one incarnation."""


def _healed() -> None:
    """Heal what is over at once."""


@attrs.define(eq=False)
class RealExecutor:
    """Makes faults happen in real processes; stands at the sites of the test's own.

    Attributes:
        proc: The test's own process.
        plan: Faults that were planned, and have fired.
        token: What the processes of the test are armed with.
        job: Of the hosts in a network that the test disturbs, or None.
        links: Disturbs their links.
    """

    proc: Proc
    plan: FaultPlan
    token: str
    seed: int = 0
    job: NetworkJob | None = None
    links: RealLinks = attrs.field(init=False)
    _starts: FailingStarts = attrs.field(init=False)
    _transfers: FailingTransfers = attrs.field(init=False)
    _clock: ProcClock = attrs.field(factory=ProcClock)
    _armed: set[ProcId] = attrs.field(factory=set[ProcId])
    _armed_seats: set[tuple[str, int]] = attrs.field(factory=set[tuple[str, int]])
    _received: int = 0
    _awaited: int = 0
    _has_come: trio.Event = attrs.field(factory=trio.Event)
    _started_at: float = attrs.field(factory=trio.current_time)

    def __attrs_post_init__(self) -> None:
        assert isinstance(self.proc.transport, NativeTransport)
        self.links = RealLinks(FaultTable(self.proc.transport), self.proc.proc_id, self.seed, self._fire_late)
        self._starts = FailingStarts(lambda index, site, where: self._fire(self.plan.planned[index], site, where))
        self._transfers = FailingTransfers(
            lambda index, _: self._fire(self.plan.planned[index], "transfer", "controller")
        )
        self._armed.add(self.proc.proc_id)
        self.proc.sites = self
        self.proc.routes[messages.Fired] = self._take

    def close(self) -> None:
        """Look for what has happened a last time, and undo what would outlive the test."""
        self.links.harvest()
        self.links.table.close()
        self._clock.restore()

    # ---- sites -----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, link: Link, message: messages.Message) -> bool:
        """Let every message pass, and count it; see `Sites.received`."""
        del proc, peer, link, message
        self._received += 1
        if self._received == self._awaited:
            self._has_come.set()
        return True

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        return self._starts.launching(request)

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        """Run what was called: the actors of the test's own process have no faults; see `Sites.dispatch`."""
        del cell
        return call.spec

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Disturb a transfer of the test itself; see `Sites.moving`."""
        del proc_id
        return self._transfers.moving(None)

    # ---- what has happened -----------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: messages.Fired, bodies: list[memoryview]) -> None:
        del bodies
        if message.index == ARMED:
            self._armed.add(peer.proc_id)
            member = self.proc.members.get(peer.proc_id)
            if member is not None:
                self._armed_seats.add((member.mesh, member.rank))
        elif 0 <= message.index < len(self.plan.planned):
            self._fire(self.plan.planned[message.index], message.site, message.where)

    def _fire(self, planned: Planned, site: str, where: str) -> None:
        self._fire_late(planned, 0.0, site, where)

    def _fire_late(self, planned: Planned, ago: float, site: str, where: str) -> None:
        self.plan.fire(planned.index, trio.current_time() - self._started_at - ago, site, where)
        self.plan.log.sort(key=lambda fired: fired.time)

    async def pause(self, seconds: float, messages: int) -> None:
        """Wait for some seconds, or for so many messages if those come sooner; see `Executor.pause`."""
        self._has_come, self._awaited = trio.Event(), self._received + messages
        with trio.move_on_after(seconds):
            await self._has_come.wait()

    def moment(self, share: float) -> Moment:
        """Choose when a process that chaos kills ends; see `Executor.moment`."""
        return MOMENTS[min(int(share * len(MOMENTS)), len(MOMENTS) - 1)]

    # ---- planning --------------------------------------------------------------------------------------------

    def place_of(self, proc_id: ProcId) -> Place:
        return (_MESH, proc_id)

    def is_alive(self, place: Place) -> bool:
        """Return whether there is a living process at a place; one that replaces an armed one must be armed, too."""
        member = self.proc.members.get(ProcId(place[1])) if place is not None else None
        if member is None or member.gone.is_set():
            return False
        return member.peer.proc_id in self._armed or (member.mesh, member.rank) not in self._armed_seats

    def execute(self, planned: Planned) -> Callable[[], None]:
        """Make a planned fault happen; return what heals it.

        Raises:
            UnsupportedFault: Real processes cannot have it, or were not armed.
        """
        fault = planned.fault
        if planned.is_left_out:
            return _healed
        if isinstance(fault, HostFault):
            return self._disturb_host(planned, fault)
        match fault:
            case EndpointFault() | LostCall() | ProcessorFault():
                return self._arm_all(planned, fault)
            case Death():
                return self._kill(planned, fault)
            case LoopLag():
                self._misbehave(fault.where.places, "lag", fault.seconds)
                self._fire(planned, "loop", fault.where.text)
            case ClockFault():
                self._set_clocks(planned, fault)
                self._fire(planned, "clock", fault.where.text)
            case LinkFault():
                self._check_armed((*fault.a.places, *fault.b.places))
                return self.links.disturb(planned, fault)
            case Partition():
                self._check_armed((*fault.a.places, *fault.b.places))
                self._fire(planned, "partition", f"{fault.a.text} - {fault.b.text}")
                return self.links.partition(fault)
            case ResourceFault():
                self._check_armed(fault.where.places)
                return self.links.refuse(planned, fault)
            case SpawnFault():
                self._starts.plan(planned, fault)
            case TransferFault():
                return self._disturb_transfers(planned, fault)
        return _healed

    def _disturb_host(self, planned: Planned, fault: HostFault) -> Callable[[], None]:
        if self.job is None:
            raise UnsupportedFault(
                f'hosts are disturbed in simulation, and by the back end "net", see simulate(hosts=); got {fault}'
            )
        if not 0 <= fault.host < self.job.hosts:
            raise ShapeError(f"there are {self.job.hosts} hosts, see simulate(hosts=), got host {fault.host}")
        heal = self.job.disturb(fault)
        self._fire(planned, "host", f"host {fault.host}")
        return heal

    def _arm_all(self, planned: Planned, fault: EndpointFault | LostCall | ProcessorFault) -> Callable[[], None]:
        places = fault.where.places
        for peer in self._peers(places):
            self._arm(peer, planned)
        if not isinstance(fault, ProcessorFault):
            return _healed
        return lambda: self._misbehave(tuple(filter(self.is_alive, places)), "quicken", planned.index)

    def _check_armed(self, places: tuple[Place, ...]) -> None:
        if any(place is not None and place[1] not in self._armed for place in places):
            raise UnsupportedFault(
                "faults of real processes need processes that are armed: those of the fixture mesh, or "
                "spawn_procs(..., setup=faults.armed())"
            )

    def _peers(self, places: tuple[Place, ...]) -> list[Peer]:
        self._check_armed(places)
        if None in places:
            raise UnsupportedFault("the process of a test runs the test itself: this fault is for the others")
        return [self.proc.peer(ProcId(place[1])) for place in places if place is not None]

    def _disturb_transfers(self, planned: Planned, fault: TransferFault) -> Callable[[], None]:
        others = tuple(place for place in fault.where.places if place is not None)
        for peer in self._peers(others):
            self._arm(peer, planned)
        if len(others) < len(fault.where.places):
            return self._transfers.plan(planned.index, fault, (None,))
        return _healed

    def _set_clocks(self, planned: Planned, fault: ClockFault) -> None:
        self._peers(tuple(place for place in fault.where.places if place is not None))  # all of them, or none
        jumps = fault.jumps(stream(self.seed, "clock", planned.index))
        for place, jump in zip(fault.where.places, jumps, strict=True):
            kind, number = ("drift", fault.drift) if fault.drift else ("jump", jump)
            if place is None:
                (self._clock.drift if fault.drift else self._clock.jump)(number)
            else:
                self._misbehave((place,), kind, number)

    def _arm(self, peer: Peer, planned: Planned) -> None:
        value = self.proc.values.encode_call((planned.fault,), {}, endpoint="a planned fault")
        payload, bodies = place_payload(value)
        head = messages.encode(messages.Arm(self.token, planned.index, payload))
        peer.send(Parcel(head, bodies, value.definitions))

    def _misbehave(self, places: tuple[Place, ...], kind: str, number: float) -> None:
        for peer in self._peers(places):
            peer.send(Parcel(messages.encode(messages.Misbehave(self.token, kind, number))))

    def _kill(self, planned: Planned, fault: Death) -> Callable[[], None]:
        kind, number = parse_how(fault.how)
        places = fault.where.places
        if fault.moment != "now":
            self._misbehave(places, "die", MOMENTS.index(fault.moment) - 1)
            trio.lowlevel.spawn_system_task(self._insist, places)
        elif kind in ("exit", "hold_gil"):
            self._misbehave(places, kind, number)
        else:
            self._signal(places, signal.SIGSTOP if kind == "sigstop" else SIGNALS[kind])
        self._fire(planned, "process", fault.where.text)
        return (lambda: self._signal(places, signal.SIGCONT)) if kind == "sigstop" else _healed

    async def _insist(self, places: tuple[Place, ...]) -> None:
        """Kill processes in which no endpoint has started for a while."""
        await trio.sleep(IDLE_SECONDS)
        self._signal(places, signal.SIGKILL)

    def _signal(self, places: tuple[Place, ...], signum: int) -> None:
        for place in places:
            member = self.proc.members.get(ProcId(place[1])) if place is not None else None
            if member is not None and member.child is not None and not member.gone.is_set():
                member.child.signal(signum)


def run_real(
    body: Callable[..., Awaitable[None]],
    wanted: Mapping[str, Any],
    options: SeededOptions,
    plan: FaultPlan,
    seed: int = 0,
    jitter: float = 0.0,
) -> dict[str, int]:
    """Run `body(**wanted)` over real processes; then everything that was planned must have fired.

    Args:
        body: The test.
        wanted: Its arguments; those that are ours are filled in.
        options: What the fixture `mesh` is made with.
        plan: Where the faults are noted.
        seed: Of faults by chance.
        jitter: Messages between the processes of the fixture `mesh`, and the test, are late by up to so many seconds.

    Returns:
        How often each state of `chaos.sometimes` was reached.

    Raises:
        UnfiredFault: Something was planned and did not happen.
        HangError: It did not end within `REAL_SECONDS`.
    """
    return trio.run(_main, body, wanted, options, plan, seed, jitter, None)


def run_net(
    body: Callable[..., Awaitable[None]],
    wanted: Mapping[str, Any],
    options: SeededOptions,
    plan: FaultPlan,
    seed: int = 0,
    jitter: float = 0.0,
) -> dict[str, int]:
    """Run `body(**wanted)` as `run_real` does, with `options.hosts` hosts, each in a network namespace of its own.

    Raises:
        OSError, RuntimeError: There can be no such network here, see `why_no_networks`.
        ValueError: There are to be no hosts.
    """
    with open_host_network(options.hosts) as network:
        return trio.run(_main, body, wanted, options, plan, seed, jitter, NetworkJob(network))


async def _watch(scope: trio.CancelScope, found: list[HangError]) -> None:
    """End a run that hangs, and say what it was waiting for."""
    await trio.sleep(REAL_SECONDS)
    text = io.StringIO()
    dump(text)
    found.append(HangError(f"the run has not ended after {REAL_SECONDS:g} seconds; the controller:\n{text.getvalue()}"))
    scope.cancel(reason="the run hangs")


async def _main(
    body: Callable[..., Awaitable[None]],
    wanted: Mapping[str, Any],
    options: SeededOptions,
    plan: FaultPlan,
    seed: int,
    jitter: float,
    job: NetworkJob | None,
) -> dict[str, int]:
    hangs: list[HangError] = []
    reached: dict[str, int] = {}
    with trio.CancelScope() as scope:
        trio.lowlevel.spawn_system_task(_watch, scope, hangs)  # it ends with the run
        try:
            reached = await _run(body, wanted, options, plan, seed, jitter, job)
        except trio.Cancelled:
            raise
        except BaseException as error:
            if not hangs:
                raise
            raise hangs[0] from error  # what it said when it was ended
    if hangs:
        raise hangs[0]
    plan.check()
    return reached


async def _run(
    body: Callable[..., Awaitable[None]],
    wanted: Mapping[str, Any],
    options: SeededOptions,
    plan: FaultPlan,
    seed: int,
    jitter: float,
    job: NetworkJob | None,
) -> dict[str, int]:
    async with this_host().warm() as machine:
        if options.hosts and job is None:
            raise UnsupportedFault(
                'simulate(hosts=) is for the back ends "sim" and "net": on this one, a test enters a LocalJob'
            )
        with closing(RealExecutor(current_proc(), plan, secrets.token_hex(16), seed, job)) as executor:
            faults = Faults(executor, token=executor.token, table=executor.links.table.key)
            chaos = Chaos(faults, seed)
            given: dict[str, Any] = {
                "faults": faults,
                "fault_log": LiveLog(plan.log, executor.links.harvest),
                "chaos": chaos,
            }
            arguments = {name: given.get(name, value) for name, value in wanted.items()}
            async with AsyncExitStack() as stack:
                hosts = machine
                if job is not None:
                    hosts = await stack.enter_async_context(job)
                    if "host_mesh" in wanted:
                        arguments["host_mesh"] = hosts
                if "mesh" in wanted:
                    spawn: dict[str, Any] = {**options.spawn, "setup": faults.armed(options.spawn.get("setup"))}
                    mesh = await stack.enter_async_context(hosts.spawn_procs(options.per_host, **spawn))
                    faults.mesh = arguments["mesh"] = mesh
                    if jitter:
                        executor.links.jitter((None, *faults.where(mesh).places), jitter)
                with faults.healed_after():
                    await body(**arguments)
            return chaos.reached
