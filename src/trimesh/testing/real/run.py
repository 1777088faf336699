"""Run of a test body over real processes of this machine, with the same faults as in simulated ones.

Endpoints raise, are late, lose their link; processes get real signals, exit, hold the GIL, have their clocks set. The
fault table of the native library disturbs their links and system calls. Hosts are agents in network namespaces, and
the kernel disturbs the network between them.
"""

from __future__ import annotations

import io
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, closing
from typing import Any, ClassVar, Final, overload

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
from trimesh.actor.host_mesh import HostMesh, this_host
from trimesh.ids import ProcId
from trimesh.testing.plans.armed import ARMED
from trimesh.testing.plans.chaos import Chaos
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.endpoint_faults import lose_link
from trimesh.testing.plans.fault import (
    REAL,
    ActiveFaults,
    Direction,
    Fault,
    Heal,
    MessageCount,
    Place,
    UnsupportedFault,
)
from trimesh.testing.plans.faults import Faults
from trimesh.testing.plans.host_faults import HostFault
from trimesh.testing.plans.plan import FaultPlan, Fired, Planned
from trimesh.testing.plans.process_faults import ProcClock
from trimesh.testing.real.host_network import HostNetwork, open_host_network
from trimesh.testing.real.network_job import NetworkJob
from trimesh.testing.simulated.seeded_run import HangError, SeededOptions

JITTERED_LINKS_MAX: Final = 512
"""Maximum directions of links with jitter: half of the rows of the fault table, the rest is for faults."""


