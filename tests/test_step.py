"""Steps of the set-up print one line each, and all that their command printed if it fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

STEP = Path(__file__).resolve().parents[1] / "requirements" / "step.py"


def step(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, STEP, "making a file", folder, sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_step_prints_one_line(tmp_path: Path) -> None:
    script = f"print('chatter'); open({str(tmp_path / 'made')!r}, 'wb').truncate(3 << 20)"
    done = step(tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"making a file \.+ +3 MiB +\d+ s\n", done.stdout)


def test_failed_step_prints_output_of_its_command(tmp_path: Path) -> None:
    done = step(tmp_path, "import sys; print('no network'); print('gave up', file=sys.stderr, flush=True); sys.exit(7)")
    assert done.returncode == 7
    assert re.fullmatch(r"making a file \.+ failed\n", done.stdout)
    assert set(done.stderr.split("\n")) >= {"no network", "gave up"}
