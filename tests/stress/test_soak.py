"""Ten seconds of `make soak-proc`: a loaded mesh whose members are killed loses nothing and keeps nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 10  # `make soak-proc` for more

pytestmark = [pytest.mark.real, pytest.mark.stress]


def test_loaded_mesh_survives_ten_seconds_of_kills(capsys: pytest.CaptureFixture[str]) -> None:
    """Z01, R01, R08, R09: right answers or `ProcDied`, each kill a restart, and equal counts at the end."""
    command = [sys.executable, "-m", "tests.stress.soak", "--minutes", str(SECONDS / 60), "--every", "1"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)

    with capsys.disabled():
        print("\n".join(["", *re.findall(r".*(?:kills|right answers|PROBLEM).*", done.stdout)]))
    unexpected = [line for line in done.stderr.splitlines() if not line.startswith("pool: ProcDied: ")]
    assert (done.returncode, unexpected) == (0, []), done.stdout
    (kills,) = re.findall(r"(\d+) kills \(", done.stdout)
    assert int(kills) >= SECONDS // 3