@attrs.frozen(eq=False)
class LiveLog(Sequence[Fired]):
    """The fixture `fault_log`: faults that have fired, updated on each access.

    Attributes:
        log: Recorded faults.
        look: Records the faults that fired since.
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


# ---- run -------------------------------------------------------------------------------------------------------------

REAL_SECONDS: Final = 60.0
"""Time after which a test over real processes counts as hanging."""


@attrs.frozen
class _Row:
    """A row of the fault table whose fault has not fired yet."""

    planned: Planned
    site: str
    where: str


@attrs.define(eq=False)
class RealExecutor:
    """Causes faults in real processes; is the `Sites` of the test's own process.

    Faults of links and of resources are rows of a table of the native library, one for each direction of each link,
    applied at the receiver. The table is read when the test reads the log, and at the end: each row fires once.

    Attributes:
        proc: The test's own process.
        plan: Planned and fired faults.
        token: Token with which processes of the test are armed.
        job: Job of hosts in a network that the test disturbs, or None.
        table: Faults of links and resources.
        faults: Faults that have begun in the test's own process.
        clock: Clock that Python code of the test reads.
        arrivals: Messages that the test's own process has received.
        passing: The same: nothing counts those of the others.
    """

    hits_starts: ClassVar = False
    """Whether chaos hits members that are being restarted: here that takes real time, and they might never serve."""

    proc: Proc
    plan: FaultPlan
    token: str
    table: FaultTable
    seed: int = 0
    job: NetworkJob | None = None
    faults: ActiveFaults = attrs.field(init=False)
    clock: ProcClock = attrs.field(factory=ProcClock)
    arrivals: MessageCount = attrs.field(factory=MessageCount)
    passing: MessageCount = attrs.field(init=False)
    _rows: dict[int, _Row] = attrs.field(factory=dict[int, _Row])
    _jittered: list[int] = attrs.field(factory=list[int])
    _armed: set[ProcId] = attrs.field(factory=set[ProcId])
    _armed_seats: set[tuple[str, int]] = attrs.field(factory=set[tuple[str, int]])
    _started_at: float = attrs.field(factory=trio.current_time)

    def __attrs_post_init__(self) -> None:
        self.passing = self.arrivals
        self.faults = ActiveFaults(self.fire, lambda _: "controller")
        self._armed.add(self.proc.proc_id)
        self.proc.sites = self
        self.proc.routes[messages.Fired] = self._take

    def close(self) -> None:
        """Collect fired faults a last time, and undo faults that would outlive the test."""
        self.harvest()
        for row in self._jittered:
            self.table.heal(row)
        self.clock.restore()

    # ---- sites -----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, link: Link, message: messages.Message) -> bool:
        """Count every message, and lose those that a fault targets; see `Sites.received`."""
        self.arrivals.add()
        if self.faults.received(None, proc, peer, message):
            return True
        lose_link(proc, link)
        return False

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        return self.faults.launching(request)

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        """Run the called endpoint: actors of the test's own process have no faults; see `Sites.dispatch`."""
        del cell
        return call.spec

    def answered(self, call: IncomingCall) -> None:
        """Do nothing: the test's own process is not killed."""

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Disturb a transfer of the test itself; see `Sites.moving`."""
        del proc_id
        return self.faults.moving(None)

    def operating(self, proc_id: ProcId) -> AbstractContextManager[Any] | None:
        """Run operators of ranks of the test's own process as they are; see `Sites.operating`."""
        del proc_id
        return None

    # ---- fired faults ----------------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: messages.Fired, bodies: list[memoryview]) -> None:
        del bodies
        if message.index == ARMED:
            self._armed.add(peer.proc_id)
            member = self.proc.members.get(peer.proc_id)
            if member is not None:
                self._armed_seats.add((member.mesh, member.rank))
        elif 0 <= message.index < len(self.plan.planned):
            self.fire(message.index, message.site, message.where)
            if self.plan.planned[message.index].fault.loses_link:  # the process waits for this with the link
                peer.send(Parcel(messages.encode(messages.Heal(self.token, message.index))))

    def fire(self, index: int, site: str, where: str, ago: float = 0.0) -> None:
        """Record that a planned fault happens now, or happened `ago` seconds ago."""
        self.plan.fire(index, trio.current_time() - self._started_at - ago, site, where)
        self.plan.log.sort(key=lambda fired: fired.time)

    def harvest(self) -> None:
        """Record faults of the table that fired since the last harvest."""
        found = [(ago, row) for row in self._rows if (ago := self.table.ago_of(row)) is not None]
        for ago, number in sorted(found, reverse=True):
            row = self._rows.pop(number)
            self.fire(row.planned.index, row.site, row.where, ago)

    # ---- places ----------------------------------------------------------------------------------------------

    def place_of(self, proc_id: ProcId) -> Place:
        return (REAL, proc_id)

    def id_of(self, place: Place) -> ProcId:
        return self.proc.proc_id if place is None else ProcId(place[1])

    def is_alive(self, place: Place) -> bool:
        """Return whether a place has a live process; one that replaced an armed process must be armed, too."""
        member = self.proc.members.get(self.id_of(place))
        if member is None or member.gone.is_set():
            return False
        return member.peer.proc_id in self._armed or (member.mesh, member.rank) not in self._armed_seats

    def checked_armed(self, places: Sequence[Place]) -> Sequence[Place]:
        """Return the places, after checking that their processes accept faults.

        Raises:
            UnsupportedFault: A process was not armed.
        """
        if any(self.id_of(place) not in self._armed for place in places):
            raise UnsupportedFault(
                "faults of real processes need armed processes, got others: use those of the fixture mesh, or "
                "spawn_procs(..., setup=faults.armed())"
            )
        return places

    def pairs(
        self, a: Sequence[Place], b: Sequence[Place], direction: Direction = "both"
    ) -> list[tuple[ProcId, ProcId]]:
        """Return the pairs of sender and receiver of the links between two places, each once.

        Raises:
            UnsupportedFault: A process was not armed.
        """
        self.checked_armed((*a, *b))
        found: dict[tuple[ProcId, ProcId], None] = {}
        for one, other in ((self.id_of(one), self.id_of(other)) for one in a for other in b):
            if one != other:
                found.update({} if direction == "b_to_a" else {(one, other): None})
                found.update({} if direction == "a_to_b" else {(other, one): None})
        return list(found)

    # ---- planning --------------------------------------------------------------------------------------------

    def execute(self, planned: Planned) -> Heal:
        return planned.fault.real(self, planned)

    def begin(self, planned: Planned) -> Heal:
        """Begin a fault at the sites of the test's own process; return a function that ends it."""
        return self.faults.begin(planned.index, planned.fault)

    def draw(self, purpose: str, planned: Planned) -> random.Random:
        """Return the random numbers of a planned fault."""
        return stream(self.seed, purpose, planned.index)

    def arm(self, planned: Planned, places: Sequence[Place], fault: Fault | None = None) -> Heal:
        """Call `Fault.armed` in some processes; return a function that heals it in those still alive.

        Args:
            planned: The fault.
            places: Places of the processes.
            fault: Fault to send instead of the planned one.

        Raises:
            UnsupportedFault: A process was not armed, or is the test's own.
        """
        if None in self.checked_armed(places):
            raise UnsupportedFault("this fault must be for other processes, got the one of the test: name a worker")
        for place in places:
            value = self.proc.values.encode_call((fault or planned.fault,), {}, endpoint="a planned fault")
            payload, bodies = place_payload(value)
            head = messages.encode(messages.Arm(self.token, planned.index, payload))
            self.proc.peer(self.id_of(place)).send(Parcel(head, bodies, value.definitions))

        def heal() -> None:
            head = messages.encode(messages.Heal(self.token, planned.index))
            for place in filter(self.is_alive, places):
                self.proc.peer(self.id_of(place)).send(Parcel(head))

        return heal

    def in_table(self, rows: list[int], planned: Planned | None = None, site: str = "", where: str = "") -> Heal:
        """Return a function that heals rows of the table; record each row of a planned fault once it fires."""
        if planned is not None:
            self._rows.update(dict.fromkeys(rows, _Row(planned, site, where)))

        def heal() -> None:
            for row in rows:
                self.table.heal(row)
            self.harvest()
            for row in rows:
                self._rows.pop(row, None)
            rows.clear()  # other faults may get their numbers from now on

        return heal

    def jitter(self, places: Sequence[Place], seconds: float) -> None:
        """Delay each message between these places by up to `seconds`, drawn from the seed, until the test ends."""
        draw = stream(self.seed, "jitter", "links")
        for source, target in self.pairs(places, places)[:JITTERED_LINKS_MAX]:
            self._jittered.append(self.table.disturb("reorder", source, target, seconds, draw.getrandbits(64)))

    def signal(self, places: Sequence[Place], signum: int) -> None:
        """Send a signal to the live processes."""
        for place in places:
            member = self.proc.members.get(self.id_of(place))
            if member is not None and member.child is not None and not member.gone.is_set():
                member.child.signal(signum)


