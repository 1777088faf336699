"""Agents that a keeper starts pass the cases of every launcher; hosts of any launcher can be kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.jobs import slurm, sshd
from tests.jobs.kept.keeping import attached_program, below, double_on, keeper_of, kept_in, wait_gone
from tests.jobs.pods.cluster import IMAGE, FakeKubernetes
from tests.jobs.pods.cluster import missing as missing_kubernetes
from tests.patience import HANG_SECONDS

from trimesh import jobs

pytest.importorskip("cryptography")

from trimesh._native import tls
from trimesh.testing import LAUNCHER_CASES, LauncherSubject, check_launcher

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs `lab1`, `lab2` and `lab3`, of so many hosts."""
    with kept_in(tmp_path_factory.mktemp("state")):
        for count in (1, 2, 3):
            trio.run(lambda count=count: jobs.keep(f"lab{count}", jobs.LocalJob(count), lease=3600))
        yield
        for count in (1, 2, 3):
            trio.run(jobs.stop, f"lab{count}")


@pytest.mark.stress
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("case", LAUNCHER_CASES)
def test_agents_of_kept_hosts(case: str) -> None:
    """H1, H2, H4, H13, H23: given to one program after the other."""
    check_launcher(case, LauncherSubject(lambda count: jobs.attach(f"lab{count}")))


@pytest.mark.skipif(sshd.missing() is not None, reason=sshd.missing() or "")
async def test_hosts_by_ssh_are_kept(tmp_path: Path) -> None:
    """H2, H13, H23: a killed program leaves them clean, a killed keeper leaves nothing."""
    (tmp_path / "sshd").mkdir()
    server = sshd.SSHServer(tmp_path / "sshd")
    try:
        with kept_in(tmp_path), trio.fail_after(HANG_SECONDS):
            await jobs.keep("lab", jobs.SSHJob(["n1", "n2"], options=server.options), lease=600)
            async with attached_program("lab") as attached:
                attached.process.kill()
                assert await double_on("lab") == [42, 42]
                await attached.wait_gone()
            held = [*below(keeper_of(tmp_path, "lab")), *below(server.pid)]
            os.kill(keeper_of(tmp_path, "lab"), signal.SIGKILL)
            await wait_gone([pid for pid in held if pid != server.pid])
            assert "is gone" in await jobs.stop("lab")
            server.wait_idle()
    finally:
        server.close()


@pytest.mark.stress
@pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")
async def test_nodes_of_slurm_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2, H13, H23: the allocation outlives the program, and ends with the lease, and with the keeper."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "slurm").mkdir()
    cluster = slurm.SlurmCluster(tmp_path / "slurm")
    try:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        with kept_in(tmp_path), trio.fail_after(3 * HANG_SECONDS):
            for is_killed in (False, True):
                await jobs.keep("lab", jobs.SlurmJob(2), lease=600)
                [before] = cluster.jobs()
                async with attached_program("lab") as attached:
                    attached.process.kill()
                    assert await double_on("lab") == [42, 42]
                    await attached.wait_gone()
                assert cluster.jobs() == [before]
                keeper = keeper_of(tmp_path, "lab")
                if is_killed:
                    os.kill(keeper, signal.SIGKILL)
                else:
                    await jobs.extend("lab", lease=0.1)
                await wait_gone([keeper])
                await trio.to_thread.run_sync(cluster.wait_idle)
                if is_killed:
                    assert "is gone" in await jobs.stop("lab")
                assert await jobs.kept() == []
    finally:
        cluster.close()


@pytest.mark.stress
@pytest.mark.skipif(missing_kubernetes() is not None, reason=missing_kubernetes() or "")
async def test_pods_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13, H23: one program after the other has them; the end of the lease deletes what was applied."""
    cluster = FakeKubernetes(tmp_path / "kubernetes")
    try:
        monkeypatch.setenv("KUBECONFIG", str(cluster.config))
        with kept_in(tmp_path), trio.fail_after(3 * HANG_SECONDS):
            await jobs.keep("lab", jobs.KubernetesJob(2, image=IMAGE, interface="127.0.0.1"), lease=600)
            async with attached_program("lab") as attached:
                attached.process.kill()
                assert await double_on("lab") == [42, 42]
                await attached.wait_gone()
            keeper = keeper_of(tmp_path, "lab")
            await jobs.extend("lab", lease=0.1)
            await wait_gone([keeper])
            assert cluster.everything() == []
            assert await jobs.kept() == []
    finally:
        cluster.close()
