"""The messages of channels as a home and a holder take them from peers, whatever the peers do (T2, E12)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trio
import trio.testing
from tests.runtime.frames import RecordingLink, RecordingTransport

from trimesh import Port, limits
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._runtime.peers.peer import Peer
from trimesh._transport.interface import Lane
from trimesh._wire import messages
from trimesh.ids import ProcId

HOME = ProcId(1)


@pytest.fixture
def proc() -> Proc:
    return Proc(HOME, RecordingTransport(), seed=1)


def meet(proc: Proc, proc_id: int) -> tuple[Peer, RecordingLink]:
    link = RecordingLink()
    return proc.adopt_link(ProcId(proc_id), link), link


def receive(proc: Proc, link: RecordingLink, *received: messages.Message) -> None:
    for message in received:
        proc.received(link, memoryview(messages.encode(message)), [])


def item(proc: Proc, channel: int, value: object) -> messages.PortItem:
    return messages.PortItem(channel, proc.values.encode(value, what="an item").payload)


def sent(link: RecordingLink, kind: type[Any]) -> list[Any]:
    return [message for message in link.sent if isinstance(message, kind)]


def open_and_send(proc: Proc, peer: Peer, capacity: int = 2) -> tuple[Port[Any], Any, messages.Transit]:
    """Open a channel and send its port to `peer`, who has taken it."""
    port, home = proc.channels.open(capacity)
    assert peer.link is not None
    proc.channels.send(peer, peer.link, [port])
    assert isinstance(peer.link, RecordingLink)
    [transit] = sent(peer.link, messages.Carried)[-1].transits
    receive(proc, peer.link, messages.Accepted(transit.channel, HOME, transit.transit, 5))
    return port, home, transit


# ---- a home ----------------------------------------------------------------------------------------------------------


async def test_items_wait_until_they_are_received(proc: Proc):
    peer, link = meet(proc, 2)
    port, home, transit = open_and_send(proc, peer)
    receive(proc, link, item(proc, transit.channel, "first"), item(proc, transit.channel, "second"))
    assert await home.receive() == "first"
    assert sent(link, messages.Room) == [messages.Room(5, 1, recalled=False)]
    assert link.lanes[-1] is Lane.CONTROL
    assert home.receive_nowait() == "second"
    port.close()


async def test_item_of_a_traced_sender_is_taken_out_of_its_envelope(proc: Proc):
    """Q12: the receiver's process is not traced."""
    peer, link = meet(proc, 2)
    port, home, transit = open_and_send(proc, peer)
    traced = messages.TracedItem("00-1-2-01", messages.encode(item(proc, transit.channel, "first")))
    receive(proc, link, traced, item(proc, transit.channel, "second"))
    assert [home.receive_nowait(), home.receive_nowait()] == ["first", "second"]
    port.close()


@pytest.mark.parametrize("number", range(4))
async def test_broken_envelope_ends_the_link(proc: Proc, number: int):
    """E12."""
    peer, link = meet(proc, 2)
    port, home, transit = open_and_send(proc, peer)
    inner = messages.encode(item(proc, transit.channel, 1))
    wrong = [
        messages.TracedItem("x" * (limits.TRACE_CONTEXT_CHARS_MAX + 1), inner),
        messages.TracedItem("", b"no message"),
        messages.TracedItem("", messages.encode(messages.TracedItem("", inner))),
        messages.TracedItem("", messages.encode(messages.Dropped(transit.channel, 1))),
    ]
    receive(proc, link, wrong[number])
    assert link.aborted
    with pytest.raises(trio.WouldBlock):
        home.receive_nowait()
    port.close()


@pytest.mark.parametrize("number", range(7))
async def test_holder_that_breaks_the_rules_loses_its_link(proc: Proc, number: int):
    """E12: nothing reaches a receiver, nothing else is touched."""
    peer, link = meet(proc, 2)
    stranger, strange_link = meet(proc, 3)
    port, home, transit = open_and_send(proc, peer, 1)
    channel = transit.channel
    wrong: list[tuple[RecordingLink, list[messages.Message]]] = [
        (link, [item(proc, channel, 1), item(proc, channel, 2)]),  # more than its room
        (strange_link, [item(proc, channel, 1)]),  # holds nothing
        (strange_link, [messages.Dropped(channel, 1)]),
        (link, [messages.Dropped(channel, 2)]),
        (strange_link, [messages.InTransit(channel, 1, 2)]),
        (link, [messages.Dropped(channel, 1), item(proc, channel, 1)]),  # holds nothing any more
        (link, [messages.Accepted(channel, 9, 9, 5), messages.Accepted(channel, 9, 9, 5)]),
    ]
    at, what = wrong[number]
    receive(proc, at, *what)
    assert at.aborted
    assert not (strange_link if at is link else link).aborted
    assert not home.holders.is_over
    port.close()
    del stranger


