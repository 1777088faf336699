"""Sessions between hosts at their edges, by the native library: before they begin, and after they are over."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import AsyncGenerator, Iterator

import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh._native import tls
from trimesh.errors import LimitExceeded, TrimeshInternalError

pytest.importorskip("cryptography")

from tests.relay.ends import DIALLED, DIALLER, End, Wires, open_end, receive_exactly, trio_pair, wires

from trimesh._transport import relay
from trimesh._transport.relay import OpenedChannel, SessionDown, SessionEnding, SessionInterrupted, SessionResumed

pytestmark = pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])


@pytest.fixture
def all_wires() -> Iterator[Wires]:
    with wires() as made:
        yield made


@pytest.fixture
async def ends(all_wires: Wires) -> AsyncGenerator[tuple[End, End], None]:
    with trio.fail_after(HANG_SECONDS):
        async with open_end("native", is_dialler=True) as one, open_end("native", is_dialler=False) as other:
            yield one, other


async def connect(ends: tuple[End, End], all_wires: Wires) -> None:
    for end, connection in zip(ends, all_wires.connect(), strict=True):
        end.session.attach(connection)
        assert connection.sock.fileno() == -1, "the session has the socket"
        with pytest.raises(AssertionError, match="freed"):  # and what goes with it
            connection.tls.forget()
    for end in ends:
        await end.wait(SessionResumed)


async def test_dialling_side_alone_chooses_the_number_of_a_session(ends: tuple[End, End]) -> None:
    near, far = socket.socketpair()
    with near, far:
        for is_dialler, number in ((True, 0), (False, 5)):
            with pytest.raises(ValueError, match=f"got {number} with is_dialler={is_dialler}"):
                ends[0].relay.open_session(
                    far, peer=DIALLER, is_dialler=is_dialler, lease_seconds=3.0, session_id=number
                )
        assert far.fileno() >= 0, "the socket is still the caller's"
        near.send(b"x")
        assert far.recv(1) == b"x"


async def test_relay_takes_the_socket_of_each_session(ends: tuple[End, End], all_wires: Wires) -> None:
    await connect(ends, all_wires)
    relay_there = ends[0].relay
    for _ in range(3):
        near, far = socket.socketpair()
        with near:
            session = relay_there.open_session(far, peer=DIALLER, is_dialler=True, lease_seconds=9.0, session_id=1)
            assert far.fileno() == -1, "the session has the socket"
            session.abort()
    await ends[0].control.send_all(b"goes on")
    assert await receive_exactly(ends[1].control, 7) == b"goes on"


async def test_session_counts_what_it_has_sent(ends: tuple[End, End], all_wires: Wires) -> None:
    one, other = ends
    assert (one.session.peer, other.session.peer) == (DIALLED, DIALLER)
    assert not one.session.is_connected
    assert one.session.statistics() == (0, 0, 0, 0, 0, 0, 0, 0, 0)
    await connect(ends, all_wires)
    assert one.session.is_connected
    await one.control.send_all(b"seven b")
    assert await receive_exactly(other.control, 7) == b"seven b"
    await connect(ends, all_wires)
    for end, sent, received in ((one, 7, 0), (other, 0, 7)):
        counts = end.session.statistics()
        assert (counts.connections, counts.bytes_sent, counts.bytes_received) == (2, sent, received)


async def test_events_of_a_connection_that_was_replaced_are_left_out(ends: tuple[End, End], all_wires: Wires) -> None:
    one, _ = ends
    await connect(ends, all_wires)
    ours, theirs = all_wires.connect()
    one.session.drop_connection()
    one.session.attach(ours)  # before the event that the first is broken
    ends[1].session.attach(theirs)
    await one.wait(SessionResumed)
    assert one.session.is_connected
    assert not any(isinstance(event, SessionInterrupted) for event in one.events)


async def test_purpose_may_have_all_bytes_of_its_limit(ends: tuple[End, End], all_wires: Wires) -> None:
    await connect(ends, all_wires)
    near, far = trio_pair()
    purpose = bytes(range(256)) * (limits.HOST_PURPOSE_BYTES_MAX // 256 + 1)
    purpose = purpose[: limits.HOST_PURPOSE_BYTES_MAX]
    number = ends[0].session.open_channel(far, purpose)
    assert far.fileno() == -1
    opened = await ends[1].wait(OpenedChannel)
    assert (opened.session, opened.channel, opened.purpose) == (ends[1].session, number, purpose)
    other, far = trio_pair()
    ends[1].session.accept_channel(number, far)
    assert far.fileno() == -1
    await near.send_all(b"seven b")
    assert await receive_exactly(other, 7) == b"seven b"
    await near.aclose()
    assert await other.receive_some() == b""
    await other.aclose()


async def test_limits_are_named_with_what_came(ends: tuple[End, End]) -> None:
    near, far = socket.socketpair()
    with near, far:
        with pytest.raises(LimitExceeded) as caught:
            ends[0].session.open_channel(far, bytes(limits.HOST_PURPOSE_BYTES_MAX + 2))
        assert (caught.value.limit, caught.value.value) == ("HOST_PURPOSE_BYTES_MAX", limits.HOST_PURPOSE_BYTES_MAX + 2)
        for _ in range(limits.HOST_CHANNELS_MAX):
            ends[0].session.open_channel(far.dup(), b"")
        with pytest.raises(LimitExceeded) as caught:
            ends[0].session.open_channel(far, b"")
        assert (caught.value.limit, caught.value.value) == ("HOST_CHANNELS_MAX", limits.HOST_CHANNELS_MAX + 1)
        assert far.fileno() >= 0


async def test_closed_sockets_are_refused(ends: tuple[End, End], all_wires: Wires) -> None:
    """The caller's mistake is an error, and what else was given stays the caller's."""
    session = ends[0].session
    near, far = socket.socketpair()
    far.close()
    with near:
        with pytest.raises(TrimeshInternalError, match="beginning a session with a host"):
            ends[0].relay.open_session(far, peer=DIALLER, is_dialler=True, lease_seconds=9.0, session_id=6)
        with pytest.raises(TrimeshInternalError, match="opening a channel to a host"):
            session.open_channel(far, b"")
    for connection in all_wires.connect():
        connection.sock.close()
        with pytest.raises(TrimeshInternalError, match="attaching a connection to a host"):
            session.attach(connection)
        connection.tls.free()
    assert session.statistics().connections == 0
    assert not session.is_connected
    await connect(ends, all_wires)


async def test_relays_and_sessions_have_limits() -> None:
    relays: list[relay.NativeRelay] = []
    try:
        with pytest.raises(LimitExceeded) as caught:
            while True:
                relays.append(relay.NativeRelay(lambda _: None))
        assert caught.value.limit == "BUSES_MAX"
    finally:
        for one in relays:
            one.close()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(8192, before[1])), before[1]))
    try:
        async with relay.open_relay(lambda _: None) as opened:
            near, far = socket.socketpair()
            with near, far, pytest.raises(LimitExceeded) as caught:
                while True:
                    with far.dup() as control:
                        session = opened.open_session(
                            control, peer=DIALLER, is_dialler=True, lease_seconds=9.0, session_id=6
                        )
            assert caught.value.limit == "HOST_SESSIONS_MAX"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    near, far = socket.socketpair()
    with near:
        assert session.open_channel(far, b"") == 0, "it ended with its relay"
    assert session.statistics().connections == 0


async def test_relay_that_is_closed_while_it_delivers_an_event_delivers_no_more() -> None:
    seen: list[object] = []

    def take(event: object) -> None:
        seen.append(event)
        closed.close()

    closed = relay.NativeRelay(take)
    pairs = [socket.socketpair() for _ in range(2)]
    for near, far in pairs:
        with near:
            closed.open_session(far, peer=DIALLER, is_dialler=True, lease_seconds=0.1, session_id=6)
    with trio.fail_after(HANG_SECONDS):
        await closed.serve()
    [event] = seen
    assert isinstance(event, SessionDown)
    assert event.ending is SessionEnding.LEASE


async def test_session_says_whether_it_is_connected(ends: tuple[End, End], all_wires: Wires) -> None:
    await connect(ends, all_wires)
    ends[0].session.drop_connection()
    for end in ends:
        assert (await end.wait(SessionInterrupted)).reason
        assert not end.session.is_connected
    await connect(ends, all_wires)
    assert ends[0].session.is_connected


@pytest.mark.parametrize("how", ["abort", "bye"])
async def test_session_that_is_over_closes_what_it_is_given(ends: tuple[End, End], all_wires: Wires, how: str) -> None:
    one, other = ends
    await connect(ends, all_wires)
    await one.control.send_all(b"seven b")
    assert await receive_exactly(other.control, 7) == b"seven b"
    await other.control.send_all(b"x")
    assert await receive_exactly(one.control, 1) == b"x"  # a turn later, so what was sent has been counted
    if how == "abort":
        one.session.abort()
        assert await one.control.receive_some() == b"", "its sockets are closed"
    else:
        other.session.close()
        down = await one.wait(SessionDown)
        assert (down.session, down.ending) == (one.session, SessionEnding.BYE)
    assert not one.session.is_connected
    near, far = trio_pair()
    assert one.session.open_channel(far, b"") == 0
    assert far.fileno() == -1
    assert await near.receive_some() == b""
    await near.aclose()
    near, far = trio_pair()
    one.session.accept_channel(2, far)
    assert far.fileno() == -1
    assert await near.receive_some() == b""
    await near.aclose()
    ours, theirs = all_wires.connect()
    one.session.attach(ours)
    assert ours.sock.fileno() == -1
    with pytest.raises(AssertionError, match="freed"):
        ours.tls.forget()
    theirs.sock.close()
    theirs.tls.free()
    assert not one.session.is_connected
    for act in (one.session.close, one.session.drop_connection, one.session.abort):
        act()
    one.session.refuse_channel(2)
    counts = one.session.statistics()
    assert (counts.connections, counts.bytes_sent) == (1, 7)
    assert not any(isinstance(event, SessionDown) for event in one.events)


async def test_aborted_session_tells_nothing_of_what_has_come(ends: tuple[End, End], all_wires: Wires) -> None:
    await connect(ends, all_wires)
    one, other = ends
    near, far = socket.socketpair()
    with near:
        other.session.open_channel(far, b"")
        os.write(other.control.socket.fileno(), b"behind it")
        assert select.select([one.control.socket.fileno()], [], [], HANG_SECONDS)[0]  # Trio has no turn meanwhile
        one.session.abort()
        await other.wait(SessionInterrupted)
        await trio.testing.wait_all_tasks_blocked()
    assert one.events == []


async def test_sessions_end_with_their_relay(all_wires: Wires) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with open_end("native", is_dialler=True) as one, open_end("native", is_dialler=False) as other:
            await connect((one, other), all_wires)
        for end in (one, other):
            near, far = socket.socketpair()
            with near:
                assert end.session.open_channel(far, b"") == 0
                assert near.recv(1) == b""
            assert (end.session.is_connected, end.session.statistics().connections) == (False, 1)


async def test_sockets_of_channels_are_read_and_written_whole() -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = bytes(range(256)) * 1024
    with trio.socket.from_stdlib_socket(near) as one, trio.socket.from_stdlib_socket(far) as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.send_everything, one, data)
            found = await relay.receive_exactly(other, len(data) - 3)
        assert found == data[:-3]
        assert await relay.receive_exactly(other, 3) == data[-3:]
        assert await relay.receive_exactly(other, 0) == b""
        await relay.send_everything(one, memoryview(b"cut"))
        one.shutdown(socket.SHUT_WR)
        assert await relay.receive_exactly(other, 4) is None
