"""A quarter of a minute of `python -m tests.service.soak`: a loop whose replicas are killed loses and keeps nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 12

pytestmark = [pytest.mark.real, pytest.mark.stress]


def test_loop_of_real_processes_survives_a_kill_a_second() -> None:
    """Y1, Y2, Y5, Y7, Y8: one outcome a request, each sample accounted for, equal counts of descriptors at the end."""
    command = [sys.executable, "-m", "tests.service.soak", "--minutes", str(SECONDS / 60), "--every", "1"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)

    unexpected = [line for line in done.stderr.splitlines() if not line.startswith("procs: ProcDied: ")]
    assert (done.returncode, unexpected) == (0, []), done.stdout
    (kills,) = re.findall(r"^(\d+) kills", done.stdout, re.MULTILINE)
    assert int(kills) >= 2  # fewer than there are seconds on a busy machine
