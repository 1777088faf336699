"""What every transport promises to the runtime: whole messages, in the order of their lane."""

from __future__ import annotations

import array
import random

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conformance.transports import (
    BACKENDS,
    FRAGMENT,
    MIB,
    SIZES,
    Recorder,
    World,
    fill,
    number,
    open_world,
    pattern,
    wait_sent,
)
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh._transport.interface import Lane, Link
from trimesh.errors import LimitExceeded

world = pytest.fixture(params=BACKENDS)(open_world)


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_message_arrives_whole(world: World, size: int):
    here, _, _, there_sees = world.pair()
    body = pattern(size)

    await wait_sent([here.send(b"head", [body])])

    (message,) = await there_sees.wait_messages(1)
    assert message.head == b"head"
    assert message.contents == [body]


@pytest.mark.parametrize("size", [0, 1, 1000, limits.HEAD_BYTES_MAX])
@pytest.mark.parametrize("lane", Lane)
async def test_head_arrives_whole(world: World, lane: Lane, size: int):
    here, _, _, there_sees = world.pair()

    here.send(pattern(size), lane=lane)

    (message,) = await there_sees.wait_messages(1)
    assert (message.head, message.bodies) == (pattern(size), [])


async def test_message_of_the_largest_head_and_bodies_arrives_whole(world: World):
    here, _, _, there_sees = world.pair()
    bodies = [pattern(size, seed=size) for size in (0, 1, 20_000, FRAGMENT, 0, 3 * FRAGMENT + 1, 0)]

    await wait_sent([here.send(pattern(limits.HEAD_BYTES_MAX), bodies)])

    (message,) = await there_sees.wait_messages(1)
    assert message.head == pattern(limits.HEAD_BYTES_MAX)
    assert message.contents == bodies


@pytest.mark.parametrize("head_size", [*range(9), limits.HEAD_BYTES_MAX])
async def test_one_body_that_just_fits_a_frame_or_just_does_not_arrives_whole(world: World, head_size: int):
    here, _, _, there_sees = world.pair()
    head = pattern(head_size)
    bodies = [pattern(FRAGMENT - head_size + more) for more in (-24, -17, -16, -15, -9, -8, -7, -1, 0, 1)]

    await wait_sent([here.send(head, [body]) for body in bodies])

    messages = await there_sees.wait_messages(len(bodies))
    assert [(message.head, message.contents) for message in messages] == [(head, [body]) for body in bodies]


async def test_message_of_many_bodies_keeps_their_order_and_sizes(world: World):
    here, _, _, there_sees = world.pair()
    bodies = [pattern(i % 101, seed=i) for i in range(limits.BODIES_MAX)]

    await wait_sent([here.send(b"many", bodies)])

    (message,) = await there_sees.wait_messages(1)
    assert message.contents == bodies


async def test_bodies_may_be_any_contiguous_buffer(world: World):
    here, _, _, there_sees = world.pair()
    numbers = array.array("d", range(10))
    grid = memoryview(bytes(range(12))).cast("B", (3, 4))
    bodies = [b"bytes", bytearray(b"bytearray"), memoryview(b"a view")[2:], memoryview(numbers), grid, b""]

    await wait_sent([here.send(b"kinds", bodies), *[here.send(b"alone", [body]) for body in bodies]])

    message, *others = await there_sees.wait_messages(1 + len(bodies))
    assert message.contents == [b"bytes", b"bytearray", b"view", numbers.tobytes(), bytes(range(12)), b""]
    assert [other.contents for other in others] == [[content] for content in message.contents]
    assert {(body.format, body.ndim) for one in (message, *others) for body in one.bodies} == {("B", 1)}


@pytest.mark.parametrize(
    ("head", "bodies", "lane", "error"),
    [
        (bytes(limits.HEAD_BYTES_MAX + 1), [], Lane.DATA, LimitExceeded),
        (bytes(limits.HEAD_BYTES_MAX + 1), [], Lane.CONTROL, LimitExceeded),
        (b"", [b""] * (limits.BODIES_MAX + 1), Lane.DATA, LimitExceeded),
        (b"", [b"x"], Lane.CONTROL, ValueError),
    ],
)
async def test_send_refuses_what_is_above_its_limits(world: World, head, bodies, lane, error):
    """And the link goes on as if nothing had been sent."""
    here, _, _, there_sees = world.pair()

    with pytest.raises(error):
        here.send(head, bodies, lane=lane)

    here.send(b"next")
    assert [message.head for message in await there_sees.wait_messages(1)] == [b"next"]


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", Lane)
async def test_lane_keeps_order(world: World, lane: Lane):
    """S01."""
    here, _, _, there_sees = world.pair()
    sizes = random.Random(1)

    events = [
        here.send(head, [bytes(sizes.choice((0, 100, 70_000)))] if lane is Lane.DATA else [], lane=lane)
        for head in number(1000)
    ]

    await there_sees.wait_messages(1000)
    await wait_sent(events)
    assert there_sees.heads() == number(1000)


async def test_control_overtakes_data_that_waits(world: World):
    """S07: the peer reads nothing, DATA is queued, CONTROL gets past what is queued."""
    a, b = world.transport(), world.transport()
    here, _ = world.connect(a, b)
    world.start(a)
    await trio.testing.wait_all_tasks_blocked()
    events = fill(here, bytes(FRAGMENT))

    here.send(b"control", lane=Lane.CONTROL)

    there_sees = world.start(b)
    await there_sees.wait_messages(len(events) + 1)
    await wait_sent(events)
    heads = there_sees.heads()
    assert heads.index(b"control") <= len(events) // 2
    heads.remove(b"control")
    assert heads == [i.to_bytes(8, "big") for i in range(len(events))]


