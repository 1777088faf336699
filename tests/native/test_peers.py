"""What a foreign, broken or hostile peer can do to a link: end it, with a text. The process lives (E12)."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import pytest
import trio
from tests.conformance.transports import Recorder
from tests.native import wire
from tests.native.wire import RingPeer
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh._transport.interface import DownReason
from trimesh._transport.native.transport import NativeLink, NativeTransport
from trimesh.ids import ProcId


@attrs.define(eq=False)
class Side:
    """Our side of a connection whose other end a test writes by hand."""

    transport: NativeTransport
    recorder: Recorder
    sock: socket.socket

    def open(self, *, local: bool, peer: ProcId | None = None, hello_seconds: float = 60.0) -> NativeLink:
        mine, theirs = socket.socketpair()
        self.sock = theirs
        return self.transport.open_link(mine, local=local, lease=False, peer=peer, hello_seconds=hello_seconds)


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    transport = NativeTransport(ProcId(1), beat_seconds=0.02, lease_seconds=0.2)
    try:
        async with trio.open_nursery() as nursery:
            one = Side(transport, Recorder(), socket.socket())
            one.sock.close()
            nursery.start_soon(transport.run, one.recorder)
            yield one
            nursery.cancel_scope.cancel()
    finally:
        one.sock.close()
        transport.close()


@pytest.fixture
def close_peers() -> Iterator[list[RingPeer]]:
    peers: list[RingPeer] = []
    yield peers
    for peer in peers:
        peer.close()


async def ring_peer(side: Side, peers: list[RingPeer], **options: object) -> tuple[NativeLink, RingPeer]:
    """Return a link over rings that is up, and its peer."""
    link = side.open(local=True, **options)  # type: ignore[arg-type]
    peer = RingPeer(side.sock)
    peers.append(peer)
    peer.greet()
    with trio.fail_after(HANG_SECONDS):
        await link.up.wait()
    return link, peer


async def expect_protocol(side: Side, link: NativeLink, text: str) -> None:
    down = await side.recorder.wait_down(link)
    assert (down.reason, down.detail) == (DownReason.PROTOCOL, f"the peer sent {text}")
    assert side.recorder.late == []
    # The process and the transport live: another link works.
    other, theirs = socket.socketpair()
    again = side.transport.open_link(other, local=False, lease=False)
    theirs.sendall(wire.hello() + wire.message(b"fine"))
    await side.recorder.wait(lambda: b"fine" in side.recorder.heads(again))
    again.abort()
    theirs.close()


# ---- a stream ------------------------------------------------------------------------------------------------------


async def test_hand_written_stream_peer_is_understood(side: Side):
    """The description of the wire is enough to write a peer."""
    link = side.open(local=False)

    side.sock.sendall(
        wire.hello(pid=4711) + wire.message(b"one") + wire.message_with_bodies(b"two", [3, 0, 2], b"abcde", sequence=1)
    )

    messages = await side.recorder.wait_messages(2)
    assert [(m.head, m.contents) for m in messages] == [(b"one", []), (b"two", [b"abc", b"", b"de"])]
    assert (link.peer_epoch, link.peer_pid) == (7, 4711)


async def test_stream_may_come_byte_by_byte(side: Side):
    side.open(local=False)
    data = wire.hello() + wire.message(b"first") + wire.header(wire.BEAT) + wire.message(b"second", sequence=1)

    for i in range(len(data)):
        side.sock.sendall(data[i : i + 1])
        if i % 7 == 0:
            await trio.lowlevel.checkpoint()

    await side.recorder.wait_messages(2)
    assert side.recorder.heads() == [b"first", b"second"]


async def test_frames_of_another_epoch_are_dropped_and_counted(side: Side):
    """R08: an old incarnation's frames are never delivered."""
    link = side.open(local=False)

    side.sock.sendall(wire.hello() + wire.message(b"old", epoch=6, sequence=99) + wire.message(b"new"))

    await side.recorder.wait_messages(1)
    assert side.recorder.heads() == [b"new"]
    assert link.statistics().dropped_frames == 1


