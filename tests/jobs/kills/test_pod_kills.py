"""The table of kills for pods: agents, their pods, the API server and the program, a Kubernetes for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.jobs.kills.staged_agent import FOLDER, POD_BOOT
from tests.jobs.kills.table import ROOT, STAGES, Run, agent, check_kill, controller
from tests.jobs.pods.cluster import BOOT, IMAGE, FakeKubernetes, missing
from tests.patience import HANG_SECONDS

pytest.importorskip("cryptography")

from trimesh._native import tls

pytestmark = [
    pytest.mark.real,
    pytest.mark.stress,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

Kill = Callable[[Run, FakeKubernetes], None]
SHORT = {"POD_WAIT_SECONDS": 3.0, "KUBERNETES_SILENT_SECONDS": 1.0, "KUBERNETES_END_SECONDS": 2.0}
"""Limits of the program that a test would wait for."""

JOB = (
    f"[setattr(__import__('trimesh').limits, name, value) for name, value in {SHORT!r}.items()] and "
    f"jobs.KubernetesJob(2, image={IMAGE!r}, interface='127.0.0.1')"
)
AWAY_SECONDS = 1.0


@pytest.fixture(params=["jobset", "job"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeKubernetes]:
    """A Kubernetes for one test, which it may kill."""
    env = {FOLDER: str(tmp_path), BOOT: POD_BOOT}
    one = FakeKubernetes(tmp_path / "kubernetes", has_jobset=request.param == "jobset", env=env)
    one.control(ttl=0.0)
    yield one
    one.close()


def pod(run: Run, cluster: FakeKubernetes) -> None:
    """Evict both: which one has the agent is not known before it has joined."""
    for index in range(2):
        cluster.on_pod(index, "eviction")


def api_server(run: Run, cluster: FakeKubernetes) -> None:
    cluster.process.kill()
    cluster.process.wait()


def api_server_for_a_while(run: Run, cluster: FakeKubernetes) -> None:
    """Stop it, and let it go on later: it keeps what it knows."""
    process = cluster.process
    process.send_signal(signal.SIGSTOP)
    threading.Timer(AWAY_SECONDS, process.send_signal, [signal.SIGCONT]).start()


def wait_empty(cluster: FakeKubernetes) -> None:
    """Wait until nothing is left in the namespace."""
    deadline = time.monotonic() + HANG_SECONDS
    while cluster.everything():
        assert time.monotonic() < deadline, cluster.everything()
        time.sleep(0.05)


CASES = [
    (victim, stage)
    for victim in (controller, agent, pod, api_server, api_server_for_a_while)
    for stage in STAGES
    if (victim, stage) != (api_server, "starting")  # as `test_killed_in_the_queue`, or as "joining": who comes first
]


@pytest.mark.parametrize(("victim", "stage"), CASES)
def test_pods(victim: Kill, stage: str, cluster: FakeKubernetes, tmp_path: Path) -> None:
    """H2, H4, H13: and nothing is left in the namespace."""
    is_held = victim in (api_server, api_server_for_a_while)
    seen = check_kill(
        JOB,
        stage,
        lambda run: victim(run, cluster),
        tmp_path,
        env={"KUBECONFIG": str(cluster.config)},
        is_held=is_held,
    )
    print(f"{victim.__name__} {stage}: {seen}")
    if victim is controller:
        assert seen is None
    elif is_held:
        assert seen == [], "hosts that run need no API server"
    elif stage in ("starting", "joining"):
        assert seen is not None
        assert {one["type"] for one in seen} == {"SpawnError"}, seen
    else:
        assert seen is not None
        assert seen or stage == "stopping"
        assert {one["type"] for one in seen} <= {"HostLost"}, seen
        assert {one["reason"] for one in seen} <= {"evicted" if victim is pod else "agent exit", "agent exit"}, seen
    if victim is not api_server:
        wait_empty(cluster)


@pytest.mark.parametrize("victim", ["controller", "pod", "api_server"])
def test_killed_in_the_queue(victim: str, cluster: FakeKubernetes) -> None:
    """H13: pods of a program that was killed see, once they start, that nobody comes, and go."""
    cluster.control(places=1)
    env = {**os.environ, "KUBECONFIG": str(cluster.config)}
    command = [sys.executable, "-m", "tests.jobs.kills.program", JOB, "queued"]
    Path(cluster.config.parent.parent, "stage").write_text("queued")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as program:
        try:
            deadline = time.monotonic() + HANG_SECONDS
            while not (cluster.running() == 1 and "Unschedulable" in str(cluster.listed("pods"))):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if victim == "controller":
                program.kill()
            elif victim == "pod":
                for index in range(2):
                    cluster.on_pod(index, "eviction")
            else:
                cluster.process.kill()
            out, _ = program.communicate(timeout=HANG_SECONDS)
        finally:
            program.kill()
    print(victim, out)
    if victim == "controller":
        assert not out
        cluster.control(places=1)
    else:
        [said] = [json.loads(line) for line in out.splitlines()]
        assert {one["type"] for one in said["seen"]} == {"SpawnError"}, said
        text = "evicting" if victim == "pod" else "the API server cannot be reached"
        assert any(text in one["text"] for one in said["seen"]), said
    if victim != "api_server":
        wait_empty(cluster)
