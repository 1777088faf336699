"""Who is let in at the door of a mesh: who has a token, once; who has a certificate; who runs the same versions."""

from __future__ import annotations

import errno
import gc
import select
import socket
import struct
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS
from tests.rows import rows

from trimesh import HostRefused, LinkLost, MeshErrorGroup, SpawnError, leaves, limits
from trimesh.ids import ProcId

pytest.importorskip("cryptography")

from tests.jobs.strangers import OWN, Guest, open_plain_door

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs import door as doors
from trimesh.jobs.agent import HostProgram
from trimesh.jobs.connections import LENGTH, ListenAddress, SecureSocket, own_hello
from trimesh.jobs.identity import PLAIN, Authority, ForeignAuthority, JoinToken

pytestmark = [pytest.mark.real, pytest.mark.daily, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


@asynccontextmanager
async def open_door() -> AsyncGenerator[tuple[doors.Door, Authority], None]:
    authority = Authority(time.time())
    with trio.fail_after(HANG_SECONDS), doors.door_context(OWN, authority) as context:
        async with doors.open_door_at(ListenAddress("127.0.0.1"), OWN, authority, context) as door:
            yield door, authority


def program(door: doors.Door, token: JoinToken) -> HostProgram:
    return HostProgram(jobs.AgentOrder(token.text, (door.address,)))


async def test_token_lets_one_host_in_once() -> None:
    """H7: a second use, a wrong secret and a token of another mesh are refused; the door goes on."""
    async with open_door() as (door, _):
        guest = Guest()
        token = door.expect(guest)
        wrong = JoinToken(token.number, bytes(32), token.pin)
        with pytest.raises(HostRefused, match="token"):
            await program(door, wrong)._join()
        credentials = await program(door, token)._join()
        assert credentials.chain
        with pytest.raises(HostRefused, match="token"):
            await program(door, token)._join()
        stranger = JoinToken(token.number, token.secret, Authority(time.time()).pin)
        with pytest.raises(LinkLost):
            await program(door, stranger)._join()
        await program(door, door.expect(guest))._join()
        assert guest.refusals == []


async def test_host_that_leaves_before_its_certificate_is_refused() -> None:
    """H7: the launcher that waits for it hears why, rather than of a time limit."""
    async with open_door() as (door, _):
        guest = Guest()
        token = door.expect(guest)
        async with joining(program(door, token)):
            assert guest.refusals == []
        while not guest.refusals:
            await trio.lowlevel.checkpoint()
        [refused] = guest.refusals
        assert isinstance(refused, HostRefused)
        assert "the peer has closed the connection" in str(refused)


@pytest.mark.parametrize("excess", [0, 1])
async def test_request_for_a_certificate_is_bounded(excess: int) -> None:
    """H7"""
    said = "must have at most limits.KEY_REQUEST_BYTES_MAX (4096) bytes, got 4097" if excess else "PKCS #10 in PEM"
    async with open_door() as (door, _):
        guest = Guest()
        host = program(door, door.expect(guest))
        async with joining(host) as secure:
            size = limits.KEY_REQUEST_BYTES_MAX + excess
            await secure.send(LENGTH.pack(size) + bytes(size))
            with pytest.raises(LinkLost):
                await secure.receive_exactly(1)
        [refused] = guest.refusals
        assert isinstance(refused, HostRefused)
        assert said in str(refused)


async def test_hosts_of_a_mesh_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: one more is refused, and its launcher hears why."""
    guest = Guest()
    async with open_door() as (door, _), open_plain_door() as plain:
        for one, already in ((door, 1), (plain, 0)):  # a mesh with certificates has that of the program
            monkeypatch.setattr(limits, "CERTIFIED_MAX", already)
            with pytest.raises(LinkLost):
                await program(one, one.expect(guest))._join()
    assert [str(error).partition(":")[0] for error in guest.refusals] == ["too many hosts have joined this mesh"] * 2


@asynccontextmanager
async def joining(host: HostProgram) -> AsyncGenerator[SecureSocket, None]:
    """Let a host come as far as its token leads."""
    context = tls.TLSContext(pin=host._token.pin)
    try:
        async with host._dialled(context, is_join=True) as secure:
            yield secure
    finally:
        context.close()


async def test_host_that_is_being_certified_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """JD-1: and is not dropped for one."""
    monkeypatch.setattr(limits, "TLS_HALF_OPEN_MAX", 1)
    monkeypatch.setattr(limits, "DOOR_PATIENCE_SECONDS", 0.0)
    async with open_door() as (door, _):
        slow = program(door, door.expect(Guest()))
        async with joining(slow) as secure:
            assert (await program(door, door.expect(Guest()))._join()).chain
            assert (await slow._get_credentials(secure)).chain


async def test_host_that_makes_way_as_its_hello_comes_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """JD-1: its token is not used up."""
    monkeypatch.setattr(limits, "DOOR_PATIENCE_SECONDS", 0.0)
    came = list[bytes]()
    async with open_door() as (door, _):
        decide = door._decide

        def late(hello: tls.TLSHello, secure: SecureSocket, entry: doors._Entry) -> tls.TLSVerdict:
            came.append(hello.token)
            if len(came) == 1:
                entry.scope.cancel(reason="others wait")
            return decide(hello, secure, entry)

        monkeypatch.setattr(door, "_decide", late)
        guest = Guest()
        token = door.expect(guest)
        assert (await program(door, token)._join()).chain
        assert (came, guest.refusals) == ([token.number] * 2, [])


async def test_guest_of_a_token_that_is_too_old_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: a door that is open for months keeps those of the last minutes."""
    async with open_door() as (door, _):
        kept, old = Guest(), Guest()
        known = weakref.ref(old)
        token = door.expect(kept)
        monkeypatch.setattr(limits, "JOIN_TOKEN_SECONDS", 0.0)
        door.expect(old)
        del old
        door.expect(Guest())
        gc.collect()
        assert known() is None
        assert (await program(door, token)._join()).chain


async def test_member_needs_a_certificate() -> None:
    """H7: who has none, or one of an incarnation that the door does not know, comes no further than its hello."""
    async with open_door() as (door, authority):
        guest = Guest()
        token = door.expect(guest)
        for context in (
            tls.TLSContext(pin=token.pin),
            tls.TLSContext(**_texts(authority.credentials(ProcId(9), time.time()))),
        ):
            host, port = door.address.split(":")
            stream = await trio.open_tcp_stream(host, int(port))
            secure = SecureSocket(stream.socket, context.open(own_hello(ProcId(9), token.mesh), is_server=False))
            with pytest.raises(LinkLost):
                await secure.shake_hands()
                await secure.receive_exactly(1)
            secure.close()
            context.close()
        assert guest.connections == []


def _texts(credentials: object) -> dict[str, bytes]:
    return {name: getattr(credentials, name) for name in ("chain", "key", "authority")}


async def test_other_versions_are_refused_by_the_names_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: `HostRefused` says what each side runs, and nothing of the job is left."""
    monkeypatch.setattr(doors, "own_versions", lambda: ("9.9.9", "3.99.1", ""))
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.LocalJob(1):
            pytest.fail("the host has joined")
    (refused,) = leaves(caught.value)
    assert isinstance(refused, HostRefused)
    assert "this program runs trimesh 9.9.9" in str(refused)
    assert "this program runs Python 3.99.1" in str(refused)


def test_versions_fit_where_the_first_two_numbers_of_python_do() -> None:
    """H7: torch counts where both have loaded it."""
    assert doors.difference(("1.0", "3.11.7", ""), ("1.0", "3.11.9", "2.4.0")) is None
    assert doors.difference(("1.0", "3.11.7", "2.3.0"), ("1.0", "3.11.9", "")) is None
    said = doors.difference(("1.0", "3.11.7", "2.3.0"), ("1.0.1", "3.12.7", "2.3.1"))
    assert said == (
        "the host runs trimesh 1.0 where this program runs trimesh 1.0.1, and Python 3.11.7 where this program runs "
        "Python 3.12.7, and torch 2.3.0 where this program runs torch 2.3.1: install the same version there"
    )


# ---- connections that have proved nothing ----------------------------------------------------------------------------

PLAIN_HELLO = b"tmplain1"
"""With which a door without TLS begins: what has read it is being served."""


@attrs.frozen
class Stranger:
    """A connection at a door.

    Attributes:
        stream: Its end.
        over: Set when the door has done with it.
    """

    stream: trio.SocketStream
    over: trio.Event

    @property
    def is_served(self) -> bool:
        return bool(select.select([self.stream.socket.fileno()], [], [], 0)[0])


async def stranger(door: doors.Door, nursery: trio.Nursery) -> Stranger:
    """Connect to a door, and return when that has begun to serve it, or lets it wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    over = trio.Event()

    async def serve() -> None:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(theirs)) as stream:
            await door.serve(stream)
        over.set()

    nursery.start_soon(serve)
    await trio.testing.wait_all_tasks_blocked()
    return Stranger(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), over)


