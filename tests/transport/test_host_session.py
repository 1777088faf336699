"""Sessions between hosts as a state machine: order, windows, acknowledgements and resumption, without a connection."""

from __future__ import annotations

import random

import pytest
from tests.relay.oracle.frames import Frame, FrameKind, Resume, encode, encode_many
from tests.relay.oracle.machine import (
    CONTROL,
    Bye,
    ChannelClosed,
    ChannelData,
    ChannelOpened,
    ChannelReset,
    HostSession,
    News,
)
from tests.rows import rows

from trimesh import limits
from trimesh._transport.relay import SessionEnding
from trimesh.errors import LimitExceeded, ProtocolError


class Pair:
    """Two sides, and the bytes between them."""

    def __init__(self) -> None:
        self.dialler = HostSession(is_dialler=True, lease_seconds=3.0, session_id=5)
        self.other = HostSession(is_dialler=False, lease_seconds=4.0)
        self.heard = {side: list[News]() for side in (self.dialler, self.other)}
        self.connect()

    def connect(self) -> None:
        for side in (self.dialler, self.other):
            side.connect()

    def pass_once(self, size: int = 1 << 20) -> bool:
        moved = False
        for source, target in ((self.dialler, self.other), (self.other, self.dialler)):
            data = source.take(size)
            if data:
                moved = True
                self.heard[target] += target.receive(data)
        return moved

    def settle(self) -> None:
        while self.pass_once():
            pass

    def data(self, side: HostSession, channel: int) -> bytes:
        news = self.heard[side]
        return b"".join(one.data for one in news if isinstance(one, ChannelData) and one.channel == channel)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_channels_carry_bytes_both_ways_until_both_have_closed(pair: Pair) -> None:
    channel = pair.dialler.open(b"why")
    pair.dialler.give(channel, b"there")
    pair.dialler.finish(channel)
    pair.settle()
    assert [one for one in pair.heard[pair.other] if isinstance(one, ChannelOpened)] == [ChannelOpened(channel, b"why")]
    assert pair.heard[pair.other][-1] == ChannelClosed(channel)
    pair.other.give(channel, b"back")
    pair.other.finish(channel)
    pair.settle()
    assert (pair.data(pair.other, channel), pair.data(pair.dialler, channel)) == (b"there", b"back")
    assert (pair.dialler.channels, pair.other.channels) == (0, 0)


@rows("seed", range(20))
def test_connections_that_break_at_any_byte_lose_and_double_nothing(seed: int) -> None:
    """H3: whatever part of what was sent has come, the peer takes each frame once and in order."""
    break_connections_at_any_byte(seed)


def break_connections_at_any_byte(seed: int) -> None:
    chance, pair = random.Random(seed), Pair()
    pair.settle()
    channel, sent = pair.dialler.open(b""), bytearray()
    for _ in range(60):
        data = chance.randbytes(chance.randint(1, 9_000))
        if pair.dialler.room(channel) >= len(data):
            pair.dialler.give(channel, data)
            sent += data
        wire = pair.dialler.take(1 << 16)
        is_broken = chance.random() < 0.3
        kept = wire[: chance.randrange(len(wire) + 1)] if is_broken else wire
        news = list(pair.other.receive(kept)) if kept else []
        pair.heard[pair.other] += news
        for one in news:
            if isinstance(one, ChannelData):
                pair.other.consumed(channel, len(one.data))
        if is_broken:
            pair.dialler.disconnect()
            pair.other.disconnect()
            pair.connect()
        pair.settle()
    assert pair.data(pair.other, channel) == sent
    assert pair.dialler.resent == 0 or pair.other.duplicates <= pair.dialler.resent


@pytest.mark.parametrize("seed", range(5))
def test_small_pieces_of_several_channels_share_frames_and_none_is_lost_or_doubled(seed: int) -> None:
    """H3, over connections that break."""
    chance, pair = random.Random(seed), Pair()
    channels = [pair.dialler.open(b"") for _ in range(4)]
    pair.settle()
    sent, pieces = {channel: bytearray() for channel in channels}, 0
    for _ in range(60):
        for channel in channels:
            data = chance.randbytes(chance.randint(1, limits.HOST_FOLD_BYTES + 100))
            if chance.random() < 0.8 and pair.dialler.room(channel) >= len(data):
                pair.dialler.give(channel, data)
                sent[channel] += data
                pieces += 1
        wire = pair.dialler.take(1 << 16)
        is_broken = chance.random() < 0.2
        news = list(pair.other.receive(wire[: chance.randrange(len(wire) + 1)] if is_broken else wire))
        pair.heard[pair.other] += news
        if is_broken:
            pair.dialler.disconnect()
            pair.other.disconnect()
            pair.connect()
        pair.settle()
        for channel in channels:
            pair.other.consumed(channel, len(sent[channel]) - pair.other._channels[channel].consumed)
    wrong = [channel for channel in channels if pair.data(pair.other, channel) != sent[channel]]
    assert wrong == []  # not the bytes: pytest would compare 100 KiB of them for minutes
    assert pair.dialler.frames_sent < pieces


