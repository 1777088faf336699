"""The mixed workload: callers use every verb of a supervised mesh while members come and go, and check what they get.

Beside the oracles of the simulation it holds:

    W-1  A caller gets the value that its step asks for, or an error that its step or trouble explains.
    W-2  A caller with a deadline leaves within the bound for acknowledgements after it.
    W-3  Items of streams and channels come in order and once; results of a map once each.
    W-4  The members of a process are made in spawn order, each time.
    W-5  When the trouble is over, who is to be healed answers.
    W-6  A message starts once at most at each member.
    W-7  The block raises nothing that its policy and the trouble do not explain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import trio
from tests.soak.actors import BackgroundError, Journal, Planned, Worker, new_journal
from tests.soak.callers import TROUBLE, Callers, check
from tests.soak.schedule import Schedule, Trouble

import trimesh
from trimesh import FailFast, Restart, RestartLimit, this_host
from trimesh.testing.plans.endpoint_faults import EndpointFault, LostCall
from trimesh.testing.plans.fault import Fault, Where
from trimesh.testing.plans.link_faults import LinkFault, Partition
from trimesh.testing.plans.process_faults import Death, LoopLag
from trimesh.testing.simulated.seeded_run import SeededOptions, SeededOutcome, run_once

STATES: Final = ("nothing went wrong", "all answered after trouble", "the block failed")
"""What some of a few seeds reach."""

CALM_SECONDS: Final = 30.0
"""After everything, until leases, acknowledgements and broadcasts are over."""

HEALED_SECONDS: Final = 120.0
"""After the last trouble, until whoever is to be healed answers."""

MESHES: Final = ("w", "v")

BURST: Final = 5
"""Calls at once of an actor that has failed."""

BURST_TOKEN: Final = 1_000_000
"""Above the tokens of all steps."""

CONTROLLER: Final = Where("controller", (None,))


async def mixed_workload(faults: Any, chaos: Any) -> None:
    """Run what the seed says."""
    await Workload(faults, chaos, Schedule(chaos.draw("schedule"))).run()


@attrs.define(eq=False)
class Workload:
    """One run.

    Attributes:
        faults, chaos: Of the simulated test.
        schedule: What happens.
        gave_up: Whether a member was lost by what was done on purpose.
    """

    faults: Any
    chaos: Any
    schedule: Schedule
    gave_up: bool = False
    callers: Callers = attrs.field(init=False)
    journal: Journal = attrs.field(factory=new_journal)

    async def run(self) -> None:
        """Do everything; what the policy explains is no failure."""
        schedule = self.schedule
        size = {"n": schedule.procs}
        try:
            async with (
                this_host().spawn_procs({"n": 1}, name="away", grace=schedule.grace) as away,
                this_host().spawn_procs(size, name="main", supervision=schedule.policy, grace=schedule.grace) as procs,
            ):
                other = await away.spawn("other", Worker)
                view = procs if schedule.actor_policy is None else procs.supervised(schedule.actor_policy)
                meshes = [await view.spawn(name, Worker) for name in MESHES]
                self.callers = Callers(self.faults, procs, meshes, other, spawned=[*MESHES])
                await self._together()
                await self._check_healed()
                self.chaos.sometimes("all answered after trouble", self.callers.is_troubled)
                await trio.sleep(CALM_SECONDS)
                self.faults.executor.judge_loads()
        except Exception as error:  # noqa: BLE001 - judged
            self._explain(error)
        self.chaos.sometimes("nothing went wrong", not self.callers.explained)
        self._check_journal()

    async def _together(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._suffer)
            for number, steps in enumerate(self.schedule.callers):
                nursery.start_soon(self._call, number, steps)
        self.faults.heal()

    async def _call(self, number: int, steps: Any) -> None:
        for step in self.chaos.steps(steps, f"caller{number}"):
            await self.callers.take(step)

    # ---- trouble ---------------------------------------------------------------------------------------------

    async def _suffer(self) -> None:
        async with trio.open_nursery() as nursery:
            for trouble in self.chaos.steps(self.schedule.troubles, "trouble"):
                await trio.sleep(trouble.after)
                self.callers.is_troubled = True
                if trouble.kind in ("actor", "replace"):
                    nursery.start_soon(self._on_purpose, trouble)
                else:
                    fault = self._fault(trouble)
                    heal = self.faults.plan(fault, f"c9.{trouble.number}")
                    if not isinstance(fault, EndpointFault | LostCall):
                        nursery.start_soon(self._heal_after, trouble.seconds, heal)

    async def _heal_after(self, seconds: float, heal: Callable[[], None]) -> None:
        await trio.sleep(seconds)
        heal()

    def _fault(self, trouble: Trouble) -> Fault:
        callers, rank = self.callers, trouble.rank
        where = self.faults.where(callers.procs.slice(n=rank))
        match trouble.kind:
            case "kill":
                return Death(where, trouble.how)
            case "stop":
                return Death(where, "sigstop")
            case "partition":
                return Partition(CONTROLLER, where)
            case "between":
                other = callers.other if trouble.other == rank else callers.meshes[0].slice(n=trouble.other)
                return Partition(where, self.faults.where(other))
            case "delay":
                return LinkFault(CONTROLLER, where, "delay", trouble.seconds / 10)
            case "lag":
                return LoopLag(where, trouble.seconds)
        mesh = callers.meshes[trouble.mesh]._view.info.mesh
        if trouble.kind == "lose":
            loss = ("request", "reply", "in_flight")[trouble.nth % 3]
            return LostCall(where, mesh, (rank,), trouble.endpoint, loss, trouble.nth)
        is_late = trouble.kind == "late"
        error = None if is_late else MemoryError("injected")
        seconds = trouble.seconds if is_late else 0.0
        return EndpointFault(where, mesh, (rank,), trouble.endpoint, trouble.nth, 1, error, seconds)

    async def _on_purpose(self, trouble: Trouble) -> None:
        callers = self.callers
        with trio.move_on_after(60 if trouble.nth > 1 else trouble.seconds) as scope:
            try:
                if trouble.kind == "actor":
                    member = callers.meshes[trouble.mesh].slice(n=trouble.rank)
                    await member.fail_later.call_one()
                    await callers.other.burst.call_one(member, BURST_TOKEN * (1 + trouble.number), BURST)
                elif not isinstance(self.schedule.policy, FailFast):
                    await callers.procs.replace([{"n": trouble.rank}])
            except Exception as error:
                self.gave_up = self.gave_up or trouble.kind == "replace"
                for leaf in trimesh.leaves(error):
                    if not isinstance(leaf, TROUBLE):
                        raise
        self.gave_up = self.gave_up or (scope.cancelled_caught and trouble.kind == "replace")

    # ---- the end ---------------------------------------------------------------------------------------------

    async def _check_healed(self) -> None:
        """W-5."""
        is_whole = isinstance(self.schedule.policy, Restart) and not self.gave_up
        error: Exception | None = None
        with trio.move_on_after(HEALED_SECONDS):
            while True:
                try:
                    for mesh in self.callers.meshes:
                        await (mesh if is_whole else mesh.alive()).inline.call(0, "at once", 0.0)
                except* TROUBLE as group:
                    error = group
                else:
                    return
                await trio.sleep(0.5)
        check("W-5", False, f"the members did not answer again: {error!r}")

    def _explain(self, error: Exception) -> None:
        """W-7."""
        explained = self.callers.explained
        if explained:
            explained += (RestartLimit, BackgroundError, Planned)
        for leaf in trimesh.leaves(error):
            if not isinstance(leaf, explained):
                raise error
        self.chaos.sometimes("the block failed")

    def _check_journal(self) -> None:
        """W-4, W-6."""
        order = {name: place for place, name in enumerate(self.callers.spawned)}
        for made in self.journal.made.values():
            first = [order[name] for name in dict.fromkeys(made) if name in order]
            check("W-4", first == sorted(first), f"in one process were made {made}")
        for (token, mesh, rank), count in self.journal.starts.items():
            allowed = count <= 1 or token in self.callers.repeated or token == 0
            check("W-6", allowed, f"step {token} started {count} times at {mesh}[{rank}]")


def run_schedule(seed: int) -> SeededOutcome:
    """Run one schedule, as the simulated test does."""
    return run_once(mixed_workload, {"faults": None, "chaos": None}, SeededOptions({"gpus": 2}), seed)
