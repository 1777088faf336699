"""`chaos`: random faults, and requirements on the system under them.

A plan lists kinds of faults with their weights; a seed draws steps from it: time, kind, victim, duration. Each seed
leaves some kinds out (*swarm testing*), because kinds that always occur together hide what one alone does. `safety`
runs the body while faults occur; `liveness` heals them and requires progress; `sometimes` names states that some seed
must reach, else the suite fails. `steps` names the actions of the test itself, so that a failure can be reduced to the
steps that it needs.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, overload

import attrs
import trio

from trimesh import limits
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.fault import Fault, Moment, Place, Where, checked_amount
from trimesh.testing.plans.faults import Faults
from trimesh.testing.plans.link_faults import LinkFault, Partition
from trimesh.testing.plans.plan import checked_series
from trimesh.testing.plans.process_faults import Death, LoopLag, ProcessorFault
from trimesh.testing.plans.system_faults import TransferFault

T = TypeVar("T")

CONTROLLER: Final = Where("controller", (None,))

TRANSFERS: Final = 10
"""Consecutive transfers of a member that one fault delays."""


@attrs.frozen
class Strike:
    """Parameters of a random fault.

    Attributes:
        victim: The member.
        seconds: Duration of the fault.
        late: Delay in seconds, for faults that delay.
        moment: When a killed member ends.
    """

    victim: Where
    seconds: float
    late: float
    moment: Moment


KINDS: Final[dict[str, Callable[[Strike], Fault]]] = {
    "kill": lambda one: Death(one.victim, "sigkill", one.moment),
    "stop": lambda one: Death(one.victim, "sigstop"),
    "partition": lambda one: Partition(CONTROLLER, one.victim),
    "delay": lambda one: LinkFault(CONTROLLER, one.victim, "delay", one.late),
    "lag": lambda one: LoopLag(one.victim, one.seconds),
    "slow": lambda one: ProcessorFault(one.victim, one.late),
    "transfer": lambda one: TransferFault(one.victim, times=TRANSFERS, seconds=one.late),
}
"""Functions that make each kind of fault. Seeds draw kinds in this order, so add a new one at the end."""

SLOW: Final = ("delay", "slow", "transfer")
"""Kinds that make a member slow: it counts as up."""

SWARM: Final = 0.5
"""Probability with which a seed includes a kind; at least one kind is included."""

LONGEST_SECONDS: Final = 2 * limits.LEASE_SECONDS
"""Longest stop, partition or other lasting fault: half of them end a lease."""

DELAY_SECONDS: Final = 0.5
"""Longest delay by a slow link, of a transfer of a buffer, or of the start of an endpoint."""

FIRST_MESSAGES: Final = 50
"""Most messages before the first fault over real processes: it occurs in a body of some dozen calls."""

DURATION_SECONDS: Final = 600.0
"""Default length of `safety`, in virtual seconds."""


class LivenessError(AssertionError):
    """All faults were healed, and the body did not end in time."""


@attrs.frozen
class ChaosStep:
    """One random fault.

    Attributes:
        number: Its number, from 0.
        after: Seconds since the previous one.
        kind: One of `KINDS`.
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
    """

    weights: tuple[tuple[str, float], ...]
    every: tuple[float, float]
    max_down: int

    def steps(self, draw: random.Random) -> Iterator[ChaosStep]:
        """Yield the faults of one seed, without end."""
        chosen = [weight for weight in self.weights if draw.random() < SWARM] or [draw.choice(self.weights)]
        kinds, weights = [kind for kind, _ in chosen], [weight for _, weight in chosen]
        number = 0
        while True:
            (kind,) = draw.choices(kinds, weights)
            seconds = draw.uniform(0, LONGEST_SECONDS)
            yield ChaosStep(number, draw.uniform(*self.every), kind, draw.random(), seconds)
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
    _plans: int = 0
    _series: set[str] = attrs.field(factory=set[str])

    def plan(
        self,
        *,
        kill: float = 0.0,
        stop: float = 0.0,
        partition: float = 0.0,
        delay: float = 0.0,
        lag: float = 0.0,
        slow: float = 0.0,
        transfer: float = 0.0,
        every: tuple[float, float] = (1.0, 10.0),
        max_down: int = 1,
    ) -> ChaosPlan:
        """Plan random faults of the members of `mesh`.

        Args:
            kill: Weight of killing a member, relative to the other kinds.
            stop: Weight of stopping it for a while, which may end its lease.
            partition: Weight of a partition between the controller and it, for a while.
            delay: Weight of a slow link between them, for a while.
            lag: Weight of a blocked loop, for a while, with heartbeats.
            slow: Weight of computing before each start of an endpoint there, for a while.
            transfer: Weight of delays of the buffer transfers that it makes, for a while.
            every: Shortest and longest pause between two faults, in seconds.
            max_down: Members that may be dead, stopped or cut off at one time.

        Raises:
            ValueError: All weights are 0, or a number is out of range.
        """
        given = (kill, stop, partition, delay, lag, slow, transfer)
        weights: dict[str, float] = dict(zip(KINDS, given, strict=True))
        chosen = tuple((kind, checked_amount(kind, weight)) for kind, weight in weights.items() if weight)
        if not chosen:
            raise ValueError(f"chaos.plan needs a weight of at least one kind of fault, got none of {', '.join(KINDS)}")
        if not 0 < every[0] <= every[1]:
            raise ValueError(f"every must be a shortest and a longest pause in seconds, got {every!r}")
        if max_down < 1:
            raise ValueError(f"max_down must be at least 1, got {max_down!r}")
        return ChaosPlan(chosen, every, max_down)

    @asynccontextmanager
    async def safety(
        self, plan: ChaosPlan, *, duration: float = DURATION_SECONDS, of: ProcMesh | None = None
    ) -> AsyncGenerator[None, None]:
        """Run the body while faults occur, for at most `duration` seconds; then heal those that last.

        Args:
            plan: The plan of random faults.
            duration: Seconds after which the body is cancelled.
            of: The members; all of the fixture `mesh` by default.
        """
        mesh = self._members(of)
        draw = stream(self.seed, "chaos", self._plans)
        self._plans += 1
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
        shortest, longest = plan.every
        for step in steps:
            share = (step.after - shortest) / (longest - shortest) if longest > shortest else 0.5
            await self.faults.executor.pause(step.after, 0 if step.number else 1 + int(share * FIRST_MESSAGES))
            victims = [self.faults.where(mesh.exclude(_others(mesh, point))) for point in mesh.points()]
            up = [one for one in victims if self.faults.executor.is_alive(one.places[0]) and not self._is_down(one)]
            if step.kind not in SLOW and len(victims) - len(up) >= plan.max_down:
                continue
            if not up:
                continue
            victim = up[int(step.victim * len(up))]
            late = DELAY_SECONDS * step.seconds / LONGEST_SECONDS or 1e-6
            moment = self.faults.executor.moment(step.seconds / LONGEST_SECONDS)
            fault = KINDS[step.kind](Strike(victim, step.seconds or 1e-6, late, moment))
            heal = self.faults.plan(fault, key=f"c{self._plans - 1}.{step.number}")
            heals.append(heal)
            if step.kind != "kill":
                nursery.start_soon(self._heal_after, step, victim, heal)

    def _is_down(self, victim: Where) -> bool:
        return self._down.get(victim.places[0], 0) > 0

    async def _heal_after(self, step: ChaosStep, victim: Where, heal: Callable[[], None]) -> None:
        place = victim.places[0]
        counts = step.kind not in SLOW
        self._down[place] = self._down.get(place, 0) + counts
        try:
            await trio.sleep(step.seconds)
        finally:
            self._down[place] -= counts
            heal()


def _others(mesh: ProcMesh, point: Any) -> list[Any]:
    return [other for other in mesh.points() if other.rank != point.rank]
