"""The short form of `make soak WORKLOAD=hosts`."""

from __future__ import annotations

import pytest
from tests.jobs.network.observing import needs_network

pytest.importorskip("cryptography")

from tests.jobs.network.chaos import ROUNDS, suffer

pytestmark = needs_network


async def test_hosts_that_suffer_lose_nothing_and_leave_nothing() -> None:
    """H3, H4: faults that are survived and hosts that are lost, in two blocks one after the other."""
    suffered = await suffer(0, blocks=2, seed=1)
    assert sum(suffered.faults.values()) == 2 * (ROUNDS + 1)
