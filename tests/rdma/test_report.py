"""`python -m trimesh.rdma`: what is tried here, by real processes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real


def test_report_says_of_each_carrier_whether_it_works_or_why_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trimesh.rdma"], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(re.findall(r"^  (\w+) +((?:yes +[\d.]+ GB/s|no +\S).*)$", done.stdout, re.MULTILINE))
    assert list(lines) == ["shm", "cma", "tcp", "ucx", "cuda_ipc"]
    assert lines["shm"].startswith("yes")