@pytest.mark.parametrize(
    "payload",
    [
        encode_many([(1, b"a")]),
        encode_many([(1, b"a"), (1, b"")]),
        encode_many([(1, b"a"), (1, b"b")]) + b"x",
        encode_many([(1, b"a"), (1, b"b")])[:-1],
        encode_many([(1, b"a"), (7, b"b")]),
    ],
)
def test_frame_of_several_channels_that_is_none_breaks_the_protocol(pair: Pair, payload: bytes) -> None:
    pair.dialler.open(b"")
    pair.settle()
    with pytest.raises(ProtocolError):
        list(pair.other.receive(encode(Frame(FrameKind.MANY, 0, pair.other._expected, 0, payload))))


def test_window_bounds_what_was_not_taken(pair: Pair) -> None:
    """H3: no more than a window is under way, until the reader has taken some."""
    pair.settle()
    channel, given = pair.dialler.open(b""), 0
    while room := pair.dialler.room(channel):
        pair.dialler.give(channel, bytes(room))
        given += room
        pair.settle()
    assert given == limits.HOST_WINDOW_BYTES
    pair.other.consumed(channel, given)
    pair.settle()
    assert pair.dialler.room(channel) > 0


def test_control_goes_before_data_that_waits(pair: Pair) -> None:
    pair.settle()
    channel = pair.dialler.open(b"")
    pair.dialler.give(channel, bytes(pair.dialler.room(channel)))
    pair.dialler.give(CONTROL, b"first")
    pair.settle()
    data = [one.channel for one in pair.heard[pair.other] if isinstance(one, ChannelData)]
    assert data[0] == CONTROL


def test_reset_ends_both_ways_and_what_crosses_it_is_dropped(pair: Pair) -> None:
    pair.settle()
    channel = pair.dialler.open(b"")
    pair.settle()
    pair.other.reset(channel)
    pair.dialler.give(channel, b"crossing")
    pair.settle()
    assert ChannelReset(channel) in pair.heard[pair.dialler]
    assert pair.data(pair.other, channel) == b""
    assert (pair.dialler.channels, pair.other.channels) == (0, 0)


def test_bye_comes_behind_everything_and_is_acknowledged(pair: Pair) -> None:
    pair.settle()
    pair.dialler.give(CONTROL, b"last words")
    pair.dialler.bye()
    pair.settle()
    assert pair.heard[pair.other][-2:] == [ChannelData(CONTROL, b"last words"), Bye()]
    assert pair.dialler.is_parted
    assert pair.dialler.tick(0.1) is SessionEnding.CLOSED


def test_silence_ends_a_session_by_its_own_ticks_and_beats_prevent_it(pair: Pair) -> None:
    """H2: with beats it lives; without a peer it ends after its lease."""
    pair.settle()
    for _ in range(100):
        assert pair.dialler.tick(0.1) is None
        assert pair.other.tick(0.1) is None
        pair.settle()
    pair.dialler.disconnect()
    endings = [pair.dialler.tick(0.1) for _ in range(31)]
    assert endings[25] is None
    assert endings[-1] is SessionEnding.LEASE


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (Frame(FrameKind.DATA, 1, 0, 0, b"x"), "begins with one RESUME"),
        (Frame(FrameKind.RESUME, 0, 0, 0, Resume(9, 0, True).encode()), "resumes its session"),
        (Frame(FrameKind.RESUME, 0, 0, 7, Resume(5, 7, False).encode()), "an acknowledgement is from"),
    ],
)
def test_first_frame_that_breaks_the_rules_ends_the_session(pair: Pair, frame: Frame, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        list(pair.dialler.receive(encode(frame)))


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (Frame(FrameKind.DATA, 8, 0, 0, b"x"), "a channel is opened first"),
        (Frame(FrameKind.OPEN, 1, 0, 0, b""), "a number of its side"),
        (Frame(FrameKind.DATA, 0, 3, 0, b"x"), "frames come in order"),
        (Frame(FrameKind.CLOSE, 0, 0, 0, b""), "open as long as the session"),
        (Frame(FrameKind.DATA, 0, 0, 0, b""), "DATA has bytes"),
        (Frame(FrameKind.BEAT, 3, 0, 0, b""), "is of the session"),
        (Frame(FrameKind.RESUME, 0, 0, 0, Resume(5, 0, True).encode()), "begins with one RESUME"),
    ],
)
def test_frame_that_breaks_the_rules_ends_the_session(pair: Pair, frame: Frame, match: str) -> None:
    pair.settle()
    with pytest.raises(ProtocolError, match=match):
        list(pair.dialler.receive(encode(frame)))


def test_random_bytes_raise_nothing_but_protocol_errors() -> None:
    for seed in range(300):
        pair, chance = Pair(), random.Random(seed)
        pair.settle()
        try:
            list(pair.dialler.receive(chance.randbytes(200)))
        except ProtocolError:
            continue


def test_purpose_that_is_too_long_opens_nothing(pair: Pair) -> None:
    with pytest.raises(LimitExceeded, match="a purpose must have at most"):
        pair.dialler.open(bytes(limits.HOST_PURPOSE_BYTES_MAX + 1))
    assert pair.dialler.channels == 0
