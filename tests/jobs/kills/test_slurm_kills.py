"""The table of kills for nodes of Slurm: agents, steps, and the daemons of Slurm itself, a Slurm for each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.jobs.kills.table import ROOT, STAGES, Run, agent, check_kill, children_of, controller, staged_python
from tests.jobs.slurm import SlurmCluster, missing

pytest.importorskip("cryptography")

from trimesh._native import tls

pytestmark = [
    pytest.mark.real,
    pytest.mark.stress,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

Kill = Callable[[Run, SlurmCluster], None]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm for one test, whose daemons it may kill."""
    one = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield one
    one.close()


def srun(run: Run, cluster: SlurmCluster) -> None:
    """Kill each srun of the program."""
    clients = children_of(run.program.pid, "srun")
    assert clients
    for pid in clients:
        os.kill(pid, signal.SIGKILL)


def slurmd(run: Run, cluster: SlurmCluster) -> None:
    """Kill that of both nodes: which one has the agent is Slurm's choice."""
    for node in ("n1", "n2"):
        cluster.kill(f"slurmd {node}")


def slurmctld(run: Run, cluster: SlurmCluster) -> None:
    """Kill it, and start it again, as a site would."""
    cluster.kill("slurmctld")
    cluster.start("slurmctld")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", [controller, agent, srun, slurmd, slurmctld])
def test_nodes_of_slurm(victim: Kill, stage: str, cluster: SlurmCluster, tmp_path: Path) -> None:
    """H2, H4, H13: and nothing is left in the queue."""
    job = f"jobs.SlurmJob(2, python={str(staged_python(tmp_path))!r})"
    seen = check_kill(
        job, stage, lambda run: victim(run, cluster), tmp_path, env=cluster.env, is_held=victim is slurmctld
    )
    print(f"{victim.__name__} {stage}: {seen}")
    if victim is controller:
        assert seen is None
    else:
        assert seen is not None
        assert {one["type"] for one in seen} <= {"HostLost", "SpawnError"}, seen
        if victim is slurmctld and stage == "running":
            assert seen == [], "hosts that run need no slurmctld"
    if victim is slurmd:
        for node in ("n1", "n2"):
            cluster.start(f"slurmd {node}")
    cluster.wait_idle()


@pytest.mark.parametrize("victim", ["controller", "salloc"])
def test_killed_in_the_queue(victim: str, cluster: SlurmCluster) -> None:
    """H13: nothing stays queued; what has killed salloc is said."""
    command = [sys.executable, "-m", "tests.jobs.kills.program", "jobs.SlurmJob(2, options=('--exclusive',))", "queued"]
    env = {**os.environ, **cluster.env}
    holder = subprocess.Popen(
        ["salloc", "-N2", "--exclusive", "cat"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    )
    with holder:
        cluster.wait_for("RUNNING")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as program:
            cluster.wait_for("PENDING")
            if victim == "controller":
                program.kill()
            else:
                for pid in children_of(program.pid, "salloc"):
                    os.kill(pid, signal.SIGKILL)
            out, _ = program.communicate()
        print(victim, out)
        assert ("SpawnError" in out) == (victim == "salloc"), out
        cluster.wait_for("PENDING", is_so=False)
        assert holder.stdin is not None
        holder.stdin.close()
    cluster.wait_idle()
