"""What a session between two hosts does, whoever implements either side."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import pytest
import trio
import trio.testing
from tests.native.tls_ends import Ends
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh._native import tls
from trimesh.errors import LimitExceeded

pytest.importorskip("cryptography")

from tests.relay.ends import DIALLER, PAIRS, End, Wires, open_end, receive_exactly, tcp_pair, trio_pair, wires
from tests.relay.oracle.frames import Frame, FrameKind, Resume, encode

from trimesh._transport.relay import (
    ChannelEnded,
    HostConnection,
    OpenedChannel,
    SessionDown,
    SessionEnding,
    SessionInterrupted,
    SessionResumed,
)

pytestmark = pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])


class Both(NamedTuple):
    """Both sides, connected."""

    dialler: End
    dialled: End
    wires: Wires

    async def connect(self) -> None:
        """Give both a new connection, and wait until they use it."""
        ours, theirs = self.wires.connect()
        self.dialler.session.attach(ours)
        self.dialled.session.attach(theirs)
        await self.dialler.wait(SessionResumed)
        await self.dialled.wait(SessionResumed)

    async def channel(self, purpose: bytes = b"") -> tuple[trio.SocketStream, trio.SocketStream, int]:
        """Open a channel; return both ends of it, and its number."""
        near, far = trio_pair()
        number = self.dialler.session.open_channel(far, purpose)
        opened = await self.dialled.wait(OpenedChannel)
        assert (opened.channel, opened.purpose) == (number, purpose)
        other, far = trio_pair()
        self.dialled.session.accept_channel(number, far)
        return near, other, number


@pytest.fixture
def all_wires() -> Iterator[Wires]:
    with wires() as made:
        yield made


@pytest.fixture(params=PAIRS, ids="-".join)
async def both(request: pytest.FixtureRequest, all_wires: Wires) -> AsyncGenerator[Both, None]:
    one, other = request.param
    with trio.fail_after(HANG_SECONDS):
        async with open_end(one, is_dialler=True) as dialler, open_end(other, is_dialler=False) as dialled:
            made = Both(dialler, dialled, all_wires)
            await made.connect()
            yield made


async def test_control_channel_is_there_from_the_start(both: Both) -> None:
    await both.dialler.control.send_all(b"to the agent")
    await both.dialled.control.send_all(b"to the controller")

    assert await receive_exactly(both.dialled.control, 12) == b"to the agent"
    assert await receive_exactly(both.dialler.control, 17) == b"to the controller"


async def test_either_side_opens_channels_by_numbers_of_its_own(both: Both) -> None:
    near, other, number = await both.channel(b"why")
    back, far = trio_pair()
    theirs = both.dialled.session.open_channel(far, b"")
    opened = await both.dialler.wait(OpenedChannel)

    assert (number, theirs, opened.channel) == (1, 2, 2)
    for stream in (near, other, back):
        await stream.aclose()


async def test_small_pieces_of_several_channels_share_a_frame(both: Both) -> None:
    """What several processes of a host have answered when the thread has its turn: here, when there is a connection."""
    channels = [await both.channel() for _ in range(6)]
    both.dialled.session.drop_connection()
    await both.dialler.wait(SessionInterrupted)
    await both.dialled.wait(SessionInterrupted)
    before = both.dialled.session.statistics().frames_sent
    for number, (_, other, _) in enumerate(channels):
        await other.send_all(b"reply %d" % number)
    await trio.testing.wait_all_tasks_blocked()
    await both.connect()

    for number, (near, _, _) in enumerate(channels):
        assert await receive_exactly(near, 7) == b"reply %d" % number
    assert both.dialled.session.statistics().frames_sent - before < len(channels) // 2
    for near, other, _ in channels:
        await near.aclose()
        await other.aclose()


async def test_end_of_each_direction_crosses_on_its_own(both: Both) -> None:
    near, other, number = await both.channel()
    async with near, other:
        await near.send_all(b"question")
        await near.send_eof()
        assert await receive_exactly(other, 8) == b"question"
        assert await other.receive_some() == b""
        await other.send_all(b"answer")
        await other.send_eof()
        assert await receive_exactly(near, 6) == b"answer"
        assert await near.receive_some() == b""
    for end in (both.dialler, both.dialled):
        assert (await end.wait(ChannelEnded)).channel == number
        assert end.session.statistics().channels == 0


async def test_channel_that_is_refused_ends(both: Both) -> None:
    near, far = trio_pair()
    number = both.dialler.session.open_channel(far, b"")
    both.dialled.session.refuse_channel((await both.dialled.wait(OpenedChannel)).channel)

    async with near:
        assert (await both.dialler.wait(ChannelEnded)).channel == number
        assert await near.receive_some() == b""


async def test_bytes_that_come_before_the_answer_are_kept(both: Both) -> None:
    near, far = trio_pair()
    number = both.dialler.session.open_channel(far, b"")
    async with near:
        await near.send_all(b"early")
        await both.dialled.wait(OpenedChannel)
        await both.dialler.control.send_all(b"after")
        await receive_exactly(both.dialled.control, 5)
        other, far = trio_pair()
        both.dialled.session.accept_channel(number, far)
        async with other:
            assert await receive_exactly(other, 5) == b"early"


async def test_limits_of_channels_are_told_before_anything_is_taken(both: Both) -> None:
    near, far = trio_pair()
    with pytest.raises(LimitExceeded, match="purpose") as caught:
        both.dialler.session.open_channel(far, bytes(limits.HOST_PURPOSE_BYTES_MAX + 1))

    assert caught.value.value == limits.HOST_PURPOSE_BYTES_MAX + 1
    assert far.fileno() >= 0
    far.close()
    await near.aclose()


@pytest.mark.parametrize("both", [("native", "native")], ids="-".join, indirect=True)
async def test_table_of_channels_that_is_full_refuses_one_more_alone(both: Both) -> None:
    """H3: what is there goes on; when a channel has ended, there is room for one."""
    for _ in range(limits.HOST_CHANNELS_MAX):
        near, far = socket.socketpair()
        with near:
            both.dialler.session.open_channel(far, b"")
    near, far = socket.socketpair()
    with near, far:
        with pytest.raises(LimitExceeded, match="HOST_CHANNELS_MAX"):
            both.dialler.session.open_channel(far, b"")
        await both.dialler.control.send_all(b"goes on")
        assert await receive_exactly(both.dialled.control, 7) == b"goes on"
        both.dialled.session.refuse_channel((await both.dialled.wait(OpenedChannel)).channel)
        await both.dialler.wait(ChannelEnded)
        both.dialler.session.open_channel(far.dup(), b"")


async def test_broken_connections_lose_and_double_nothing(both: Both) -> None:
    """H3."""
    near, other, _ = await both.channel()
    payload = b"".join(number.to_bytes(4, "little") for number in range(250_000))

    async def echo() -> None:
        async for data in other:
            await other.send_all(data)
        await other.send_eof()

    async def send() -> None:
        await near.send_all(payload)
        await near.send_eof()

    got = bytearray()
    breaks = 0
    async with near, other, trio.open_nursery() as nursery:
        for task in (echo, send):
            nursery.start_soon(task)
        async for data in near:
            got += data
            if len(got) > (breaks + 1) * 80_000:
                (both.dialler if breaks % 2 else both.dialled).session.drop_connection()
                await both.dialler.wait(SessionInterrupted)
                await both.connect()
                breaks += 1
    assert bytes(got) == payload
    assert breaks > 2


async def test_reader_that_stops_holds_its_channel_only(both: Both) -> None:
    near, other, _ = await both.channel()
    quick, answers, _ = await both.channel()
    async with near, other, quick, answers:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def _flood() -> None:
                    while True:
                        await near.send_all(bytes(1 << 16))

                for number in range(200):
                    await quick.send_all(number.to_bytes(4, "little"))
                    assert await receive_exactly(answers, 4) == number.to_bytes(4, "little")
                scope.cancel()
        counted = both.dialler.session.statistics()
    assert counted.unacknowledged <= limits.HOST_RESEND_BYTES
    assert counted.bytes_sent < 4 * limits.HOST_WINDOW_BYTES + (1 << 20)


async def test_slow_reader_gets_everything(both: Both) -> None:
    near, other, _ = await both.channel()
    payload = bytes(range(256)) * 8192
    got = bytearray()
    async with near, other, trio.open_nursery() as nursery:
        nursery.start_soon(near.send_all, payload)
        while len(got) < len(payload):
            got += await other.receive_some(10_000)
            await trio.lowlevel.checkpoint()
    assert bytes(got) == payload


async def test_session_is_closed_behind_what_was_sent(both: Both) -> None:
    await both.dialler.control.send_all(b"last words")
    assert await receive_exactly(both.dialled.control, 10) == b"last words"
    both.dialler.session.close()

    assert (await both.dialler.wait(SessionDown)).ending is SessionEnding.CLOSED
    assert (await both.dialled.wait(SessionDown)).ending is SessionEnding.BYE
    assert await both.dialled.control.receive_some() == b""
    late, far = trio_pair()
    both.dialler.session.open_channel(far, b"")
    assert await late.receive_some() == b""
    await late.aclose()


def spawn_writer(fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["yes"], stdout=fd, stderr=subprocess.DEVNULL)


async def test_writers_that_never_pause_do_not_keep_a_session_from_closing(both: Both) -> None:
    """What is there when it is closed goes first, and nothing that is written meanwhile."""
    writers, readers = list[subprocess.Popen[bytes]](), list[trio.SocketStream]()
    async with trio.open_nursery() as nursery:

        async def drain(stream: trio.SocketStream) -> None:
            with suppress(trio.BrokenResourceError):
                async for _ in stream:
                    pass

        for _ in range(4):
            near, other, _ = await both.channel()
            writers.append(spawn_writer(near.socket.fileno()))
            await near.aclose()
            readers.append(other)
            assert await other.receive_some()
            nursery.start_soon(drain, other)
        both.dialler.session.close()
        assert (await both.dialler.wait(SessionDown)).ending is SessionEnding.CLOSED
        assert (await both.dialled.wait(SessionDown)).ending is SessionEnding.BYE
    for writer in writers:
        assert writer.wait() != 0  # nothing takes what they write any more
    for stream in readers:
        await stream.aclose()


async def test_session_that_is_aborted_says_nothing(both: Both) -> None:
    both.dialler.session.abort()
    both.dialler.session.abort()

    assert await both.dialler.control.receive_some() == b""
    assert "closed" in (await both.dialled.wait(SessionInterrupted)).reason
    assert not both.dialled.session.is_connected
    assert both.dialler.events == []


def forked(*acts: Callable[[], object]) -> int:
    """Have a forked child try what is its parent's; return its exit status, 0 when it was told so each time."""
    pid = os.fork()
    if pid == 0:
        try:
            for act in acts:
                with pytest.raises(trio.ClosedResourceError, match="forked"):
                    act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.real
