"""A program is killed at any moment of its hosts' lives: nothing of it is left on any of them."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.network.observing import needs_network
from tests.lifetime.processes import MARKER, family, wait_ended
from tests.patience import HANG_SECONDS

pytest.importorskip("cryptography")

pytestmark = needs_network

ROOT = Path(__file__).parents[3]
NAMES = "/run/netns"
PROGRAM = "tests.jobs.network.killed_program"

PHASES = {"network": 0.6, "hosts": 0.3, "workers": 0.2}
"""What the program says, and for how long what follows takes, about."""

ROUNDS = [5, pytest.param(100, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])]


def names() -> list[str]:
    """Return the network namespaces that have a name, and so outlive their processes."""
    return sorted(os.listdir(NAMES)) if os.path.isdir(NAMES) else []


@pytest.mark.parametrize("count", ROUNDS)
def test_nothing_is_left_of_three_hosts_when_the_controller_is_killed(count: int) -> None:
    """H2: agents end by their lifelines, and what runs on their hosts with them, whenever it was."""
    before = names()
    for number in range(count):
        chance = random.Random(f"controller {number}")
        mark = secrets.token_hex(8)
        env: dict[str, Any] = {**os.environ, MARKER: mark}
        phase = list(PHASES)[number % len(PHASES)]
        with subprocess.Popen(
            [sys.executable, "-m", PROGRAM], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as program:
            assert program.stdout is not None
            while (said := program.stdout.readline().strip()) != phase:
                assert said, "the program has ended by itself"
            time.sleep(chance.uniform(0, PHASES[phase]))  # the moment is what is varied
            there = family(mark)
            program.kill()
            deadline = time.monotonic() + HANG_SECONDS
            left = wait_ended(there, deadline)
            while not left and (new := family(mark)):
                left = wait_ended(new, deadline)
        assert not left, f"round {number}, {phase}: {', '.join(map(str, left))}"
        assert names() == before, "a namespace without a name is gone with its last process"
