"""The search for deadlocks against an oracle that sees everything (C8; SE-1 to SE-3, WA-1 to WA-5)."""

from __future__ import annotations

import pytest
from tests.routing.call_graphs import World

BATCHES = 20
GRAPHS = 500
"""10,000 seeded call graphs in all."""


@pytest.mark.parametrize("batch", range(BATCHES))
def test_search_agrees_with_the_oracle(batch: int):
    """C8: no false alarm, no miss, one victim a deadlock, the greatest of its knot."""
    victims = exact = 0
    for seed in range(batch * GRAPHS, (batch + 1) * GRAPHS):
        world = World(seed)
        try:
            world.run()
            assert not world.oracle(), "a miss: something can never end"
            left = [proc for proc, process in enumerate(world.processes) if process.calls and not process.is_dead]
            assert not left, "a call has not ended, and is in no deadlock"
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        victims += len(world.victims)
        exact += world.exact
    assert exact > GRAPHS // 10, f"too few deadlocks to show anything: {victims}, and {exact} undisturbed ones"
