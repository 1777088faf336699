"""What becomes of a mesh over hosts when connections break, agents stop, and the controller is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio
from tests.jobs.orphans import check_killed_program
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of, wait_gone

from trimesh import Actor, HostLost, MeshErrorGroup, endpoint, leaves

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


class Counter(Actor):
    """Counts, so that what is lost or comes twice is seen."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def add(self, data: bytes) -> int:
        self.count += len(data)
        return self.count

    @endpoint
    async def agent(self) -> int:
        return parent_of(os.getppid())

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


def session_of(hosts: Any, rank: int) -> Any:
    return hosts._owned.host.hosts[rank].host._pipe.session


@pytest.mark.daily
async def test_broken_connection_resumes_and_nothing_is_lost_or_doubled() -> None:
    """H3: calls go on over a new connection of the same session, in order."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(1) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("counter", Counter) as counter,
        ):
            session = session_of(hosts, 0)
            one = counter.slice(hosts=0, gpus=0)
            for number in range(30):
                if number % 10 == 5:
                    session.drop_connection()
                assert await one.add.call_one(bytes(100_000)) == (number + 1) * 100_000
            counted = session.statistics()
    assert counted.connections == 4


@pytest.mark.daily
async def test_silent_agent_is_lost_after_its_lease() -> None:
    """H4: a stopped agent, and all that ran on its host, is gone when the block has raised."""
    agent = 0
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.slice(hosts=1).spawn_procs({"gpus": 2}) as procs,
            procs.spawn("counter", Counter) as counter,
        ):
            agent = next(iter(await counter.agent.call()))
            os.kill(agent, signal.SIGSTOP)
            await counter.sleep.call()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert lost.reason == "lease"
    await wait_gone([agent])


@pytest.mark.daily
async def test_loss_of_an_idle_host_ends_the_block_of_the_job() -> None:
    """H4: where no mesh has a process there, the job itself fails."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.LocalJob(2) as hosts:
            async with hosts.spawn_procs({"gpus": 1}) as procs, procs.spawn("counter", Counter) as counter:
                agents = list(await counter.agent.call())
            os.kill(agents[0], signal.SIGKILL)
            await trio.sleep_forever()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert (lost.host, lost.reason) == (hosts.names[0], "agent exit")


@pytest.mark.daily
def test_nothing_is_left_on_any_host_after_the_controller_was_killed() -> None:
    """H2: agents end with their standard input, and everything on their hosts with them."""
    check_killed_program("jobs.LocalJob(2)", hosts=2, gpus=2)
