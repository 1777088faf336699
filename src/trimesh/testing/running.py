"""Runner of one test item: its seeds in turn, or its body over real processes; and its failure report."""

from __future__ import annotations

import inspect
import itertools
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import attrs
import pytest

from trimesh import limits
from trimesh.errors import add_note, leaves
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.plan import FaultPlan, compact, rest_after
from trimesh.testing.real.run import RealSeed, run_net, run_real
from trimesh.testing.simulated.oracles import STEPS_MAX
from trimesh.testing.simulated.seeded_run import SeededOptions, SeededOutcome, run_once

# ---- `@simulate`: one test, many seeds, each in its own simulation ---------------------------------------------------

F = TypeVar("F", bound=Callable[..., Awaitable[None]])

OPTIONS: Final = "__trimesh_simulate__"
"""Attribute of test functions that `simulate` decorated."""

SEEDS_DEFAULT: Final = 20
"""Default number of seeds of a test: enough to see a race that every tenth schedule has."""


@attrs.frozen
class Simulated:
    """Arguments of `simulate`.

    Attributes:
        seeds: Number of seeds.
        sometimes: Conditions that at least one seed must reach.
        options: Options of each run.
        real_seeds: Number of seeds over real processes and hosts; 0 for the default.
    """

    seeds: int
    sometimes: tuple[str, ...]
    options: SeededOptions
    real_seeds: int = 0


def simulate(
    *,
    seeds: int = SEEDS_DEFAULT,
    real_seeds: int = 0,
    hosts: int = 0,
    per_host: Mapping[str, int] | None = None,
    sometimes: tuple[str, ...] = (),
    steps_max: int = STEPS_MAX,
    **spawn: Any,
) -> Callable[[F], F]:
    """Run an async test under many seeds, each in its own simulated mesh, as one test item.

    A seed decides everything random: the order of tasks, ids, delays of messages, random faults. A failure states its
    seed and the command that repeats it: `pytest path::test --mesh-seed=0x2a`.

    Args:
        seeds: Number of seeds, from 0 on. `--mesh-seeds` overrides it.
        real_seeds: Number of seeds over real processes and hosts. By default 3 with chaos; 1 without, and no delays.
        hosts: Number of hosts of the fixture `host_mesh`, on which `mesh` is spawned; 0 for this host alone.
        per_host: Extent of the fixture `mesh` on each host; by default `{"gpus": 2}`.
        sometimes: Names given to `chaos.sometimes`, each of which some seed must reach.
        steps_max: Steps of tasks after which a run counts as hanging (`HangError`).
        **spawn: Further arguments of `spawn_procs` for the fixture `mesh`: grace, supervision, setup.

    The test may use the fixtures `mesh`, `host_mesh`, `faults`, `fault_log` and `chaos`, and those of pytest. It needs
    the plugin `trimesh.testing.plugin`, which an installed trimesh registers.

    Raises:
        TypeError: The test is no coroutine function.
        ValueError: `seeds` is below 1, `real_seeds` or `hosts` below 0.
    """
    if seeds < 1:
        raise ValueError(f"simulate needs at least one seed, got seeds={seeds!r}")
    if real_seeds < 0:
        raise ValueError(f"real_seeds= must be a number of seeds, or 0 for the default, got {real_seeds!r}")
    if not 0 <= hosts <= limits.JOB_HOSTS_MAX:
        raise ValueError(f"hosts= must be a number from 0 to {limits.JOB_HOSTS_MAX}, got {hosts!r}")
    simulated = Simulated(
        seeds, tuple(sometimes), SeededOptions(dict(per_host or {"gpus": 2}), spawn, steps_max, hosts), real_seeds
    )

    def decorate(test: F) -> F:
        if not inspect.iscoroutinefunction(cast("Any", test)):
            raise TypeError(f"simulate must decorate an async test, got {test!r}: write `async def`")
        setattr(test, OPTIONS, simulated)
        return test

    return decorate


# ---- seeds of a test, by the command line; report of the runs --------------------------------------------------------

SEEDED: Final = pytest.mark.mesh_seeded
"""Marks tests that run under seeds; as a property of a report, the number of its runs."""

FRESH: Final = "fresh"
"""Value of `--mesh-first-seed` that draws a new first seed."""

FRESH_BITS: Final = 32
"""Bits of a drawn first seed: short enough to type, and no two runs of a year begin at the same."""


REAL_SEEDS: Final = 3
"""Default seeds of a test over real processes, or hosts, with random faults."""

REAL_JITTERS: Final = (0.001, 0.01, 0.05)
"""Longest delays of messages between real processes, in seconds; the seed of a run selects one. Seed 0 delays none, so
that a test without random faults is the same by default."""


