"""Random call graphs on the runtime itself: nothing hangs, and what cannot hang is never disturbed (rule C8)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from tests.conformance.meshes import SimBackend, only_sim
from tests.conformance.nodes import no_deadline

from trimesh import Actor, DeadlockError, endpoint, leaves

SEEDS = 15
"""10,000 graphs are searched in tests/routing; here it is shown that the runtime tells the search the truth."""

Program = list[Any]
"""What a call does: numbers are sleeps, ("call", slot, actors, program) are calls, ("both", programs) are tasks."""


class Walker(Actor):
    """Runs programs."""

    @endpoint
    async def one(self, walkers: Any, program: Program) -> int:
        return await run(walkers, program)

    @endpoint(concurrency=2)
    async def two(self, walkers: Any, program: Program) -> int:
        return await run(walkers, program)


async def run(walkers: Any, program: Program) -> int:
    """Run a program; return how many deadlocks it has met."""
    found = 0

    async def task(part: Program) -> None:
        nonlocal found
        found += await run(walkers, part)

    for step in program:
        match step:
            case float():
                await trio.sleep(step)
            case ("both", *parts):
                async with trio.open_nursery() as nursery:
                    for part in parts:
                        nursery.start_soon(task, part)
            case (slot, ranks, part):
                view = walkers.exclude([{"gpus": rank} for rank in range(len(walkers)) if rank not in ranks])
                outcomes = await getattr(view, slot).call_settled(walkers, part)
                for outcome in outcomes.values():
                    if outcome.error is None:
                        found += outcome.value
                    else:
                        assert {type(leaf) for leaf in leaves(outcome.error)} == {DeadlockError}
                        found += 1
    return found


def make_program(draw: random.Random, size: int, depth: int, first: int, *, upwards: bool) -> Program:
    """Make a program; `upwards` ones call only actors with greater numbers than their own, so they never hang."""
    program: Program = []
    for _ in range(draw.randint(1, 2)):
        low = first if upwards else 0
        if draw.random() < 0.3 or depth == 0 or low == size:
            program.append(draw.choice([0.0, 0.001, 0.02]))
        elif draw.random() < 0.2:
            parts = [make_program(draw, size, depth - 1, first, upwards=upwards) for _ in range(2)]
            program.append(("both", *parts))
        else:
            ranks = draw.sample(range(low, size), draw.choice([1, 1, min(2, size - low)]))
            part = make_program(draw, size, depth - 1, max(ranks) + 1, upwards=upwards)
            program.append((draw.choice(["one", "one", "two"]), ranks, part))
    return program


@only_sim
@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.seeds(SEEDS)
async def test_random_graphs_end(backend: SimBackend, seed: int, upwards: bool):
    """C8: by themselves where calls go in one direction, else with an error for some."""
    draw = random.Random(seed)
    size = draw.randint(2, 4)
    backend.lag.control, backend.lag.data = draw.choice([0.0, 0.002]), draw.choice([0.0, 0.0, 0.005])
    found = 0

    async def root(program: Program) -> None:
        nonlocal found
        found += await run(walkers, program)

    async with no_deadline(), backend.procs({"gpus": size}) as procs:
        walkers = await procs.spawn("walkers", Walker)
        async with trio.open_nursery() as nursery:
            for _ in range(draw.randint(1, 5)):
                nursery.start_soon(root, make_program(draw, size, 4, 0, upwards=upwards))
        if upwards:
            assert found == 0
