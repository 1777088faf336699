"""The table of kills: each part of a job killed at each stage. README.md shows it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.jobs import sshd
from tests.jobs.kills.table import STAGES, Run, agent, check_kill, children_of, controller, staged_python

pytest.importorskip("cryptography")

from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

Seen = list[dict[str, str]] | None
LOCAL = "jobs.LocalJob(2)"


def spawner(run: Run) -> None:
    os.kill(run.spawner, signal.SIGKILL)


def ssh(run: Run) -> None:
    """Kill each client of ssh that the program has started."""
    clients = children_of(run.program.pid, "ssh")
    assert clients
    for pid in clients:
        os.kill(pid, signal.SIGKILL)


def check_seen(seen: Seen, victim: Callable[[Run], None], stage: str) -> None:
    """Check what the user sees, as the table of README.md says."""
    if victim is controller:
        assert seen is None
        return
    assert seen is not None
    if stage in ("starting", "joining"):
        assert {one["type"] for one in seen} == {"SpawnError"}, seen
        assert any("ended" in one["text"] or "cannot start" in one["text"] for one in seen), seen
    elif stage == "running":
        assert {one["type"] for one in seen} == {"HostLost"}, seen
        assert {one["reason"] for one in seen} <= {"agent exit", "lease"}, seen
    else:  # all that was to be done is done
        assert all(one["type"] == "HostLost" for one in seen), seen


STRESS = pytest.mark.stress
CASES = [
    pytest.param(controller, "joining"),
    pytest.param(agent, "starting"),
    pytest.param(agent, "stopping"),
    *(pytest.param(controller, stage, marks=STRESS) for stage in STAGES if stage != "joining"),
    *(pytest.param(agent, stage, marks=STRESS) for stage in ("joining", "running")),
    *(pytest.param(spawner, stage, marks=STRESS) for stage in ("running", "stopping")),
]


@pytest.mark.parametrize(("victim", "stage"), CASES)
def test_local_hosts(victim: Callable[[Run], None], stage: str, tmp_path: Path) -> None:
    """H2, H4, H13: those that other tests have, too, are run by hand."""
    check_seen(check_kill(LOCAL, stage, victim, tmp_path), victim, stage)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.SSHServer]:
    """An sshd for the tests of this file."""
    one = sshd.SSHServer(tmp_path_factory.mktemp("sshd"))
    yield one
    one.close()


@pytest.mark.stress
@pytest.mark.skipif(sshd.missing() is not None, reason=sshd.missing() or "")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", [controller, agent, ssh])
def test_hosts_by_ssh(victim: Callable[[Run], None], stage: str, tmp_path: Path, server: sshd.SSHServer) -> None:
    """H2, H4, H13: ssh tells the agent of its end by closing its standard input."""
    job = f"jobs.SSHJob(['n1', 'n2'], options={server.options!r}, python={str(staged_python(tmp_path))!r})"
    check_seen(check_kill(job, stage, victim, tmp_path), victim, stage)
    server.wait_idle()
