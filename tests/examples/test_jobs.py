"""examples/jobs: a program and its hosts, as launchers start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trimesh._native import tls

pytest.importorskip("cryptography")

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

ROOT = Path(__file__).parents[2]
START = ["examples/jobs/start.sh", "examples/jobs/train.py"]
SECONDS = 60.0
PRINTED = ["2 hosts, 4 processes", *(str({"hosts": host, "gpus": gpu}) for host in (0, 1) for gpu in (0, 1))]


def variables(shared: Path, **more: str) -> dict[str, str]:
    """Return the environment of a launcher, with the commands of this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SHARED": str(shared), "INTERFACE": "127.0.0.1"} | more


def start(environ: dict[str, str], command: list[str] = START) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_of_a_launcher_are_a_program_and_its_hosts(tmp_path: Path) -> None:
    """As mpirun numbers them; all end well, in whatever order they were started."""
    ranks = [start(variables(tmp_path, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="3")) for rank in (2, 0, 1)]
    ended = [(*one.communicate(timeout=SECONDS), one.returncode) for one in ranks]
    assert [code for *_, code in ended] == [0, 0, 0], ended
    assert ended[1][0].splitlines() == PRINTED


TORCHRUN = shutil.which("torchrun", path=str(Path(sys.executable).parent))


@pytest.mark.parametrize("name", ["RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "SKYPILOT_NODE_RANK"])
def test_start_knows_the_ranks_of_each_launcher(name: str, tmp_path: Path) -> None:
    """Which command each executes, by commands that print their arguments."""
    for command in ("python", "trimesh"):
        printing = tmp_path / command
        printing.write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        printing.chmod(0o755)
    (tmp_path / "door").write_text("here:1\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shown = [start(variables(tmp_path, **{name: rank, "PATH": path})).communicate(timeout=SECONDS)[0] for rank in "01"]
    assert shown == [f"python {START[1]}\n", f"trimesh host join here:1 --token-file {tmp_path}/tokens --line 1\n"]


@pytest.mark.torch
@pytest.mark.stress  # torchrun takes seconds to import torch, and numbers ranks as above
@pytest.mark.skipif(TORCHRUN is None, reason="torch is an extra")
def test_torchrun_starts_a_program_and_its_hosts(tmp_path: Path) -> None:
    """The command of the README, on one machine."""
    command = [str(TORCHRUN), "--nnodes=1", "--nproc-per-node=3", "--no-python", *START]
    out, err = start(variables(tmp_path), command).communicate(timeout=SECONDS)
    assert out.splitlines() == PRINTED, err


def test_start_says_what_is_missing(tmp_path: Path) -> None:
    for environ, words in (
        ({key: value for key, value in variables(tmp_path).items() if key != "SHARED"}, "SHARED"),
        (variables(tmp_path), "start this by mpirun, srun, torchrun or SkyPilot"),
    ):
        _, err = (process := start(environ)).communicate(timeout=SECONDS)
        assert process.returncode != 0
        assert words in err


def test_task_of_skypilot_says_what_start_reads() -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((ROOT / "examples/jobs/sky.yaml").read_text())
    assert set(task) <= {"num_nodes", "resources", "workdir", "file_mounts", "setup", "run", "envs", "name"}
    assert task["run"].splitlines()[-1].split() == START
    assert "SHARED=/shared/" in task["run"]
    assert "/shared" in task["file_mounts"]