@pytest.mark.parametrize(
    "message",
    [
        messages.InTransit(99, 1, 2),
        messages.Dropped(99, 1),
        messages.Settled(99, 3),
        messages.PortItem(99, b"\x80\x05N."),
        messages.Recall(99),
        messages.Room(99, 1, recalled=False),
        messages.Ended(99),
        messages.Dropped(-(2**62), 2**62),
    ],
)
async def test_message_for_a_channel_that_is_no_more_is_dropped(proc: Proc, message: messages.Message):
    """It may have crossed with the end."""
    _, link = meet(proc, 2)
    receive(proc, link, message)
    assert not link.aborted
    assert not link.sent


async def test_port_that_comes_after_the_end_is_told_so(proc: Proc):
    """HO-4."""
    _, link = meet(proc, 2)
    receive(proc, link, messages.Accepted(99, 1, 1, 5))
    assert link.sent == [messages.Ended(99)]
    _, own = meet(proc, HOME)
    port, home = proc.channels.open(1)
    receive(proc, own, messages.Dropped(home.number, 1))
    assert home.holders.is_over  # and its receiver is open
    receive(proc, link, messages.Accepted(home.number, 1, 1, 5))
    assert link.sent[1:] == [messages.Ended(home.number)]
    port.close()
    home.close()


async def test_recall_gives_back_what_waits_and_nothing_else(proc: Proc):
    peer, link = meet(proc, 2)
    port, home, transit = open_and_send(proc, peer, 0)
    receive(
        proc, link, item(proc, transit.channel, 1), messages.Recall(transit.channel), messages.Recall(transit.channel)
    )
    assert sent(link, messages.Room) == [messages.Room(5, 1, recalled=True)]
    with pytest.raises(trio.WouldBlock):
        home.receive_nowait()
    receive(proc, link, item(proc, transit.channel, 2))
    assert home.receive_nowait() == 2
    receive(proc, link, messages.Recall(transit.channel))
    assert sent(link, messages.Room)[1:] == [messages.Room(5, 2, recalled=False)]
    port.close()


async def test_holder_that_comes_back_begins_anew(proc: Proc):
    """What it sent before still waits, and does not count for its new window."""
    peer, link = meet(proc, 2)
    port, home, transit = open_and_send(proc, peer, 1)
    receive(proc, link, item(proc, transit.channel, "old"), messages.Dropped(transit.channel, 1))
    receive(proc, link, messages.Accepted(transit.channel, 3, 1, 6), item(proc, transit.channel, "new"))
    assert home.receive_nowait() == "old"
    assert home.receive_nowait() == "new"
    assert sent(link, messages.Room) == [messages.Room(5, 1, recalled=False), messages.Room(6, 1, recalled=False)]
    port.close()


# ---- a holder --------------------------------------------------------------------------------------------------------


def carry(proc: Proc, link: RecordingLink, *transits: int, capacity: int = 2) -> None:
    """Let ports of channels of process 7 arrive."""
    receive(
        proc, link, messages.Carried(tuple(messages.Transit(7, number, number + 100, capacity) for number in transits))
    )


async def test_message_that_is_never_decoded_gives_its_ports_back(proc: Proc):
    """T2: a reply that is not waited for."""
    _, link = meet(proc, 2)
    _, home = meet(proc, 7)
    carry(proc, link, 1, 2)
    assert [type(message) for message in home.sent] == [messages.Accepted] * 2
    receive(proc, link, messages.Return(404, 1, 0, b"x"))
    await trio.testing.wait_all_tasks_blocked()
    assert home.sent[2:] == [messages.Dropped(1, 1), messages.Dropped(2, 1)]
    assert not list(proc.channels.left())


async def test_ports_that_wait_with_a_dead_lender_are_given_back(proc: Proc):
    """Its message was announced, and did not come."""
    peer, link = meet(proc, 2)
    _, home = meet(proc, 7)
    carry(proc, link, 1)
    proc.declare_gone(peer, ProcDeath("gone"))
    await trio.testing.wait_all_tasks_blocked()
    assert home.sent[1:] == [messages.Dropped(1, 1)]


async def test_units_are_given_back_together(proc: Proc):
    _, link = meet(proc, 2)
    peer, home = meet(proc, 7)
    for _ in range(3):
        carry(proc, link, 1)
        receive(proc, link, messages.Return(404, 1, 0, b"x"))
    await trio.testing.wait_all_tasks_blocked()
    assert sent(home, messages.Dropped) == [messages.Dropped(1, 3)]
    del peer


