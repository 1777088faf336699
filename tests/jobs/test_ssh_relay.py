"""Programs that hosts cannot reach (H30): a relay behind a real sshd, in network namespaces."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.jobs.network.observing import needs_network
from tests.jobs.sshd import SSHServer, failure_of, missing
from tests.patience import HANG_SECONDS
from tests.runtime.processes import wait_gone

from trimesh import Actor, HostLost, MeshErrorGroup, Restart, endpoint, leaves

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh.testing import open_host_network
from trimesh.testing.real.host_network import CONTROLLER, HostNetwork

pytestmark = [pytest.mark.real, *needs_network, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

SECRET = b"a text that no relay may read. "
RECORDER = f"""#!{sys.executable}
import asyncio, os, sys
read = asyncio.StreamReader.read
async def recorded(self, size):
    data = await read(self, size)
    with open(sys.argv[0] + ".bytes", "ab") as file:
        file.write(data)
    return data
asyncio.StreamReader.read = recorded
with open(sys.argv[0] + ".pids", "a") as file:
    print(os.getpid(), file=file)
exec(sys.argv[3])
"""
"""Runs the relay as `python3 -S -c` does, and keeps what it reads."""


class Worker(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def reverse(self, data: bytes) -> bytes:
        return data[::-1]

    @endpoint
    async def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


@attrs.frozen
class Cluster:
    """A login node and two hosts, which reach each other and not the program; the program reaches the login node.

    Attributes:
        via: The login node, with a relay that records.
        recorder: Path of its interpreter.
        servers: The sshd of each, that of the login node first.
        options: Of ssh.
    """

    network: HostNetwork
    via: jobs.SSH
    recorder: Path
    servers: list[SSHServer]
    options: tuple[str, ...]

    def job(self, **more: Any) -> jobs.SSHJob:
        return jobs.SSHJob(["n1", "n2"], options=self.options, via=self.via, **more)

    @property
    def login(self) -> SSHServer:
        """The sshd of the login node."""
        return self.servers[0]

    @property
    def relays(self) -> list[int]:
        """Process ids of the relays, oldest first."""
        return [int(line) for line in Path(f"{self.recorder}.pids").read_text().split()]

    @property
    def seen(self) -> bytes:
        """All bytes that relays have read."""
        found = Path(f"{self.recorder}.bytes")
        return found.read_bytes() if found.exists() else b""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("login")
    servers = list[SSHServer]()
    recorder = folder / "python"
    recorder.write_text(RECORDER)
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    with open_host_network(3) as network:
        for rank, name in enumerate(("login", "n1", "n2")):
            place = folder / name
            place.mkdir()
            servers.append(SSHServer(place, network.address(rank), network.namespace(rank).prefix, name, imports=True))
        config = folder / "ssh.conf"
        config.write_text("".join(server.config.read_text() for server in servers))
        network.part([1, 2], [CONTROLLER])
        options = ("-F", str(config))
        via = jobs.SSH("login", options=options, python=str(recorder))
        yield Cluster(network, via, recorder, servers, options)
        for server in servers:
            server.close()


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    """The nodes, without connections before and after the test."""
    yield nodes
    for server in nodes.servers:
        server.wait_idle()


@pytest.mark.daily
async def test_hosts_that_cannot_reach_the_program_are_a_mesh_and_the_relay_sees_ciphertext(cluster: Cluster) -> None:
    """H30, H7: one relay carries all sessions; nothing of it stays."""
    secret = SECRET * 4000
    before = len(cluster.seen)
    with trio.fail_after(HANG_SECONDS):
        async with cluster.job() as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            assert list(await workers.reverse.call(secret)) == [secret[::-1]] * 2
            pids = list(await workers.pid.call())
            relay = cluster.relays[-1]
            assert cluster.network.connections(1, 0) >= 1
            assert cluster.network.connections(1, CONTROLLER) == 0
        await wait_gone([*pids, relay])
    seen = cluster.seen[before:]
    assert len(seen) > 2 * len(secret)
    assert SECRET not in seen
    assert SECRET[::-1] not in seen
    assert b"trimesh-join" not in seen


async def test_relay_whose_process_dies_goes_on_and_no_session_ends(cluster: Cluster) -> None:
    """H30, H3: calls go on, and each arrives once."""
    with trio.fail_after(HANG_SECONDS):
        async with cluster.job() as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            for number in range(1, 5):
                assert list(await workers.add.call()) == [number] * 2
                os.kill(child_of(cluster.relays[-1]), signal.SIGKILL)


@pytest.mark.stress
async def test_relay_that_ends_is_started_again_at_its_address(cluster: Cluster) -> None:
    """H30, H20: sessions that outlive their lease are lost, and their hosts are started again through the new relay."""
    policy = Restart("one_for_one", along="hosts", intensity=20)
    with trio.fail_after(HANG_SECONDS):
        async with cluster.job() as hosts, hosts.spawn_procs({"gpus": 1}, supervision=policy) as procs:
            workers = await procs.spawn("workers", Worker)
            first = cluster.relays[-1]
            os.kill(first, signal.SIGKILL)
            found = list[int]()
            while not found or cluster.relays[-1] == first:
                try:
                    found = list(await workers.add.call())
                except MeshErrorGroup as error:
                    assert {type(leaf) for leaf in leaves(error)} == {HostLost}  # noqa: PT017 - and goes on
            assert len(found) == 2


async def test_login_node_that_stays_away_is_a_lost_host(cluster: Cluster) -> None:
    """H30, H4: once the lease is over, as for any connection."""
    with trio.fail_after(HANG_SECONDS):
        with pytest.raises(MeshErrorGroup) as caught:
            async with cluster.job() as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
                workers = await procs.spawn("workers", Worker)
                heal = cluster.network.part([0], [CONTROLLER])
                try:
                    await workers.sleep.call()
                finally:
                    heal()
        cluster.login.wait_idle()
        assert {type(leaf) for leaf in leaves(caught.value)} == {HostLost}


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


async def test_what_keeps_a_relay_from_starting_is_said(cluster: Cluster, tmp_path: Path) -> None:
    """H30: a login node that forwards nothing, has no such interpreter or interface, or is not known."""
    options, network = cluster.options, cluster.network
    job = jobs.SSHJob(["n1"], options=options, via=jobs.SSH("login", options=options, python="/no/python"))
    text = await failure_of(job)
    assert "cannot start the relay on login" in text
    assert "/no/python" in text
    text = await failure_of(jobs.SSHJob(["n1"], options=options, via=cluster.via, interface="eth77"))
    assert "the relay cannot listen there" in text
    assert "cannot start the relay on nowhere.invalid" in await failure_of(
        jobs.SSHJob(["n1"], options=options, via=jobs.SSH("nowhere.invalid"))
    )
    server = SSHServer(tmp_path, network.address(0), network.namespace(0).prefix, "strict", "AllowTcpForwarding no\n")
    try:
        job = jobs.SSHJob(["n1"], options=options, via=jobs.SSH("strict", options=server.options))
        assert "AllowTcpForwarding" in await failure_of(job)
        server.wait_idle()
    finally:
        server.close()


def test_via_takes_a_relay_host() -> None:
    """H30."""
    with pytest.raises(TypeError, match=r'via= takes the relay host, jobs.SSH\("login"\)'):
        jobs.SSHJob(["n1"], via="login")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="the name of a host"):
        jobs.SSH("-oProxyCommand=x")


def test_job_with_a_relay_cannot_be_kept() -> None:
    """H30."""
    with pytest.raises(ValueError, match="a job with via= cannot be kept"):
        trio.run(lambda: jobs.keep("x", jobs.SSHJob(["n1"], via=jobs.SSH("login")), lease=9))
