"""How bytes go between a device and what carries them: in pieces, a copy and a carrier at work at the same time.

There are two *places*, pieces of pinned memory as a rule. While a carrier fills the one, the device is given what is in
the other.

    ST-1 A place is not touched while a copy to or from it is under way.
    ST-2 A transfer is left, in whatever way, with no copy under way; if one does not end, its memory is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from trimesh import limits

if TYPE_CHECKING:
    from trimesh.rdma.memory.device import DeviceLane

PLACES: Final = 2

Step = Callable[[int, int, int], Awaitable[object]]
"""What is done with a piece at the other end: called with the place, and where the piece starts and stops."""


def pieces(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return start and stop of each piece."""
    return [(start, min(nbytes, start + size)) for start in range(0, nbytes, size)]


async def until(is_done: Callable[[], bool], meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
    """Wait for a device, which does not tell: look again and again. A checkpoint, cancellable.

    Args:
        is_done: Whether the wait is over.
        meanwhile: Done after each look; may raise.
    """
    pause = limits.CUDA_POLL_SECONDS
    await trio.lowlevel.checkpoint()
    while not is_done():
        await trio.sleep(pause)
        if meanwhile is not None:
            await meanwhile()
        pause = min(2 * pause, limits.CUDA_POLL_SECONDS_MAX)


async def feed(lane: DeviceLane, step: Step, nbytes: int, size: int) -> None:
    """Bring bytes to the device: `step` fills a place, the lane empties it."""
    try:
        for number, (start, stop) in enumerate(pieces(nbytes, size)):
            place = number % PLACES
            await _until_done(lane, place)
            await step(place, start, stop)
            lane.begin(place, start, stop)
        await _until_all_done(lane)
    except BaseException:
        await _end(lane)
        raise


async def drain(lane: DeviceLane, step: Step, nbytes: int, size: int) -> None:
    """Bring bytes from the device: the lane fills a place, `step` empties it."""
    cut = pieces(nbytes, size)
    try:
        lane.begin(0, *cut[0])
        for number, (start, stop) in enumerate(cut):
            place = number % PLACES
            if number + 1 < len(cut):  # that place is empty: its last step has ended
                lane.begin((number + 1) % PLACES, *cut[number + 1])
            await _until_done(lane, place)
            await step(place, start, stop)
    except BaseException:
        await _end(lane)
        raise


async def _until_done(lane: DeviceLane, place: int) -> None:
    await until(lambda: lane.is_done(place))


async def _until_all_done(lane: DeviceLane) -> None:
    for place in range(PLACES):
        await _until_done(lane, place)


async def _end(lane: DeviceLane) -> None:
    """See ST-2."""
    with trio.move_on_after(limits.CUDA_END_SECONDS, shield=True) as scope, suppress(RuntimeError):
        await _until_all_done(lane)  # a device that has failed copies nothing any more
    if scope.cancelled_caught:
        lane.keep()
