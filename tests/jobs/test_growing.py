"""Jobs that get more hosts while they run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from tests.jobs.joining import joining
from tests.patience import HANG_SECONDS
from tests.runtime.processes import is_there, parent_of, wait_gone

from trimesh import Actor, HostLost, MeshErrorGroup, Restart, SpawnError, endpoint, leaves, limits, origin, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs.launcher import ChildAgent
from trimesh.jobs.local import LocalLauncher

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


class Worker(Actor):
    """Says where it is."""

    @endpoint
    async def agent(self) -> int:
        """Return the process id of the agent of its host."""
        return parent_of(os.getppid())

    @endpoint
    async def ask(self, other: Worker) -> list[int]:
        """Call all of another mesh."""
        return list(await other.agent.call())


async def agents_of(hosts: Any) -> list[int]:
    """Return the agents of hosts."""
    async with hosts.spawn_procs({}) as procs, procs.spawn("workers", Worker) as workers:
        return list(await workers.agent.call())


async def test_new_hosts_come_after_those_that_there_are() -> None:
    """H27: meshes, views and names of parts stay; messages go between old and new ones; a lost one is followed."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob({"trainers": 1, "generators": 1}) as hosts,
            hosts.spawn_procs({}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            before = list(await workers.agent.call())
            names = hosts.names
            grown = await hosts.grow(1)
            assert dict(grown.extent) == {"hosts": 3}
            assert grown.names[:2] == names == hosts.names
            assert dict(hosts.extent) == {"hosts": 2}
            assert grown["generators"].names == names[1:]
            with pytest.raises(ValueError, match="grows as a whole"):
                await grown["generators"].grow(1)
            healing = Restart(along="hosts")
            async with (
                grown.slice(hosts=slice(-1, None)).spawn_procs({}, supervision=healing) as more,
                more.spawn("workers", Worker) as others,
            ):
                [new] = await others.agent.call()
                assert new not in before
                assert list(await workers.ask.call(others)) == [[new], [new]]
                os.kill(new, signal.SIGKILL)
                await wait_gone([new])
                after = await answer(others)
                assert after != new
            assert list(await workers.agent.call()) == before
            again = await hosts.grow(1)  # of a view that is older
            assert dict(again.extent) == {"hosts": 4}
            assert again.names[:3] == grown.names
            assert len(set(await agents_of(again))) == 4
    assert not any(map(is_there, [*before, new, after]))


async def answer(workers: Any) -> int:
    """Return the agent of the one worker, once it has one again."""
    while True:
        try:
            return int(next(iter(await workers.agent.call())))
        except MeshErrorGroup as group:
            if {type(one) for one in leaves(group)} != {HostLost}:
                raise
            await trio.sleep(0.005)


async def test_what_is_no_growth_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOB_HOSTS_MAX", 2)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            for count in (0, -1, True, 1.5, "2"):
                with pytest.raises(ValueError, match="number of hosts to add, 1 or more"):
                    await hosts.grow(count)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="JOB_HOSTS_MAX"):
                await hosts.grow(2)
        with pytest.raises(RuntimeError, match="has begun to stop"):
            await hosts.grow(1)
        with pytest.raises(ValueError, match="hosts of a job"):
            await this_host().grow(1)


@attrs.frozen
class StagedJob(jobs.LocalJob):
    """A job whose agents come as `start` says, and whose launcher gets others only if `is_growing`."""

    begin: Callable[[int], Any] = attrs.field(kw_only=True)
    is_growing: bool = attrs.field(default=True, kw_only=True)

    def launcher(self) -> jobs.Launcher:
        """See `Job.launcher`."""
        launcher = StagedLauncher(self)
        return launcher if self.is_growing else Fixed(launcher)


class StagedLauncher(LocalLauncher):
    """Starts agents, after what the test says."""

    def __init__(self, job: StagedJob) -> None:
        super().__init__(sum(job.parts.values()) + job.spares)
        self._begin = job.begin

    async def start(self, rank: int, order: jobs.AgentOrder) -> ChildAgent:
        """See `Launcher.start`."""
        await self._begin(rank)
        return await super().start(rank, order)


class Fixed(jobs.Launcher):
    """A launcher that gets no others, as that of ssh: it has the defaults of the base class."""

    def __init__(self, launcher: StagedLauncher) -> None:
        self.interface, self.hosts = launcher.interface, launcher.hosts
        self._launcher = launcher

    def open(self) -> AbstractAsyncContextManager[object]:
        """See `Launcher.open`."""
        return self._launcher.open()

    async def start(self, rank: int, order: jobs.AgentOrder) -> jobs.StartedAgent:
        """See `Launcher.start`."""
        return await self._launcher.start(rank, order)


@pytest.mark.parametrize("is_growing", [pytest.param(True, marks=pytest.mark.stress), False])
async def test_all_come_or_none(*, is_growing: bool) -> None:
    """H27: one that cannot be had ends the others, and a cancel does. Spare hosts, those of an `SSHJob`, are kept."""
    begun = list[int]()
    is_begun = trio.Event()

    async def begin(rank: int) -> None:
        begun.append(rank)
        if begun.count(2) == 1 and rank == 2:
            raise SpawnError(f"the cloud has no machine for {rank}")
        if begun.count(rank) == 1 and rank == (4 if is_growing else 3):
            is_begun.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        with trio.fail_after(HANG_SECONDS):
            async with StagedJob(1, spares=0 if is_growing else 3, begin=begin, is_growing=is_growing) as hosts:
                with pytest.raises(MeshErrorGroup) as caught:
                    await hosts.grow(2)
                [error] = leaves(caught.value)
                where = origin(error)
                assert isinstance(error, SpawnError)
                assert "the cloud has no machine for 2" in str(error)
                assert where is not None
                assert dict(where.point) == {"hosts": 2}
                scope = trio.CancelScope()
                nursery.start_soon(grow_within, scope, hosts)
                await is_begun.wait()
                scope.cancel()
                grown = await hosts.grow(2)
                assert len(set(await agents_of(grown))) == 3
                numbers = [name.rpartition("/")[2] for name in grown.names]
                assert numbers == (["0", "5", "6"] if is_growing else ["0", "1", "3"])  # 2 is none that can be had
                if not is_growing:
                    with pytest.raises(SpawnError, match=r"cannot add 1 hosts: .* has 0 spare hosts"):
                        await grown.grow(1)


async def grow_within(scope: trio.CancelScope, hosts: Any) -> None:
    """Have two more hosts, unless that is cancelled."""
    with scope:
        await hosts.grow(2)


async def test_hosts_at_the_door_are_taken_and_waited_for() -> None:
    """H27: those that wait, and those that come; a cancel leaves those that have come where they were."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door, AsyncExitStack() as agents:
            for _ in range(2):
                await agents.enter_async_context(joining(door))
            async with door.expect(1) as hosts:
                while not door.waiting:  # noqa: ASYNC110 - a process that joins
                    await trio.sleep(0.005)
                with trio.move_on_after(0):
                    await hosts.grow(2)
                assert len(door.waiting) == 1
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(agents.enter_async_context, joining(door)))
                    grown = await hosts.grow(2)
                assert not door.waiting
                assert len(set(await agents_of(grown))) == 3