FRAGMENT_OF_NOTHING = wire.padded(wire.header(wire.FRAGMENT, length=33, lane=wire.DATA) + b"x")

VIOLATIONS = {
    "a frame before the hello": wire.message(b"impolite"),
    "a second hello": wire.hello() + wire.hello(),
    "a frame of another protocol version": wire.header(wire.HELLO, length=64, version=9) + bytes(32),
    "a frame of an unknown kind": wire.header(200),
    "a frame on an unknown lane": wire.header(wire.BEAT, lane=5),
    "a frame with unknown flags": wire.header(wire.BEAT, flags=128),
    "a frame whose length does not fit its kind": wire.header(wire.MESSAGE, length=1 << 31),
    "a hello of another version of the library": wire.hello(abi=77),
    "a hello without an epoch": wire.hello(epoch=0),
    "a hello with a slot out of range": wire.hello(slot=5000),
    "a hello with a ring size out of range": wire.hello(ring_bytes=1 << 30),
    "a credit out of range": wire.hello() + wire.header(wire.CREDIT, sequence=1 << 60),
    "a frame out of order": wire.hello() + wire.message(b"", sequence=3),
    "a fragment whose size does not add up": wire.hello() + FRAGMENT_OF_NOTHING,
    "a message above MESSAGE_BYTES_MAX": wire.hello()
    + wire.message_with_bodies(b"", [1 << 62, 1 << 62], b"", more=True),
    "a segment on a link without any": wire.hello()
    + wire.message_with_bodies(b"", [wire.in_segment(0, 1, 100_000)], b""),
    "a message whose sizes do not add up": wire.hello() + wire.message_with_bodies(b"", [4], b"abc"),
    "a message inside another one": wire.hello()
    + wire.message_with_bodies(b"", [100], b"abc", more=True)
    + wire.message_with_bodies(b"", [100], b"abc", more=True, sequence=1),
    "a frame after the goodbye": b"",  # see the test of its own
}


@pytest.mark.parametrize("text", [text for text, data in VIOLATIONS.items() if data])
async def test_violation_ends_a_stream_link(side: Side, text: str):
    link = side.open(local=False)

    side.sock.sendall(VIOLATIONS[text])

    await expect_protocol(side, link, text)


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", bytes(4096), b"\xff" * 100, random.Random(1).randbytes(100_000)],
    ids=["http", "zeros", "ones", "random"],
)
async def test_foreign_bytes_end_a_stream_link(side: Side, garbage: bytes, greeted: bool):
    link = side.open(local=False)
    side.sock.setblocking(False)

    if greeted:
        side.sock.sendall(wire.hello())
    side.sock.send(garbage)

    await expect_protocol(side, link, "bytes that are no frame")


async def test_peer_that_sends_beyond_its_credit_is_refused():
    """Nobody polls, so no credit is given: what was within the first window arrives, then the link ends."""
    transport = NativeTransport(ProcId(1))
    mine, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    link = transport.open_link(mine, local=False, lease=False)
    recorder = Recorder()
    messages = [wire.message(bytes(40_000), sequence=i) for i in range(20)]

    await trio.to_thread.run_sync(theirs.sendall, wire.hello() + b"".join(messages))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.run, recorder)
        down = await recorder.wait_down(link)
        nursery.cancel_scope.cancel()

    assert (down.reason, down.detail) == (DownReason.PROTOCOL, "the peer sent more bytes than it had credit for")
    window = limits.RING_BYTES - limits.RING_CONTROL_RESERVE_BYTES
    assert len(recorder.messages) == window // 40_032
    theirs.close()
    transport.close()


@pytest.mark.parametrize("cut", [1, 31, 32, 40, 63, 64 + 10, 64 + 36])
async def test_stream_that_ends_in_the_middle_of_a_frame_is_an_end(side: Side, cut: int):
    link = side.open(local=False)

    side.sock.sendall((wire.hello() + wire.message(b"whole"))[:cut])
    side.sock.close()

    down = await side.recorder.wait_down(link)
    assert (down.reason, down.detail) == (DownReason.EOF, "the stream ended in the middle of a frame")


