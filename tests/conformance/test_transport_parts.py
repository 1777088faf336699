"""Large messages and those that pass them: what every transport over processes promises (`Link.send`, flows)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.transports import BACKENDS, MIB, World, open_world, pattern, wait_sent

from trimesh import limits
from trimesh._transport.interface import DownReason

any_world = pytest.fixture(params=BACKENDS)(open_world)
native = pytest.fixture(params=[name for name in BACKENDS if name != "memory"])(open_world)

LARGE = 24 * MIB


@pytest.mark.parametrize("make", [bytes, bytearray])
async def test_large_message_arrives_as_it_was_sent(any_world: World, make: type):
    here, _, _, there_sees = any_world.pair()
    bodies = [b"small", make(pattern(LARGE)), b"", bytearray(pattern(MIB)), b"last"]

    await wait_sent([here.send(b"head", bodies)])

    (message,) = await there_sees.wait_messages(1)
    assert message.head == b"head"
    assert message.contents == [bytes(body) for body in bodies]
    assert all(not got.readonly for got, body in zip(message.bodies, bodies, strict=True) if type(body) is bytearray)


async def test_message_of_another_flow_passes_a_large_one(native: World):
    here, _, _, there_sees = native.pair()
    event = here.send(b"large", [bytes(LARGE)], flow=5)

    here.send(b"small", flow=6)

    await there_sees.wait_messages(2)
    await wait_sent([event])
    assert there_sees.heads() == [b"small", b"large"]


@pytest.mark.parametrize(("large", "small"), [(5, 5), (0, 6), (5, 0), (0, 0)])
async def test_other_messages_keep_their_order(any_world: World, large: int, small: int):
    here, _, _, there_sees = any_world.pair()

    events = [
        here.send(b"1", flow=small),
        here.send(b"2", [bytes(LARGE)], flow=large),
        here.send(b"3", flow=small),
        here.send(b"4", [bytes(100)], flow=small),
    ]

    await there_sees.wait_messages(4)
    await wait_sent(events)
    assert there_sees.heads() == [b"1", b"2", b"3", b"4"]


async def test_message_behind_a_held_one_waits_with_it(native: World):
    here, _, _, there_sees = native.pair()

    events = [here.send(b"1", [bytes(LARGE)], flow=5), here.send(b"2", flow=0), here.send(b"3", flow=6)]

    await there_sees.wait_messages(3)
    await wait_sent(events)
    assert there_sees.heads() == [b"1", b"2", b"3"]


async def test_large_messages_of_several_flows_arrive_whole(native: World):
    here, _, _, there_sees = native.pair()
    bodies = {bytes([flow]): pattern(3 * MIB, seed=flow) for flow in range(1, limits.CHUNKED_MAX + 5)}

    await wait_sent([here.send(head, [body], flow=head[0]) for head, body in bodies.items()])

    messages = await there_sees.wait_messages(len(bodies))
    assert {message.head: message.contents[0] for message in messages} == bodies
    statistics = here.statistics()
    assert statistics.messages_sent == len(bodies)
    assert statistics.queued_bytes == 0


async def test_goodbye_comes_after_large_messages(native: World):
    here, there, here_sees, there_sees = native.pair()
    here.send(b"large", [bytes(LARGE)], flow=5)
    here.send(b"held", flow=5)

    here.close()

    assert (await there_sees.wait_down(there)).reason is DownReason.CLOSED
    assert there_sees.heads() == [b"large", b"held"]
    there.close()
    assert (await here_sees.wait_down(here)).reason is DownReason.CLOSED


async def test_link_that_ends_lets_go_of_large_messages(native: World):
    here, there, _, there_sees = native.pair()
    events = [here.send(b"large", [bytes(LARGE)], flow=5), here.send(b"held", [bytes(10)], flow=5)]

    here.abort()

    await wait_sent(events)
    await there_sees.wait_down(there)
    assert there_sees.heads() == []


async def test_large_message_to_a_group_arrives_at_all(native: World):
    transport = native.transport()
    native.start(transport)
    ends = [native.connect(transport, native.transport()) for _ in range(2)]
    recorders = [native.start(there.transport) for _, there in ends]
    body = pattern(limits.CHUNKED_BYTES_MIN)
    group = transport.define_group([here for here, _ in ends])

    await wait_sent([group.cast(b"head", [body], flow=5)])

    with trio.fail_after(60):
        for recorder in recorders:
            (message,) = await recorder.wait_messages(1)
            assert message.contents == [body]