@pytest.mark.daily
async def test_forked_child_has_a_dead_relay_and_the_parent_goes_on(all_wires: Wires) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with open_end("native", is_dialler=True) as one, open_end("native", is_dialler=False) as other:
            both = Both(one, other, all_wires)
            await both.connect()
            near, far, number = await both.channel()
            ours, theirs = all_wires.connect()
            spare, more = socket.socketpair()
            with spare, more, ours.sock, theirs.sock:
                assert not forked(
                    one.session.close,
                    one.session.drop_connection,
                    one.session.statistics,
                    lambda: one.session.attach(ours),
                    lambda: one.session.open_channel(spare, b""),
                    lambda: other.session.accept_channel(number, spare),
                    lambda: other.session.refuse_channel(number),
                    lambda: other.relay.open_session(spare, peer=DIALLER, is_dialler=False, lease_seconds=9.0),
                )
            ours.tls.free()
            theirs.tls.free()
            await near.send_all(b"still there")
            assert await receive_exactly(far, 11) == b"still there"
            await near.aclose()
            assert await far.receive_some() == b""
            await far.aclose()


@pytest.mark.parametrize("kind", ["native", "trio"])
async def test_silence_ends_a_session(kind: str) -> None:
    """H2."""
    with trio.fail_after(HANG_SECONDS):
        async with open_end(kind, is_dialler=False, lease_seconds=0.5) as end:
            down = await end.wait(SessionDown)
            assert down.ending is SessionEnding.LEASE
            assert await end.control.receive_some() == b""


