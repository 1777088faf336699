"""Hosts that join by themselves: tokens, who waits, who is taken, who is refused, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.jobs.joining import joining
from tests.patience import HANG_SECONDS

from trimesh import Actor, HostLost, HostRefused, MeshErrorGroup, endpoint, leaves, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs import door as doors
from trimesh.jobs.addresses import address_of, address_towards
from trimesh.jobs.agent import rank_of, read_token
from trimesh.jobs.identity import IdentityError

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


class Worker(Actor):
    """What the tests call."""

    @endpoint
    async def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    def spawner(self) -> int:
        return os.getppid()

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


async def words_of(process: trio.Process) -> str:
    """Return all that it writes to standard error until it ends."""
    assert process.stderr is not None
    text = b""
    async for data in process.stderr:
        text += data
    return text.decode()


async def until_waiting(door: jobs.OpenDoor, count: int) -> None:
    while len(door.waiting) < count:  # noqa: ASYNC110 - a program has no event for it; it asks, or expects
        await trio.sleep(0.01)


async def test_hosts_that_join_become_a_mesh_and_end_with_its_block() -> None:
    """H11: those that have come first are taken; their agents end with the block that has taken them."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door:
            assert door.command == f"trimesh host join {door.addresses[0]} --token-file -"
            async with joining(door) as first, joining(door) as second, joining(door) as third:
                async with door.expect({"a": 1, "b": 1}) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
                    assert dict(procs.extent) == {"hosts": 2, "gpus": 1}
                    assert len(hosts["b"]) == 1
                    async with procs.spawn("workers", Worker) as workers:
                        assert list(await workers.double.call(4)) == [8, 8]
                    await until_waiting(door, 1)
                async with (
                    door.expect(1) as others,
                    others.spawn_procs({"gpus": 2}) as procs,
                    procs.spawn("workers", Worker) as workers,
                ):
                    assert list(await workers.double.call(1)) == [2, 2]
    assert [one.returncode for one in (first, second, third)] == [0, 0, 0]


@pytest.mark.daily
async def test_host_that_joined_waits_until_the_door_is_closed() -> None:
    """H11: it holds a session for as long as nothing takes it; then its agent ends in good order."""
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery, jobs.open_door("127.0.0.1") as door:

            async def join() -> None:
                async with joining(door) as process:
                    text = await words_of(process)
                assert (process.returncode, text) == (0, "trimesh agent: stopped by the controller\n")

            nursery.start_soon(join)
            await until_waiting(door, 1)
            assert door.waiting == this_host().names
            with trio.move_on_after(0.1) as scope:
                async with door.expect(2):
                    pytest.fail("there is one host only")
            assert scope.cancelled_caught
            assert len(door.waiting) == 1


async def test_a_used_token_and_a_foreign_one_are_refused_in_words_on_both_sides() -> None:
    """H7: the host hears that its token is worth nothing, the program why; neither ends the program's block."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door, jobs.open_door("127.0.0.1") as other:
            token = door.token()
            async with joining(door, token=token), door.expect(1):
                async with joining(door, token=token) as again:
                    assert "does not let this host" in await words_of(again)
                assert again.returncode == 77
                async with joining(door, token=other.token()) as stranger:
                    await words_of(stranger)
                assert stranger.returncode == 77
            (used,) = door.refusals
            assert isinstance(used, HostRefused)
            assert "a host has joined by it" in str(used)


async def test_other_versions_are_refused_and_who_expects_hosts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: the program names both sides; the host says what it runs itself."""
    monkeypatch.setattr(doors, "own_versions", lambda: ("9.9.9", "3.99.1", ""))
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door:
            async with joining(door) as process:
                with pytest.raises(MeshErrorGroup) as caught:
                    async with door.expect(1):
                        pytest.fail("the host has joined")
                text = await words_of(process)
            (refused,) = leaves(caught.value)
            assert isinstance(refused, HostRefused)
            assert "this program runs trimesh 9.9.9 and" in str(refused).replace(",", "")
            assert "its versions and the ones here do not work together" in text
            assert door.refusals == (refused,)


