"""What meshes over several hosts are used for: channels, other event loops, restarts, events, buffers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import trio
from tests.conformance.publishing import Publisher, Reader
from tests.conformance.sender import Sender, received, rest
from tests.conformance.vault import SMALL, Vault, pattern
from tests.conformance.vault import Reader as VaultReader
from tests.patience import HANG_SECONDS

import trimesh.aio  # noqa: F401 - asyncio programs enter jobs once it is imported
import trimesh.blocking as tb
from trimesh import Actor, Died, ProcDied, Restart, Restarted, endpoint, open_channel

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


class Worker(Actor):
    """What the tests call."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = trio.Event()

    @endpoint
    async def bump(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    async def variables(self, names: list[str]) -> list[str]:
        return [os.environ[name] for name in names]

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint(group="hold")
    async def sleep(self) -> None:
        self.begun.set()
        await trio.sleep_forever()

    @endpoint
    async def sleeps(self) -> None:
        await self.begun.wait()

    @endpoint
    async def collect(self, senders: Any, count: int) -> list[tuple[int, int]]:
        """Open a channel here, let all others send, and return what came."""
        async with open_channel(tuple, capacity=4) as (port, receiver), trio.open_nursery() as nursery:
            nursery.start_soon(senders.count.call, port, count)
            items = await received(receiver, 1)
            await port.aclose()
            items += await rest(receiver)
        return items


async def test_ports_go_to_other_hosts_and_between_them() -> None:
    """H1, S10: the items of each sender in order, then the end; the receiver is the program, or another host."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("senders", Sender) as senders,
            procs.spawn("workers", Worker) as workers,
        ):
            async with open_channel(tuple, capacity=4) as (port, receiver), trio.open_nursery() as nursery:
                nursery.start_soon(senders.count.call, port, 100)
                items = await received(receiver, 1)
                await port.aclose()
                items += await rest(receiver)
            others = await workers.slice(hosts=1, gpus=0).collect.call_one(senders, 100)
            for found in items, others:
                for rank in range(2):
                    assert [index for sender, index in found if sender == rank] == list(range(100))


def test_asyncio_program_enters_a_job() -> None:
    """H1, K05: as in Trio, once `trimesh.aio` is imported; a cancel of the task is one of the remote side."""

    async def main() -> None:
        async with (
            asyncio.timeout(HANG_SECONDS),
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            assert list(await workers.bump.call()) == [1, 1]
            sleeping = asyncio.create_task(workers.sleep.call())
            await workers.sleeps.call()
            sleeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleeping
            assert list(await workers.bump.call()) == [2, 2]

    asyncio.run(main())


def test_plain_program_enters_a_job() -> None:
    """H1, K06: by `enter` and `face`; the hosts are sliced and named without `await`."""
    with tb.fail_after(HANG_SECONDS), tb.enter(jobs.LocalJob({"a": 1, "b": 1})) as entered:
        hosts = tb.face(entered)
        assert (dict(hosts.extent), len(hosts.names)) == ({"hosts": 2}, 2)
        with hosts.spawn_procs({"gpus": 1}) as procs:
            workers = procs.spawn("workers", Worker)
            assert list(workers.bump.call()) == [1, 1]
            with hosts.slice(hosts=0).spawn_procs({"gpus": 1}) as some, hosts["b"].spawn_procs({"gpus": 2}) as others:
                assert (len(some), dict(others.extent)) == (1, {"hosts": 1, "gpus": 2})


@pytest.mark.daily
async def test_killed_process_of_a_host_is_restarted_there() -> None:
    """H1, R01, R07: with its actors, on the host of its rank; the others keep their state; events say it."""
    seen = list[Any]()

    async def read(mesh: Any, *, task_status: trio.TaskStatus[None]) -> None:
        async with mesh.events() as events:
            task_status.started()
            async for event in events:
                seen.append(event)
                if isinstance(event, Restarted):
                    return

    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 2}, supervision=Restart("one_for_one")) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            async with trio.open_nursery() as nursery:
                await nursery.start(read, procs)
                assert list(await workers.bump.call()) == [1] * 4
                far = workers.slice(hosts=1, gpus=0)
                before = await far.pid.call_one()
                os.kill(before, signal.SIGKILL)
            assert list(await workers.bump.call()) == [2, 2, 1, 2]
            assert await far.pid.call_one() != before
    (died,) = [event for event in seen if isinstance(event, Died)]
    assert dict(died.point) == {"hosts": 1, "gpus": 0}
    assert isinstance(died.error, ProcDied)


@pytest.mark.parametrize("apart", [False, True])
async def test_buffers_and_publications_work_between_hosts(apart: bool) -> None:
    """H1, N4: by memory on one machine, else by tcp where processes listen; `test_linked_buffers` has the rest."""
    env = {"TRIMESH_RDMA": "tcp", "TRIMESH_RDMA_ADDRESS": "127.0.0.1"} if apart else {}
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2, apart=apart) as hosts,
            hosts.spawn_procs({"gpus": 1}, env=env) as procs,
            procs.spawn("vaults", Vault, SMALL) as vaults,
            procs.spawn("readers", VaultReader) as readers,
            procs.spawn("publishers", Publisher) as publishers,
            procs.spawn("followers", Reader) as followers,
        ):
            handle = await vaults.slice(hosts=0, gpus=0).handle.call_one()
            far = readers.slice(hosts=1, gpus=0)
            assert (await far.backend.call_one(handle) == "tcp") is apart
            assert await far.read.call_one(handle) == pattern(SMALL)
            publisher = publishers.slice(hosts=0, gpus=0)
            published = await publisher.handle.call_one()
            await publisher.publish.call_one(1, 5)
            assert await followers.slice(hosts=1, gpus=0).follow.call_one(published, 5)


async def test_variables_of_a_job_are_those_of_all_that_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: of commands and processes on one host or several; those of `spawn_procs` take precedence."""
    monkeypatch.setenv("OF_PROGRAM", "program")
    command = ["sh", "-c", "echo $OF_JOB $OF_PROGRAM"]
    with trio.fail_after(HANG_SECONDS):
        for count in (1, 2):
            shown = list[str]()
            job = jobs.LocalJob(count, env={"OF_JOB": "job", "OF_PROGRAM": "over"})
            async with job as hosts:
                await hosts.run(command, output=lambda line, shown=shown: shown.append(line.text))
                async with (
                    hosts.spawn_procs({}, env={"OF_PROGRAM": "process"}) as procs,
                    procs.spawn("workers", Worker) as workers,
                ):
                    assert list(await workers.variables.call(["OF_JOB", "OF_PROGRAM"])) == [["job", "process"]] * count
            assert shown == ["job over"] * count
    for env, text in (({"A": 1}, "write 'A': '1'"), ({"A=B": "1"}, "names without '='"), ("A=1", "must be a mapping")):
        with pytest.raises((TypeError, ValueError), match=text):
            jobs.LocalJob(1, env=env)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