async def test_control_overtakes_the_rest_of_a_large_message(world: World):
    """S07: 40 MiB do not delay a cancel."""
    here, _, _, there_sees = world.pair()

    event = here.send(b"large", [bytes(40 * MIB)])
    here.send(b"control", lane=Lane.CONTROL)

    await there_sees.wait_messages(2)
    await wait_sent([event])
    assert there_sees.heads() == [b"control", b"large"]


async def test_control_passes_while_data_does_not(world: World):
    """S07: with DATA full, CONTROL still gets through to a peer that begins to read, and its answer comes back."""
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)
    here_sees = world.start(a)
    await trio.testing.wait_all_tasks_blocked()
    events = fill(here, bytes(FRAGMENT))
    for head in number(50):
        here.send(head, lane=Lane.CONTROL)

    there_sees = world.start(b)
    there_sees.react = lambda message: there.send(b"re:" + message.head, lane=Lane.CONTROL) and None

    await there_sees.wait_messages(len(events) + 50)
    await here_sees.wait_messages(len(events) + 50)
    await wait_sent(events)
    assert [head for head in there_sees.heads() if head in number(50)] == number(50)
    assert here_sees.heads() == [b"re:" + head for head in there_sees.heads()]


async def test_ten_thousand_small_messages_pass_both_ways(world: World):
    here, there, here_sees, there_sees = world.pair()
    heads = number(10_000)

    async def send(link: Link) -> None:
        for head in heads:
            event = link.send(head)
            if event is not None:
                await event.wait()

    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, here)
            nursery.start_soon(send, there)
            await there_sees.wait_messages(10_000)
            await here_sees.wait_messages(10_000)
    assert there_sees.heads() == here_sees.heads() == heads


async def test_handler_may_answer_from_inside(world: World):
    here, there, here_sees, there_sees = world.pair()
    there_sees.react = lambda message: there.send(message.head, message.bodies) and None
    here_sees.react = lambda message: (
        int(message.head) < 1000 and here.send(b"%d" % (int(message.head) + 1), message.bodies) and None
    )

    here.send(b"1", [b"ball"])

    await here_sees.wait_messages(1000)
    assert here_sees.heads() == number(1001)[1:]
    assert all(message.contents == [b"ball"] for message in here_sees.messages)


async def test_many_transports_exchange_at_once(world: World):
    """Each of five processes talks to each other; nothing is mixed up."""
    transports = [world.transport() for _ in range(5)]
    ends: dict[tuple[int, int], Link] = {}
    for i in range(5):
        for j in range(i):
            ends[i, j], ends[j, i] = world.connect(transports[i], transports[j])
    sees = [world.start(transport) for transport in transports]

    events = [link.send(b"%d>%d:%d" % (i, j, n), [bytes(n)]) for n in range(100) for (i, j), link in ends.items()]

    for j, recorder in enumerate(sees):
        await recorder.wait_messages(400)
        for i in set(range(5)) - {j}:
            assert recorder.heads(ends[j, i]) == [b"%d>%d:%d" % (i, j, n) for n in range(100)]
    await wait_sent(events)


async def test_flush_wakes_a_peer_when_the_sender_does_not_run(world: World):
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)
    there_sees = world.start(b)
    here_sees = Recorder()
    async with trio.open_nursery() as nursery:  # run until the link stands, then not any more
        nursery.start_soon(a.run, here_sees)
        there.send(b"up")
        await here_sees.wait_messages(1)
        nursery.cancel_scope.cancel()

    here.send(b"hello")
    a.flush()

    assert [message.head for message in await there_sees.wait_messages(1)] == [b"hello"]


# ---- any schedule ----------------------------------------------------------------------------------------------------


ACTIONS = st.tuples(
    st.sampled_from(["send", "send", "control", "cast", "pause"]),
    st.integers(0, 1),
    st.lists(st.sampled_from([0, 1, 100, 5000, FRAGMENT, FRAGMENT + 1, limits.RING_BYTES + 1]), max_size=3),
)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, max_size=30), st.booleans())
def test_any_schedule_delivers_every_lane_in_order(name: str, actions: list[tuple[str, int, list[int]]], late: bool):
    """Two ends send what they like, one may begin to read late: each sees exactly what the other sent, lane by lane."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = World(backend, nursery)
            transports = [world.transport(), world.transport()]
            links = world.connect(*transports)
            groups = [transport.define_group([link]) for transport, link in zip(transports, links, strict=True)]
            sees = {0: world.start(transports[0])}
            if not late:
                sees[1] = world.start(transports[1])
            sent: list[dict[Lane, list[tuple[bytes, list[bytes]]]]] = [{lane: [] for lane in Lane} for _ in range(2)]
            events = []
            for i, (kind, side, sizes) in enumerate(actions):
                head, bodies = b"%d" % i, [pattern(size, seed=i) for size in sizes]
                if kind == "pause":
                    await trio.testing.wait_all_tasks_blocked()
                elif kind == "control":
                    events.append(links[side].send(head, lane=Lane.CONTROL))
                    sent[side][Lane.CONTROL].append((head, []))
                else:
                    send = links[side].send if kind == "send" else groups[side].cast
                    events.append(send(head, bodies))
                    sent[side][Lane.DATA].append((head, bodies))
            if late:
                sees[1] = world.start(transports[1])
            for side in range(2):
                control, data = sent[side][Lane.CONTROL], sent[side][Lane.DATA]
                messages = await sees[1 - side].wait_messages(len(control) + len(data))
                seen = [(message.head, message.contents) for message in messages]
                assert [message for message in seen if message in control] == control
                assert [message for message in seen if message not in control] == data
            await wait_sent(events)
            nursery.cancel_scope.cancel()

    backend = BACKENDS[name]()
    try:
        trio.run(main)
    finally:
        backend.close()