@attrs.frozen
class RealSeed:
    """One run of a test over real processes.

    Attributes:
        plan: Records the faults.
        seed: Seed of random faults.
        jitter: Longest delay, in seconds, of messages between processes of the fixture `mesh`, and the test.
    """

    plan: FaultPlan = attrs.field(factory=FaultPlan)
    seed: int = 0
    jitter: float = 0.0


@attrs.frozen
class _Case:
    """A test body, its arguments, options of the fixture `mesh`, and the network of its hosts or None."""

    body: Callable[..., Awaitable[None]]
    wanted: Mapping[str, Any]
    options: SeededOptions
    network: HostNetwork | None


_Ground = tuple[HostMesh, FaultTable]
"""What the seeds of a test share: hosts to spawn on, and the table of faults of links, which a process has once."""


def run_real(
    body: Callable[..., Awaitable[None]],
    wanted: Mapping[str, Any],
    options: SeededOptions,
    runs: Iterable[RealSeed],
    network: HostNetwork | None = None,
) -> None:
    """Run `body(**wanted)` over real processes, once for each of `runs`, until one fails.

    All runs share a spawner, and hosts until a run disturbs them; processes of meshes are new in each.

    Args:
        body: The test.
        wanted: Its arguments; fixtures of this kit are filled in.
        options: Options of the fixture `mesh`.
        runs: Seeds to run; after each, every planned fault must have fired.
        network: Network of the hosts that the body runs on, or None.

    Raises:
        UnfiredFault: A planned fault did not happen.
        HangError: The body did not end within `REAL_SECONDS`.
    """
    trio.run(_run_all, _Case(body, wanted, options, network), runs)


