"""`chaos`: random faults, and requirements on a system that suffers them.

A plan lists the kinds of fault and their weights; a seed draws steps from it: time, kind, victim, duration. Each seed
leaves some kinds out (*swarm testing*): faults that always come together hide faults that matter alone. `safety` runs
the body while the faults occur; `liveness` stops and heals them and requires progress; `sometimes` names states that
some seed must reach, so that a suite that never reaches one fails. `steps` names the actions of the test itself, so
that a failure can be reduced to the steps that it needs.
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
"""So many transfers of a member are late, one after the other."""


@attrs.frozen
class Strike:
    """Parameters of a random fault.

    Attributes:
        victim: The member.
        seconds: Its duration.
        late: Delay in seconds, of faults that delay.
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
"""Kinds of faults that chaos draws, and what makes one. Seeds draw them in this order: a new one is the last."""

SLOW: Final = ("delay", "slow", "transfer")
"""Kinds that make a member slow: it counts as up."""

SWARM: Final = 0.5
"""Probability with which one seed has a kind at all; one kind is always left."""

LONGEST_SECONDS: Final = 2 * limits.LEASE_SECONDS
"""Stops, partitions and the like last up to this: half of them end a lease."""

DELAY_SECONDS: Final = 0.5
"""A slow link is slower by up to this, and so are a transfer of a buffer and the start of an endpoint."""

FIRST_MESSAGES: Final = 50
"""Over real processes the first fault comes after up to so many messages: a body of some dozen calls meets it."""

DURATION_SECONDS: Final = 600.0
"""Default length of `safety`, in virtual seconds."""


class LivenessError(AssertionError):
    """The faults had been healed, and the body did not end in time."""


@attrs.frozen
class ChaosStep:
    """One fault by chance.

    Attributes:
        number: From 0.
        after: Seconds since the one before.
        kind: One of `KINDS`.
        victim: A number that chooses the member.
        seconds: How long it lasts.
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
        faults: Plans what happens.
        seed: Of the steps.
        reached: How often each state of `sometimes` was reached.
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
            kill: How likely a member is killed, beside the other kinds.
            stop: It is stopped for a while, which may end its lease.
            partition: The controller and it do not hear of each other for a while.
            delay: The link between them is slow for a while.
            lag: It does nothing for a while, and its heartbeats go on.
            slow: Each start of an endpoint there computes first, for a while.
            transfer: The transfers of buffers that it makes are late for a while.
            every: Shortest and longest pause between two faults, in seconds.
            max_down: Members that may be dead, stopped or cut off at one time.

        Raises:
            ValueError: Nothing may happen, or a number is out of its range.
        """
        given = (kill, stop, partition, delay, lag, slow, transfer)
        weights: dict[str, float] = dict(zip(KINDS, given, strict=True))
        chosen = tuple((kind, checked_amount(kind, weight)) for kind, weight in weights.items() if weight)
        if not chosen:
            raise ValueError(f"a plan of chaos needs one kind at least: {', '.join(KINDS)}")
        if not 0 < every[0] <= every[1]:
            raise ValueError(f"every must be a shortest and a longest pause in seconds, got {every!r}")
        if max_down < 1:
            raise ValueError(f"max_down must be 1 at least, got {max_down!r}")
        return ChaosPlan(chosen, every, max_down)

    @asynccontextmanager
    async def safety(
        self, plan: ChaosPlan, *, duration: float = DURATION_SECONDS, of: ProcMesh | None = None
    ) -> AsyncGenerator[None, None]:
        """Run the body while faults come, for `duration` seconds at most; then heal what lasts.

        Args:
            plan: What may happen.
            duration: The body is cancelled after it.
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
        """Heal every fault, and require the body to end within so many seconds.

        Raises:
            LivenessError: It did not.
        """
        self.faults.heal()
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(within) as scope:
            yield
        if scope.cancelled_caught:
            raise LivenessError(f"all faults were healed, and there was no progress within {within:g} s")

    def sometimes(self, name: str, condition: object = True) -> None:  # noqa: FBT002 - reads like an assertion
        """Note a state that at least one seed must reach: the test fails if none did, after all its seeds."""
        self.reached[name] = self.reached.get(name, 0) + bool(condition)

    @overload
    def steps(self, work: int, name: str | None = None) -> Iterator[int]: ...
    @overload
    def steps(self, work: Iterable[T], name: str | None = None) -> Iterator[T]: ...
    def steps(self, work: int | Iterable[T], name: str | None = None) -> Iterator[int] | Iterator[T]:
        """Iterate over the steps of the test: `for number in chaos.steps(100):`, `for order in chaos.steps(orders):`.

        When a run fails, it is run again without some of its steps until none can be spared; the report lists those
        that are needed. What a step does should follow from the step alone: draw it from `chaos.draw(...)`, not from
        one generator that all steps share.

        Args:
            work: How many, or what to go through; an item of it is a step.
            name: Of the series, where several tasks have one each: `chaos.steps(orders, f"buyer{number}")`. The series
                without one are numbered as they begin.

        Raises:
            ValueError: The name is no word, or was given before.
        """
        series = f"s{len(self._series)}" if name is None else checked_series(name)
        if series in self._series:
            raise ValueError(f"each series of steps has a name of its own, {series!r} was given before")
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
            raise RuntimeError("chaos.safety needs members: ask for the fixture mesh, or say of=procs")
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
