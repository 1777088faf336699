"""One seeded run of a test body: a new simulation, one seed, then the checks of the oracles."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, cast

import attrs
import trio
import trio.testing

from trimesh._runtime.life.current import dump
from trimesh.actor.host_mesh import this_host
from trimesh.errors import leaves, set_context
from trimesh.testing.plans.chaos import Chaos
from trimesh.testing.plans.determinism import run_seeded, virtual_clock
from trimesh.testing.plans.faults import Faults
from trimesh.testing.simulated.host import open_world
from trimesh.testing.simulated.job_host import open_simulated_hosts
from trimesh.testing.simulated.oracles import HANG_SECONDS, STEPS_MAX, Progress, what_it_waits_for
from trimesh.testing.simulated.simulation import Simulation

UNWIND_SECONDS: Final = 60.0
"""Virtual time for waits for acknowledgements, and the grace, of a killed process to end."""

PROVIDED: Final = ("mesh", "host_mesh", "faults", "fault_log", "chaos")
"""Fixtures that a body may request by the names of its parameters."""


@attrs.frozen
class SeededOptions:
    """Options of a simulated test.

    Attributes:
        per_host: Extent of the fixture `mesh`, on each host.
        spawn: Further arguments of its `spawn_procs`.
        steps_max: Number of task steps after which it counts as hung.
        hosts: Number of hosts in the job of the fixture `host_mesh`; 0 for this host only.
    """

    per_host: Mapping[str, int]
    spawn: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    steps_max: int = STEPS_MAX
    hosts: int = 0


class HangError(AssertionError):
    """A run did not end; the text lists the waits of all tasks."""


@attrs.define(eq=False)
class SeededOutcome:
    """Outcome of one run.

    Attributes:
        simulation: Trace, faults, oracles.
        error: The exception it raised, or None.
        hang: Set when it did not end by itself.
        reached: Number of times that each state of `chaos.sometimes` was reached.
    """

    simulation: Simulation
    error: BaseException | None = None
    hang: HangError | None = None
    reached: dict[str, int] = attrs.field(factory=dict[str, int])


def run_once(
    body: Callable[..., Awaitable[None]],
    wanted: Mapping[str, Any],
    options: SeededOptions,
    seed: int,
    *,
    left_out: frozenset[str] = frozenset(),
) -> SeededOutcome:
    """Run `body(**wanted)` under one seed; arguments named in `PROVIDED` are made for this run."""
    simulation = Simulation(seed, left_out=left_out)
    outcome = SeededOutcome(simulation)
    progress = Progress(options.steps_max)

    async def main() -> None:
        async with open_world(simulation.prepare, seed=seed):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch, outcome, progress, nursery.cancel_scope)
                outcome.error = await _run_body(body, wanted, options, outcome)
                nursery.cancel_scope.cancel()
            outcome.error = outcome.hang or outcome.error
            simulation.calm()
            if simulation.has_killed:
                await trio.sleep(UNWIND_SECONDS)
            await trio.testing.wait_all_tasks_blocked()
            if outcome.error is None:
                simulation.judge()
            else:
                simulation.oracles.check()

    clock = virtual_clock()
    with simulation.surroundings():
        try:
            run_seeded(seed, main, clock=clock, instruments=[simulation.numbers, progress])
        except BaseException as error:  # noqa: BLE001 - the caller reports it with the seed
            found = _single(error)
            if outcome.error is not None:
                set_context(found, outcome.error)
            outcome.error = found
    return outcome


async def _watch(outcome: SeededOutcome, progress: Progress, scope: trio.CancelScope) -> None:
    """End a run that hangs, and report its waits."""
    with trio.move_on_after(HANG_SECONDS):
        await progress.is_stuck.wait()
    world = outcome.simulation.world
    lines = [f"the run has not ended {progress.stuck or f'after {HANG_SECONDS:g} virtual seconds'}:"]
    lines += what_it_waits_for(world)
    if progress.stuck:
        lines += ["most steps were made by:", *progress.busiest(world)]
    text = io.StringIO()
    dump(text)
    outcome.hang = HangError("\n".join([*lines, "the controller:", text.getvalue()]))
    world.kill_all()  # a task that never waits stops the clock, and cannot be cancelled
    scope.cancel(reason="the run hangs")


async def _run_body(
    body: Callable[..., Awaitable[None]], wanted: Mapping[str, Any], options: SeededOptions, outcome: SeededOutcome
) -> BaseException | None:
    """Run the body; return the error of the body, or of the block of `mesh`."""
    raised: BaseException | None = None
    simulation = outcome.simulation
    faults = Faults(simulation)
    chaos = Chaos(faults, simulation.seed, outcome.reached)
    given: dict[str, Any] = {"faults": faults, "fault_log": simulation.plan.log, "chaos": chaos}
    try:
        async with AsyncExitStack() as stack:
            machine = this_host()
            if options.hosts:
                opened = open_simulated_hosts(simulation, options.hosts)
                machine = given["host_mesh"] = await stack.enter_async_context(opened)
            if "mesh" in wanted:
                spawning = machine.spawn_procs(options.per_host, **options.spawn)
                faults.mesh = given["mesh"] = await stack.enter_async_context(spawning)
            arguments = {name: given.get(name, value) for name, value in wanted.items()}
            try:
                await body(**arguments)
                simulation.judge_loads()
            except trio.Cancelled:
                raise
            except BaseException as error:
                raised = error
                raise
            finally:
                faults.heal()
    except trio.Cancelled:
        raise
    except BaseException as error:  # noqa: BLE001 - returned
        own = raised is not None and list(leaves(error)) == list(leaves(raised))
        return raised if own else error
    return None


def _single(error: BaseException) -> BaseException:
    """Remove the groups that nurseries of the run have put around one error."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inside: tuple[BaseException, ...] = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return _single(inside[0]) if len(inside) == 1 else cast("BaseException", error)
