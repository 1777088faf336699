"""A kept job, and the programs that attach to it one after the other: real processes."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.jobs.kept.keeping import Worker, attached_program, double_on, kept_in, wait_gone
from tests.patience import HANG_SECONDS

from trimesh import ConnectError, HostLost, Need, SpawnError, jobs, leaves

pytest.importorskip("cryptography")

from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the state is, of a job `lab` that is kept for the tests of this file."""
    place = tmp_path_factory.mktemp("state")
    with kept_in(place):
        trio.run(_keep)
        yield place
        assert "nothing of it is left" in trio.run(jobs.stop, "lab")


async def _keep() -> None:
    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("lab", jobs.LocalJob({"others": 1}, apart=True), lease=3600)


@pytest.fixture(autouse=True)
def _kept(folder: Path) -> None:
    """Each test of this file has it."""


async def test_attached_hosts_have_places() -> None:
    """H28: for the next program, too; the reservation of the one before has ended with it."""
    with trio.fail_after(HANG_SECONDS):
        for _ in range(2):
            async with jobs.attach("lab") as hosts:
                count = len((await hosts.resources())[0].cpus)
                placement = await hosts.place({"a": Need(cpus=count)})
                async with hosts.spawn_procs(on=placement["a"]) as procs, procs.spawn("workers", Worker) as workers:
                    assert list(await workers.double.call(21)) == [42]
                with pytest.raises(SpawnError, match="taken by 'a'"):
                    await hosts.place({"b": Need(cpus=1)})


async def test_attached_hosts_are_those_of_the_job() -> None:
    """H1, H7, H23: parts by name, one agent a host, and another one for the next program."""
    agents = list[int]()
    with trio.fail_after(HANG_SECONDS):
        for _ in range(2):
            async with jobs.attach("lab") as hosts, hosts["others"].spawn_procs({"procs": 2}) as procs:
                assert dict(hosts.extent) == {"hosts": 1}
                assert len(set(hosts.names)) == 1
                async with procs.spawn("workers", Worker) as workers:
                    assert list(await workers.double.call(21)) == [42, 42]
                    pids = list(await workers.pids.call())
                    agents.append(pids[0][2])
            await wait_gone([pid for three in pids for pid in three])
    assert len(set(agents)) == 2


@pytest.mark.daily
async def test_second_program_is_told_who_has_the_hosts() -> None:
    """H13, H23: of two that race one gets them, and the error of the other names host, process and time."""
    errors, entered = list[str](), trio.Event()
    is_refused = trio.Event()

    async def race() -> None:
        try:
            async with jobs.attach("lab") as hosts:
                assert len(hosts) == 1
                entered.set()
                await is_refused.wait()
        except ConnectError as error:
            errors.append(str(error))
            is_refused.set()

    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(race)
            nursery.start_soon(race)
    assert entered.is_set()
    [text] = errors
    assert f"process {os.getpid()} on {os.uname().nodename} has had them since 20" in text


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.stress)])
async def test_hosts_of_a_killed_program_are_clean_and_free(signum: signal.Signals) -> None:
    """H2, H4, H23: its processes are gone; the next program has the hosts then. A stopped one has them."""
    with trio.fail_after(HANG_SECONDS):
        async with attached_program("lab") as attached:
            assert len(attached.pids) == 6
            attached.process.send_signal(signum)
            if signum is signal.SIGSTOP:
                await attached.wait_gone()
                with pytest.raises(ConnectError, match=f"process {attached.process.pid} on"):
                    await double_on("lab")
                attached.process.kill()
            assert await double_on("lab") == [42]
            await attached.wait_gone()


@pytest.mark.stress
async def test_host_whose_agent_is_killed_is_lost_and_there_again() -> None:
    """H4, H13, H23: for the program that is attached one host is lost; it can start an agent there again."""
    with trio.fail_after(HANG_SECONDS):
        with pytest.raises(BaseExceptionGroup) as caught:
            async with (
                jobs.attach("lab") as hosts,
                hosts.spawn_procs({}) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                [(_, _, agent)] = await workers.pids.call()
                os.kill(agent, signal.SIGKILL)
                await trio.sleep_forever()
        [lost] = {type(one): one for one in leaves(caught.value)}.values()
        assert isinstance(lost, HostLost)
        assert lost.reason == "agent exit"
        assert await double_on("lab") == [42]


async def test_lease_is_extended_while_a_program_is_attached() -> None:
    """The state says until when, and who is attached; the program notices nothing."""
    with trio.fail_after(HANG_SECONDS):
        [before] = await jobs.kept()
        assert before.attached is None
        async with jobs.attach("lab") as hosts:
            extended = await jobs.extend("lab", lease=7200)
            assert extended.until > before.until + 3000
            [seen] = await jobs.kept()
            assert seen.attached is not None
            assert seen.attached.pid == os.getpid()
            assert list(await hosts.run(["true"])) == [0]
        [after] = await jobs.kept()
        assert after.until == extended.until


async def test_state_file_is_private(folder: Path) -> None:
    """H7, H23: mode 0600 in a folder of mode 0700, without a secret; one that others can read is refused in words."""
    path = folder / "trimesh" / "jobs" / "lab.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not any(word in path.read_text() for word in ("PRIVATE", "trimesh-join", "token"))
    for mode in (0o640, 0o604):
        path.chmod(mode)
        try:
            with pytest.raises(ConnectError, match="chmod 600"):
                await double_on("lab")
        finally:
            path.chmod(0o600)
    path.parent.chmod(0o750)
    try:
        with pytest.raises(ConnectError, match="0700"):
            await double_on("lab")
    finally:
        path.parent.chmod(0o700)


async def test_name_is_taken_while_it_is_kept() -> None:
    with pytest.raises(ConnectError, match="trimesh job stop lab"):
        await jobs.keep("lab", jobs.LocalJob(1), lease=60)
