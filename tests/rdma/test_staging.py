"""Pieces between a device and what carries them: nothing is touched too early, nothing is left under way."""

from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing
from tests.conformance.vault import pattern
from tests.rdma.slow_lane import PIECE, SlowLane

from trimesh import limits
from trimesh.rdma.memory.device import drain, feed, pieces, until

SIZES = [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 3]


@pytest.mark.parametrize("size", SIZES)
def test_pieces_cover_all(size: int):
    cut = pieces(size, PIECE)
    assert [start for start, _ in cut] == list(range(0, size, PIECE))
    assert sum(stop - start for start, stop in cut) == size
    assert cut[-1][1] == size


@pytest.mark.parametrize("size", SIZES)
async def test_bytes_to_the_device(size: int, autojump_clock: trio.testing.MockClock):
    """ST-1: a place that is filled while its copy is under way would show here. Both ends work at the same time."""
    source, lane = pattern(size), SlowLane(bytearray(size), is_feed=True)
    beside = list[int]()

    async def carry(place: int, start: int, stop: int) -> None:
        assert place not in lane.pending
        beside.append(len(lane.pending))
        lane.places[place][: stop - start] = source[start:stop]
        await trio.lowlevel.checkpoint()

    await feed(lane, carry, size, PIECE)
    assert lane.memory == source
    assert not lane.pending
    assert beside == [0] + [1] * (len(pieces(size, PIECE)) - 1)


@pytest.mark.parametrize("size", SIZES)
async def test_bytes_from_the_device(size: int, autojump_clock: trio.testing.MockClock):
    source, found = pattern(size), bytearray(size)
    lane = SlowLane(bytearray(source), is_feed=False)

    async def carry(place: int, start: int, stop: int) -> None:
        assert place not in lane.pending
        await trio.lowlevel.checkpoint()
        found[start:stop] = lane.places[place][: stop - start]

    await drain(lane, carry, size, PIECE)
    assert found == source
    assert not lane.pending
    assert lane.most == min(2, len(pieces(size, PIECE)))


@pytest.mark.parametrize("is_feed", [True, False])
async def test_error_leaves_nothing_under_way(is_feed: bool, autojump_clock: trio.testing.MockClock):
    """ST-2"""
    lane = SlowLane(bytearray(5 * PIECE), is_feed=is_feed)

    async def carry(_place: int, start: int, _stop: int) -> None:
        await trio.lowlevel.checkpoint()
        if start == 2 * PIECE:
            raise trio.ClosedResourceError

    with pytest.raises(trio.ClosedResourceError):
        await (feed if is_feed else drain)(lane, carry, 5 * PIECE, PIECE)
    assert lane.most
    assert not lane.pending
    assert not lane.is_kept


@pytest.mark.parametrize("is_feed", [True, False])
async def test_cancel_leaves_nothing_under_way(is_feed: bool, autojump_clock: trio.testing.MockClock):
    """ST-2"""
    lane = SlowLane(bytearray(5 * PIECE), is_feed=is_feed, looks=10)

    async def carry(_place: int, start: int, _stop: int) -> None:
        await trio.lowlevel.checkpoint()
        if start == 2 * PIECE:
            scope.cancel()
            await trio.sleep_forever()

    with trio.CancelScope() as scope:
        await (feed if is_feed else drain)(lane, carry, 5 * PIECE, PIECE)
    assert scope.cancelled_caught
    assert lane.most
    assert not lane.pending
    assert not lane.is_kept


async def test_memory_of_a_copy_that_does_not_end_is_kept(autojump_clock: trio.testing.MockClock):
    """ST-2: and the wait for it has a bound."""
    lane = SlowLane(bytearray(2 * PIECE), is_feed=True, looks=1 << 30)

    async def carry(_place: int, start: int, _stop: int) -> None:
        await trio.lowlevel.checkpoint()
        if start:
            raise trio.ClosedResourceError

    before = trio.current_time()
    with pytest.raises(trio.ClosedResourceError):
        await feed(lane, carry, 2 * PIECE, PIECE)
    assert lane.is_kept
    assert trio.current_time() - before == pytest.approx(limits.CUDA_END_SECONDS)


@pytest.mark.parametrize("is_feed", [True, False])
async def test_failure_of_the_device_is_raised(is_feed: bool, autojump_clock: trio.testing.MockClock):
    lane = SlowLane(bytearray(3 * PIECE), is_feed=is_feed)

    async def carry(_place: int, _start: int, _stop: int) -> None:
        await trio.lowlevel.checkpoint()

    lane.failure = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await (feed if is_feed else drain)(lane, carry, 3 * PIECE, PIECE)


async def test_wait_for_a_device_is_a_checkpoint():
    with trio.testing.assert_checkpoints():
        await until(lambda: True)


async def test_wait_ends_with_what_is_done_meanwhile(autojump_clock: trio.testing.MockClock):
    """The event of a process that has died may never come."""
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        await trio.lowlevel.checkpoint()
        if looks == 3:
            raise trio.ClosedResourceError

    with pytest.raises(trio.ClosedResourceError):
        await until(lambda: False, look)


async def test_wait_looks_less_and_less_often(autojump_clock: trio.testing.MockClock):
    """A computation of seconds costs a thousand looks a second, a copy of a millisecond is noticed within as much."""
    times = list[float]()

    def look() -> bool:
        times.append(trio.current_time())
        return len(times) == 40

    await until(look)
    pauses = [round(after - before, 9) for before, after in itertools.pairwise(times)]
    assert pauses[0] == pytest.approx(limits.CUDA_POLL_SECONDS)
    assert pauses[-1] == pytest.approx(limits.CUDA_POLL_SECONDS_MAX)
    assert pauses == sorted(pauses)
