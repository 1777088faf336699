"""The workload of pools under some seeds, and bugs that it must find."""

from __future__ import annotations

import itertools

import pytest
from tests.service.pool_mutations import MUTATIONS, find
from tests.service.pool_workload import HEALED, REPLICAS, STATES, pool_workload, run_schedule

from trimesh.testing import simulate

NEAR = 100
"""Seeds that are tried when the one of the table does not show a bug any more."""


@simulate(seeds=12, per_host={"gpus": REPLICAS}, supervision=HEALED, sometimes=STATES)
async def test_each_request_has_one_outcome_whatever_happens(mesh, chaos):
    """Y1, Y2, Y3, Y4, Y5."""
    await pool_workload(mesh, chaos)


@pytest.mark.stress
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_found(name: str):
    mutation = MUTATIONS[name]

    found = find(mutation, itertools.chain([mutation.seed], range(NEAR)), mutation.rule)

    assert found is not None
    assert run_schedule(found.seed).error is None, "without the bug"
