"""`spmd.from_torchrun`: a mesh of the processes of a job that the real torchrun, or `trimesh spmd`, has started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import HANG_SECONDS
from tests.runtime.processes import wait_gone

from trimesh import spmd

pytest.importorskip("cryptography")
pytest.importorskip("torch")

from trimesh._native import tls

pytestmark = [
    pytest.mark.real,
    pytest.mark.torch,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
]

SCRIPT = str(Path(__file__).parent / "scripts" / "inside.py")
STARTERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "trimesh spmd": ["-m", "trimesh", "spmd", "--procs", "2"],
}


def started(starter: str, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, *STARTERS[starter], SCRIPT, what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("starter", ["torchrun", pytest.param("trimesh spmd", marks=pytest.mark.stress)])
async def test_mesh_has_the_ranks_of_the_job(starter: str) -> None:
    """With a store of torchrun's own, and with one that rank 0 serves; only rank 0 is a program."""
    with started(starter, "total") as process:
        output, errors = process.communicate(timeout=2 * HANG_SECONDS)
    assert process.returncode == 0, errors
    assert "total ValueMesh([hosts=0]: 1.0, [hosts=1]: 1.0)" in output
    assert re.findall(r"left (\d)", output) == ["0"]
    pids = re.search(r"mesh (\d+) (\d+)", output)
    assert pids is not None
    await wait_gone([int(pid) for pid in pids.groups()])


@pytest.mark.stress
def test_failure_is_that_of_rank_0() -> None:
    with started("torchrun", "fail") as process:
        output, errors = process.communicate(timeout=2 * HANG_SECONDS)
    assert process.returncode == 1
    assert "left" not in output
    assert "LookupError: of rank 1" in errors
    assert "<NO_OTHER_FAILURES>" in errors


@pytest.mark.stress
async def test_killed_rank_is_an_error_of_the_program_and_of_torchrun() -> None:
    with started("torchrun", "wait") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        pids = [int(pid) for pid in re.findall(r"\d+", line)]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=2 * HANG_SECONDS)
    assert process.returncode == 1
    assert "ProcDied" in errors
    assert "ranks[hosts=1]" in errors
    await wait_gone(pids)


def test_other_programs_are_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"start the program by `torchrun --nproc-per-node 8 script\.py`, or use"):
        spmd.from_torchrun()
