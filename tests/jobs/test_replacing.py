"""Hosts that are lost, and others in their place."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from tests.jobs.joining import joining
from tests.patience import HANG_SECONDS
from tests.runtime.processes import is_there, parent_of, wait_gone

import trimesh.blocking as tb
from trimesh import (
    Actor,
    Backoff,
    HostLost,
    Isolate,
    MeshErrorGroup,
    Restart,
    RestartLimit,
    ShapeError,
    SpawnError,
    endpoint,
    leaves,
    origin,
    this_host,
)

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs.local import LocalLauncher

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

HEALING = Restart("one_for_one", along="hosts", backoff=Backoff(0.001, cap=0.01))


class Worker(Actor):
    """Counts, and says where it is."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def add(self) -> int:
        """Return how often it was called."""
        self.count += 1
        return self.count

    @endpoint
    async def agent(self) -> int:
        """Return the process id of the agent of its host."""
        return parent_of(os.getppid())

    @endpoint
    async def stay(self) -> None:
        """Answer nothing."""
        await trio.sleep_forever()


async def until(workers: Any) -> list[int]:
    """Return the agents of all workers once all of them answer."""
    while True:
        try:
            return list(await workers.agent.call())
        except MeshErrorGroup as group:
            if {type(one) for one in leaves(group)} != {HostLost}:
                raise
            await trio.sleep(0.005)


async def killed(workers: Any, rank: int) -> int:
    """Kill the agent of a host; return who it was."""
    agent: int = next(iter(await workers.slice(hosts=rank).agent.call()))
    os.kill(agent, signal.SIGKILL)
    await wait_gone([agent])
    return agent


async def test_lost_host_is_replaced_by_a_spare_one() -> None:
    """H20: its processes are started there as one unit, with new actors; those of other hosts go on."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2, spares=1) as hosts:
            first, second = hosts.names
            async with (
                hosts.spawn_procs({"gpus": 2}, supervision=HEALING) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                before = list(await workers.agent.call())
                assert list(await workers.add.call()) == [1] * 4
                await killed(workers, 1)
                after = await until(workers)
                assert after[:2] == before[:2]
                assert set(after[2:]).isdisjoint(before)
                assert list(await workers.add.call()) == [2, 2, 1, 1]
                assert hosts.names[0] == first
                assert hosts.names[1] not in (first, second)
    assert not any(map(is_there, {*before, *after}))


async def test_agent_is_started_again_where_there_is_no_spare() -> None:
    """H20: on the same host; and again, when that one is lost."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            names = hosts.names
            async with hosts.spawn_procs({}, supervision=HEALING) as procs, procs.spawn("workers", Worker) as workers:
                agents = {await killed(workers, 0)}
                for _ in range(2):
                    await until(workers)
                    agents.add(await killed(workers, 0))
                agents.update(await until(workers))
                assert len(agents) == 5
                assert hosts.names == names


async def test_idle_host_is_replaced_when_it_is_next_used() -> None:
    """H20: the block of the job goes on while there is a spare, and fails when there is none."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.LocalJob(2, spares=1) as hosts:
            for count in (1, 2):
                async with (
                    hosts.spawn_procs({}, supervision=Isolate()) as procs,
                    procs.spawn("workers", Worker) as workers,
                ):
                    agents = list(await workers.agent.call())
                assert len(set(agents)) == 2, count
                os.kill(agents[1], signal.SIGKILL)
                await wait_gone([agents[1]])
            await trio.sleep_forever()
    assert [type(one) for one in leaves(caught.value)] == [HostLost]


async def test_host_that_lives_is_replaced_on_demand() -> None:
    """H20: with all that runs there, which its policy starts again on the other one."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2, spares=1) as hosts:
            async with hosts.spawn_procs({}, supervision=HEALING) as procs, procs.spawn("workers", Worker) as workers:
                before = list(await workers.agent.call())
                await hosts.slice(hosts=1).replace({})
                await wait_gone([before[1]])
                after = await until(workers)
                assert after[0] == before[0] != after[1] != before[1]
            await hosts.replace({"hosts": 0})
            await wait_gone([before[0]])
            with pytest.raises(ShapeError):
                await hosts.replace({"hosts": 2})
            with pytest.raises(ShapeError, match="one host"):
                await hosts.replace({})
        with pytest.raises(ValueError, match="hosts of a job"):
            await this_host().replace({})


async def test_loss_fails_the_block_where_nothing_is_restarted() -> None:
    """H4: as before, whatever spares there are."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.LocalJob(2, spares=1) as hosts,
            hosts.spawn_procs({}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            await killed(workers, 1)
            await trio.sleep_forever()
    assert [type(one) for one in leaves(caught.value)] == [HostLost]


async def test_meshes_of_one_host_wait_for_one_replacement() -> None:
    """HP-2: it is replaced once, whoever asks."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1, spares=3) as hosts, trio.open_nursery() as nursery:
            found = list[list[int]]()

            async def use() -> None:
                async with (
                    hosts.spawn_procs({"gpus": 2}, supervision=HEALING) as procs,
                    procs.spawn("workers", Worker) as workers,
                ):
                    before = list(await workers.agent.call())
                    ready.append(before[0])
                    await wait_gone([before[0]])
                    found.append(await until(workers))

            ready = list[int]()
            for _ in range(3):
                nursery.start_soon(use)
            while len(ready) < 3:  # noqa: ASYNC110 - three tasks
                await trio.sleep(0.005)
            os.kill(ready[0], signal.SIGKILL)
    assert len({agent for agents in found for agent in agents}) == 1