@attrs.frozen
class SeedPlan:
    """The seeds of every seeded test of a session.

    Attributes:
        only: The only seed, or None.
        first: The first seed.
        count: Number of seeds, in place of the test's own; or None.
        seconds: Time for seeds in each test, in place of a number; None to count them.
        fresh_first: First of the seeds that were never run.
        fresh_seconds: Time for those in each test, after the others.
    """

    only: int | None = None
    first: int = 0
    count: int | None = None
    seconds: float | None = None
    fresh_first: int = 0
    fresh_seconds: float = 0.0

    def seeds(self, asked: int) -> Iterator[int]:
        """Yield the seeds of a test that requests `asked` of them; at least one."""
        if self.only is not None:
            yield self.only
            return
        if self.seconds is None:
            yield from range(self.first, self.first + (self.count or asked))
        else:
            yield from _seeds_for(self.seconds, self.first)
        if self.fresh_seconds > 0:
            yield from _seeds_for(self.fresh_seconds, self.fresh_first)

    @property
    def is_chosen(self) -> bool:
        """True if the command line gives the seeds or their number."""
        return self.only is not None or self.count is not None

    def real_seeds(self, asked: int, most: int) -> Iterator[int]:
        """Yield the seeds of a test over real processes: those of the command line, else `asked`, at most `most`."""
        if self.only is not None:
            yield self.only
        else:
            yield from range(self.first, self.first + (self.count or min(asked, most)))


def _seeds_for(seconds: float, first: int) -> Iterator[int]:
    end = time.monotonic() + seconds
    for seed in itertools.count(first):
        yield seed
        if time.monotonic() >= end:
            return


def real_jitter(seed: int) -> float:
    """Return the longest delay of messages between real processes under a seed, in seconds."""
    return stream(seed, "jitter").choice(REAL_JITTERS) if seed else 0.0


def read_seed(text: str) -> int:
    """Return the seed of a text such as `42` or `0x2a`; `fresh` draws one.

    Raises:
        ValueError: It is no number.
    """
    return secrets.randbits(FRESH_BITS) if text == FRESH else int(text, 0)


def runs_told(properties: Iterable[Iterable[tuple[str, object]]], first: int, fresh: int | None = None) -> str:
    """Return a summary of tests and seeds from the properties of their reports; "" for none."""
    counts = [value for one in properties for name, value in one if name == SEEDED.name and isinstance(value, int)]
    if not counts:
        return ""
    each = f"{min(counts)} to {max(counts)} seeds each, from {first:#x} on"
    if fresh is not None:
        each += f", then from {fresh:#x} on"
    return f"{len(counts)} tests under seeds, {sum(counts)} runs: {each}"


# ---- running ---------------------------------------------------------------------------------------------------------

SHRINK_RUNS: Final = 64
"""Maximum runs to find the faults that a failure needs, and as many for its steps: a second or so each."""

STEP_CHARS: Final = 120
"""Text of one step in a report; the rest of its repr is cut off."""


@attrs.frozen
class RunSettings:
    """Options of the command line.

    Attributes:
        seeds: Seeds of every test.
        trace_file: File for the trace of the last run, or None.
        left_out: Keys of planned faults and steps to omit.
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
        simulated: Arguments of `simulate`, or None.
        sections: Sections added to the report of a failure: (title, text).
        ran: Seeds that have run.
        failed: The seed that failed, if a seed decides.
    """

    nodeid: str
    body: Callable[..., Awaitable[None]]
    wanted: Mapping[str, Any]
    simulated: Simulated | None
    settings: RunSettings
    sections: list[tuple[str, str]] = attrs.field(factory=list[tuple[str, str]])
    ran: set[int] = attrs.field(factory=set[int])
    failed: int | None = None

    @property
    def options(self) -> SeededOptions:
        """Return the options of each run."""
        return SeededOptions({"gpus": 2}) if self.simulated is None else self.simulated.options

    @property
    def seeds_asked(self) -> int:
        """Return the number of seeds of the test."""
        return SEEDS_DEFAULT if self.simulated is None else self.simulated.seeds

    def replay_line(self, seed: int | None = None, left_out: Iterable[str] = ()) -> str:
        """Return the command that repeats one run; without a seed, one whose faults no seed decides."""
        without = compact(left_out)
        of_seed = "" if seed is None else f" --mesh-seed={seed:#x}"
        return f"pytest '{self.nodeid}'{of_seed}" + (f" --mesh-leave-out={without}" if without else "")


class NeverFired(AssertionError):
    """A random fault happened under no seed."""


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
            run.failed = seed
            _tell(run, outcome)
            raise outcome.error
        fired.update({str(one.fault): one.fired for one in outcome.simulation.plan.planned if not one.is_chance})
        reached.update(outcome.reached)
    # Fewer seeds than the test's own, or other ones, need not reach what some of them must.
    if run.seeds_asked > 1 and run.ran.issuperset(range(run.seeds_asked)) and not run.settings.left_out:
        _check_never(fired, reached, len(run.ran))