async def test_stream_peer_of_another_epoch_than_expected_is_refused(side: Side):
    link = side.open(local=False, peer=ProcId(8))

    side.sock.sendall(wire.hello(epoch=7))

    await expect_protocol(side, link, "a hello of another epoch than expected")
    assert not link.up.is_set()


@pytest.mark.parametrize("local", [True, False])
async def test_link_without_a_hello_ends(side: Side, local: bool):
    link = side.open(local=local, hello_seconds=0.05)

    down = await side.recorder.wait_down(link)

    assert (down.reason, down.detail) == (DownReason.LEASE, "no hello came in time")


@pytest.mark.parametrize("local", [True, False])
async def test_peer_that_vanishes_before_its_hello_is_an_end(side: Side, local: bool):
    link = side.open(local=local)

    side.sock.close()

    assert (await side.recorder.wait_down(link)).reason is DownReason.EOF


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


async def test_announced_memory_is_not_taken_before_it_comes(side: Side):
    """64 GiB announced, nothing sent: no memory is written for it."""
    link = side.open(local=False)
    before = resident_pages()

    side.sock.sendall(
        wire.hello() + wire.message_with_bodies(b"", [1 << 36], b"x", more=True) + wire.message(b"c", lane=wire.CONTROL)
    )
    await side.recorder.wait(lambda: bool(side.recorder.messages or side.recorder.downs))

    assert resident_pages() - before < 10_000
    link.abort()


# ---- rings ---------------------------------------------------------------------------------------------------------


async def test_hand_written_ring_peer_is_understood(side: Side, close_peers: list[RingPeer]):
    link, peer = await ring_peer(side, close_peers)

    peer.write(wire.message(b"one"))
    peer.write(wire.message_with_bodies(b"two", [3], b"abc", sequence=1))

    messages = await side.recorder.wait_messages(2)
    assert [(m.head, m.contents) for m in messages] == [(b"one", []), (b"two", [b"abc"])]
    assert (link.peer_epoch, link.peer_pid) == (7, os.getpid())


RING_VIOLATIONS = {
    "bytes that are no frame": (bytes(range(64)), None),
    "a ring that ends in the middle of a frame": (wire.message(b"x" * 100)[:64], None),
    "a ring whose counters are broken": (b"", 3),
    "a frame of the byte stream inside a ring": (wire.header(wire.CREDIT), None),
    "a second hello": (wire.hello(), None),
    "a frame after the goodbye": (b"", None),
}


@pytest.mark.parametrize("text", [text for text, (data, move) in RING_VIOLATIONS.items() if data or move])
async def test_violation_ends_a_ring_link(side: Side, close_peers: list[RingPeer], text: str):
    link, peer = await ring_peer(side, close_peers)
    data, move = RING_VIOLATIONS[text]

    peer.write(data, move=move)

    await expect_protocol(side, link, text)


@pytest.mark.parametrize("move", [limits.RING_BYTES + 8, 1 << 40, (1 << 64) - 8, 1 << 63])
async def test_head_out_of_range_ends_a_ring_link(side: Side, close_peers: list[RingPeer], move: int):
    link, peer = await ring_peer(side, close_peers)

    peer.write(b"", move=move)

    await expect_protocol(side, link, "a ring whose counters are broken")


@pytest.mark.parametrize("tail", [limits.RING_BYTES + 8, 1 << 40, (1 << 64) - 8])
async def test_tail_out_of_range_ends_a_ring_link_when_room_is_looked_for(
    side: Side, close_peers: list[RingPeer], tail: int
):
    link, peer = await ring_peer(side, close_peers)
    peer.set_tail(tail)

    for _ in range(10):
        link.send(b"", [bytes(60_000)])

    await expect_protocol(side, link, "a ring whose counters are broken")


