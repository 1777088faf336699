"""What is done with the pieces of a transfer at the end that is no device: carried from a buffer, or copied on a host.

The device's end is a lane of host memory, which is as slow as it likes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

import pytest
import trio
from tests.conformance.vault import Vault, pattern
from tests.rdma.slow_lane import SlowLane

from trimesh import Isolate, ProcDied, RDMABuffer, limits, this_host
from trimesh._runtime.life.current import current_proc
from trimesh._transport.interface import TransferKind
from trimesh.rdma.memory.device import Step, drain, feed
from trimesh.rdma.memory.device_transfer import by_carrier, on_host
from trimesh.rdma.memory.local import memory_of

pytestmark = pytest.mark.real

PIECE = 2 * limits.INLINE_BYTES_MAX
SIZE = 5 * PIECE + 3


def by_buffer(buffer: RDMABuffer, kind: TransferKind, lane: SlowLane) -> Step:
    return by_carrier(current_proc().bulk, buffer.handle, kind, lane.spans)


def and_first(do: Callable[[], Awaitable[object]], at: int, step: Step) -> Step:
    """Return a step that does something else before the piece that starts `at`."""

    async def both(place: int, start: int, stop: int) -> None:
        if start == at:
            await do()
        await step(place, start, stop)

    return both


@pytest.mark.parametrize("allocated", [True, False])
async def test_pieces_of_a_buffer_are_carried(allocated: bool) -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault, SIZE + 100, allocated=allocated)
        part = (await vault.handle.call_one())[7 : 7 + SIZE]
        lane = SlowLane(bytearray(SIZE), is_feed=True, piece=PIECE)
        await feed(lane, by_buffer(part, TransferKind.READ, lane), SIZE, PIECE)
        assert lane.memory == pattern(SIZE + 100)[7 : 7 + SIZE]
        lane = SlowLane(bytearray(pattern(SIZE, 5)), is_feed=False, piece=PIECE)
        await drain(lane, by_buffer(part, TransferKind.WRITE, lane), SIZE, PIECE)
        assert await vault.look.call_one(7, 7 + SIZE) == pattern(SIZE, 5)
        assert await vault.look.call_one(0, 7) == pattern(7)


@pytest.mark.parametrize("is_feed", [True, False])
async def test_buffer_is_revoked_between_pieces(is_feed: bool) -> None:
    """N4: and the lane is left with nothing under way."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault, SIZE)
        handle = await vault.handle.call_one()
        lane = SlowLane(bytearray(SIZE), is_feed=is_feed, piece=PIECE)
        step = by_buffer(handle, TransferKind.READ if is_feed else TransferKind.WRITE, lane)
        with pytest.raises(trio.ClosedResourceError, match="revoked"):
            await (feed if is_feed else drain)(lane, and_first(vault.revoke.call_one, 2 * PIECE, step), SIZE, PIECE)
        assert not lane.pending


@pytest.mark.parametrize("is_feed", [True, False])
async def test_owner_dies_between_pieces(is_feed: bool) -> None:
    """BK-2"""
    async with this_host().spawn_procs({"gpus": 1}, supervision=Isolate()) as procs:
        vault = await procs.spawn("vault", Vault, SIZE)
        handle = await vault.handle.call_one()

        async def kill() -> None:
            pidfd = os.pidfd_open(handle.owner.pid)  # afterwards it may be gone and reaped
            os.kill(handle.owner.pid, signal.SIGKILL)
            await trio.lowlevel.wait_readable(pidfd)
            os.close(pidfd)

        lane = SlowLane(bytearray(SIZE), is_feed=is_feed, piece=PIECE)
        step = by_buffer(handle, TransferKind.READ if is_feed else TransferKind.WRITE, lane)
        with pytest.raises(ProcDied):
            await (feed if is_feed else drain)(lane, and_first(kill, 2 * PIECE, step), SIZE, PIECE)
        assert not lane.pending


async def test_pieces_are_copied_on_the_host() -> None:
    """Large and small ones; the memory may be read-only if it is read."""
    async with this_host().spawn_procs({"gpus": 1}), RDMABuffer(bytearray(8)) as buffer:
        bulk, handle = current_proc().bulk, buffer.handle
        found = bytearray(SIZE)
        lane = SlowLane(bytearray(pattern(SIZE)), is_feed=False, piece=PIECE)
        await drain(lane, on_host(bulk, handle, TransferKind.READ, lane.spans, memory_of(found, "a test")), SIZE, PIECE)
        assert found == pattern(SIZE)
        lane = SlowLane(bytearray(SIZE), is_feed=True, piece=PIECE)
        source = memory_of(pattern(SIZE, 4), "a test")
        await feed(lane, on_host(bulk, handle, TransferKind.WRITE, lane.spans, source), SIZE, PIECE)
        assert lane.memory == pattern(SIZE, 4)


async def test_copy_on_the_host_ends_when_the_buffer_is_revoked() -> None:
    """N4: who copies looks at the grant after each piece."""
    async with this_host().spawn_procs({"gpus": 1}):
        buffer = RDMABuffer(bytearray(8))
        lane = SlowLane(bytearray(SIZE), is_feed=False, piece=PIECE)
        target = memory_of(bytearray(SIZE), "a test")
        step = on_host(current_proc().bulk, buffer.handle, TransferKind.READ, lane.spans, target)
        with pytest.raises(trio.ClosedResourceError, match="revoked"):
            await drain(lane, and_first(buffer.aclose, 2 * PIECE, step), SIZE, PIECE)
        assert not lane.pending