def run_net(
    body: Callable[..., Awaitable[None]], wanted: Mapping[str, Any], options: SeededOptions, runs: Iterable[RealSeed]
) -> None:
    """Run `body(**wanted)` as `run_real` does, with `options.hosts` hosts, each in a network namespace of its own.

    Raises:
        OSError, RuntimeError: The network cannot be made here; see `why_no_networks`.
        ValueError: `options.hosts` is 0.
    """
    with open_host_network(options.hosts) as network:
        run_real(body, wanted, options, runs, network)


async def _run_all(case: _Case, runs: Iterable[RealSeed]) -> None:
    left = iter(runs)
    failures: list[BaseException] = []
    async with this_host().warm() as machine:
        if case.options.hosts and case.network is None:
            raise UnsupportedFault(
                'simulate(hosts=) is for the back ends "sim" and "net", got "proc": enter a LocalJob in the test'
            )
        transport = current_proc().transport
        assert isinstance(transport, NativeTransport)
        with closing(FaultTable(transport)) as table:
            while await _share_hosts(case, left, (machine, table), failures):
                pass
    if failures:  # raised here, as no block puts a group around it
        raise failures[0]


async def _share_hosts(case: _Case, left: Iterator[RealSeed], ground: _Ground, failures: list[BaseException]) -> bool:
    """Run seeds until one fails, none is left, or one has disturbed its hosts; return whether others may be left."""
    async with AsyncExitStack() as stack:
        job: NetworkJob | None = None
        hosts, table = ground
        for one in left:
            if case.network is not None and job is None:
                job = NetworkJob(case.network, shared=True)
                hosts = await stack.enter_async_context(job)
            try:
                await _run_watched(case, one, (hosts, table), job)
            except trio.Cancelled:
                raise
            except BaseException as error:  # noqa: BLE001 - raised by `_run_all`
                failures.append(error)
                return False
            if any(isinstance(planned.fault, HostFault) for planned in one.plan.planned):
                return True
    return False


async def _watch(scope: trio.CancelScope, found: list[HangError]) -> None:
    """End a run that hangs, and report its waits."""
    await trio.sleep(REAL_SECONDS)
    text = io.StringIO()
    dump(text)
    found.append(HangError(f"the run has not ended after {REAL_SECONDS:g} seconds; the controller:\n{text.getvalue()}"))
    scope.cancel(reason="the run hangs")


async def _run_watched(case: _Case, one: RealSeed, ground: _Ground, job: NetworkJob | None) -> None:
    hangs: list[HangError] = []
    ended = trio.CancelScope()

    async def watch() -> None:
        with ended:
            await _watch(scope, hangs)

    with trio.CancelScope() as scope:
        trio.lowlevel.spawn_system_task(watch)
        try:
            await _run(case, one, ground, job)
        except trio.Cancelled:
            raise
        except BaseException as error:
            if not hangs:
                raise
            raise hangs[0] from error  # the error of the ended body
        finally:
            ended.cancel()
    if hangs:
        raise hangs[0]
    one.plan.check()


async def _run(case: _Case, one: RealSeed, ground: _Ground, job: NetworkJob | None) -> None:
    hosts, table = ground
    options, wanted = case.options, case.wanted
    with closing(RealExecutor(current_proc(), one.plan, secrets.token_hex(16), table, one.seed, job)) as executor:
        faults = Faults(executor, token=executor.token, table=executor.table.key)
        given: dict[str, Any] = {
            "faults": faults,
            "fault_log": LiveLog(one.plan.log, executor.harvest),
            "chaos": Chaos(faults, one.seed),
        }
        if job is not None:
            given["host_mesh"] = hosts
        arguments = {name: given.get(name, value) for name, value in wanted.items()}
        async with AsyncExitStack() as stack:
            if "mesh" in wanted:
                spawn: dict[str, Any] = {**options.spawn, "setup": faults.armed(options.spawn.get("setup"))}
                mesh = await stack.enter_async_context(hosts.spawn_procs(options.per_host, **spawn))
                faults.mesh = arguments["mesh"] = mesh
                if one.jitter:
                    executor.jitter((None, *faults.where(mesh).places), one.jitter)
            with faults.healed_after():
                await case.body(**arguments)
