"""The port of a mesh as those meet it who are no hosts of it: T3, T4, T6, T8, T11 of the security tests."""

from __future__ import annotations

import logging
import pickle
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

pytest.importorskip("cryptography")

from tests.jobs.strangers import OpenDoor, certified, open_member_door, raw, s_client

from trimesh import LinkLost, limits
from trimesh._native import lib, tls
from trimesh.ids import ProcId
from trimesh.jobs import agent as agent_module
from trimesh.jobs.addresses import held_port
from trimesh.jobs.agent import HostProgram
from trimesh.jobs.identity import Authority, Credentials
from trimesh.jobs.launcher import AgentOrder

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is a client of other make"),
]

HOURS = 3600.0
BOMB = pickle.dumps(OSError("a pickle"))


@pytest.fixture(autouse=True)
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Have nothing unpickled: neither in Python nor in C."""
    seen = list[bytes]()

    def refuse(data: bytes, *_: Any, **__: Any) -> Any:
        seen.append(data)
        raise AssertionError("what a stranger sends is unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    return seen


def of_another_authority(door: OpenDoor) -> Credentials:
    return Authority(time.time()).credentials(door.member, time.time())


def over(door: OpenDoor) -> Credentials:
    return certified(door.authority, f"trimesh://{door.authority.mesh.hex()}/{door.member:016x}", -2 * HOURS)


def to_come(door: OpenDoor) -> Credentials:
    return certified(door.authority, f"trimesh://{door.authority.mesh.hex()}/{door.member:016x}", 2 * HOURS)


def of_another_mesh(door: OpenDoor) -> Credentials:
    return certified(door.authority, f"trimesh://{bytes(16).hex()}/{door.member:016x}")


def of_another_incarnation(door: OpenDoor) -> Credentials:
    return certified(door.authority, f"trimesh://{door.authority.mesh.hex()}/{door.member + 1:016x}")


def of_a_site(door: OpenDoor) -> Credentials:
    return certified(door.authority, "www.example.org")


def of_the_member(door: OpenDoor) -> Credentials:
    return door.credentials


REFUSED: dict[str, tuple[Callable[[OpenDoor], Credentials | None], tuple[str, ...], int]] = {
    "another authority": (of_another_authority, (), lib.ERR_TLS_CERTIFICATE),
    "expired": (over, (), lib.ERR_TLS_CERTIFICATE),
    "not yet valid": (to_come, (), lib.ERR_TLS_CERTIFICATE),
    "another mesh": (of_another_mesh, (), lib.ERR_TLS_NAME),
    "another incarnation": (of_another_incarnation, (), lib.ERR_TLS_NAME),
    "no name of a mesh": (of_a_site, (), lib.ERR_TLS_NAME),
    "no certificate": (lambda _: None, (), lib.ERR_TLS_CERTIFICATE),
    "TLS 1.2": (of_the_member, ("-tls1_2",), lib.ERR_TLS_VERSION),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_client_that_is_no_host_is_refused_and_logged_once(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, unpickled: list[bytes]
) -> None:
    """H7: whatever is wrong with it, it says the right hello, and gets no word back."""
    credentials_of, options, found = REFUSED[case]
    caplog.set_level(logging.WARNING, "trimesh")
    async with open_member_door(tmp_path) as door:
        hello, credentials = door.hello(), credentials_of(door)
        files = [] if credentials is None else door.files(credentials)
        for _ in range(2):
            got = await s_client(door.port, *files, *options, said=hello + BOMB)
            assert got.stdout == b""
        assert (door.guest.connections, door.guest.refusals) == ([], [])
        assert door.door.offences == {found: 2}
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1
    assert f"127.0.0.1:{door.port} was refused" in logged[0]
    assert unpickled == []


RAW = {
    "a web page of another name": b"GET /run?code=1 HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n",
    "a request from a form": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n\r\nimport os",
    "a pickle": BOMB,
    "a client of ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
}


@pytest.mark.parametrize("case", RAW)
async def test_bytes_without_tls_are_refused_and_answered_by_nothing(
    case: str, tmp_path: Path, unpickled: list[bytes]
) -> None:
    """H7: what a web page makes a browser send is one of them: there is nothing that speaks HTTP."""
    async with open_member_door(tmp_path) as door:
        assert await raw(door.port, RAW[case]) == b""
        assert door.guest.connections == []
        assert door.door.offences == {lib.ERR_TLS_PLAINTEXT: 1}
    assert unpickled == []


async def test_what_a_stranger_calls_itself_cannot_steer_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """JD-2: the name in a certificate is its own words; one that cannot be printed is none."""
    caplog.set_level(logging.WARNING, "trimesh")
    async with open_member_door(tmp_path) as door:
        files = door.files(certified(door.authority, "a://\x1b[2J\r\nok"))
        await s_client(door.port, *files, said=door.hello())
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert "has no name of a mesh, but ''" in record.getMessage()


async def test_openssl_meets_a_door_with_the_credentials_of_a_host(tmp_path: Path) -> None:
    """H7: the other make sees TLS 1.3, and no ticket by which a session could be taken up again, or begun early."""
    async with open_member_door(tmp_path) as door:
        hello, files = door.hello(), door.files(door.credentials)
        trusted = ("-CAfile", str(tmp_path / "authority"), "-verify_return_error")
        got = await s_client(door.port, *files, *trusted, "-state", "-msg", said=hello)
        assert door.guest.connections == [door.member]
    said = (got.stdout + got.stderr).decode(errors="replace")
    assert "tmhello1" in said, "the door has said its hello"
    assert "NewSessionTicket" not in said
    assert "CertificateRequest" in said


async def test_python_meets_a_door_with_the_credentials_of_a_host(tmp_path: Path) -> None:
    """H7: `trio.SSLStream`, whose context trusts the authority of the mesh alone."""
    async with open_member_door(tmp_path) as door:
        hello = door.hello()
        door.files(door.credentials)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(tmp_path / "authority")
        context.load_cert_chain(tmp_path / "chain", tmp_path / "key")
        stream = trio.SSLStream(await trio.open_tcp_stream("127.0.0.1", door.port), context)
        async with stream:
            await stream.send_all(hello)
            answer = b""
            while len(answer) < limits.TLS_HELLO_BYTES:
                answer += await stream.receive_some()
            assert answer.startswith(b"tmhello1")
            assert door.guest.connections == [door.member]
            await trio.aclose_forcefully(stream)


class Recorder:
    """Passes a connection on, and keeps what its client has sent.

    Attributes:
        sent: By the client of each connection, in order.
    """

    def __init__(self, port: int) -> None:
        self.sent = list[bytearray]()
        self._port = port

    async def serve(self, outer: trio.SocketStream) -> None:
        """Pass one on."""
        kept = bytearray()
        self.sent.append(kept)
        async with outer, await trio.open_tcp_stream("127.0.0.1", self._port) as inner, trio.open_nursery() as nursery:
            nursery.start_soon(self._pass, inner, outer, bytearray(), nursery.cancel_scope)
            await self._pass(outer, inner, kept, nursery.cancel_scope)

    async def _pass(
        self, source: trio.SocketStream, target: trio.SocketStream, kept: bytearray, scope: trio.CancelScope
    ) -> None:
        try:
            async for data in source:
                kept += data
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


async def test_what_was_recorded_is_worth_nothing_when_it_is_sent_again(tmp_path: Path) -> None:
    """H7: a join, and a member's connection, byte for byte."""
    async with open_member_door(tmp_path) as door, trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        recorder = Recorder(door.port)
        nursery.start_soon(trio.serve_listeners, recorder.serve, [listener])
        between = listener.socket.getsockname()[1]
        joining = HostProgram(AgentOrder(door.door.expect(door.guest).text, (f"127.0.0.1:{between}",)))
        await joining._join()
        await s_client(between, *door.files(door.credentials), said=door.hello())
        assert door.guest.connections == [door.member]
        members = len(door.door._members)
        assert len(recorder.sent) == 2
        for sent in recorder.sent:
            assert len(sent) > 500
            await raw(door.port, bytes(sent))
        assert door.guest.connections == [door.member]
        assert len(door.door._members) == members == 2
        assert door.door.offences.total() == 2
        nursery.cancel_scope.cancel()