@attrs.frozen
class FaultyJob(jobs.LocalJob):
    """A job whose agents come up to a number; then `after` says what their start does."""

    good: int = attrs.field(default=2, kw_only=True)
    after: Any = attrs.field(default=None, kw_only=True)

    def launcher(self) -> LocalLauncher:
        """See `Job.launcher`."""
        return FaultyLauncher(self)


class FaultyLauncher(LocalLauncher):
    """Starts some agents."""

    def __init__(self, job: FaultyJob) -> None:
        super().__init__(sum(job.parts.values()) + job.spares)
        self._job = job
        self._started = 0

    async def start(self, rank: int, order: jobs.AgentOrder) -> Any:
        """See `Launcher.start`."""
        self._started += 1
        if self._started > self._job.good:
            await self._job.after(rank)
        return await super().start(rank, order)


async def refuse(rank: int) -> None:
    """Start none."""
    raise SpawnError(f"the cloud has no machine for {rank}")


async def test_host_that_cannot_be_had_ends_the_restarts() -> None:
    """H20: with the words of whoever has refused."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            FaultyJob(2, after=refuse) as hosts,
            hosts.spawn_procs({}, supervision=HEALING) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            await killed(workers, 1)
            await trio.sleep_forever()
    [failure] = leaves(caught.value)
    assert isinstance(failure, RestartLimit)
    assert "the cloud has no machine for 1" in str(failure)


async def test_cancelled_replacement_leaves_nothing_and_keeps_the_spare() -> None:
    """H20: a cancel while the agent is started; whoever asks next gets the same spare."""
    asked = list[int]()
    is_asked = trio.Event()

    async def wait_once(rank: int) -> None:
        asked.append(rank)
        is_asked.set()
        if len(asked) == 1:
            await trio.sleep_forever()

    with trio.fail_after(HANG_SECONDS):
        async with FaultyJob(2, spares=1, after=wait_once) as hosts:
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()

                async def replace() -> None:
                    with scope:
                        await hosts.replace({"hosts": 1})

                nursery.start_soon(replace)
                await is_asked.wait()
                scope.cancel()
            await hosts.replace({"hosts": 1})
            assert asked == [2, 2]
            async with hosts.spawn_procs({}) as procs, procs.spawn("workers", Worker) as workers:
                assert list(await workers.add.call()) == [1, 1]


@asynccontextmanager
async def running(hosts: Any) -> AsyncGenerator[Any, None]:
    async with hosts.spawn_procs({}, supervision=HEALING) as procs, procs.spawn("workers", Worker) as workers:
        yield workers


async def test_host_at_the_door_takes_the_place_of_a_lost_one() -> None:
    """H20: one that comes, or one that waits."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door, AsyncExitStack() as agents:  # they outlive the block of hosts
            for _ in range(2):
                await agents.enter_async_context(joining(door))
            async with door.expect(2) as hosts, running(hosts) as workers:
                lost = await killed(workers, 1)
                await agents.enter_async_context(joining(door))
                before = await until(workers)
                await agents.enter_async_context(joining(door))
                while not door.waiting:  # noqa: ASYNC110 - a process that joins
                    await trio.sleep(0.005)
                await hosts.replace({"hosts": 0})  # HP-4: no call after it is answered by what was there
                assert set(await until(workers)).isdisjoint({lost, before[0]})
                assert not door.waiting


def test_blocking_programs_replace_hosts_and_get_more() -> None:
    """H20, H27."""
    with tb.fail_after(HANG_SECONDS), tb.enter(jobs.LocalJob(1)) as entered:
        hosts = tb.face(entered)
        hosts.replace({"hosts": 0})
        with hosts.grow(1).spawn_procs({}) as procs:
            assert list(procs.spawn("workers", Worker).add.call()) == [1, 1]


async def test_words_of_a_lost_host_name_its_place() -> None:
    """H4, H20: also those of a second loss at the place."""
    seen = list[tuple[str, Any]]()
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2, spares=1) as hosts, running(hosts) as workers:
            for _ in range(2):
                name = hosts.names[1]
                far = workers.slice(hosts=1)
                agent = next(iter(await far.agent.call()))
                with pytest.raises(BaseExceptionGroup) as caught:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(far.stay.call)  # sent before: a later call waits for the next host
                        await trio.testing.wait_all_tasks_blocked()
                        os.kill(agent, signal.SIGKILL)
                [lost] = leaves(caught.value)
                where = origin(lost)
                assert isinstance(lost, HostLost)
                assert where is not None
                seen.append((lost.host, dict(lost.point or {})))
                assert seen[-1] == (name, {"hosts": 1})
                await until(workers)
    assert len({name for name, _ in seen}) == 2
