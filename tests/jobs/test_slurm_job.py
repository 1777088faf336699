"""Hosts that are nodes of a real Slurm: a controller and two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import trio
from tests.jobs.slurm import SlurmCluster, missing
from tests.patience import HANG_SECONDS

from trimesh import Actor, HostLost, MeshErrorGroup, SpawnError, endpoint, leaves, limits

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.testing import LAUNCHER_CASES, LauncherSubject, check_launcher

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm for the tests of this file."""
    one = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield one
    one.close()


@pytest.fixture(autouse=True)
def surroundings(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program's commands find that Slurm; no job outlives its test."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    yield
    cluster.wait_idle()


async def until(cluster: SlurmCluster, state: str) -> None:
    """Wait until a job is in a state."""
    while not any(line.endswith(state) for line in cluster.jobs()):  # noqa: ASYNC110 - Slurm has no event for it
        await trio.sleep(0.02)


class Worker(Actor):
    """What the tests call."""

    @endpoint
    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


@pytest.mark.parametrize("case", LAUNCHER_CASES)
def test_agents_on_nodes(case: str, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1, H2, H4, H13: what each launcher must do; and nothing is left in the queue."""
    monkeypatch.setattr(limits, "HOST_LEASE_SECONDS", 2.0)

    def leftovers() -> list[str]:
        return [line for line in cluster.jobs() if "COMPLETING" not in line]

    check_launcher(case, LauncherSubject(jobs.SlurmJob, leftovers=leftovers))


async def test_nodes_of_the_allocation_around_the_program_are_used(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H13: what others own is not touched: the allocation is there afterwards. Too few nodes are said in words.

    H27: its other nodes are those that a job gets more of.
    """
    async with trio.open_nursery() as nursery:
        salloc = partial(trio.run_process, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        holder = await nursery.start(salloc, ["salloc", "-N2", "cat"])
        with trio.fail_after(HANG_SECONDS):
            await until(cluster, "RUNNING")
            number = cluster.jobs()[0].split()[0]
            monkeypatch.setenv("SLURM_JOB_ID", number)
            monkeypatch.setenv("SLURM_JOB_NODELIST", cluster.ask("squeue", "-h", "-j", number, "-o", "%N"))
            monkeypatch.setenv("SLURM_NTASKS", "7")
            async with jobs.SlurmJob(1) as one:
                hosts = await one.grow(1)
                with pytest.raises(SpawnError, match="has 0 unused nodes"):
                    await hosts.grow(1)
                async with hosts.spawn_procs({"gpus": 1}) as procs, procs.spawn("workers", Worker) as workers:
                    assert list(await workers.variable.call("SLURM_JOB_ID")) == [number] * 2
                    assert list(await workers.variable.call("SLURMD_NODENAME")) == list(hosts.names)
                    assert len(set(hosts.names)) == 2
            assert [line.split()[0] for line in cluster.jobs()] == [number]
            with pytest.raises(MeshErrorGroup) as caught:
                async with jobs.SlurmJob(3):
                    pytest.fail("the allocation has two nodes")
            assert "needs 3 nodes, and the allocation" in str(next(iter(leaves(caught.value))))
        await holder.stdin.aclose()


async def test_job_that_is_cancelled_by_others_is_lost_in_the_words_of_slurm(cluster: SlurmCluster) -> None:
    """H4, H13: `scancel` of an operator ends the hosts; the reason says so."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.SlurmJob(2) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            await workers.variable.call("PATH")
            cluster.ask("scancel", cluster.jobs()[0].split()[0])
            await workers.sleep.call()
    lost = list(leaves(caught.value))
    assert lost
    assert all(isinstance(one, HostLost) for one in lost), lost


async def test_cancel_in_the_queue_leaves_nothing_queued(cluster: SlurmCluster) -> None:
    """H13: while the job waits for nodes that another one has."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.SlurmJob(2, options=("--exclusive",)):
            async with trio.open_nursery() as nursery:

                async def wait_in_queue() -> None:
                    async with jobs.SlurmJob(2, options=("--exclusive",)):
                        pytest.fail("the nodes are taken")

                nursery.start_soon(wait_in_queue)
                await until(cluster, "PENDING")
                nursery.cancel_scope.cancel()
            assert [line.split()[2] for line in cluster.jobs() if "COMPLETING" not in line] == ["RUNNING"]


async def test_what_slurm_refuses_is_said_in_its_words() -> None:
    """H13: an unknown partition."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.SlurmJob(1, partition="nope"):
            pytest.fail("there is no such partition")
    (error,) = leaves(caught.value)
    assert isinstance(error, SpawnError)
    assert "invalid partition specified: nope" in str(error)


async def test_parts_of_a_mapping_have_resources_of_their_own(cluster: SlurmCluster) -> None:
    """H13: a heterogeneous job; its components start together, and each part has the nodes of its own."""
    parts = {"trainers": {"hosts": 1, "cpus": 2, "memory": "200M"}, "loaders": 1}
    with trio.fail_after(2 * HANG_SECONDS):
        async with jobs.SlurmJob(parts, cpus=1, time=5) as hosts:
            rows = cluster.ask("squeue", "-h", "-o", "%N %C %m").splitlines()
            node_of = {cpus: node for node, cpus, _ in (row.split() for row in rows)}
            assert hosts["trainers"].names == (node_of["2"],)
            assert hosts["loaders"].names == (node_of["1"],)
            async with hosts.spawn_procs({"gpus": 1}) as procs, procs.spawn("workers", Worker) as workers:
                assert list(await workers.variable.call("SLURMD_NODENAME")) == list(hosts.names)


async def test_limit_of_time_is_told_before_and_the_block_is_left_while_the_hosts_live(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H26: first a notice, then a cancel in which the program can still save."""
    monkeypatch.setattr(limits, "SLURM_LIMIT_LOOK_SECONDS", 0.5)
    saved = list[str]()
    with trio.fail_after(2 * HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.SlurmJob(1, time=10, notice=600.0) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            saved.append(await hosts.wait_notice())
            assert cluster.jobs()[0].endswith("RUNNING")
            monkeypatch.setattr(limits, "SLURM_LEAVE_SECONDS", 600.0)
            try:
                await workers.sleep.call()
            finally:
                with trio.CancelScope(shield=True):
                    saved += [str(one) for one in await workers.variable.call("SLURMD_NODENAME")]
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert lost.reason == "time limit"
    assert "left while they live" in str(lost)
    assert "reaches its time limit in" in saved[0]
    assert saved[1:] == ["n1"]


async def test_queue_is_told_in_the_words_of_slurm(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13: what the job waits for, and how many come before it."""
    monkeypatch.setattr(limits, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(limits, "SLURM_QUEUE_LOOK_SECONDS", 0.2)
    texts, told = list[str](), trio.Event()

    def say(text: str) -> None:
        texts.append(text)
        if "ahead of it in debug" in text:
            told.set()

    with trio.fail_after(HANG_SECONDS):
        async with jobs.SlurmJob(2, options=("--exclusive",)):
            async with trio.open_nursery() as nursery:

                async def wait_in_queue() -> None:
                    launcher = jobs.SlurmJob(1, options=("--exclusive",)).launcher()
                    launcher.tell_by(say)
                    async with launcher.open():
                        pytest.fail("the nodes are taken")

                nursery.start_soon(wait_in_queue)
                await told.wait()
                nursery.cancel_scope.cancel()
            assert [line.split()[2] for line in cluster.jobs() if "COMPLETING" not in line] == ["RUNNING"]
    assert "is PENDING" in texts[-1]


PROGRAM = """
import trio
from trimesh import jobs

async def main():
    async with jobs.SlurmJob(2):
        print("ready", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_nothing_is_left_after_the_program_was_killed(cluster: SlurmCluster) -> None:
    """H2: the allocation ends with the standard input of whatever holds it, and the nodes are idle again."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        assert len(cluster.jobs()) == 1
        program.kill()
    cluster.wait_idle()