async def test_host_says_nothing_to_who_is_in_the_way(tmp_path: Path) -> None:
    """H7: a server of other make, with a certificate of its own, hears neither a hello nor a proof of the token."""
    async with open_member_door(tmp_path) as door:
        other = Authority(time.time()).credentials(ProcId(7), time.time())
        command = ["openssl", "s_server", "-accept", "127.0.0.1:0", "-tls1_3", "-naccept", "1", *door.files(other)]
        process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        said = b""
        while b"\n" not in said.partition(b"ACCEPT ")[2]:
            said += await process.stdout.receive_some()
        address = said.partition(b"ACCEPT ")[2].split()[0].decode()
        host = HostProgram(AgentOrder(door.door.expect(door.guest).text, (address,)))
        with pytest.raises(LinkLost, match="cannot be trusted"):
            await host._join()
        async for data in process.stdout:
            said += data
        await process.stdin.aclose()
        await process.wait()
    assert b"tmhello1" not in said


async def test_host_that_had_to_make_way_comes_again(tmp_path: Path) -> None:
    """JD-1: a door that has many lets the slowest go, who is no stranger for that."""
    async with open_member_door(tmp_path) as door, trio.open_nursery() as nursery:
        recorder, came = Recorder(door.port), 0

        async def serve(stream: trio.SocketStream) -> None:
            nonlocal came
            came += 1
            if came > 2:
                await recorder.serve(stream)

        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        assert (await HostProgram(AgentOrder(door.door.expect(door.guest).text, (address,)))._join()).chain
        assert came == 3
        nursery.cancel_scope.cancel()