def _check_never(fired: Mapping[str, int], reached: Mapping[str, int], seeds: int) -> None:
    never = [fault for fault, count in fired.items() if not count]
    if never:
        raise NeverFired(
            f"some seed must hit each random fault, not hit under any of {seeds} seeds: {'; '.join(never)}"
        )
    missed = [name for name, count in reached.items() if not count]
    if missed:
        raise NeverReached(
            f"some seed must reach each state, not reached under any of {seeds} seeds: {'; '.join(missed)}"
        )


def _shrunk(run: ItemRun, outcome: SeededOutcome) -> Iterator[str]:
    """Yield the faults, then the steps, that the failure needs, if there were several."""
    simulation = outcome.simulation
    faults = {planned.key: str(planned.fault) for planned in simulation.plan.planned if planned.fired}
    steps = {key: repr(step)[:STEP_CHARS] for key, step in simulation.plan.steps.items()}
    if len(faults) + len(steps) < 2:
        return
    kind, everything = _kinds(outcome.error), {*faults, *steps}
    rest = rest_after(everything)  # later steps are left out, which would otherwise replace omitted ones

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
    """Return the identity of a failure: the types of its leaves."""
    return set() if error is None else {type(leaf).__qualname__ for leaf in leaves(error)}


def _history(plan: FaultPlan) -> Iterator[str]:
    for fired in plan.log:
        yield f"{fired.time:.6f}  {fired.site}  {fired.where}  {fired.fault}"
    for planned in plan.unfired():
        yield f"not fired: {planned.fault}"


def _tell(run: ItemRun, outcome: SeededOutcome) -> None:
    """Add to a failure the way to reproduce it, and its faults."""
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
    """Note that the seed does not decide hashes of strings, which Python chose when this process began."""
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED", "random") == "random":
        yield "hashes of strings are random in this process: if the replay passes, run all with PYTHONHASHSEED=0"


def run_over_processes(run: ItemRun) -> None:
    """Run the body over real processes."""
    __tracebackhide__ = True
    _run_seeds(run, run_real, REAL_SEEDS)


def run_over_network(run: ItemRun) -> None:
    """Run the body over real processes of hosts in network namespaces."""
    __tracebackhide__ = True
    _run_seeds(run, run_net, REAL_SEEDS)


def _run_seeds(run: ItemRun, run_body: Callable[..., None], most: int) -> None:
    """Run the body under one seed after the other; by default once if no fault depends on the seed."""
    __tracebackhide__ = True
    seeds, own = run.settings.seeds, 0 if run.simulated is None else run.simulated.real_seeds
    is_chosen = seeds.is_chosen or own > 0
    begun: list[RealSeed] = []

    def runs() -> Iterator[RealSeed]:
        for seed in seeds.real_seeds(own or run.seeds_asked, own or most):
            jitter = real_jitter(seed) if is_chosen or "chaos" in run.wanted else 0.0
            begun.append(RealSeed(FaultPlan(left_out=run.settings.left_out), seed, jitter))
            yield begun[-1]
            if not is_chosen and not _is_drawn(run, begun[-1].plan):
                return
            run.ran.add(seed)

    try:
        run_body(run.body, run.wanted, run.options, runs())
    except BaseException as error:
        if begun:
            plan = begun[-1].plan
            run.failed = begun[-1].seed if is_chosen or _is_drawn(run, plan) else None
            line = f"replay: {run.replay_line(run.failed, run.settings.left_out)}"
            add_note(error, line)
            run.sections.append(("mesh faults", "\n".join([line, *_history(plan)])))
        raise


def _is_drawn(run: ItemRun, plan: FaultPlan) -> bool:
    """Return whether faults over real processes depend on the seed."""
    return "chaos" in run.wanted or any(planned.is_drawn for planned in plan.planned)


BACKENDS: Final[dict[str, Callable[[ItemRun], None]]] = {
    "sim": run_simulated,
    "proc": run_over_processes,
    "net": run_over_network,
}
"""Functions that run a mesh test, by the name of its back end."""


# ---- shrinking -------------------------------------------------------------------------------------------------------

# Find the few faults and steps that a failure needs, by running the same seed without the others. PURE.
#
# Delta debugging: leave out one half, then the other, then quarters, and so on; continue with any part that still
# fails. The schedule of tasks follows from the seed and does not change.


def smallest(keys: Sequence[str], fails: Callable[[Sequence[str]], bool], runs_max: int) -> list[str]:
    """Return a minimal part of `keys` with which the test still fails.

    Args:
        keys: Keys of faults or steps; with all of them it fails.
        fails: Runs the test with some of them.
        runs_max: Maximum number of runs; then the smallest part found so far is returned.
    """
    kept, parts, runs = list(keys), 1, 0
    while kept and parts <= len(kept):
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            if runs >= runs_max:
                return kept
            runs += 1
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept, parts = rest, max(1, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return kept