@pytest.mark.parametrize("seed", range(20))
async def test_random_bytes_in_a_ring_never_do_more_than_end_the_link(
    side: Side, close_peers: list[RingPeer], seed: int
):
    """Headers that pass the check, with everything else random."""
    link, peer = await ring_peer(side, close_peers)
    chance = random.Random(seed)
    for sequence in range(200):
        frame = wire.header(
            chance.randrange(1, 8),
            length=chance.choice([32, 33, 40, 64, 100, 1000, chance.randrange(1 << 32)]),
            lane=chance.randrange(2),
            flags=chance.randrange(2),
            epoch=chance.choice([7, 7, 7, 8]),
            sequence=chance.choice([0, sequence]),
            head_size=chance.choice([0, 1, 60, chance.randrange(1 << 16)]),
            n_bodies=chance.choice([0, 1, 3, chance.randrange(1 << 16)]),
        )
        peer.write(wire.padded(frame + chance.randbytes(chance.choice([0, 8, 68, 1000]))))
        await trio.lowlevel.checkpoint()
        if side.recorder.is_down(link):
            break

    assert (await side.recorder.wait_down(link)).reason in (DownReason.PROTOCOL, DownReason.CLOSED)


async def test_bell_rung_for_links_that_do_not_exist_is_harmless(side: Side, close_peers: list[RingPeer]):
    link, peer = await ring_peer(side, close_peers)
    page = peer._maps[1]
    page[64 : 64 + 128] = b"\xff" * 128
    peer.ring()

    peer.write(wire.message(b"still here"))

    await side.recorder.wait_messages(1)
    assert not side.recorder.is_down(link)


# ---- the hello of a ring link --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"x" * 64, "bytes that are no frame"),
        (wire.message(b"x" * 32), "a frame before the hello"),
        (wire.hello(abi=wire.ABI + 1), "a hello of another version of the library"),
        (wire.hello(), "a hello whose shared memory is not what it should be"),
    ],
    ids=["foreign bytes", "early message", "other version", "no memory"],  # a hello holds random numbers
)
async def test_hello_without_descriptors_is_refused(side: Side, data: bytes, text: str):
    link = side.open(local=True)

    side.sock.sendall(data)

    await expect_protocol(side, link, text)


async def test_hello_with_too_many_descriptors_is_refused_and_they_are_closed(side: Side):
    link = side.open(local=True)
    fds = [wire.shared_memory(wire.PAGE) for _ in range(7)]

    socket.send_fds(side.sock, [wire.hello()], fds)
    for fd in fds:
        os.close(fd)

    await expect_protocol(side, link, "a hello with the wrong number of descriptors")


@pytest.mark.parametrize(
    "which", ["ring unsealed", "ring too small", "page too small", "ring is a pipe", "bell is a pipe"]
)
async def test_hello_with_bad_shared_memory_is_refused(side: Side, which: str):
    link = side.open(local=True)
    pipe = os.pipe()
    ring = {
        "ring unsealed": lambda: wire.shared_memory(wire.PAGE + limits.RING_BYTES, seals=0),
        "ring too small": lambda: wire.shared_memory(limits.RING_BYTES),
        "ring is a pipe": lambda: os.dup(pipe[0]),
    }.get(which, lambda: wire.shared_memory(wire.PAGE + limits.RING_BYTES))()
    page = wire.shared_memory(64 if which == "page too small" else wire.PAGE)
    bell = os.dup(pipe[1]) if which == "bell is a pipe" else os.eventfd(0)

    socket.send_fds(side.sock, [wire.hello()], [ring, page, bell])
    for fd in (ring, page, bell, *pipe):
        os.close(fd)

    what = "bell" if which == "bell is a pipe" else "shared memory"
    await expect_protocol(side, link, f"a hello whose {what} is not what it should be")


async def test_hello_of_a_ring_may_come_in_two_parts(side: Side, close_peers: list[RingPeer]):
    link = side.open(local=True)
    peer = RingPeer(side.sock)
    close_peers.append(peer)
    data = wire.hello()

    socket.send_fds(side.sock, [data[:10]], [peer.ring_fd, peer.page_fd, peer.bell_fd])
    await trio.sleep(0.01)
    side.sock.sendall(data[10:])

    with trio.fail_after(HANG_SECONDS):
        await link.up.wait()


def test_header_is_the_vector_that_it_was():
    """Neither side of the protocol changes alone, nor both without a new version."""
    assert wire.header(wire.BEAT, epoch=1).hex() == "20000000080500000100000000000000000000000000000000000000a31227e6"
