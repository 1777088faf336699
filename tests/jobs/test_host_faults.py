"""What becomes of a mesh over hosts when connections break, agents stop, and the controller is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio
from tests.jobs.joining import joining
from tests.jobs.orphans import check_killed_program
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of, wait_gone

from trimesh import Actor, HostLost, Isolate, MeshErrorGroup, ProcDied, RDMABuffer, endpoint, leaves

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs.launcher import AgentExit, AgentOrder, ChildAgent
from trimesh.jobs.local import LocalLauncher

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
    def spawner(self) -> int:
        return os.getppid()

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


class Holder(Actor):
    """Has memory that others read, and reads theirs."""

    def __init__(self) -> None:
        self.buffer = RDMABuffer(bytearray(300_000))

    @endpoint
    async def handle(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    async def agent(self) -> int:
        return parent_of(os.getppid())

    @endpoint(concurrency=4)
    async def sleep(self) -> None:
        await trio.sleep_forever()

    @endpoint(concurrency=2)
    async def loss_of(self, other: Any, buffer: RDMABuffer | None) -> tuple[str, str, str, Any]:
        """Use another process until that is lost, and return by what."""
        return await loss_by(other, buffer)


async def loss_by(other: Any, buffer: RDMABuffer | None) -> tuple[str, str, str, Any]:
    try:
        if buffer is None:
            await other.sleep.call_one()
        while buffer is not None:
            await buffer.read_into(bytearray(buffer.nbytes))
            await trio.sleep(0.01)
    except Exception as error:  # noqa: BLE001 - it is what is asked for
        return (
            type(error).__name__,
            getattr(error, "reason", ""),
            getattr(error, "host", ""),
            getattr(error, "point", 0),
        )
    raise AssertionError("unreachable")


@pytest.mark.daily
async def test_all_that_use_a_lost_host_get_the_same_error() -> None:
    """H4: calls and buffers, of the program and of processes on other hosts, at once."""
    found = list[tuple[str, str, str, Any]]()

    async def use(uses: Any, *args: Any) -> None:
        found.append(await uses(*args))

    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2, apart=True) as hosts,
            hosts.spawn_procs({"gpus": 1}, supervision=Isolate()) as procs,
            procs.spawn("holders", Holder) as holders,
        ):
            one, other = (holders.slice(hosts=rank, gpus=0) for rank in range(2))
            agent, buffer = await other.agent.call_one(), await other.handle.call_one()
            async with trio.open_nursery() as nursery:
                for args in ((other, None), (other, buffer)):
                    nursery.start_soon(use, loss_by, *args)
                    nursery.start_soon(use, one.loss_of.call_one, *args)
                await trio.sleep(0.5)
                os.kill(agent, signal.SIGKILL)
    assert found == [("HostLost", "agent exit", hosts.names[1], {"hosts": 1})] * 4


async def test_buffer_of_a_host_that_falls_silent_gives_the_loss_of_the_host() -> None:
    """H4, N4: nobody but the lease tells of its end; the reader waits for that, as a call does."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.open_door("127.0.0.1") as door,
            joining(door, env={"TRIMESH_HOST_ID": "another"}) as agent,
            door.expect(1) as hosts,
            hosts.spawn_procs({"gpus": 1}, supervision=Isolate()) as procs,
            procs.spawn("holders", Holder) as holders,
        ):
            buffer = await holders.handle.call_one()
            agent.kill()
            kind, reason, *_ = await loss_by(None, buffer)
    assert (kind, reason) == ("HostLost", "lease")


class _Told(ChildAgent):
    async def exit_of(self, code: int) -> AgentExit:
        await trio.sleep(0.3)  # a scheduler is asked
        return AgentExit(f"the scheduler has cancelled the job; exit code {code}", "", "cancelled")


class _Scheduled(LocalLauncher):
    async def start(self, rank: int, order: AgentOrder) -> ChildAgent:
        agent = await super().start(rank, order)
        return _Told(agent._process)


class _ScheduledJob(jobs.LocalJob):
    def launcher(self) -> _Scheduled:
        return _Scheduled(sum(self.parts.values()))


@pytest.mark.daily
async def test_words_of_the_scheduler_win_over_those_of_the_agent() -> None:
    """H4: an agent that hears of the end of its spawner first does not hide that its job was cancelled."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            _ScheduledJob(1) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("counter", Counter) as counter,
        ):
            os.kill(await counter.spawner.call_one(), signal.SIGKILL)
            await trio.sleep_forever()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert lost.reason == "cancelled"
    assert "the scheduler has cancelled the job" in str(lost)


@pytest.mark.daily
def test_nothing_is_left_on_any_host_after_the_controller_was_killed() -> None:
    """H2: agents end with their standard input, and everything on their hosts with them."""
    check_killed_program("jobs.LocalJob(2)", hosts=2, gpus=2)


@pytest.mark.daily
@pytest.mark.parametrize("hosts", [1, 2])
async def test_block_that_is_left_while_a_spawner_is_stopped_says_so(hosts: int) -> None:
    """M3: by one failure, in equal words of all processes there, long before the grace is over."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.LocalJob(hosts) as mesh, mesh.spawn_procs({"gpus": 2}, grace=1000) as procs:
            counter = await procs.spawn("counter", Counter)
            spawner = list(await counter.spawner.call())[-1]
            os.kill(spawner, signal.SIGSTOP)
    (shown,) = caught.value.exceptions
    assert isinstance(shown, ProcDied)
    assert "its spawner is stopped, and silent for limits.EXIT_REPORT_SECONDS (2 s)" in str(shown)
    assert len(list(leaves(caught.value))) == 2
    await wait_gone([spawner])
