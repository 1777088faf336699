"""What a hostile peer can do with segments: end its link, with a text (E12)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import pytest
import trio
import trio.testing
from tests.conformance.transports import Recorder
from tests.native import wire
from tests.native.wire import RingPeer
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh._transport.interface import DownReason
from trimesh._transport.native.transport import NativeLink, NativeTransport
from trimesh.ids import ProcId

pytestmark = pytest.mark.real

SIZE = limits.SEGMENT_BYTES_MIN
BODY = 100_000


class Side:
    """Our side of a link to a peer that a test plays by hand."""

    def __init__(self, transport: NativeTransport, link: NativeLink, peer: RingPeer) -> None:
        self.transport = transport
        self.link = link
        self.peer = peer
        self.recorder = Recorder()
        self.sequence = 0

    def name(self, *words: int) -> None:
        """Send a message whose bodies are in segments."""
        self.peer.write(wire.message_with_bodies(b"m", words, b"", sequence=self.sequence))
        self.sequence += 1

    def announce(self, fds: list[int], *, ref: int = wire.ref(0, 1), size: int = SIZE, reserved: int = 0) -> None:
        """Pass a segment."""
        socket.send_fds(self.peer.sock, [struct.pack("<IIQ", ref, reserved, size)], fds)

    async def expect_protocol(self, text: str) -> None:
        down = await self.recorder.wait_down(self.link)
        assert (down.reason, down.detail) == (DownReason.PROTOCOL, f"the peer sent {text}")
        assert self.recorder.late == []


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    transport = NativeTransport(ProcId(1))
    mine, theirs = socket.socketpair()
    link = transport.open_link(mine, local=True, lease=False)
    peer = RingPeer(theirs)
    peer.greet()
    one = Side(transport, link, peer)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.run, one.recorder)
            with trio.fail_after(HANG_SECONDS):
                await link.up.wait()
            yield one
            nursery.cancel_scope.cancel()
    finally:
        transport.close()
        peer.close()


@pytest.fixture
def memory() -> Iterator[int]:
    fd = wire.shared_memory(SIZE)
    yield fd
    os.close(fd)


async def test_segment_that_a_foreign_peer_passes_is_read(side: Side, memory: int):
    """The description of the wire is enough; what is written here the peer does not see."""
    os.pwrite(memory, b"x" * BODY, 0)
    side.announce([memory])
    side.name(wire.in_segment(0, 1, BODY))

    (message,) = await side.recorder.wait_messages(1)
    assert message.contents == [b"x" * BODY]
    message.bodies[0][:3] = b"abc"

    assert os.pread(memory, 5, 0) == b"xxxxx"


async def test_segment_may_take_the_place_of_one_that_is_free(side: Side, memory: int):
    side.announce([memory])
    side.name(wire.in_segment(0, 1, BODY))
    await side.recorder.wait_messages(1)
    side.recorder.messages.clear()
    await trio.testing.wait_all_tasks_blocked()
    other = wire.shared_memory(2 * SIZE)
    os.pwrite(other, b"new", 0)

    side.announce([other], ref=wire.ref(0, 2), size=2 * SIZE)
    side.name(wire.in_segment(0, 2, 2 * SIZE))
    (message,) = await side.recorder.wait_messages(1)

    assert bytes(message.bodies[0][:3]) == b"new"
    os.close(other)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("word", "text"),
    [
        (wire.in_segment(0, 1, BODY), "a body in a segment that it has not passed"),
        (wire.in_segment(0, 0, BODY), "a body in a segment that cannot be"),
        (wire.in_segment(limits.SEGMENTS_MAX, 1, BODY), "a body in a segment that cannot be"),
        (wire.in_segment(0, 1, 0), "a body in a segment that cannot be"),
        (wire.in_segment(0, 1, limits.SEGMENT_BYTES_MAX + 1), "a body in a segment that cannot be"),
        ((1 << 64) - 1, "a body in a segment that cannot be"),
    ],
)
async def test_word_that_names_no_segment_ends_the_link(side: Side, word: int, text: str):
    side.name(word)

    await side.expect_protocol(text)


async def test_body_larger_than_its_segment_ends_the_link(side: Side, memory: int):
    side.announce([memory])
    side.name(wire.in_segment(0, 1, SIZE + 1))

    await side.expect_protocol("a body that is larger than its segment")


async def test_segment_in_use_is_not_lent_again(side: Side, memory: int):
    """V1: two messages never share memory."""
    side.announce([memory])
    side.name(wire.in_segment(0, 1, BODY), wire.in_segment(0, 1, BODY))

    await side.expect_protocol("a body in a segment that is in use")
    assert side.recorder.messages == []


async def test_segment_in_use_is_not_replaced(side: Side, memory: int):
    side.announce([memory])
    side.name(wire.in_segment(0, 1, BODY))
    (message,) = await side.recorder.wait_messages(1)

    side.announce([memory], ref=wire.ref(0, 2))
    side.name(wire.in_segment(0, 2, BODY))

    await side.expect_protocol("a segment in place of one that is in use")
    message.bodies[0][:] = bytes(BODY)


async def test_segment_in_use_is_not_retired(side: Side, memory: int):
    side.announce([memory])
    side.name(wire.in_segment(0, 1, BODY))
    (message,) = await side.recorder.wait_messages(1)

    side.peer.write(wire.about_segments(wire.RETIRE, [wire.ref(0, 1)]))

    await side.expect_protocol("the end of a segment in use")
    message.bodies[0][:] = bytes(BODY)


BAD_MEMORY = {
    "too small": (lambda: wire.shared_memory(SIZE // 2), "a segment that is not what it should be"),
    "too large": (lambda: wire.shared_memory(2 * SIZE), "a segment that is not what it should be"),
    "unsealed": (lambda: wire.shared_memory(SIZE, seals=0), "a segment that is not what it should be"),
    "may shrink": (
        lambda: wire.shared_memory(SIZE, seals=fcntl.F_SEAL_GROW),
        "a segment that is not what it should be",
    ),
    "a plain file": (lambda: os.memfd_create("plain"), "a segment that is not what it should be"),
}


@pytest.mark.parametrize("which", BAD_MEMORY)
async def test_memory_that_could_fail_later_is_refused(side: Side, which: str):
    make, text = BAD_MEMORY[which]
    fd = make()
    side.announce([fd])
    os.close(fd)
    side.name(wire.in_segment(0, 1, BODY))

    await side.expect_protocol(text)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("lies", "count", "text"),
    [
        ({"size": 0}, 1, "a segment that is not what it should be"),
        ({"size": SIZE + 4096}, 1, "a segment that is not what it should be"),
        ({"size": 1 << 62}, 1, "a segment that is not what it should be"),
        ({"ref": 0}, 1, "a segment that cannot be"),
        ({"ref": 1 << 30}, 1, "a segment that cannot be"),
        ({"reserved": 1}, 1, "a segment that cannot be"),
        ({}, 0, "a segment with the wrong number of descriptors"),
        ({}, 2, "a segment with the wrong number of descriptors"),
        ({}, 9, "a segment with the wrong number of descriptors"),
    ],
)
async def test_lies_about_a_segment_end_the_link(side: Side, memory: int, lies: dict[str, int], count: int, text: str):
    before = set(os.listdir("/proc/self/fd"))
    side.announce([memory] * count, **lies)
    side.name(wire.in_segment(0, 1, BODY))

    await side.expect_protocol(text)
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before)


async def test_torn_announcement_ends_the_link(side: Side, memory: int):
    socket.send_fds(side.peer.sock, [b"torn"], [memory])
    side.name(wire.in_segment(0, 1, BODY))

    await side.expect_protocol("a segment that cannot be")


@pytest.mark.daily
@pytest.mark.parametrize(
    ("refs", "text"),
    [
        ([wire.ref(0, 1)], "a segment back that it does not hold"),
        ([0], "a segment that cannot be"),
        ([(1 << 32) - 1], "a segment that cannot be"),
    ],
)
async def test_release_of_what_is_not_held_ends_the_link(side: Side, refs: list[int], text: str):
    side.peer.write(wire.about_segments(wire.RELEASE, refs))

    await side.expect_protocol(text)


async def test_release_that_comes_twice_ends_the_link(side: Side):
    assert side.link.send(b"", [bytes(BODY)]) is None
    side.peer.write(wire.about_segments(wire.RELEASE, [wire.ref(0, 1), wire.ref(0, 1)]))

    await side.expect_protocol("a segment back that it does not hold")


async def test_retirement_of_an_unknown_segment_is_nothing(side: Side):
    """The peer may give one up before we have looked at it."""
    side.peer.write(wire.about_segments(wire.RETIRE, [wire.ref(3, 9)]))
    side.peer.write(wire.message(b"fine"))

    await side.recorder.wait_messages(1)


async def test_release_on_a_stream_ends_the_link():
    transport = NativeTransport(ProcId(1))
    mine, theirs = socket.socketpair()
    link = transport.open_link(mine, local=False, lease=False)
    recorder = Recorder()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.run, recorder)
        theirs.sendall(wire.hello() + wire.about_segments(wire.RELEASE, [wire.ref(0, 1)]))
        down = await recorder.wait_down(link)
        nursery.cancel_scope.cancel()
    transport.close()
    theirs.close()
    assert (down.reason, down.detail) == (DownReason.PROTOCOL, "the peer sent a segment on a link without any")
