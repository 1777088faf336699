"""What every transport promises about memory: whose it is, how much waits, what is counted and given back."""

from __future__ import annotations

import gc
import os

import pytest
import trio
import trio.testing
from tests.conformance.transports import (
    BACKENDS,
    FRAGMENT,
    KIB,
    MIB,
    World,
    fill,
    open_world,
    pattern,
    wait_sent,
)

from trimesh import limits
from trimesh._transport.interface import Lane

world = pytest.fixture(params=BACKENDS)(open_world)


# ---- ownership of memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1000, FRAGMENT, 4 * limits.RING_BYTES])
async def test_bodies_are_writable_and_private(world: World, size: int):
    """V1: a write is seen by no other reader, not by the sender, not by the next message."""
    a, b, c = world.transport(), world.transport(), world.transport()
    links = [world.connect(a, b)[0], world.connect(a, c)[0]]
    world.start(a)
    first, second = world.start(b), world.start(c)
    body = bytearray(pattern(size))

    for head in (b"1", b"2"):
        await wait_sent([link.send(head, [body]) for link in links])
        await wait_sent([a.define_group(links).cast(head + b"g", [body])])
        for recorder in (first, second):
            message, cast = (await recorder.wait_messages(2))[-2:]
            assert [message.contents, cast.contents] == [[pattern(size)], [pattern(size)]]
            for view in (*message.bodies, *cast.bodies):
                view[:] = bytes(size)
            recorder.messages.clear()
        assert body == pattern(size)


@pytest.mark.parametrize("size", [1, FRAGMENT, 4 * limits.RING_BYTES])
async def test_sender_may_change_its_buffers_once_they_are_given_back(world: World, size: int):
    here, _, _, there_sees = world.pair()
    body = bytearray(pattern(size))

    await wait_sent([here.send(b"1", [body])])
    body[:] = bytes(size)
    await wait_sent([here.send(b"2", [body])])

    assert [message.contents for message in await there_sees.wait_messages(2)] == [[pattern(size)], [bytes(size)]]


async def test_bodies_outlive_later_messages_and_the_link(world: World):
    here, there, _, there_sees = world.pair()
    for i in range(200):
        await wait_sent([here.send(b"%d" % i, [pattern(3000, seed=i), pattern(FRAGMENT * 2, seed=-i)])])
    here.close()
    await there_sees.wait_down(there)

    for i, message in enumerate(there_sees.messages):
        assert message.contents == [pattern(3000, seed=i), pattern(FRAGMENT * 2, seed=-i)]


# ---- a peer that does not read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10 * KIB, FRAGMENT, 4 * MIB])
async def test_send_returns_an_event_when_the_peer_does_not_read(world: World, size: int):
    """It is set when the buffers have been copied, and nothing was lost or changed."""
    a, b = world.transport(), world.transport()
    here, _ = world.connect(a, b)
    world.start(a)
    body = pattern(size)
    await trio.testing.wait_all_tasks_blocked()

    events = fill(here, body)
    await trio.testing.wait_all_tasks_blocked()
    assert events[-1] is not None
    assert not events[-1].is_set()
    assert here.statistics().queued_bytes > 0

    there_sees = world.start(b)
    await wait_sent(events)
    await there_sees.wait_messages(len(events))
    assert [int.from_bytes(head, "big") for head in there_sees.heads()] == list(range(len(events)))
    assert all(message.contents == [body] for message in there_sees.messages)
    assert here.statistics().queued_bytes == 0


@pytest.mark.parametrize("who", ["here", "there"])
async def test_event_is_set_when_the_link_goes_down(world: World, who: str):
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)
    world.start(a)
    await trio.testing.wait_all_tasks_blocked()
    events = fill(here, bytes(FRAGMENT))
    large = here.send(b"large", [bytes(4 * MIB)])
    cast = a.define_group([here]).cast(b"cast", [bytes(FRAGMENT)])

    {"here": here, "there": there}[who].abort()

    await wait_sent([*events, large, cast])


# ---- counters and resources ------------------------------------------------------------------------------------------


async def test_statistics_count_messages_and_bytes(world: World):
    here, there, _, there_sees = world.pair()

    await wait_sent([here.send(b"12345", [bytes(100), bytes(FRAGMENT * 3)]), here.send(b"", lane=Lane.CONTROL)])
    await there_sees.wait_messages(2)

    sent, received = here.statistics(), there.statistics()
    assert (sent.messages_sent, sent.bytes_sent) == (2, 105 + FRAGMENT * 3)
    assert (received.messages_received, received.bytes_received) == (2, 105 + FRAGMENT * 3)
    assert (sent.messages_received, received.messages_sent) == (0, 0)
    assert sent.queued_bytes == received.queued_bytes == sent.dropped_frames == received.dropped_frames == 0


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", BACKENDS)
def test_closed_transport_leaves_no_descriptor(name: str):
    """Z01: cancelled in the middle of large transfers, closed twice."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = World(backend, nursery)
            here, there, _, there_sees = world.pair()
            for link in (here, there):
                link.send(b"large", [bytes(40 * MIB)])
            here.send(b"up")
            await there_sees.wait_messages(1)
            nursery.cancel_scope.cancel()
        backend.close()
        backend.close()

    trio.run(trio.lowlevel.checkpoint)  # what trio itself opens once
    gc.collect()  # what earlier tests have dropped closes now, and not meanwhile
    before = descriptors()
    backend = BACKENDS[name]()
    trio.run(main)
    assert descriptors() == before