async def test_host_that_is_told_to_end_is_lost_at_once() -> None:
    """H4: SIGTERM ends an agent in good order, with all on its host; the block hears of it as `HostLost`."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door:
            async with joining(door) as process:
                with pytest.raises(MeshErrorGroup) as caught:
                    async with (
                        door.expect(1) as hosts,
                        hosts.spawn_procs({"gpus": 1}) as procs,
                        procs.spawn("workers", Worker) as workers,
                        trio.open_nursery() as nursery,
                    ):
                        nursery.start_soon(workers.sleep.call)
                        assert list(await workers.double.call(2)) == [4]
                        process.send_signal(signal.SIGTERM)
            (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert (lost.reason, dict(lost.point or {})) == ("agent exit", {"hosts": 0})


_DOOR = """
import trio
from trimesh import jobs

async def main():
    async with jobs.open_door("127.0.0.1") as door:
        print(*door.addresses, door.token(), flush=True)
        async with door.expect(1):
            print("joined", flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.daily
def test_agent_that_was_not_told_to_end_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: the program was killed, so the lease of its agent ends: whoever has started it sees a failure."""
    monkeypatch.setenv("TRIMESH_OBSERVE", "off")
    with subprocess.Popen([sys.executable, "-c", _DOOR], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        address, token = program.stdout.readline().split()
        command = [sys.executable, "-m", "trimesh.cli", "host", "join", address, "--token-file", "-"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as agent:
            assert agent.stdin is not None
            agent.stdin.write(f"{token}\n")
            agent.stdin.flush()
            assert program.stdout.readline() == "joined\n"
            program.kill()
            said = agent.communicate(timeout=HANG_SECONDS)[1]
    assert agent.returncode == 1, said


async def test_agent_whose_spawner_is_lost_ends_with_1() -> None:
    """H2, H4: as above; the program says which host, and why."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door, joining(door) as process:
            with pytest.raises(MeshErrorGroup) as caught:
                async with (
                    door.expect(1) as hosts,
                    hosts.spawn_procs({"gpus": 1}) as procs,
                    procs.spawn("workers", Worker) as workers,
                ):
                    os.kill(await workers.spawner.call_one(), signal.SIGKILL)
                    await trio.sleep_forever()
            text = await words_of(process)
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert lost.reason == "agent exit"
    assert process.returncode == 1
    assert "the spawner of this host is lost" in text


async def test_file_of_tokens_serves_what_mpirun_starts(tmp_path: Path) -> None:
    """H7: a file of mode 0600, a line for each rank; a rank without a line, and a file of others, are refused."""
    path = tmp_path / "tokens"
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door:
            door.write_tokens(path, 2)
            assert path.stat().st_mode & 0o777 == 0o600
            by = ("--token-file", str(path))
            async with (
                joining(door, *by, env={"OMPI_COMM_WORLD_RANK": "0"}),
                joining(door, *by, env={"OMPI_COMM_WORLD_RANK": "1"}),
                door.expect(2) as hosts,
            ):
                assert len(hosts) == 2
                async with joining(door, *by, env={"OMPI_COMM_WORLD_RANK": "2"}) as third:
                    assert "it has 2, and this host needs line 2" in await words_of(third)
    path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        read_token(str(path), 0)


async def test_cancelled_entry_and_wrong_places_leave_nothing() -> None:
    """H5: an interface that this machine has not is refused in words, before any host can come."""
    with trio.fail_after(HANG_SECONDS):
        for interface in ("no-such-interface", "192.0.2.77"):
            with pytest.raises(MeshErrorGroup) as caught:
                async with jobs.open_door(interface):
                    pytest.fail("the door is open")
            assert "address of this machine" in str(next(iter(leaves(caught.value))))
    with pytest.raises(ValueError, match="port must be a number"):
        jobs.open_door(port=70_000)


@pytest.mark.daily
async def test_addresses_are_those_of_interfaces_and_routes() -> None:
    """H5: what is advertised is the address by which the peer reaches this machine."""
    assert await address_of("lo") == "127.0.0.1"
    assert await address_of("::1") == "::1"
    assert await address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "rank"), [({}, 0), ({"RANK": "3"}, 3), ({"SLURM_PROCID": "2", "RANK": "x"}, 2), ({"PMI_RANK": ""}, 0)]
)
def test_rank_is_that_of_whoever_has_started_it(environ: dict[str, Any], rank: int) -> None:
    """H7: mpirun, srun, torchrun and SkyPilot each have a variable."""
    assert rank_of(environ) == rank
