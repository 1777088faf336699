"""What the in-memory transport has beyond the contract: slow deliveries, faults, and traps for careless handlers."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing
from tests.conformance.transports import Received, Recorder, fill, wait_sent

from trimesh import limits
from trimesh._transport.in_memory.transport import Delivery, MemoryLink, MemoryNetwork, MemoryTransport
from trimesh._transport.interface import DownReason, Lane, Link
from trimesh.errors import LimitExceeded, TrimeshInternalError
from trimesh.ids import ProcId


@attrs.frozen
class Latency(Delivery):
    """Seconds under way, by lane; those of one source may differ."""

    control: float = 0.0
    data: float = 0.0
    slow_source: int = 0

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        if self.slow_source and source != self.slow_source:
            return 0.0
        return self.control if lane is Lane.CONTROL else self.data


@attrs.define(eq=False)
class Clocked(Recorder):
    """A recorder that also notes when."""

    times: list[float] = attrs.field(factory=list)

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        self.times.append(trio.current_time())
        super().received(link, head, bodies)


def two(network: MemoryNetwork) -> tuple[MemoryTransport, MemoryTransport, MemoryLink, MemoryLink]:
    a, b = network.transport(ProcId(1)), network.transport(ProcId(2))
    return a, b, *network.connect(a, b)


async def test_delivery_delays_by_virtual_time(nursery, autojump_clock):
    _, b, here, _ = two(MemoryNetwork(Latency(control=0.25, data=3.0)))
    sees = Clocked()
    nursery.start_soon(b.run, sees)

    here.send(b"data")
    here.send(b"control", lane=Lane.CONTROL)

    await sees.wait_messages(2)
    assert list(zip(sees.heads(), sees.times, strict=True)) == [(b"control", 0.25), (b"data", 3.0)]


async def test_delivery_keeps_order_when_a_later_message_is_quicker(nursery, autojump_clock):
    class Shrinking(Delivery):
        def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
            return 10.0 - size

    _, b, here, there = two(MemoryNetwork(Shrinking()))
    sees = Clocked()
    nursery.start_soon(b.run, sees)

    for size in (1, 5, 9):
        here.send(bytes(size))
    here.close()

    await sees.wait_down(there)
    assert [len(head) for head in sees.heads()] == [1, 5, 9]
    assert sees.times == [9.0, 9.0, 9.0]
    assert trio.current_time() == 10.0  # the goodbye has size 0


async def test_delivery_of_one_process_does_not_slow_the_others(nursery, autojump_clock):
    network = MemoryNetwork(Latency(data=5.0, slow_source=1))
    slow, quick, target = (network.transport(ProcId(i)) for i in (1, 2, 3))
    sees = Clocked()
    nursery.start_soon(target.run, sees)

    network.connect(slow, target)[0].send(b"slow")
    network.connect(quick, target)[0].send(b"quick")

    await sees.wait_messages(2)
    assert list(zip(sees.heads(), sees.times, strict=True)) == [(b"quick", 0.0), (b"slow", 5.0)]


async def test_delivery_delays_what_waited_for_room_from_when_it_left(nursery, autojump_clock):
    _, b, here, _ = two(MemoryNetwork(Latency(data=1.0)))
    sees = Clocked()
    half = bytes(limits.RING_BYTES // 2 + 1)  # one on the wire at a time
    events = [here.send(b"%d" % i, [half]) for i in range(3)]

    nursery.start_soon(b.run, sees)

    await sees.wait_messages(3)
    await wait_sent(events)
    assert sees.times == [1.0, 2.0, 3.0]


async def test_end_of_a_link_takes_as_long_as_a_message(nursery, autojump_clock):
    _, b, here, there = two(MemoryNetwork(Latency(data=2.0)))
    sees = Clocked()
    nursery.start_soon(b.run, sees)
    here.send(b"last words")

    here.abort()

    down = await sees.wait_down(there)
    assert (down.reason, sees.heads(), sees.times, trio.current_time()) == (DownReason.EOF, [b"last words"], [2.0], 2.0)


async def test_severed_link_is_eof_on_both_sides_after_what_was_on_the_wire(nursery):
    network = MemoryNetwork()
    a, b, here, there = two(network)
    a_sees, b_sees = Recorder(), Recorder()
    waiting = fill(here, bytes(limits.RING_BYTES // 2))[-1]
    assert waiting is not None
    assert not waiting.is_set()
    there.send(b"back")

    network.sever(here)
    network.sever(there)

    assert waiting.is_set()
    nursery.start_soon(a.run, a_sees)
    nursery.start_soon(b.run, b_sees)
    assert (await a_sees.wait_down(here)).reason is DownReason.EOF
    assert (await b_sees.wait_down(there)).reason is DownReason.EOF
    assert (len(a_sees.messages), len(b_sees.messages)) == (1, 1)
    network.sever(here)
    await trio.testing.wait_all_tasks_blocked()
    assert (len(a_sees.downs), len(b_sees.downs)) == (1, 1)


async def test_large_message_of_a_vanished_writer_never_arrives(nursery):
    """MT-2: it was on the wire, but not all of it."""
    a, b, here, there = two(MemoryNetwork())
    small, large = here.send(b"small"), here.send(b"large", [bytes(limits.RING_BYTES)])
    assert small is None
    assert large is not None

    a.close()

    sees = Recorder()
    nursery.start_soon(b.run, sees)
    await sees.wait_down(there)
    assert large.is_set()
    assert sees.heads() == [b"small"]


async def test_message_of_another_epoch_is_dropped_and_counted(nursery):
    """R08."""
    network = MemoryNetwork()
    _, b, here, there = two(network)
    sees = Recorder()
    nursery.start_soon(b.run, sees)

    network.inject(there, b"ghost", [b"body"], epoch=ProcId(99))
    network.inject(there, b"ghost", epoch=ProcId(99), lane=Lane.CONTROL)
    here.send(b"alive")

    await sees.wait_messages(1)
    assert sees.heads() == [b"alive"]
    assert there.statistics().dropped_frames == 2
    assert there.statistics().messages_received == 1


@pytest.mark.parametrize("keep", [lambda head: head[1:3], memoryview])
def test_handler_that_keeps_a_head_ends_the_run(keep):
    """MT-1."""
    kept = []

    class Careless(Recorder):
        def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
            kept.append(keep(head))

    async def main() -> None:
        _, b, here, _ = two(MemoryNetwork())
        here.send(b"lent")
        await b.run(Careless())

    with pytest.raises(TrimeshInternalError, match="must not keep a view of the borrowed head"):
        trio.run(main)


async def test_head_is_read_only_and_gone_afterwards(nursery):
    """MT-1."""
    heads = []

    class Keeper(Recorder):
        def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
            assert head.readonly
            heads.append(head)
            super().received(link, head, bodies)

    _, b, here, _ = two(MemoryNetwork())
    sees = Keeper()
    nursery.start_soon(b.run, sees)
    here.send(b"lent")
    await sees.wait_messages(1)

    with pytest.raises(ValueError, match="released"):
        bytes(heads[0])


async def test_links_are_served_in_the_order_in_which_something_came(nursery):
    """MT-3."""
    network = MemoryNetwork()
    target = network.transport(ProcId(1))
    links = [network.connect(network.transport(ProcId(2 + i)), target)[0] for i in range(20)]
    for i in (7, 3, 19, 3, 0, 7):
        links[i].send(b"%d" % i)
    sees = Recorder()

    nursery.start_soon(target.run, sees)

    await sees.wait_messages(6)
    assert sees.heads() == [b"7", b"7", b"3", b"3", b"19", b"0"]


async def test_batch_leaves_what_came_meanwhile_for_the_next(nursery):
    """MT-4: a link that answers itself for ever does not keep the others waiting."""
    network = MemoryNetwork()
    a, b, here, there = two(network)
    other = network.connect(network.transport(ProcId(3)), b)[0]
    sees = Recorder()

    def react(message: Received) -> None:
        if message.link is there and len(sees.messages) < 10:
            here.send(b"again")

    sees.react = react
    here.send(b"first")
    other.send(b"other")

    nursery.start_soon(b.run, sees)

    await sees.wait_messages(10)
    assert sees.heads()[:3] == [b"first", b"other", b"again"]
    a.close()


async def test_link_to_the_own_process_works(nursery):
    network = MemoryNetwork()
    alone = network.transport(ProcId(1))
    here, there = network.connect(alone, alone)
    sees = Recorder()
    nursery.start_soon(alone.run, sees)

    here.send(b"to myself")
    here.close()

    await sees.wait(lambda: len(sees.downs) == 2)
    assert sees.messages[0].link is there
    assert {down.reason for _, down in sees.downs} == {DownReason.CLOSED}


async def test_both_closing_wait_for_the_slower_queue(nursery, autojump_clock):
    """Both said goodbye while much was queued on a slow network: all of it arrives, and no time is spun away."""
    a, b, here, there = two(MemoryNetwork(Latency(data=1.0)))
    a_sees, b_sees = Recorder(), Recorder()
    events = [here.send(b"%d" % i, [bytes(limits.RING_BYTES)]) for i in range(3)]
    events.append(there.send(b"only", [bytes(limits.RING_BYTES)]))
    here.close()
    there.close()

    nursery.start_soon(a.run, a_sees)
    nursery.start_soon(b.run, b_sees)

    await a_sees.wait_down(here)
    await b_sees.wait_down(there)
    await wait_sent(events)
    assert (a_sees.heads(), b_sees.heads()) == ([b"only"], [b"0", b"1", b"2"])
    assert [down.reason for _, down in a_sees.downs + b_sees.downs] == [DownReason.CLOSED] * 2


async def test_message_above_its_limit_is_refused(monkeypatch):
    _, _, here, _ = two(MemoryNetwork())
    monkeypatch.setattr(limits, "MESSAGE_BYTES_MAX", 10)

    with pytest.raises(LimitExceeded, match="MESSAGE_BYTES_MAX was exceeded, got 11"):
        here.send(b"", [b"123456", b"12345"])


async def test_transport_runs_once(nursery):
    network = MemoryNetwork()
    transport = network.transport(ProcId(1))
    nursery.start_soon(transport.run, Recorder())
    await trio.testing.wait_all_tasks_blocked()

    with pytest.raises(trio.BusyResourceError):
        await transport.run(Recorder())


async def test_closed_transport_refuses_to_run_and_to_connect():
    network = MemoryNetwork()
    closed, other = network.transport(ProcId(1)), network.transport(ProcId(2))
    closed.close()

    with pytest.raises(trio.ClosedResourceError):
        await closed.run(Recorder())
    with pytest.raises(trio.ClosedResourceError, match="process 1 is closed"):
        network.connect(other, closed)


def test_process_has_one_transport_at_a_time():
    network = MemoryNetwork()
    first = network.transport(ProcId(1))

    with pytest.raises(ValueError, match="a second one for process 1"):
        network.transport(ProcId(1))
    first.close()
    assert network.transport(ProcId(1)) is not first


def test_same_run_twice_gives_the_same_trace():
    """Under a virtual clock, with latencies, in-memory runs are repeatable."""

    async def main(trace: list[tuple[float, bytes]]) -> None:
        network = MemoryNetwork(Latency(control=0.5, data=1.5))
        transports = [network.transport(ProcId(i + 1)) for i in range(4)]
        sees = []
        async with trio.open_nursery() as nursery:
            for transport in transports:
                recorder = Clocked(react=lambda m: trace.append((trio.current_time(), m.head)))
                sees.append(recorder)
                nursery.start_soon(transport.run, recorder)
            links = [network.connect(a, b)[0] for a in transports for b in transports if a is not b]
            for i, link in enumerate(links):
                link.send(b"%d" % i, lane=Lane(i % 2))
                await trio.sleep(0.1)
            await trio.sleep(5)
            nursery.cancel_scope.cancel()

    traces: list[list[tuple[float, bytes]]] = [[], []]
    for trace in traces:
        trio.run(main, trace, clock=trio.testing.MockClock(autojump_threshold=0))
    assert traces[0] == traces[1]
    assert len(traces[0]) == 12


# ---- a loop that lags ----------------------------------------------------------------------------------------------


async def test_lag_keeps_what_comes_and_is_told_to_peers_as_it_doubles(nursery, autojump_clock):
    a, b, here, _ = two(MemoryNetwork())
    sees, told = Clocked(), Recorder()
    nursery.start_soon(b.run, sees)
    nursery.start_soon(a.run, told)

    b.lag(21.0)
    here.send(b"late")
    await trio.sleep(22.0)

    await sees.wait_messages(1)
    assert sees.times == [21.0]
    await told.wait(lambda: told.stalls[-1:] == [(here, 0.0)])
    assert told.stalls == [(here, 5.0), (here, 10.0), (here, 20.0), (here, 0.0)]


async def test_lag_shorter_than_a_stall_is_told_to_nobody(nursery, autojump_clock):
    a, b, here, _ = two(MemoryNetwork())
    sees, told = Clocked(), Recorder()
    nursery.start_soon(b.run, sees)
    nursery.start_soon(a.run, told)

    b.lag(limits.STALL_SECONDS - 0.1)
    here.send(b"late")
    await sees.wait_messages(1)
    await trio.sleep(10)

    assert told.stalls == []
