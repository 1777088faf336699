"""What every transport promises about the end of a link: all that came, then exactly one `link_down`."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from tests.conformance.transports import (
    BACKENDS,
    FRAGMENT,
    KIB,
    MIB,
    Recorder,
    World,
    check_down,
    fill,
    number,
    open_world,
    pattern,
    wait_sent,
)

from trimesh._transport.interface import DownReason, Lane

world = pytest.fixture(params=BACKENDS)(open_world)


async def test_close_sends_what_is_queued_then_ends_both_sides(world: World):
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)
    here_sees = world.start(a)
    await trio.testing.wait_all_tasks_blocked()
    events = fill(here, bytes(FRAGMENT))
    events.append(here.send(b"large", [pattern(2 * MIB)]))

    here.close()

    there_sees = world.start(b)
    await there_sees.wait_down(there)
    await here_sees.wait_down(here)
    check_down(here_sees, here, DownReason.CLOSED)
    check_down(there_sees, there, DownReason.CLOSED)
    assert len(there_sees.messages) == len(events)
    assert there_sees.messages[-1].contents == [pattern(2 * MIB)]
    await wait_sent(events)


async def test_close_of_both_sides_at_once_loses_nothing(world: World):
    here, there, here_sees, there_sees = world.pair()
    body = pattern(2 * MIB)
    events = [link.send(b"last", [body]) for link in (here, there)]

    here.close()
    there.close()

    await here_sees.wait_down(here)
    await there_sees.wait_down(there)
    check_down(here_sees, here, DownReason.CLOSED)
    check_down(there_sees, there, DownReason.CLOSED)
    assert [message.contents for message in here_sees.messages + there_sees.messages] == [[body], [body]]
    await wait_sent(events)


async def test_close_twice_is_close_once(world: World):
    here, there, here_sees, there_sees = world.pair()

    here.close()
    here.close()

    await here_sees.wait_down(here)
    await there_sees.wait_down(there)
    here.close()
    there.close()
    await trio.testing.wait_all_tasks_blocked()
    check_down(here_sees, here, DownReason.CLOSED)
    check_down(there_sees, there, DownReason.CLOSED)


async def test_send_after_close_is_dropped(world: World):
    here, there, _, there_sees = world.pair()
    here.send(b"before")

    here.close()

    assert here.send(b"after", [bytes(MIB)]) is None
    assert here.send(b"after", lane=Lane.CONTROL) is None
    await there_sees.wait_down(there)
    assert there_sees.heads() == [b"before"]


async def test_abort_tells_the_peer_and_not_this_side(world: World):
    here, there, here_sees, there_sees = world.pair()
    here.send(b"hello")
    await there_sees.wait_messages(1)

    here.abort()
    here.abort()

    assert here.send(b"after", [bytes(MIB)]) is None
    await there_sees.wait_down(there)
    await trio.testing.wait_all_tasks_blocked()
    check_down(there_sees, there, DownReason.EOF)
    assert here_sees.downs == []
    assert there_sees.heads() == [b"hello"]


async def test_abort_inside_the_handler_is_the_last_it_sees(world: World):
    here, there, _, there_sees = world.pair()
    there_sees.react = lambda _message: there.abort()

    for head in number(100):
        here.send(head)

    await there_sees.wait_messages(1)
    await trio.testing.wait_all_tasks_blocked()
    assert there_sees.heads() == [b"0"]
    assert there_sees.downs == []


async def test_abort_after_close_ends_at_once(world: World):
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)
    here_sees = world.start(a)
    await trio.testing.wait_all_tasks_blocked()
    events = fill(here, bytes(FRAGMENT))
    here.close()

    here.abort()

    await wait_sent(events)
    there_sees = world.start(b)
    await there_sees.wait_down(there)
    assert here_sees.downs == []
    assert there_sees.heads() == [i.to_bytes(8, "big") for i in range(len(there_sees.messages))]
    assert len(there_sees.messages) < len(events)
    check_down(there_sees, there, DownReason.EOF)


@pytest.mark.parametrize("size", [0, 10 * KIB, 200 * KIB])
async def test_peer_that_vanishes_is_down_once_after_all_that_came(world: World, size: int):
    """Complete messages in order, then one `link_down`; never a torn one."""
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)
    here_sees = world.start(a)
    there.send(b"up")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(b.run, Recorder())
        await here_sees.wait_messages(1)
        nursery.cancel_scope.cancel()
    here_sees.messages.clear()
    for head in number(50):
        there.send(head, [pattern(size, seed=int(head))])

    b.close()

    await here_sees.wait_down(here)
    check_down(here_sees, here, DownReason.EOF)
    assert here_sees.heads() == number(len(here_sees.messages))
    assert all(message.contents == [pattern(size, seed=int(message.head))] for message in here_sees.messages)
    assert here.send(b"nobody hears", [bytes(MIB)]) is None


async def test_end_of_one_link_leaves_the_others(world: World):
    a, b, c = world.transport(), world.transport(), world.transport()
    (to_b, _), (to_c, _) = world.connect(a, b), world.connect(a, c)
    a_sees, c_sees = world.start(a), world.start(c)
    world.start(b)

    to_b.abort()

    to_c.send(b"still here")
    assert [message.head for message in await c_sees.wait_messages(1)] == [b"still here"]
    assert a_sees.downs == []
