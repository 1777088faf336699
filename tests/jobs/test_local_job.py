"""Meshes over several hosts: agents on this machine, over real TCP and TLS."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, HostLost, MeshErrorGroup, endpoint, leaves

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Worker(Actor):
    """What the tests call."""

    def __init__(self) -> None:
        self.seen = list[int]()

    @endpoint
    async def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    async def where(self) -> tuple[int, int]:
        """Return the pids of this process, and of the agent that its spawner is a child of."""
        return os.getpid(), parent_of(os.getppid())

    @endpoint
    async def fail(self) -> None:
        raise ValueError("as the test wants it")

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()

    @endpoint
    async def count(self, end: int) -> AsyncGenerator[int, None]:
        for number in range(end):
            yield number

    @endpoint
    async def ask(self, others: Worker, number: int) -> list[int]:
        """Call all others from here."""
        return list(await others.double.call(number))

    @endpoint
    async def echo(self, data: bytes) -> bytes:
        return data


async def test_job_has_hosts_whose_processes_are_called_like_any_others() -> None:
    """H1: a mesh over hosts is a mesh; each host has an agent of its own."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(3) as hosts:
            assert dict(hosts.extent) == {"hosts": 3}
            async with hosts.spawn_procs({"gpus": 2}) as procs, procs.spawn("workers", Worker) as workers:
                assert dict(procs.extent) == {"hosts": 3, "gpus": 2}
                assert list(await workers.double.call(21)) == [42] * 6
                places = list(await workers.where.call())
                assert len({pid for pid, _ in places}) == 6
                agents = [agent for _, agent in places]
                assert agents[::2] == agents[1::2]
                assert len(set(agents)) == 3
                assert os.getpid() not in agents


async def test_processes_of_different_hosts_call_each_other() -> None:
    """H1: links between processes of two hosts go through their agents and the controller."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 2}) as procs,
            procs.spawn("workers", Worker) as workers,
            procs.spawn("others", Worker) as others,
        ):
            answers = await workers.ask.call(others, 4)
            assert list(answers) == [[8] * 4] * 4


async def test_end_of_an_agent_is_the_loss_of_its_host() -> None:
    """H4: one failure, with the place of the host, and not one for each process there."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 3}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            places = list(await workers.where.call())
            os.kill(places[3][1], signal.SIGKILL)
            started = trio.current_time()
            try:
                await workers.sleep.call()
            finally:
                lasted = trio.current_time() - started
    assert lasted < 2
    assert len(list(leaves(caught.value))) == 1, caught.value.exceptions
    (lost,) = [leaf for leaf in leaves(caught.value) if isinstance(leaf, HostLost)]
    assert (lost.reason, lost.point and dict(lost.point)) == ("agent exit", {"hosts": 1})
    assert [leaf for leaf in leaves(caught.value) if leaf is not lost] == []