async def test_strangers_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JD-1: so many as the queue takes."""
    monkeypatch.setattr(limits, "TLS_HALF_OPEN_MAX", 1)
    monkeypatch.setattr(limits, "DOOR_QUEUE_MAX", 1)
    monkeypatch.setattr(limits, "DOOR_PATIENCE_SECONDS", 1000.0)
    async with open_plain_door() as door, trio.open_nursery() as nursery:
        first = await stranger(door, nursery)
        for _ in range(2):
            second, third = await stranger(door, nursery), await stranger(door, nursery)
            assert [one.over.is_set() for one in (first, second, third)] == [False, False, True]
            assert [one.is_served for one in (first, second)] == [True, False]
            await third.stream.aclose()
            await first.stream.aclose()
            await first.over.wait()
            first = second
            assert await first.stream.receive_some(8) == PLAIN_HELLO
        await first.stream.aclose()
    assert not door.offences, "who leaves has done no wrong"


async def test_stranger_who_has_had_its_time_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """JD-1"""
    monkeypatch.setattr(limits, "TLS_HALF_OPEN_MAX", 2)
    monkeypatch.setattr(limits, "DOOR_PATIENCE_SECONDS", 0.0)
    async with open_plain_door() as door, trio.open_nursery() as nursery:
        strangers = [await stranger(door, nursery) for _ in range(4)]
        assert [one.over.is_set() for one in strangers] == [True, True, False, False]
        for one in strangers:
            await one.stream.aclose()
    assert not door.offences


async def test_strangers_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """JD-2: what each has sent is counted, and logged once; who leaves or breaks a connection has sent nothing."""
    async with open_plain_door() as door, trio.open_nursery() as nursery:
        for _ in range(2):
            talker = await stranger(door, nursery)
            await talker.stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
            await talker.over.wait()
            await talker.stream.aclose()
            breaker = await stranger(door, nursery)
            breaker.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await breaker.stream.aclose()
            await breaker.over.wait()
            leaver = await stranger(door, nursery)
            await leaver.stream.send_eof()
            await leaver.over.wait()
            await leaver.stream.aclose()
    assert list(door.offences.values()) == [2]
    [record] = caplog.records
    assert "what came is no plain session of trimesh" in record.getMessage()


async def test_door_whose_library_has_no_room_takes_the_next() -> None:
    """JD-1: it counts connections, too, and some for longer."""
    authority = ForeignAuthority(PLAIN)
    with trio.fail_after(HANG_SECONDS), doors.door_context(OWN, authority) as context:
        async with (
            doors.open_door_at(ListenAddress("127.0.0.1"), OWN, authority, context) as door,
            trio.open_nursery() as nursery,
        ):
            hello = own_hello(OWN, authority.mesh)
            sessions = [context.open(hello, is_server=True, has_names=False) for _ in range(limits.TLS_HALF_OPEN_MAX)]
            early = await stranger(door, nursery)
            assert early.over.is_set()
            await early.stream.aclose()
            for session in sessions:
                session.free()
            late = await stranger(door, nursery)
            assert late.is_served
            await late.stream.aclose()
    with pytest.raises(TypeError):
        context.open(hello, is_server=True)  # the credentials are freed


# ---- where it listens ------------------------------------------------------------------------------------------------


async def test_addresses_are_those_that_are_advertised() -> None:
    """H5"""
    authority = ForeignAuthority(PLAIN)
    with doors.door_context(OWN, authority) as context:
        for advertised in ((), ("gate", "fe80::7")):
            place = ListenAddress("127.0.0.1", 0, advertised)
            async with doors.open_door_at(place, OWN, authority, context) as door:
                port = door.address.removeprefix("127.0.0.1:")
                assert door.addresses == ((f"gate:{port}", f"[fe80::7]:{port}") if advertised else (door.address,))
            with pytest.raises(OSError, match="connect"):
                await trio.open_tcp_stream("127.0.0.1", int(port))


@rows(
    "number, said",
    [
        (errno.EADDRINUSE, "n1:7: another program listens at port 7; pass a free one by port=, or leave it out"),
        (errno.EACCES, "n1:7: this user may not listen at port 7; pass one from 1024 on"),
        (errno.EADDRNOTAVAIL, "n1:7, which must be an address of this machine: [Errno 99] no"),
    ],
)
async def test_why_a_door_cannot_be_opened_is_said(number: int, said: str) -> None:
    """H5, H11"""

    async def refuse(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(number, "no")

    authority = ForeignAuthority(PLAIN)
    with pytest.MonkeyPatch.context() as patch, doors.door_context(OWN, authority) as context:
        patch.setattr(trio, "open_tcp_listeners", refuse)
        with pytest.raises(SpawnError) as caught:
            async with doors.open_door_at(ListenAddress("n1", 7), OWN, authority, context):
                pytest.fail("it is open")
    assert str(caught.value) == f"hosts cannot join at {said}"


# ---- agents that do not come -----------------------------------------------------------------------------------------


@pytest.mark.executed("what its agents execute is another text")
async def test_job_that_cannot_start_an_agent_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: an agent that ends before it has joined is told with what it wrote."""
    for boot in ("local._BOOT", "local.BOOT"):
        monkeypatch.setattr(f"trimesh.jobs.{boot}", "raise SystemExit('no trimesh here')")
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.LocalJob(2):
            pytest.fail("the host has joined")
    assert "no trimesh here" in str(next(iter(leaves(caught.value))))
