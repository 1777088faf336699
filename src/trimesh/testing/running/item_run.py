"""One test item: its seeds one after the other, or its body over real processes; and what is said of a failure."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from trimesh.errors import add_note, leaves
from trimesh.testing.plans.keys import compact, rest_after
from trimesh.testing.plans.plan import FaultPlan
from trimesh.testing.real.run import run_net, run_real
from trimesh.testing.running.decorator import SEEDS_DEFAULT, Simulated
from trimesh.testing.running.seed_plan import NETWORK_SEEDS, REAL_SEEDS, SeedPlan, real_jitter
from trimesh.testing.running.shrinking import smallest
from trimesh.testing.simulated.seeded_run import SeededOptions, SeededOutcome, run_once

SHRINK_RUNS: Final = 64
"""Runs that are spent on finding the faults that a failure needs, and as many on its steps: a second or so each."""

STEP_CHARS: Final = 120
"""Text of one step in a report; the rest of its repr is cut off."""


@attrs.frozen
class RunSettings:
    """What the command line says.

    Attributes:
        seeds: Those of every test.
        trace_file: Where the trace of the last run goes, or None.
        left_out: Keys of planned faults, and of steps, to do without.
    """

    seeds: SeedPlan = attrs.field(factory=SeedPlan)
    trace_file: str | None = None
    left_out: frozenset[str] = frozenset()


@attrs.define(eq=False)
class ItemRun:
    """One test item.

    Attributes:
        nodeid: Its name for the command line.
        body: The test.
        wanted: Its arguments.
        simulated: What `simulate` was told, or None.
        sections: What is added to the report of a failure: (title, text).
        ran: The seeds that have been run.
    """

    nodeid: str
    body: Callable[..., Awaitable[None]]
    wanted: Mapping[str, Any]
    simulated: Simulated | None
    settings: RunSettings
    sections: list[tuple[str, str]] = attrs.field(factory=list[tuple[str, str]])
    ran: set[int] = attrs.field(factory=set[int])

    @property
    def options(self) -> SeededOptions:
        """What each run is done with."""
        return SeededOptions({"gpus": 2}) if self.simulated is None else self.simulated.options

    @property
    def seeds_asked(self) -> int:
        """How many seeds the test asks for."""
        return SEEDS_DEFAULT if self.simulated is None else self.simulated.seeds

    def replay_line(self, seed: int | None = None, left_out: Iterable[str] = ()) -> str:
        """Return the command that repeats one run; without a seed, one whose faults no seed decides."""
        without = compact(left_out)
        of_seed = "" if seed is None else f" --mesh-seed={seed:#x}"
        return f"pytest '{self.nodeid}'{of_seed}" + (f" --mesh-leave-out={without}" if without else "")


class NeverFired(AssertionError):
    """A fault that happens by chance did so under no seed."""


class NeverReached(AssertionError):
    """A state that some seed must reach was reached under none."""


def run_simulated(run: ItemRun) -> None:
    """Run every seed; stop at the first that fails, and raise its error with the line that replays it."""
    __tracebackhide__ = True
    fired: Counter[str] = Counter()
    reached: Counter[str] = Counter(dict.fromkeys(run.simulated.sometimes, 0) if run.simulated is not None else {})
    for seed in run.settings.seeds.seeds(run.seeds_asked):
        run.ran.add(seed)
        outcome = run_once(run.body, run.wanted, run.options, seed, left_out=run.settings.left_out)
        if run.settings.trace_file is not None:
            outcome.simulation.trace.write(Path(run.settings.trace_file))
        if outcome.error is not None:
            _tell(run, outcome)
            raise outcome.error
        fired.update({str(one.fault): one.fired for one in outcome.simulation.plan.planned if not one.is_chance})
        reached.update(outcome.reached)
    # Fewer seeds than the test asks for, or others, prove nothing of what some of them must reach.
    if run.seeds_asked > 1 and run.ran.issuperset(range(run.seeds_asked)) and not run.settings.left_out:
        _check_never(fired, reached, len(run.ran))


def _check_never(fired: Mapping[str, int], reached: Mapping[str, int], seeds: int) -> None:
    never = [fault for fault, count in fired.items() if not count]
    if never:
        raise NeverFired(f"planned by chance, and not hit under any of {seeds} seeds: {'; '.join(never)}")
    missed = [name for name, count in reached.items() if not count]
    if missed:
        raise NeverReached(f"not reached under any of {seeds} seeds: {'; '.join(missed)}")


def _shrunk(run: ItemRun, outcome: SeededOutcome) -> Iterator[str]:
    """Say which of the faults, then which of the steps the failure needs, when there were several."""
    simulation = outcome.simulation
    faults = {planned.key: str(planned.fault) for planned in simulation.plan.planned if planned.fired}
    steps = {key: repr(step)[:STEP_CHARS] for key, step in simulation.plan.steps.items()}
    if len(faults) + len(steps) < 2:
        return
    kind, everything = _kinds(outcome.error), {*faults, *steps}
    rest = rest_after(everything)  # the run had not come to it: without this, others would take the place of a step

    def fails(kept: Iterable[str]) -> bool:
        left_out = run.settings.left_out | (everything - set(kept)) | set(rest)
        again = run_once(run.body, run.wanted, run.options, simulation.seed, left_out=left_out)
        return again.error is not None and _kinds(again.error) == kind

    def needed(keys: Iterable[str], others: Iterable[str]) -> list[str]:
        return smallest(list(keys), lambda kept: fails([*kept, *others]), SHRINK_RUNS)

    kept_faults = needed(faults, steps)
    kept_steps = needed(steps, kept_faults)
    if len(kept_steps) < len(steps):  # fewer steps may need fewer faults
        kept_faults = needed(kept_faults, kept_steps)
    if len(kept_faults) < len(faults):
        yield f"it needs {len(kept_faults)} of {len(faults)} faults" + (":" if kept_faults else "")
        yield from (f"  {key}: {faults[key]}" for key in kept_faults)
    if steps and not kept_steps:
        yield f"it needs none of its {len(steps)} steps"
    elif steps:
        yield f"the smallest program of steps that fails so has {len(kept_steps)} of {len(steps)}:"
        yield from (f"  {key}: {steps[key]}" for key in kept_steps)
    left_out = [key for key in (*faults, *steps) if key not in kept_faults and key not in kept_steps]
    if left_out:
        yield f"replay with these alone: {run.replay_line(simulation.seed, [*left_out, *rest])}"


def _kinds(error: BaseException | None) -> set[str]:
    """Return what tells one failure from another: the types of its leaves."""
    return set() if error is None else {type(leaf).__qualname__ for leaf in leaves(error)}


def _history(plan: FaultPlan) -> Iterator[str]:
    for fired in plan.log:
        yield f"{fired.time:.6f}  {fired.site}  {fired.where}  {fired.fault}"
    for planned in plan.unfired():
        yield f"not fired: {planned.fault}"


def _tell(run: ItemRun, outcome: SeededOutcome) -> None:
    """Add to a failure what repeats it, and what had been done to it."""
    assert outcome.error is not None
    simulation = outcome.simulation
    line = f"replay: {run.replay_line(simulation.seed)}"
    add_note(outcome.error, line)
    lines = [
        line,
        *_hash_note(),
        f"trace hash: {simulation.trace.hash}",
        *_history(simulation.plan),
        *_shrunk(run, outcome),
    ]
    text = "\n".join(lines)
    run.sections.append((f"mesh seed {simulation.seed:#x}", text))


def _hash_note() -> Iterator[str]:
    """Say what the seed does not decide: Python chose it when this process began."""
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED", "random") == "random":
        yield "hashes of strings are random in this process: if the replay passes, run all with PYTHONHASHSEED=0"


def run_over_processes(run: ItemRun) -> None:
    """Run the body over real processes."""
    __tracebackhide__ = True
    _run_seeds(run, run_real, REAL_SEEDS)


def run_over_network(run: ItemRun) -> None:
    """Run the body over real processes of hosts in network namespaces."""
    __tracebackhide__ = True
    _run_seeds(run, run_net, NETWORK_SEEDS)


def _run_seeds(run: ItemRun, run_body: Callable[..., object], most: int) -> None:
    """Run the body under one seed after the other; by default once where a seed decides no fault."""
    __tracebackhide__ = True
    seeds = run.settings.seeds
    for seed in seeds.real_seeds(run.seeds_asked, most):
        plan = FaultPlan(left_out=run.settings.left_out)
        jitter = real_jitter(seed) if seeds.is_chosen or "chaos" in run.wanted else 0.0
        try:
            run_body(run.body, run.wanted, run.options, plan, seed, jitter)
        except BaseException as error:
            decides = seeds.is_chosen or _is_drawn(run, plan)
            line = f"replay: {run.replay_line(seed if decides else None, run.settings.left_out)}"
            add_note(error, line)
            run.sections.append(("mesh faults", "\n".join([line, *_history(plan)])))
            raise
        if not seeds.is_chosen and not _is_drawn(run, plan):
            break
        run.ran.add(seed)


def _is_drawn(run: ItemRun, plan: FaultPlan) -> bool:
    """Return whether another seed would have meant other faults over real processes."""
    return "chaos" in run.wanted or any(planned.is_drawn for planned in plan.planned)


BACKENDS: Final[dict[str, Callable[[ItemRun], None]]] = {
    "sim": run_simulated,
    "proc": run_over_processes,
    "net": run_over_network,
}
"""How a mesh test is run, by the name of its back end."""
