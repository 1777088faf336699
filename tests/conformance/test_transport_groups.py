"""What every transport promises about groups: one cast, in order, at every member that is up."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from tests.conformance.transports import (
    BACKENDS,
    FRAGMENT,
    MIB,
    SIZES,
    Recorder,
    World,
    open_world,
    pattern,
    wait_sent,
)

from trimesh import limits
from trimesh._transport.interface import Link, Transport
from trimesh.errors import LimitExceeded

world = pytest.fixture(params=BACKENDS)(open_world)


def star(world: World, count: int) -> tuple[Transport, list[Link], list[Recorder]]:
    """One running transport joined to `count` running ones: its links, and what the others see."""
    centre = world.transport()
    others = [world.transport() for _ in range(count)]
    links = [world.connect(centre, other)[0] for other in others]
    world.start(centre)
    return centre, links, [world.start(other) for other in others]


async def test_cast_reaches_every_member_in_order_with_unicasts(world: World):
    """S01: through every verb."""
    centre, links, sees = star(world, 3)
    group = centre.define_group(links)

    events = []
    for i in range(300):
        body = pattern(random.Random(i).choice((0, 500, 80_000)), seed=i)
        events.append(group.cast(b"cast %d" % i, [body]))
        events.extend(link.send(b"unicast %d" % i) for link in links)

    expected = [b"%s %d" % (kind, i) for i in range(300) for kind in (b"cast", b"unicast")]
    for recorder in sees:
        await recorder.wait_messages(600)
        assert recorder.heads() == expected
        for i, message in enumerate(recorder.messages[::2]):
            assert message.contents == [pattern(random.Random(i).choice((0, 500, 80_000)), seed=i)]
    await wait_sent(events)


@pytest.mark.parametrize("size", SIZES[:-1])
async def test_cast_arrives_whole(world: World, size: int):
    centre, links, sees = star(world, 4)

    await wait_sent([centre.define_group(links).cast(b"cast", [pattern(size), b"", pattern(size, seed=1)])])

    for recorder in sees:
        (message,) = await recorder.wait_messages(1)
        assert message.contents == [pattern(size), b"", pattern(size, seed=1)]


async def test_overlapping_groups_keep_order_at_the_member_of_both(world: World):
    centre, links, sees = star(world, 3)
    left, right = centre.define_group(links[:2]), centre.define_group(links[1:])

    for i in range(200):
        left.cast(b"L%d" % i)
        right.cast(b"R%d" % i)

    lefts, rights = [b"L%d" % i for i in range(200)], [b"R%d" % i for i in range(200)]
    await sees[0].wait_messages(200)
    await sees[1].wait_messages(400)
    await sees[2].wait_messages(200)
    assert sees[0].heads() == lefts
    assert sees[1].heads() == [head for pair in zip(lefts, rights, strict=True) for head in pair]
    assert sees[2].heads() == rights


async def test_cast_waits_for_its_slowest_member_and_others_do_not(world: World):
    centre, quick, slow = world.transport(), world.transport(), world.transport()
    links = [world.connect(centre, other)[0] for other in (quick, slow)]
    world.start(centre)
    quick_sees = world.start(quick)
    await trio.testing.wait_all_tasks_blocked()
    group = centre.define_group(links)

    bodies = [pattern(FRAGMENT)] * 640  # what is larger may be copied at once, wherever its readers are

    event = group.cast(b"cast", bodies)

    await quick_sees.wait_messages(1)
    assert event is not None
    assert not event.is_set()
    slow_sees = world.start(slow)
    await wait_sent([event])
    (message,) = await slow_sees.wait_messages(1)
    assert message.contents == quick_sees.messages[0].contents == bodies


async def test_cast_passes_over_links_that_are_down(world: World):
    centre, links, sees = star(world, 3)
    group = centre.define_group(links)
    links[1].abort()

    await wait_sent([group.cast(b"cast", [b"body"])])

    for recorder in (sees[0], sees[2]):
        assert [message.contents for message in await recorder.wait_messages(1)] == [[b"body"]]
    assert sees[1].messages == []


async def test_cast_to_nobody_is_sent_at_once(world: World):
    centre, links, _ = star(world, 1)
    links[0].abort()

    assert centre.define_group(links).cast(b"cast", [bytes(MIB)]) is None
    assert centre.define_group([]).cast(b"cast") is None


async def test_closed_group_leaves_its_links(world: World):
    centre, links, sees = star(world, 2)
    group = centre.define_group(links)
    group.cast(b"cast")

    group.close()

    links[0].send(b"unicast")
    await sees[0].wait_messages(2)
    assert sees[0].heads() == [b"cast", b"unicast"]


async def test_group_refuses_what_is_no_link_of_its_transport(world: World):
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)

    with pytest.raises(ValueError, match="own transport"):
        a.define_group([here, there])


async def test_cast_refuses_what_is_above_its_limits(world: World):
    centre, links, _ = star(world, 2)

    with pytest.raises(LimitExceeded):
        centre.define_group(links).cast(bytes(limits.HEAD_BYTES_MAX + 1))