# ---- a peer of the test's own ----------------------------------------------------------------------------------------


class Foreign:
    """The side that dials, frame by frame."""

    def __init__(self, sock: trio.socket.SocketType, ends: Ends) -> None:
        self._stream = trio.SocketStream(sock)
        self._ends = ends

    @staticmethod
    def attach(end: End, made: Wires) -> Foreign:
        """Connect to a side."""
        ours, theirs = tcp_pair()
        ends = made.tls()
        end.session.attach(HostConnection(theirs, ends.server))
        return Foreign(trio.socket.from_stdlib_socket(ours), ends)

    async def send(self, plain: bytes) -> None:
        """Send bytes inside TLS."""
        while plain:
            step = self._ends.client.step(b"", plain)
            plain = plain[step.plain_taken :]
            await self._stream.send_all(step.wire)

    async def resume(self, *, is_new: bool, session: int = 77) -> None:
        """Begin, or go on."""
        await self.send(encode(Frame(FrameKind.RESUME, 0, 0, 0, Resume(session, 0, is_new).encode())))

    async def close(self) -> None:
        """End the connection."""
        await self._stream.aclose()
        self._ends.client.free()


FOREIGN_FRAMES = {
    "no frame": (b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n", "kind"),
    "number": (encode(Frame(FrameKind.DATA, 0, 5, 0, b"x")), "number"),
    "acknowledgement": (encode(Frame(FrameKind.BEAT, 0, 0, 9, b"")), "acknowledgement"),
    "unknown channel": (encode(Frame(FrameKind.DATA, 9, 0, 0, b"x")), "channel"),
    "number of the other side": (encode(Frame(FrameKind.OPEN, 2, 0, 0, b"x")), "channel"),
    "second beginning": (encode(Frame(FrameKind.RESUME, 0, 0, 0, Resume(77, 0, is_new=True).encode())), "one"),
}


@pytest.mark.parametrize("case", FOREIGN_FRAMES)
@pytest.mark.parametrize("kind", ["native", "trio"])
async def test_frames_that_break_the_rules_end_the_session_in_words(kind: str, case: str, all_wires: Wires) -> None:
    sent, says = FOREIGN_FRAMES[case]
    with trio.fail_after(HANG_SECONDS):
        async with open_end(kind, is_dialler=False) as end:
            foreign = Foreign.attach(end, all_wires)
            await foreign.resume(is_new=True)
            await foreign.send(sent)
            down = await end.wait(SessionDown)
            await foreign.close()
    assert down.ending is SessionEnding.PROTOCOL
    assert says in down.reason


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("kind", ["native", "trio"])
async def test_session_that_is_not_this_one_is_refused(kind: str, is_new: bool, all_wires: Wires) -> None:
    """H5: a session that began before or after this one, with the same host, by a right certificate."""
    with trio.fail_after(HANG_SECONDS):
        async with open_end(kind, is_dialler=False) as end:
            foreign = Foreign.attach(end, all_wires)
            await foreign.resume(is_new=True)
            await end.wait(SessionResumed)
            await foreign.close()
            await end.wait(SessionInterrupted)
            foreign = Foreign.attach(end, all_wires)
            await foreign.resume(is_new=is_new, session=78)
            down = await end.wait(SessionDown)
            await foreign.close()
    assert down.ending is SessionEnding.PROTOCOL
    assert "session" in down.reason


@pytest.mark.parametrize("kind", ["native", "trio"])
async def test_bytes_beyond_the_window_end_the_session(kind: str, all_wires: Wires) -> None:
    """H3: what a peer may have under way is bounded by this side, whatever the peer counts."""
    size = limits.HOST_WINDOW_BYTES // 8
    frames = [Frame(FrameKind.OPEN, 1, 0, 0, b"")]
    frames += [Frame(FrameKind.DATA, 1, 1 + number, 0, bytes(size)) for number in range(8)]
    with trio.fail_after(HANG_SECONDS):
        async with open_end(kind, is_dialler=False) as end:
            foreign = Foreign.attach(end, all_wires)
            await foreign.resume(is_new=True)
            for frame in frames:
                await foreign.send(encode(frame))
            assert (await end.wait(OpenedChannel)).channel == 1
            await foreign.send(encode(Frame(FrameKind.DATA, 1, 9, 0, b"x")))
            down = await end.wait(SessionDown)
            await foreign.close()
    assert down.ending is SessionEnding.PROTOCOL
    assert "more" in down.reason


@pytest.mark.parametrize("kind", ["native", "trio"])
async def test_frame_that_was_cut_comes_once_and_whole(kind: str, all_wires: Wires) -> None:
    """H3."""
    first = encode(Frame(FrameKind.DATA, 0, 0, 0, b"first "))
    second = encode(Frame(FrameKind.DATA, 0, 1, 0, b"second"))
    with trio.fail_after(HANG_SECONDS):
        async with open_end(kind, is_dialler=False) as end:
            foreign = Foreign.attach(end, all_wires)
            await foreign.resume(is_new=True)
            await foreign.send(first + second[:34])
            assert await receive_exactly(end.control, 6) == b"first "
            await foreign.close()
            await end.wait(SessionInterrupted)
            foreign = Foreign.attach(end, all_wires)
            await foreign.resume(is_new=False)
            await foreign.send(first + second + encode(Frame(FrameKind.OPEN, 1, 2, 0, b"")))
            assert await receive_exactly(end.control, 6) == b"second"
            await end.wait(OpenedChannel)  # which comes behind what was counted
            assert end.session.statistics().duplicates == 1
            await foreign.close()


@pytest.mark.parametrize("kind", ["native", "trio"])
async def test_bytes_that_are_no_tls_interrupt_and_do_not_end(kind: str, all_wires: Wires) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with open_end(kind, is_dialler=False) as end:
            ours, theirs = tcp_pair()
            ends = all_wires.tls()
            end.session.attach(HostConnection(theirs, ends.server))
            ours.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert "TLS" in (await end.wait(SessionInterrupted)).reason
            ours.close()
            ends.client.free()
            foreign = Foreign.attach(end, all_wires)
            await foreign.resume(is_new=True)
            await end.wait(SessionResumed)
            await foreign.close()