async def test_home_without_a_link_is_told_in_order_once_there_is_one(proc: Proc):
    _, link = meet(proc, 2)
    carry(proc, link, 1)
    receive(proc, link, messages.Return(404, 1, 0, b"x"))
    await trio.testing.wait_all_tasks_blocked()
    _, home = meet(proc, 7)
    assert [type(message) for message in home.sent] == [messages.Accepted, messages.Dropped]


class Matchmaker:
    """Makes links."""

    def __init__(self, proc: Proc) -> None:
        self.proc = proc
        self.made: list[RecordingLink] = []

    async def connect(self, peers: list[Peer]) -> None:
        for peer in peers:
            self.made.append(meet(self.proc, peer.proc_id)[1])


async def test_holder_that_gets_ports_of_others_is_connected_once(proc: Proc):
    """HO-2: its reply arrives by that link."""
    matchmaker = Matchmaker(proc)
    proc.family = matchmaker  # type: ignore[assignment]
    peer, link = meet(proc, 2)
    port, home, transit = open_and_send(proc, peer)
    async with trio.open_nursery() as nursery:
        proc.nursery = nursery  # type: ignore[assignment]
        receive(proc, link, messages.InTransit(transit.channel, 5, 9), messages.InTransit(transit.channel, 6, 9))
    assert [proc.peer(ProcId(9)).link] == matchmaker.made
    port.close()
    home.close()


async def test_what_has_not_ended_is_described(proc: Proc):
    _, link = meet(proc, 2)
    port, home = proc.channels.open(1)
    carry(proc, link, 3)
    here = f"channel {home.number}"
    assert sorted(proc.channels.left()) == [here, f"port of {here} of process 1", "port of channel 3 of process 7"]
    port.close()
    home.close()


async def test_port_is_rebuilt_by_messages_only(proc: Proc):
    port, home = proc.channels.open(1)
    with pytest.raises(TypeError, match="only by the process that a message"):
        pickle.loads(proc.values.encode(port, what="a port").payload)
    port.close()
    home.close()


async def test_process_that_ends_has_told_the_homes_of_its_ports(proc: Proc, autojump_clock: Any):
    """HO-2: also those that it has no link to; a link that is not read holds up the end for a moment only."""
    matchmaker = Matchmaker(proc)
    proc.family = matchmaker  # type: ignore[assignment]
    peer, link = meet(proc, 2)
    carry(proc, link, 1)
    await proc.channels.flush()
    assert [type(message) for message in matchmaker.made[0].sent] == [messages.Accepted]
    matchmaker.made[0].lent = trio.Event()
    carry(proc, link, 1)
    before = trio.current_time()
    await proc.channels.flush()
    assert trio.current_time() - before == limits.FLUSH_SECONDS
    matchmaker.made[0].lent.set()
    await proc.channels.flush()
    assert trio.current_time() - before == limits.FLUSH_SECONDS
    del peer


async def test_many_ports_in_one_message_are_named_in_several_frames(proc: Proc, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "TRANSITS_PER_FRAME", 3)
    peer, link = meet(proc, 2)
    opened = [proc.channels.open(1) for _ in range(7)]
    proc.channels.send(peer, link, [port for port, _ in opened])
    assert [len(message.transits) for message in sent(link, messages.Carried)] == [3, 3, 1]
    for port, home in opened:
        port.close()
        home.close()


async def test_answer_to_settle_waits_for_the_end_of_the_lender(proc: Proc):
    """HO-3."""
    sender, _ = meet(proc, 2)
    _, home = meet(proc, 7)
    receive(proc, home, messages.Settle(1, 2))
    assert not home.sent
    proc.declare_gone(sender, ProcDeath("gone"))
    assert home.sent == [messages.Settled(1, 2)]
    receive(proc, home, messages.Settle(4, 2))
    assert home.sent[1:] == [messages.Settled(4, 2)]


async def test_room_that_is_too_much_or_of_a_stranger_breaks_the_protocol(proc: Proc):
    _, link = meet(proc, 2)
    _, home = meet(proc, 7)
    carry(proc, link, 1)
    [accepted] = home.sent
    receive(proc, link, messages.Room(accepted.holding, 0, recalled=False))
    assert link.aborted
    receive(proc, home, messages.Room(accepted.holding, 1, recalled=False))
    assert home.aborted


async def test_port_without_a_transit_arrives_closed(proc: Proc):
    port, home = proc.channels.open(1)
    encoded = proc.values.encode(port, what="a port")
    assert proc.values.decode(encoded.payload, []).holding is port.holding
    await trio.testing.wait_all_tasks_blocked()
    port.close()
    assert proc.values.decode(encoded.payload, []).holding is None
    home.close()
