"""What is said on both sides of a host that cannot join, at once (H11), and of ports that are taken."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest
import trio
from tests.jobs.joining import joining
from tests.patience import HANG_SECONDS

from trimesh import MeshErrorGroup, SpawnError, leaves

pytest.importorskip("cryptography")

from trimesh import jobs, limits
from trimesh._native import tls
from trimesh.ids import ProcId
from trimesh.jobs.addresses import checked_address
from trimesh.jobs.connections import CANNOT_JOIN, words_of_host
from trimesh.jobs.identity import Authority, IdentityError, KeyRequest
from trimesh.jobs.launcher import AgentExit, AgentOrder, ChildAgent, start_child
from trimesh.jobs.local import LocalLauncher

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

_PLAIN = {"insecure": "I understand"}


async def refused(door_options: Mapping[str, str], token_options: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Have a host come to one door with a token of another; return its exit code, and what both sides say."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.open_door("127.0.0.1", **door_options) as door,
            jobs.open_door("127.0.0.1", **token_options) as other,
        ):
            async with joining(door, token=other.token()) as process:
                text = b""
                assert process.stderr is not None
                async for data in process.stderr:
                    text += data
            [said] = door.refusals
    return process.returncode, str(said), text.decode()


@pytest.mark.daily
async def test_token_without_tls_at_a_door_with_tls() -> None:
    """H11: neither side waits for a time limit."""
    code, door, host = await refused({}, _PLAIN)
    assert code == 77
    assert "a peer connected without TLS, and this door requires it" in door
    assert "uses TLS, and the token of this host is for sessions without" in host


async def test_token_with_tls_at_a_door_without() -> None:
    """H11: as above, the other way round."""
    code, door, host = await refused(_PLAIN, {})
    assert code == 77
    assert "a peer connected with TLS, and this door has none" in door
    assert "does not use TLS, and the token of this host is for sessions with" in host


async def test_host_without_a_library_of_tls_tells_the_door() -> None:
    """H11: it has no session to tell it by."""
    script = "import sys; from trimesh.cli.main import main; sys.argv[0] = 'trimesh'; main()"
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door:
            arguments = ["host", "join", *door.addresses, "--token-file", "-"]
            done = await trio.run_process(
                [sys.executable, "-c", script, *arguments],
                stdin=door.token().encode(),
                capture_stderr=True,
                check=False,
                env={**os.environ, "TRIMESH_LIBSSL": "/nowhere/libssl.so"},
            )
            [said] = door.refusals
    assert done.returncode == 77
    assert "no TLS library was found" in done.stderr.decode()
    assert "reports that it cannot join" in str(said)
    assert "no TLS library was found" in str(said)


def test_words_of_a_stranger_are_bounded_text() -> None:
    """H11: whatever it sends."""
    assert words_of_host(b"GET / HTTP/1.1") is None
    assert words_of_host(CANNOT_JOIN + b"\x1b[2J\xff no TLS\nmore") == " [2J\ufffd no TLS"


@pytest.mark.parametrize(
    ("apart", "words"), [(-7200, "is 2:00:00 behind it"), (40 * 86_400, "is 40 days, 0:00:00 ahead")]
)
def test_clock_that_is_wrong_is_called_so(apart: float, words: str) -> None:
    """H7, H11: it is a host that gets a certificate of now that does not count by its own clock."""
    now = 1_700_000_000.0
    authority, request = Authority(now), KeyRequest()
    chain = authority.certify(request.text, ProcId(7), now)
    with pytest.raises(IdentityError, match=f"the clock of this machine must agree .* {words}"):
        request.credentials(chain, authority.pin, now + apart)
    request.credentials(chain, authority.pin, now - limits.CLOCK_SKEW_SECONDS / 2)


@pytest.mark.parametrize("address", ["127.0.0.1", "host:", ":80", "host:port", "fe80::7:80", "host:70000"])
def test_address_needs_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="an address must be host:port"):
        checked_address(address)
    assert checked_address("[fe80::7]:80") == ("fe80::7", 80)
    assert checked_address("n1.lab:80") == ("n1.lab", 80)


def test_join_without_a_port_is_called_wrongly() -> None:
    command = [sys.executable, "-m", "trimesh.cli", "host", "join", "127.0.0.1", "--token-file", "-"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "an address must be host:port" in done.stderr


async def test_ports_that_are_taken_are_called_so() -> None:
    """H11, H16: of a door, a `SpawnError`; of a forwarded port the bare `OSError`, as nothing far away has failed."""
    with socket.socket() as taken, trio.fail_after(HANG_SECONDS):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeshErrorGroup) as caught:
            async with jobs.open_door("127.0.0.1", port=port):
                pytest.fail("it is taken")
        [error] = leaves(caught.value)
        assert isinstance(error, SpawnError)
        assert f"another program listens at port {port}" in str(error)
        async with jobs.LocalJob(1) as hosts:
            with pytest.raises(OSError, match=f"a free port of this machine, or 0 for any, got {port}") as bare:
                async with hosts.slice(hosts=0).forward(local=port, remote=1):
                    pytest.fail("it is taken")
    assert bare.value.errno == errno.EADDRINUSE


class _Refusing(ChildAgent):
    async def exit_of(self, code: int) -> AgentExit:
        ended = await super().exit_of(code)
        return AgentExit("there is no trimesh", ended.last_words, "refused")


class _Nowhere(LocalLauncher):
    async def start(self, rank: int, order: AgentOrder) -> ChildAgent:
        return _Refusing(await start_child(["false"], self.hosts[rank]))


class _NowhereJob(jobs.LocalJob):
    def launcher(self) -> _Nowhere:
        return _Nowhere(sum(self.parts.values()))


async def test_host_whose_agent_cannot_be_started_is_told_once() -> None:
    """H13: one failure for each host that failed."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with _NowhereJob(1):
            pytest.fail("no agent can be started")
    [error] = leaves(caught.value)
    assert "there is no trimesh" in str(error)
