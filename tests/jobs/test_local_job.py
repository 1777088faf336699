"""Meshes over several hosts: agents on this machine, over real TCP and TLS."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

from trimesh import Actor, HostLost, MeshErrorGroup, ProcDied, ShapeError, endpoint, leaves, limits, origin

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


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
    async def say(self, variable: str) -> None:
        print(os.environ[variable])

    @endpoint
    async def echo(self, data: bytes) -> bytes:
        return data


@pytest.mark.daily
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
            await workers.sleep.call()
    assert len(list(leaves(caught.value))) == 1, caught.value.exceptions
    (lost,) = [leaf for leaf in leaves(caught.value) if isinstance(leaf, HostLost)]
    assert (lost.reason, lost.point and dict(lost.point)) == ("agent exit", {"hosts": 1})
    assert [leaf for leaf in leaves(caught.value) if leaf is not lost] == []


async def test_host_that_is_lost_while_its_block_is_left_is_one_failure() -> None:
    """H4, X3: as many processes as were there say it, and a call in the body."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 3}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            _, spawner = (await workers.where.call()).values()[3]
            with trio.CancelScope(shield=True):
                os.kill(spawner, signal.SIGKILL)
                await workers.slice(hosts=1).sleep.call()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)


@pytest.mark.daily
async def test_errors_streams_and_cancels_cross_hosts() -> None:
    """H1: the same body as on one host."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            with pytest.raises(MeshErrorGroup) as caught:
                await workers.fail.call()
            (first, *_) = leaves(caught.value)
            where = origin(first)
            assert isinstance(first, ValueError)
            assert where is not None
            assert where.point is not None
            assert "hosts" in where.point

            far = workers.slice(hosts=1, gpus=0)
            async with far.count.stream(200) as items:
                assert [item async for _, item in items] == list(range(200))
            with trio.move_on_after(0.2) as scope:
                await workers.sleep.call()
            assert scope.cancelled_caught
            data = os.urandom(3 << 20)
            assert await far.echo.call_one(data) == data


@pytest.mark.daily
async def test_death_of_a_worker_names_its_place_and_its_host() -> None:
    """H1: a worker that dies on another host is a `ProcDied`, and the host goes on."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob({"a": 1, "b": 1}) as hosts:
            assert dict(hosts["b"].extent) == {"hosts": 1}
            with pytest.raises(MeshErrorGroup) as caught:
                async with hosts["b"].spawn_procs({"gpus": 2}) as procs, procs.spawn("workers", Worker) as workers:
                    places = list(await workers.where.call())
                    os.kill(places[1][0], signal.SIGKILL)
                    await workers.sleep.call()
            (died,) = leaves(caught.value)
            where = origin(died)
            assert isinstance(died, ProcDied)
            assert died.signal == signal.SIGKILL
            assert where is not None
            assert (where.host, dict(where.point or {})) == (hosts.names[1], {"hosts": 0, "gpus": 1})
            async with hosts.slice(hosts=0).spawn_procs({"cpus": 2}) as others, others.spawn("w", Worker) as workers:
                assert list(await workers.double.call(1)) == [2, 2]


async def test_processes_without_pickle_print_with_their_coordinates(capsys: pytest.CaptureFixture[str]) -> None:
    """H1: `pickle="off"` and output line by line work across hosts; of the environment only `env=` crosses."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2, pickle="off") as hosts,
            hosts.spawn_procs({"gpus": 1}, env={"COLOUR": "green"}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            await workers.say.call("COLOUR")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["procs[hosts=0,gpus=0] | green", "procs[hosts=1,gpus=0] | green"]


@pytest.mark.daily
async def test_same_lines_of_many_processes_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """H12: over hosts; all is shown when the block is left."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 6}, env={"COLOUR": "green"}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            await workers.say.call("COLOUR")
    *shown, count = capsys.readouterr().out.splitlines()
    assert len(set(shown)) == limits.OUTPUT_SAME_SHOWN
    assert all(line.endswith("] | green") for line in shown)
    assert count == "procs | (x4 more) green"


async def test_hosts_of_a_job_refuse_what_they_cannot_do_yet() -> None:
    """H1: in words, before anything starts."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            with pytest.raises(ValueError, match="rendezvous= is for the processes of one host"):
                hosts.spawn_procs({"gpus": 1}, rendezvous=True)
            with pytest.raises(ValueError, match="must use the same pickle="):
                async with hosts.spawn_procs({"gpus": 1}, pickle="off"):
                    pytest.fail("the processes were started")
            with pytest.raises(KeyError, match="no hosts are named 'c'"):
                hosts["c"]
            with pytest.raises(ShapeError, match="'hosts'"):
                hosts.spawn_procs({"hosts": 2})


@pytest.mark.parametrize(
    ("hosts", "match"),
    [(0, "at least 1 host"), ({"a": 0}, "at least 1 host"), ("3", "a number of hosts"), (True, "a number")],
)
def test_job_is_a_value_that_says_what_is_wrong_with_it(hosts: object, match: str) -> None:
    """H1: it is compared and printed, and starts nothing."""
    assert jobs.LocalJob(2) == jobs.LocalJob(2)
    assert "hosts=2" in repr(jobs.LocalJob(2))
    with pytest.raises((TypeError, ValueError), match=match):
        jobs.LocalJob(hosts)  # type: ignore[arg-type]
