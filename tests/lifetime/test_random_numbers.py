"""Processes draw numbers of their own, and the same ones again where a seed says so."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from trimesh import Actor, ProcDied, Restart, endpoint, this_host
from trimesh._runtime.system.seeds import ProcSeeds

pytestmark = pytest.mark.real


class Drawing(Actor):
    """Draws one number of each kind."""

    @endpoint
    def draw(self) -> tuple[float, ...]:
        import numpy as np

        return random.random(), float(np.random.random())

    @endpoint
    def die(self) -> None:
        os._exit(1)


async def drawn(**options: Any) -> list[tuple[float, ...]]:
    """Return what two processes of a new mesh draw first."""
    async with this_host().spawn_procs({"n": 2}, **options) as procs:
        return list((await (await procs.spawn("drawing", Drawing)).draw.call()).values())


async def test_processes_of_all_meshes_draw_numbers_of_their_own() -> None:
    """Two meshes with the same name, in one run."""
    first, second = await drawn(), await drawn()

    assert len({*first, *second}) == 4


async def test_a_seed_repeats_the_numbers_of_a_mesh() -> None:
    """By its name, too: two meshes of one program may have the same seed."""
    first, again, other = await drawn(seed=7), await drawn(seed=7), await drawn(seed=7, name="other")

    assert first == again
    assert len({*first, *other}) == 4
    assert [values[0] for values in first] == [
        random.Random(ProcSeeds.of(7, "procs", rank, 0).python).random() for rank in range(2)
    ]


async def test_a_restarted_process_draws_other_numbers() -> None:
    """What failed by its numbers does not draw them again."""
    async with this_host().spawn_procs({}, seed=7, supervision=Restart()) as procs:
        drawing = await procs.spawn("drawing", Drawing)
        first = await drawing.draw.call_one()
        with pytest.raises(ProcDied):
            await drawing.die.call_one()

        again = await drawing.draw.call_one()

    assert again != first
    assert again[0] == random.Random(ProcSeeds.of(7, "procs", 0, 1).python).random()


@pytest.mark.parametrize("seed", [-1, 2**63, True, 1.0, "7"])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    """What a record carries; anything else is refused before something is started."""
    with pytest.raises(ValueError, match="seed must be a whole number"):
        this_host().spawn_procs({}, seed=seed)
