"""Hosts by ssh: the system's client against a real sshd on a loopback port."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.jobs.orphans import check_killed_program
from tests.jobs.sshd import SSHServer, failure_of, missing
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of, wait_gone

from trimesh import Actor, HostLost, MeshErrorGroup, endpoint, leaves

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SSHServer]:
    """An sshd for the tests of this file."""
    one = SSHServer(tmp_path_factory.mktemp("sshd"))
    yield one
    one.close()


@pytest.fixture(autouse=True)
def idle(server: SSHServer) -> Iterator[None]:
    """No connection outlives its test."""
    yield
    server.wait_idle()


def arguments(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


class Worker(Actor):
    """What the tests call."""

    @endpoint
    async def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    async def agent(self) -> int:
        return parent_of(os.getppid())

    @endpoint
    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


async def test_hosts_by_ssh_are_a_mesh_and_nothing_is_left(server: SSHServer) -> None:
    """H1, H2: agents below sshd, a variable that shows in no argument, and all of it gone after the block."""
    job = jobs.SSHJob({"a": ["n1"], "b": ["n2", "n3"]}, options=server.options, env={"COLOUR": "green"})
    with trio.fail_after(HANG_SECONDS):
        async with job as hosts, hosts.spawn_procs({"gpus": 1}) as procs, procs.spawn("workers", Worker) as workers:
            assert (dict(procs.extent), len(hosts["b"])) == ({"hosts": 3, "gpus": 1}, 2)
            assert hosts.names == ("n1", "n2", "n3")
            assert list(await workers.double.call(3)) == [6, 6, 6]
            assert list(await workers.variable.call("COLOUR")) == ["green"] * 3
            agents = list(await workers.agent.call())
            assert len(set(agents)) == 3
            assert not [pid for pid in agents if b"green" in arguments(pid) or b"trimesh-join" in arguments(pid)]
        await wait_gone(agents)


async def test_jump_host_is_used_as_it_is_configured(server: SSHServer) -> None:
    """H5: the way there, and the address at which the program listens, follow the user's configuration."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.SSHJob(["behind"], options=server.options, python=sys.executable) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            assert list(await workers.double.call(4)) == [8]


async def test_shared_connection_of_the_user_is_used(server: SSHServer, tmp_path: Path) -> None:
    """H5: who has a ControlMaster open does not log in again."""
    shared = (*server.options, "-S", str(tmp_path / "master"))
    master = await trio.lowlevel.open_process(["ssh", *shared, "-M", "-N", "n1"])
    try:
        with trio.fail_after(HANG_SECONDS):
            while not (tmp_path / "master").exists():  # noqa: ASYNC110 - ssh says it by this file
                await trio.sleep(0.01)
            logins = server.log.count("Accepted publickey")
            async with jobs.SSHJob(["n1"], options=shared) as hosts:
                assert hosts.names == ("n1",)
            assert server.log.count("Accepted publickey") == logins
    finally:
        master.terminate()
        await master.wait()


async def test_killed_agent_is_a_lost_host(server: SSHServer) -> None:
    """H4: told at once, with the place of the host."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.SSHJob(["n1", "n2"], options=server.options) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            agents = list(await workers.agent.call())
            os.kill(agents[1], signal.SIGKILL)
            await workers.sleep.call()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert (lost.host, lost.reason, dict(lost.point or {})) == ("n2", "agent exit", {"hosts": 1})
    await wait_gone(agents[:1])


async def test_stopped_agent_is_killed_over_the_same_connection(server: SSHServer) -> None:
    """H2, H4: an agent that hears nothing, not even that its standard input was closed."""
    agent = 0
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            jobs.SSHJob(["n1"], options=server.options) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            agent = (await workers.agent.call()).item()
            os.kill(agent, signal.SIGSTOP)
            await workers.sleep.call()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert lost.reason == "lease"
    await wait_gone([agent])


def test_nothing_is_left_after_the_program_was_killed(server: SSHServer) -> None:
    """H2: ssh ends with its standard input, the agent with that, and everything on its host with it."""
    check_killed_program(f"jobs.SSHJob(['n1', 'n2'], options={server.options!r})", hosts=2, gpus=1)


async def test_what_ssh_refuses_is_said_with_the_name_of_the_host(server: SSHServer, tmp_path: Path) -> None:
    """H5: host key, key of the user, port, name, options: each in words, beside those of ssh."""
    config, options = server.config.read_text(), ("-F", str(tmp_path / "ssh.conf"))

    async def failure(config: str, host: str = "n2") -> str:
        (tmp_path / "ssh.conf").write_text(config)
        return await failure_of(jobs.SSHJob([host], options=options))

    (tmp_path / "unknown").write_text("")
    text = await failure(config.replace(f"{server.folder}/known", f"{tmp_path}/unknown"))
    assert "the agent of n2: its host key is not known: connect once by hand (ssh n2)" in text
    assert "Host key verification failed" in text
    (tmp_path / "changed").write_text(
        f"[127.0.0.1]:{server.port} {' '.join((server.folder / 'stranger.pub').read_text().split()[:2])}\n"
    )
    text = await failure(config.replace(f"{server.folder}/known", f"{tmp_path}/changed"))
    assert "its host key differs from the known one" in text
    text = await failure(config.replace(f"{server.folder}/user", f"{server.folder}/stranger"))
    assert "it refuses this user" in text
    text = await failure(config.replace(f"Port {server.port}", "Port 1"))
    assert "no ssh server listens at its address" in text
    text = await failure(config, "no-such-host.invalid")
    assert "no-such-host.invalid" in text
    text = await failure(f"{config}  NoSuchOption yes\n")
    assert "ssh rejects options= or its configuration" in text


async def test_python_of_the_host_is_found_or_its_lack_is_said(server: SSHServer) -> None:
    """H5: a named one that is not there, one without trimesh, and where none can be found."""
    assert "must name an interpreter there, got /no/such/python" in await failure_of(
        jobs.SSHJob(["n1"], options=server.options, python="/no/such/python")
    )
    bare = sys.base_prefix + "/bin/python3"
    assert "trimesh is not installed for" in await failure_of(jobs.SSHJob(["n1"], options=server.options, python=bare))


async def test_cancelled_entry_leaves_no_ssh(server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: also where the host does not answer."""
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener[0].socket.getsockname()[1]
    (server.folder / "silent.conf").write_text(server.config.read_text().replace(str(server.port), str(port)))
    with trio.move_on_after(0.5) as scope:
        async with jobs.SSHJob(["n1"], options=("-F", str(server.folder / "silent.conf"))):
            pytest.fail("the job has started")
    assert scope.cancelled_caught
    await listener[0].aclose()


@pytest.mark.parametrize(
    ("hosts", "match"),
    [
        (2, "a list of host names"),
        ("n1", "a list"),
        ([], "list of host names"),
        (["-oProxyCommand=x"], "ssh NAME"),
        ({"a": "n1"}, "list"),
    ],
)
def test_job_says_what_is_wrong_with_it(hosts: Any, match: str) -> None:
    """H1: before anything starts; a name can never be an option of ssh."""
    with pytest.raises((TypeError, ValueError), match=match):
        jobs.SSHJob(hosts)
    assert jobs.SSHJob(["n1"]) == jobs.SSHJob(("n1",))