async def test_host_that_waited_dials_until_its_relay_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H30: a relay that is being started again; other hosts say at once that nobody listens."""
    async with open_member_door(tmp_path) as door, trio.open_nursery() as nursery:
        with held_port() as port:
            recorder, refused = Recorder(door.port), trio.Event()

            async def dial(addresses: tuple[str, ...], connect_seconds: float) -> trio.SocketStream:
                try:
                    return await dial_once(addresses, connect_seconds)
                except LinkLost:
                    refused.set()
                    raise

            async def listen() -> None:
                await refused.wait()
                await trio.serve_tcp(recorder.serve, port, host="127.0.0.1")

            order = AgentOrder(door.door.expect(door.guest).text, (f"127.0.0.1:{port}",))
            with pytest.raises(LinkLost, match="the controller cannot be reached"):
                await HostProgram(order)._join()
            dial_once = agent_module._dial
            monkeypatch.setattr(agent_module, "_dial", dial)
            nursery.start_soon(listen)
            assert (await HostProgram(msgspec.structs.replace(order, is_patient=True))._join()).chain
            nursery.cancel_scope.cancel()


async def test_member_whose_session_is_over_comes_no_further(tmp_path: Path) -> None:
    """H5: its certificate is right, and of an incarnation that was given up."""
    async with open_member_door(tmp_path) as door:
        hello = door.hello()
        door.door.forget(door.member)
        await s_client(door.port, *door.files(door.credentials), said=hello)
        assert door.guest.connections == []
        assert door.door.offences == {lib.ERR_DENIED: 1}


async def test_certificate_of_one_host_is_not_given_to_another(tmp_path: Path) -> None:
    """H7: who has a token of its own asks for the name of a host that is there."""
    async with open_member_door(tmp_path) as door:
        thief = HostProgram(AgentOrder(door.door.expect(door.guest).text, (door.door.address,)))
        thief._own = ProcId(door.member)
        with pytest.raises(Exception, match=r"closed|broke"):
            await thief._join()
        assert [str(error) for error in door.guest.refusals] == [
            f"an incarnation gets one certificate, and {door.member:016x} has one (AU-2)"
        ]


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """One more."""
        self.count += 1


async def test_strangers_who_wait_wake_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JD-1: if all in the queue woke for each that leaves it, this many would stop the program for as many squared."""
    monkeypatch.setattr(limits, "TLS_HALF_OPEN_MAX", 4)
    monkeypatch.setattr(limits, "DOOR_PATIENCE_SECONDS", 0.02)
    count, steps = 120, Steps()
    async with open_member_door(tmp_path) as door:
        trio.lowlevel.add_instrument(steps)
        streams = [await trio.open_tcp_stream("127.0.0.1", door.port) for _ in range(count)]
        for stream in streams[: count - limits.TLS_HALF_OPEN_MAX]:
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""  # thrown out, for others wait
        trio.lowlevel.remove_instrument(steps)
        for stream in streams:
            await trio.aclose_forcefully(stream)
    assert steps.count < 30 * count
