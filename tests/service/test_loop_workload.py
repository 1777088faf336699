"""The whole loop under some seeds, and bugs that it must find."""

from __future__ import annotations

import itertools

import pytest
from tests.service.loop_mutations import MUTATIONS, find
from tests.service.loop_workload import HEALED, RANKS, STATES, loop_workload, run_schedule

from trimesh.testing import simulate

NEAR = 100
"""Seeds that are tried when the one of the table does not show a bug any more."""


@simulate(seeds=4, per_host={"gpus": RANKS}, supervision=HEALED, sometimes=STATES)
async def test_loop_whatever_happens(mesh, chaos):
    """Y1, Y5, Y7, Y8: pool, slots, buffer and publications as one loop, with a trainer that dies, too."""
    await loop_workload(mesh, chaos)


@pytest.mark.stress
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_of_the_loop_is_found(name: str):
    mutation = MUTATIONS[name]

    found = find(mutation, itertools.chain([mutation.seed], range(NEAR)), mutation.rule)

    assert found is not None
    assert run_schedule(found.seed).error is None, "without the bug"
