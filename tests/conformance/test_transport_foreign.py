"""What the native transports make of peers that break the protocol: the link ends, the process lives.

The peer is `tests.conformance.foreign` on a bare socket: it knows every rule, and how to break it.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conformance.foreign import EPOCH, HELLO, Frame, check_lives, hello, intrude, message
from tests.conformance.transports import KIB, MIB, NativeBackend, World, open_world, pattern
from tests.native import wire

from trimesh import limits
from trimesh._transport.interface import DownReason, LinkDown

FRAME_BYTES_MAX = 32 + limits.HEAD_BYTES_MAX + 8 * limits.BODIES_MAX
STREAMS = ["native-stream", "native-tcp"]

world = pytest.fixture(params=STREAMS)(open_world)
any_world = pytest.fixture(params=[*STREAMS, "native-ring"])(open_world)


async def check_breach(world: World, *parts: Frame | bytes) -> None:
    intruder = intrude(world)

    await intruder.send(*parts)

    down = await intruder.down()
    assert down.reason is DownReason.PROTOCOL
    assert down.detail.startswith("the peer sent ")
    await check_lives(world, intruder)


# ---- what a faithful peer gets -------------------------------------------------------------------------------------


async def test_peer_by_hand_is_understood(world: World):
    """So the tests below fail for the reason that they give."""
    intruder = intrude(world)
    body = pattern(1000)

    await intruder.send(
        HELLO,
        Frame(wire.BEAT, EPOCH),
        message(b"data", (body,)),
        message(b"control"),
        message(b"pieces", (body[:10],), sizes=(4, 996), more=1, sequence=1),
        message(b"between", sequence=1),
        Frame(wire.FRAGMENT, EPOCH, body[10:], lane=wire.DATA, sequence=2),
        Frame(wire.BYE, EPOCH),
    )

    assert (await intruder.down()).reason is DownReason.CLOSED
    seen = [(received.head, received.contents) for received in intruder.sees.messages]
    whole = [(b"data", [body]), (b"control", []), (b"between", []), (b"pieces", [body[:4], body[4:]])]
    assert seen == whole
    assert intruder.link.peer_epoch == EPOCH
    await check_lives(world, intruder)


# ---- breaches ------------------------------------------------------------------------------------------------------


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n" * 2,
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n" * 4,
    "tls": bytes.fromhex("16030100f1010000ed0303") + bytes(64),
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "random": random.Random(5).randbytes(100_000),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_foreign_bytes_end_the_link(any_world: World, garbage: bytes):
    """E12."""
    await check_breach(any_world, garbage)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_foreign_bytes_behind_a_hello_end_the_link(world: World, garbage: bytes):
    await check_breach(world, HELLO, garbage)


HELLO_BREACHES = {
    "message first": message(b"early"),
    "bye first": Frame(wire.BYE, EPOCH),
    "no epoch": hello(epoch=0),
    "other library": hello(abi=wire.ABI + 1),
    "slot": hello(slot=limits.LINKS_MAX),
    "no ring": hello(ring_bytes=0),
    "ring too small": hello(ring_bytes=4096),
    "ring too large": hello(ring_bytes=1 << 31),
    "ring size no power of two": hello(ring_bytes=(1 << 18) + 8),
    "other protocol version": hello(version=wire.VERSION + 1),
    "on the data lane": hello(lane=wire.DATA),
    "too short": Frame(wire.HELLO, EPOCH, b"short"),
}


@pytest.mark.parametrize("frame", HELLO_BREACHES.values(), ids=HELLO_BREACHES)
async def test_bad_hello_ends_the_link(any_world: World, frame: Frame):
    await check_breach(any_world, frame.encode().ljust(64, b"\0"))  # a ring waits for a whole hello


FRAME_BREACHES = {
    "second hello": [HELLO],
    "unknown kind": [Frame(77, EPOCH)],
    "unknown lane": [Frame(2, EPOCH, lane=7)],
    "unknown flag": [message(b"", (b"12",), sizes=(4,), more=2)],
    "length below a header": [Frame(2, EPOCH, length=31)],
    "length above the largest frame": [message(b"", (b"",), length=FRAME_BYTES_MAX + 8)],
    "length of 4 GiB": [message(b"", (b"",), length=(1 << 32) - 8)],
    "head beyond its frame": [Frame(2, EPOCH, b"four", head_size=5)],
    "head above its limit": [Frame(2, EPOCH, bytes(1 << 16)[:-1], head_size=(1 << 16) - 1)],
    "bytes behind the head": [Frame(2, EPOCH, b"four", head_size=3)],
    "too many bodies": [message(b"", sizes=(0,) * (limits.BODIES_MAX + 1))],
    "table beyond its frame": [Frame(2, EPOCH, bytes(8), lane=wire.DATA, n_bodies=2)],
    "bodies on the control lane": [message(b"", (b"x",), lane=wire.CONTROL)],
    "more to come of no bodies": [message(b"head", lane=wire.DATA, more=1)],
    "fewer body bytes than announced": [message(b"", (b"1234",), sizes=(5,))],
    "more body bytes than announced": [message(b"", (b"1234",), sizes=(3,))],
    "all there and more to come": [message(b"", (b"1234",), more=1)],
    "message above its limit": [message(b"", (b"1234",), sizes=((1 << 36) + 1,), more=1)],
    "sizes that overflow": [message(b"", (b"1234",), sizes=((1 << 64) - 1, 5), more=1)],
    "fragment of nothing": [Frame(wire.FRAGMENT, EPOCH, b"1234", lane=wire.DATA)],
    "fragment on the control lane": [Frame(wire.FRAGMENT, EPOCH, b"1234")],
    "fragment too long": [
        message(b"", (b"1",), sizes=(3,), more=1),
        Frame(wire.FRAGMENT, EPOCH, b"234", lane=wire.DATA, sequence=1),
    ],
    "last fragment too short": [
        message(b"", (b"1",), sizes=(4,), more=1),
        Frame(wire.FRAGMENT, EPOCH, b"23", lane=wire.DATA, sequence=1),
    ],
    "empty fragment": [
        message(b"", (b"1",), sizes=(3,), more=1),
        Frame(wire.FRAGMENT, EPOCH, lane=wire.DATA, more=1, sequence=1),
    ],
    "message inside a message": [
        message(b"", (b"1",), sizes=(3,), more=1),
        message(b"", (b"1",), sequence=1),
    ],
    "number left out": [message(b"", sequence=1)],
    "beat with a payload": [Frame(wire.BEAT, EPOCH, bytes(8))],
    "credit taken back": [Frame(wire.CREDIT, EPOCH, sequence=1)],
    "credit for more than a ring": [Frame(wire.CREDIT, EPOCH, sequence=1 << 40)],
}


@pytest.mark.parametrize("frames", FRAME_BREACHES.values(), ids=FRAME_BREACHES)
async def test_bad_frame_ends_the_link(world: World, frames: list[Frame]):
    await check_breach(world, HELLO, *frames)


# ---- the epoch -----------------------------------------------------------------------------------------------------


async def test_frame_of_another_epoch_is_dropped_and_counted(world: World):
    """R08: whatever else it says."""
    intruder = intrude(world)

    await intruder.send(
        HELLO,
        message(b"ghost", epoch=EPOCH + 1),
        message(b"one"),
        message(b"ghost", (b"body",), sequence=55, epoch=EPOCH + 1),
        Frame(wire.FRAGMENT, EPOCH - 1, b"ghost", lane=wire.DATA),
        Frame(wire.BYE, EPOCH - 1),
        message(b"two", sequence=1),
    )

    await intruder.sees.wait_messages(2)
    assert intruder.sees.heads() == [b"one", b"two"]
    assert intruder.link.statistics().dropped_frames == 4
    await intruder.stream.aclose()


async def test_frame_that_comes_again_is_dropped_and_counted(world: World):
    """S02: whole or in parts, also in the middle of another message."""
    intruder = intrude(world)
    parts = [
        message(b"two", (b"12",), sizes=(4,), more=1),
        Frame(wire.FRAGMENT, EPOCH, b"34", lane=wire.DATA, sequence=1),
    ]

    await intruder.send(
        HELLO, message(b"one"), message(b"one"), parts[0], message(b"one"), parts[0], *parts[1:], *parts[1:]
    )
    await intruder.send(message(b"three", sequence=1))

    await intruder.sees.wait_messages(3)
    assert intruder.sees.heads() == [b"one", b"two", b"three"]
    assert intruder.link.statistics().dropped_frames == 4
    await intruder.stream.aclose()


# ---- the end -------------------------------------------------------------------------------------------------------


async def test_nothing_is_seen_behind_a_goodbye(world: World):
    intruder = intrude(world)

    await intruder.send(HELLO, message(b"last"), Frame(wire.BYE, EPOCH), message(b"late", sequence=1))

    down = await intruder.down()
    assert down.reason in (DownReason.CLOSED, DownReason.PROTOCOL)
    assert intruder.sees.heads() == [b"last"]
    await check_lives(world, intruder)


@pytest.mark.parametrize("sizes", [(1 << 36,), (200_000,) * limits.BODIES_MAX], ids=["one", "many"])
async def test_announcement_takes_no_memory(world: World, sizes: tuple[int, ...]):
    """A peer that announces gigabytes and goes away has cost next to nothing."""
    intruder = intrude(world)
    before = resident_bytes("VmRSS")
    begin_peak()

    await intruder.send(HELLO, message(b"", (b"1234",), sizes=sizes, more=1))
    await intruder.stream.aclose()

    assert (await intruder.down()).reason in (DownReason.EOF, DownReason.PROTOCOL)
    assert intruder.sees.messages == []
    assert resident_bytes("VmHWM") - before < 64 * MIB
    await check_lives(world, intruder)


def begin_peak() -> None:
    """Let the kernel measure the most memory of this process anew, from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(field: str) -> int:
    """Return the memory that this process has (VmRSS), or has had since the peak began anew (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(field))


CONVERSATION = b"".join(
    frame.encode()
    for frame in (
        HELLO,
        message(b"one"),
        message(b"two", (b"body", b"another body")),
        message(b"three", (b"12345",), sizes=(5, 4), more=1, sequence=1),
        Frame(wire.FRAGMENT, EPOCH, b"6789", lane=wire.DATA, sequence=2),
        message(b"four", sequence=1),
    )
)
COMPLETE = [(b"one", []), (b"two", [b"body", b"another body"]), (b"three", [b"12345", b"6789"]), (b"four", [])]


def run_intrusion(name: str, conversation: bytes) -> tuple[list[tuple[bytes, list[bytes]]], LinkDown]:
    """Send `conversation` to a fresh transport and hang up; return what it delivered, and how it ended."""

    async def main() -> tuple[list[tuple[bytes, list[bytes]]], LinkDown]:
        async with trio.open_nursery() as nursery:
            world = World(backend, nursery)
            intruder = intrude(world)
            async with intruder.stream:
                await intruder.send(conversation)
            down = await intruder.down()
            await check_lives(world, intruder)
            nursery.cancel_scope.cancel()
        return [(received.head, received.contents) for received in intruder.sees.messages], down

    backend = NativeBackend(tcp=name == "native-tcp", local=name == "native-ring")
    try:
        return trio.run(main)
    finally:
        backend.close()


@pytest.mark.parametrize("name", STREAMS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(CONVERSATION)))
def test_conversation_cut_anywhere_ends_after_its_whole_messages(name: str, length: int):
    seen, down = run_intrusion(name, CONVERSATION[:length])

    assert down.reason is DownReason.EOF
    assert seen == COMPLETE[: len(seen)]
    if length == len(CONVERSATION):
        assert seen == COMPLETE


# ---- noise ---------------------------------------------------------------------------------------------------------

LIES = st.builds(
    Frame,
    kind=st.integers(0, 8),
    epoch=st.sampled_from([EPOCH, EPOCH, EPOCH, 0, EPOCH + 1]),
    payload=st.binary(max_size=100)
    | st.lists(st.integers(0, 1 << 40), max_size=5).map(lambda n: struct.pack(f"<{len(n)}Q", *n)),
    lane=st.integers(0, 2),
    more=st.integers(0, 2),
    sequence=st.integers(0, 4) | st.integers(0, (1 << 64) - 1),
    head_size=st.integers(0, 40) | st.integers(0, (1 << 16) - 1),
    n_bodies=st.integers(0, 5) | st.integers(0, (1 << 16) - 1),
    length=st.none() | st.integers(0, 300) | st.integers(0, (1 << 32) - 1),
)
EDITS = st.tuples(st.integers(0, len(CONVERSATION)), st.integers(0, 40), st.binary(max_size=40))


@pytest.mark.parametrize("name", STREAMS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(LIES, max_size=8))
def test_any_frames_end_in_one_link_down(name: str, frames: list[Frame]):
    """True checks, false everything else: this gets past the first line of defence."""
    _, down = run_intrusion(name, b"".join(frame.encode() for frame in [HELLO, *frames]))

    assert down.reason in (DownReason.PROTOCOL, DownReason.EOF, DownReason.CLOSED)


@pytest.mark.parametrize("name", [*STREAMS, "native-ring"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EDITS, min_size=1, max_size=3), st.binary(max_size=100))
def test_any_bytes_end_in_one_link_down(name: str, edits: list[tuple[int, int, bytes]], tail: bytes):
    conversation = CONVERSATION
    for at, gone, new in edits:
        conversation = conversation[:at] + new + conversation[at + gone :]

    _, down = run_intrusion(name, conversation + tail)

    assert down.reason in (DownReason.PROTOCOL, DownReason.EOF, DownReason.CLOSED)
