"""`chaos`: random faults, and requirements on the system under them.

A plan lists kinds of faults with their weights; a seed draws steps from it: time, kind, victim, duration. Each seed
leaves some kinds out (*swarm testing*), because kinds that always occur together hide what one alone does. `safety`
runs the body while faults occur; `liveness` heals them and requires progress; `sometimes` names states that some seed
must reach, else the suite fails. `steps` names the actions of the test itself, so that a failure can be reduced to the
steps that it needs.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypedDict, TypeVar, Unpack, cast, overload

import attrs
import trio

from trimesh import limits
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.plain_numbers import suggestion
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.disk_faults import ALWAYS, DiskFault
from trimesh.testing.plans.fault import MOMENTS, Direction, Fault, Moment, Place, Where, checked_amount
from trimesh.testing.plans.faults import Faults, Members
from trimesh.testing.plans.link_faults import LinkFault, Partition
from trimesh.testing.plans.name_faults import Lookup, NameFault
from trimesh.testing.plans.plan import Planned, checked_series
from trimesh.testing.plans.process_faults import ClockFault, Death, LoopLag, ProcessorFault
from trimesh.testing.plans.system_faults import Refusal, ResourceFault, SpawnFault, TransferFault
from trimesh.testing.plans.torch_faults import TorchFault

T = TypeVar("T")

CONTROLLER: Final = Where("controller", (None,))

REFUSED: Final[Mapping[Direction, Refusal]] = {"a_to_b": "EMFILE", "b_to_a": "ENOSPC"}
"""What the system refuses a member: descriptors, or shared memory."""

TRANSFERS: Final = 10
"""Consecutive transfers of a member that one fault delays."""


@attrs.frozen
class Strike:
    """Parameters of a random fault.

    Attributes:
        victim: The member.
        other: Another member, or the controller where there is none.
        seconds: Duration of the fault.
        late: Delay in seconds, for faults that delay.
        moment: When a killed member ends.
        direction: What a partition in one direction stops.
    """

    victim: Where
    other: Where
    seconds: float
    late: float
    moment: Moment
    direction: Direction


KINDS: Final[dict[str, Callable[[Strike], Fault]]] = {
    "kill": lambda one: Death(one.victim, "sigkill", one.moment),
    "stop": lambda one: Death(one.victim, "sigstop"),
    "partition": lambda one: Partition(CONTROLLER, one.victim),
    "delay": lambda one: LinkFault(CONTROLLER, one.victim, "delay", one.late),
    "lag": lambda one: LoopLag(one.victim, one.seconds),
    "slow": lambda one: ProcessorFault(one.victim, one.late),
    "transfer": lambda one: TransferFault(one.victim, times=TRANSFERS, seconds=one.late),
    "one_way": lambda one: Partition(CONTROLLER, one.victim, one.direction),
    "between": lambda one: Partition(one.other, one.victim),
    "duplicate": lambda one: LinkFault(CONTROLLER, one.victim, "duplicate", DUPLICATED),
    "reorder": lambda one: LinkFault(CONTROLLER, one.victim, "reorder", one.late),
    "clock": lambda one: ClockFault(one.victim, jump=one.seconds if one.direction == "a_to_b" else -one.seconds),
    "spawn": lambda one: SpawnFault(1, "launch"),
    "disk": lambda one: DiskFault(one.victim, ("write",), times=ALWAYS, error="ENOSPC"),
    "drift": lambda one: ClockFault(one.victim, drift=DRIFT if one.direction == "a_to_b" else -DRIFT),
    "gil": lambda one: Death(one.victim, f"hold_gil({one.seconds:.6f})"),
    "names": lambda one: NameFault(one.victim, "", Lookup(error="EAI_AGAIN")),
    "torch": lambda one: TorchFault(one.victim, "", 1 + int(OPERATORS * one.late / DELAY_SECONDS), failure="memory"),
    "resources": lambda one: ResourceFault(one.victim, REFUSED[one.direction], times=ALWAYS),
}
"""Functions that make each kind of fault. Seeds draw kinds in this order, so add a new one at the end."""

STAYS_UP: Final = frozenset(
    (
        *("delay", "slow", "transfer", "duplicate", "reorder", "clock", "spawn"),
        *("disk", "drift", "names", "torch", "resources"),
    )
)
"""Kinds under which a member counts as up: `max_down` does not limit them."""

PARTITIONS: Final = ("partition", "one_way", "between")

GENTLE: Final = (*PARTITIONS, "delay", "lag", "slow", "transfer", "duplicate", "reorder", "gil")
"""Kinds that end nothing, if partitions end before a lease: the default of a plan."""

OPERATORS: Final = 100
"""Most operators of torch that a member runs before one fails: a step of a small model."""

DRIFT: Final = 0.5
"""Share by which drifting clocks run faster or slower: enough that deadlines meet in another order."""

SWARM: Final = 0.5
"""Probability with which a seed includes a kind; at least one kind is included."""

HASTES: Final = (1, 4)
"""Powers of the random numbers that choose pauses; the seed selects one. By the second most faults come in quick
succession, so that one hits what goes on after another."""

LONGEST_SECONDS: Final = 2 * limits.LEASE_SECONDS
"""Longest stop, partition or other lasting fault: half of them end a lease."""

DUPLICATED: Final = 0.5
"""Probability with which a link delivers a message twice: two in a row are then as likely as one."""

DELAY_SECONDS: Final = 0.5
"""Longest delay by a slow link, of a transfer of a buffer, or of the start of an endpoint."""

VICTIM_STEPS: Final = 1_000
"""Steps of the number that chooses a victim; its place within a step chooses the other member and the direction. One
draw does for both, so that seeds of older plans draw what they drew."""

FIRST_MESSAGES: Final = 50
"""Most messages before the first fault: it occurs in a body of some dozen calls."""

NEXT_MESSAGES: Final = 200
"""Most messages between two faults: they hit a body that never sleeps, which takes no virtual and little real time."""

AT_MESSAGE: Final = 0.75
"""Probability with which a fault that came by its time waits for messages between any two processes: a program takes
its steps at moments that few random times hit."""

MESSAGES_LOG: Final = 4.0
"""Binary logarithm of the number of messages that a fault then waits for, at most."""

TURNS: Final = 3
"""Turns of the scheduler from the last of them to the fault: fewer than these."""

IDLE_SECONDS: Final = 0.5
"""Time after which a member that should be killed at a call, and has none, is killed without."""

ANY_FAULT: Final = "a fault in chaos.safety"
"""State that some seed must reach: otherwise the bodies end too early, or members are all spared."""

DURATION_SECONDS: Final = 600.0
"""Default length of `safety`, in virtual seconds."""


class Weights(TypedDict, total=False):
    """Weights of kinds of faults, relative to each other. Each hits one member, and lasts for a while.

    Attributes:
        kill: Kills it.
        stop: Stops it, which may end its lease.
        partition: Cuts it off from the controller.
        delay: Makes the link between them slow.
        lag: Blocks its loop; heartbeats go on.
        slow: Lets it compute before each start of an endpoint.
        transfer: Delays the next buffer transfers that it makes.
        one_way: Cuts off one direction between the controller and it.
        between: Cuts off two members from each other, which both reach the controller.
        duplicate: Repeats messages between the controller and it.
        reorder: Lets messages between them overtake each other, on other links and lanes.
        clock: Sets its wall clock forward or back, for good.
        spawn: Lets the next start of a process fail.
        disk: Fills its disk, as its actors see it.
        drift: Lets its clocks run at half or one and a half times the rate.
        gil: Keeps all of its Python from running, as a long collection of garbage does.
        names: Lets lookups of names of hosts fail there, for now (`EAI_AGAIN`).
        torch: Lets an operator of torch that it runs fail for lack of memory.
        resources: Lets the system refuse it descriptors or shared memory, for new links.
    """

    kill: float
    stop: float
    partition: float
    delay: float
    lag: float
    slow: float
    transfer: float
    one_way: float
    between: float
    duplicate: float
    reorder: float
    clock: float
    spawn: float
    disk: float
    drift: float
    gil: float
    names: float
    torch: float
    resources: float


Nemesis = Callable[[float], Awaitable[None]]
"""A fault that a test makes itself, for so many seconds: it finds whom to hit, plans faults, waits and heals."""


class LivenessError(AssertionError):
    """All faults were healed, and the body did not end in time."""


@attrs.frozen
class ChaosStep:
    """One random fault.

    Attributes:
        number: Its number, from 0.
        after: Seconds since the previous one.
        kind: One of `KINDS`, or the name of a nemesis.
        victim: Number from 0 to 1 that selects the member.
        seconds: Its duration.
    """

    number: int
    after: float
    kind: str
    victim: float
    seconds: float


@attrs.frozen
class ChaosPlan:
    """Kinds of faults that may happen, and their rate.

    Attributes:
        weights: Relative weight of each kind.
        every: Shortest and longest pause between two faults, in seconds.
        max_down: Members that may be dead, stopped or cut off at one time.
        spare: Members that no fault hits.
        bounds: Shortest and longest duration of faults of a kind, in seconds, in place of 0 and `LONGEST_SECONDS`.
        nemeses: Functions that make faults of their own, by name.
    """

    weights: tuple[tuple[str, float], ...]
    every: tuple[float, float]
    max_down: int
    spare: tuple[Members, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = attrs.field(factory=dict[str, tuple[float, float]])
    nemeses: Mapping[str, Nemesis] = attrs.field(factory=dict[str, Nemesis])

    def steps(self, draw: random.Random) -> Iterator[ChaosStep]:
        """Yield the faults of one seed, without end."""
        chosen = [weight for weight in self.weights if draw.random() < SWARM] or [draw.choice(self.weights)]
        kinds, weights = [kind for kind, _ in chosen], [weight for _, weight in chosen]
        number, haste, (shortest, longest) = 0, draw.choice(HASTES), self.every
        while True:
            (kind,) = draw.choices(kinds, weights)
            seconds = draw.uniform(*self.bounds.get(kind, (0, LONGEST_SECONDS)))
            after = shortest + (longest - shortest) * draw.random() ** haste
            yield ChaosStep(number, after, kind, draw.random(), seconds)
            number += 1


@attrs.define(eq=False)
class Chaos:
    """The fixture `chaos`.

    Attributes:
        faults: The fixture `faults`, which plans the faults.
        seed: Seed of the steps.
        reached: Number of times that each state of `sometimes` was reached.
    """

    faults: Faults
    seed: int
    reached: dict[str, int] = attrs.field(factory=dict[str, int])
    _down: dict[Place, int] = attrs.field(factory=dict[Place, int])
    _pauses: random.Random = attrs.field(init=False)
    _plans: int = 0
    _series: set[str] = attrs.field(factory=set[str])

    def __attrs_post_init__(self) -> None:
        self._pauses = stream(self.seed, "pauses")

    def plan(
        self,
        *,
        nemeses: Mapping[Nemesis, float] | None = None,
        every: tuple[float, float] = (1.0, 10.0),
        max_down: int = 1,
        spare: Sequence[Members] = (),
        bounds: Mapping[str, tuple[float, float]] | None = None,
        **weights: Unpack[Weights],
    ) -> ChaosPlan:
        """Plan random faults of the members of `mesh`.

        Without `weights` and `nemeses` all kinds of `GENTLE` have the same weight, and partitions end before a lease
        does: under these a correct program is late, and nothing else.

        Args:
            nemeses: Weights of faults that the test makes: `{cut_off_the_leader: 1}`. Each is an async function of the
                seconds that its fault should last, and heals what it plans; the end of `safety` cancels it.
            every: Shortest and longest pause between two faults, in seconds.
            max_down: Members that may be dead, stopped or cut off at one time, not counting those of `nemeses`.
            spare: Members that no fault hits: each a mesh, a view, or coordinates of the fixture `mesh`.
            bounds: Shortest and longest duration of the faults of a kind, in seconds: `{"partition": (0.1, 3)}` ends
                each before a lease does. By default 0 to twice `limits.LEASE_SECONDS`.
            **weights: See `Weights`: `kill=1, delay=2` delays twice as often as it kills.

        Raises:
            TypeError: There is no such kind.
            ValueError: All weights are 0, a number is out of range, or `bounds` names no kind of this plan.
        """
        given: Mapping[str, float] = {**cast("dict[str, float]", weights)}
        for kind in given:
            if kind not in KINDS:
                raise TypeError(
                    f"chaos.plan takes weights of {', '.join(KINDS)}, got {kind!r}{suggestion(kind, KINDS)}"
                )
        bounds = dict(bounds or {})
        if not given and not nemeses:
            given = dict.fromkeys(GENTLE, 1.0)
            bounds = {**dict.fromkeys(PARTITIONS, (0.0, limits.LEASE_SECONDS / 2)), **bounds}
        weight_of: dict[str, float] = {kind: given.get(kind, 0.0) for kind in KINDS}
        own = {nemesis.__name__: nemesis for nemesis in nemeses or {}}
        weight_of.update({nemesis.__name__: weight for nemesis, weight in (nemeses or {}).items()})
        chosen = tuple((kind, checked_amount(kind, weight)) for kind, weight in weight_of.items() if weight)
        if not chosen:
            raise ValueError(f"chaos.plan needs a weight of at least one kind of fault, got none of {', '.join(KINDS)}")
        if not 0 < every[0] <= every[1]:
            raise ValueError(f"every must be a shortest and a longest pause in seconds, got {every!r}")
        if max_down < 1:
            raise ValueError(f"max_down must be at least 1, got {max_down!r}")
        for kind, (shortest, longest) in bounds.items():
            if kind not in dict(chosen):
                near = suggestion(kind, dict(chosen))
                raise ValueError(f"bounds= must name kinds of this plan, {', '.join(dict(chosen))}, got {kind!r}{near}")
            if not 0 <= shortest <= longest or not longest:
                raise ValueError(
                    f"bounds= must be a shortest and a longest duration, got {kind!r}: {(shortest, longest)!r}"
                )
        return ChaosPlan(chosen, every, max_down, tuple(spare), bounds, own)

    @asynccontextmanager
    async def safety(
        self, plan: ChaosPlan, *, duration: float = DURATION_SECONDS, of: ProcMesh | None = None
    ) -> AsyncGenerator[None, None]:
        """Run the body while faults occur, for at most `duration` seconds; then heal those that last.

        Some seed must see a fault, as it must reach what `sometimes` names.

        Args:
            plan: The plan of random faults.
            duration: Seconds after which the body is cancelled; it counts as ended then.
            of: The members; all of the fixture `mesh` by default.
        """
        mesh = self._members(of)
        draw = stream(self.seed, "chaos", self._plans)
        self._plans += 1
        self.sometimes(ANY_FAULT, condition=False)
        heals: list[Callable[[], None]] = []
        try:
            with trio.move_on_after(duration) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._suffer, plan, plan.steps(draw), mesh, nursery, heals)
                    await trio.lowlevel.checkpoint()
                    yield
                    nursery.cancel_scope.cancel()
            del scope
        finally:
            for heal in heals:
                heal()

    @asynccontextmanager
    async def liveness(self, *, within: float) -> AsyncGenerator[None, None]:
        """Heal every fault, and require the body to end within `within` seconds.

        Raises:
            LivenessError: It did not.
        """
        self.faults.heal()
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(within) as scope:
            yield
        if scope.cancelled_caught:
            raise LivenessError(f"all faults were healed, and the body did not end within {within:g} s")

    def sometimes(self, name: str, condition: object = True) -> None:  # noqa: FBT002 - reads like an assertion
        """Record whether this run reached a state: the test fails if none of its seeds reaches it."""
        self.reached[name] = self.reached.get(name, 0) + bool(condition)

    @overload
    def steps(self, work: int, name: str | None = None) -> Iterator[int]: ...
    @overload
    def steps(self, work: Iterable[T], name: str | None = None) -> Iterator[T]: ...
    def steps(self, work: int | Iterable[T], name: str | None = None) -> Iterator[int] | Iterator[T]:
        """Iterate over the steps of the test: `for number in chaos.steps(100):`, `for order in chaos.steps(orders):`.

        A failed run is repeated without some of its steps until no step can be left out; the report lists those that
        are needed. A step must depend on itself alone: draw its numbers from `chaos.draw(...)`, not from a generator
        that all steps share.

        Args:
            work: Number of steps, or an iterable of them.
            name: Name of the series, if several tasks have one each: `chaos.steps(orders, f"buyer{number}")`. Series
                without a name are numbered as they begin.

        Raises:
            ValueError: The name is not an identifier, or was used before.
        """
        series = f"s{len(self._series)}" if name is None else checked_series(name)
        if series in self._series:
            raise ValueError(f"each series of steps needs a name of its own, got {series!r} twice: add a number to it")
        self._series.add(series)
        return self._taken(series, range(work) if isinstance(work, int) else work)

    def _taken(self, series: str, work: Iterable[Any]) -> Iterator[Any]:
        plan = self.faults.executor.plan
        for number, step in enumerate(work):
            if plan.takes(f"{series}.{number}", step):
                yield step

    def draw(self, *purpose: object) -> random.Random:
        """Return random numbers derived from the seed and a purpose: `chaos.draw("order", 3)`."""
        return stream(self.seed, "test", *purpose)

    # ---- making it happen ------------------------------------------------------------------------------------

    def _members(self, of: ProcMesh | None) -> ProcMesh:
        mesh = of if of is not None else self.faults.mesh
        if mesh is None:
            raise RuntimeError("chaos.safety needs members, got no mesh: request the fixture mesh, or write of=procs")
        return mesh

    async def _suffer(
        self,
        plan: ChaosPlan,
        steps: Iterator[ChaosStep],
        mesh: ProcMesh,
        nursery: trio.Nursery,
        heals: list[Callable[[], None]],
    ) -> None:
        executor = self.faults.executor
        shortest, longest = plan.every
        for step in steps:
            share = (step.after - shortest) / (longest - shortest) if longest > shortest else 0.5
            await self._pause(step, 1 + int(share * (NEXT_MESSAGES if step.number else FIRST_MESSAGES)), longest)
            if step.kind in plan.nemeses:
                self.sometimes(ANY_FAULT)
                nursery.start_soon(plan.nemeses[step.kind], step.seconds)
                continue
            ranks = mesh._shown.ranks()  # noqa: SLF001 - only tests need it
            parts = (mesh.exclude(_others(mesh, point)) for point in mesh.points())
            members = {rank: self.faults.where(part) for rank, part in zip(ranks, parts, strict=True)}
            up = [
                one
                for rank, one in members.items()
                if executor.is_alive(one.places[0])
                and not self._is_down(one)
                and (executor.hits_starts or not _is_starting(mesh, rank))
            ]
            if step.kind not in STAYS_UP and len(members) - len(up) >= plan.max_down:
                continue
            spared = {place for spare in plan.spare for place in self.faults.where(spare).places}
            exposed = [one for one in up if one.places[0] not in spared]
            if not exposed:
                continue
            victim = exposed[int(step.victim * len(exposed))]
            fault = KINDS[step.kind](self._strike(step, victim, [one for one in up if one != victim]))
            heal = self.faults.plan(fault, key=f"c{self._plans - 1}.{step.number}")
            heals.append(heal)
            self.sometimes(ANY_FAULT)
            if step.kind != "kill":
                nursery.start_soon(self._heal_after, step, victim, heal)
            elif isinstance(fault, Death) and fault.moment != "now":
                nursery.start_soon(self._kill_idle, executor.plan.planned[-1], fault)

    async def _pause(self, step: ChaosStep, messages: int, longest: float) -> None:
        """Wait before a fault: for a time or so many messages, then mostly for some more, and at most `longest`."""
        executor = self.faults.executor
        with trio.move_on_after(step.after):
            await executor.arrivals.wait(messages)
            return
        if self._pauses.random() < AT_MESSAGE:
            awaited, turns = int(2 ** self._pauses.uniform(0, MESSAGES_LOG)), self._pauses.randrange(TURNS)
            with trio.move_on_after(longest - step.after):
                await executor.passing.wait(awaited)
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()

    def _strike(self, step: ChaosStep, victim: Where, others: list[Where]) -> Strike:
        share = min(step.seconds / LONGEST_SECONDS, 1.0)
        fraction = step.victim * VICTIM_STEPS % 1  # of a drawn number, what has not chosen the victim
        return Strike(
            victim,
            others[int(fraction * len(others))] if others else CONTROLLER,
            step.seconds or 1e-6,
            DELAY_SECONDS * share or 1e-6,
            MOMENTS[min(int(share * len(MOMENTS)), len(MOMENTS) - 1)],
            "a_to_b" if fraction < 0.5 else "b_to_a",
        )

    def _is_down(self, victim: Where) -> bool:
        return self._down.get(victim.places[0], 0) > 0

    async def _kill_idle(self, planned: Planned, death: Death) -> None:
        """Kill a member at once if no call has ended it for a while; until then it counts as down."""
        (place,) = death.where.places
        self._down[place] = self._down.get(place, 0) + 1
        try:
            await trio.sleep(IDLE_SECONDS)
        finally:
            self._down[place] -= 1
        if not planned.fired:
            self.faults.plan(Death(death.where, death.how), key=planned.key)

    async def _heal_after(self, step: ChaosStep, victim: Where, heal: Callable[[], None]) -> None:
        place = victim.places[0]
        counts = step.kind not in STAYS_UP
        self._down[place] = self._down.get(place, 0) + counts
        try:
            await trio.sleep(step.seconds)
        finally:
            self._down[place] -= counts
            heal()


def _is_starting(mesh: ProcMesh, rank: int) -> bool:
    owned = mesh._owned  # noqa: SLF001 - only tests need it
    return owned is not None and owned.members is not None and owned.members.is_restarting(rank)


def _others(mesh: ProcMesh, point: Any) -> list[Any]:
    return [other for other in mesh.points() if other.rank != point.rank]
