"""The tables of one process stay small, and its links are believed only so far."""

from __future__ import annotations

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.frames import RecordingLink, RecordingTransport
from tests.runtime.test_outgoing import REQUEST

from trimesh import limits
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._runtime.peers.peer import Parcel, Peer, Target
from trimesh._transport.interface import DownReason, LinkDown
from trimesh._wire import messages
from trimesh.errors import ProcDied
from trimesh.ids import CallId, MeshId, ProcId

MESH = MeshId(5)


@pytest.fixture
def proc() -> Proc:
    return Proc(ProcId(1), RecordingTransport(), seed=1)


def meet(proc: Proc, proc_id: int) -> tuple[Peer, RecordingLink]:
    link = RecordingLink()
    return proc.adopt_link(ProcId(proc_id), link), link


def parcel() -> Parcel:
    return Parcel(messages.encode(messages.Call(0, MESH, "endpoint", None, b"")), (), (), 10)


async def test_processes_that_have_ended_are_forgotten_in_time(proc: Proc, monkeypatch: pytest.MonkeyPatch):
    """A program that starts processes for days does not grow by them."""
    monkeypatch.setattr(limits, "GONE_PEERS", 10)
    monkeypatch.setattr(limits, "DEATHS", 5)
    for number in range(100, 150):
        peer, link = meet(proc, number)
        proc.declare_gone(peer, ProcDeath("gone"))
        assert link.aborted
    assert len(proc.peers()) == 1  # itself
    assert len(proc._deaths) == 10
    assert proc.peer(ProcId(149)).death is not None
    assert proc.peer(ProcId(149)).death(maybe_executed=True).args == ("gone",)
    assert proc.peer(ProcId(145)).death(maybe_executed=True).args == ("gone",)
    for number in (144, 140):
        error = proc.peer(ProcId(number)).death(maybe_executed=False)
        assert isinstance(error, ProcDied)
        assert (error.reason, error.maybe_executed) == ("lost", False)
    assert proc.peer(ProcId(139)).death is None


async def test_death_is_told_once(proc: Proc):
    peer, _ = meet(proc, 2)
    first = ProcDeath("first")
    proc.declare_gone(peer, first)
    proc.declare_gone(peer, ProcDeath("second"))
    assert peer.death is first


async def test_groups_are_forgotten_in_time(proc: Proc):
    """S07: a program may call any number of different views."""
    peers = [meet(proc, number)[0] for number in range(10, 30)]
    count = 0
    for first in range(19):
        for second in range(first + 1, 20):
            proc.cast([peers[first], peers[second]], parcel())
            count += 1
    assert count < limits.GROUPS_MAX
    assert len(proc._groups.groups) == count
    for third in range(20):
        for first in range(19):
            proc.cast([peers[first], peers[19], peers[third]], parcel())
    assert len(proc._groups.groups) == limits.GROUPS_MAX
    proc.declare_gone(peers[19], ProcDeath("gone"))
    assert not any(peers[19].link in links for links in proc._groups.groups)


async def test_cast_to_nobody_that_has_a_link_goes_nowhere(proc: Proc):
    """Their deaths are about to be told."""
    peers = [meet(proc, number)[0] for number in (2, 3)]
    for peer in peers:
        peer.link = None
    assert proc.cast(peers, parcel()) is None


async def test_cast_includes_the_process_itself(proc: Proc):
    """An actor may call a mesh that it is a member of."""
    peer, link = meet(proc, 2)
    proc.cast([proc.me, peer], parcel())
    assert [type(message) for message in link.sent] == [messages.Call]
    assert proc.loopback.statistics().messages_sent == 1


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"garbage",
        messages.encode(messages.Return(1, MESH, 3, b"")),
    ],
)
async def test_frame_that_breaks_the_protocol_ends_the_link(proc: Proc, head: bytes):
    """E12: and nothing else; an answer that counts more messages than were sent is one."""
    peer, link = meet(proc, 2)
    OutgoingCall(proc, CallId(1), REQUEST, [Target(peer, MESH)], fail_fast=False).start(parcel())
    other, fine = meet(proc, 3)
    proc.received(link, memoryview(head), [])
    assert link.aborted
    assert peer.link is None
    assert not fine.aborted
    proc.received(link, memoryview(messages.encode(messages.Credit(MESH, 0))), [])
    assert other.link is fine


async def test_message_for_an_actor_that_is_not_here_is_refused(proc: Proc):
    """X3: in one terminal frame; a broadcast has none. The sender learns by both that nothing is counted here."""
    peer, link = meet(proc, 2)
    for number in (0, 7):
        head = messages.encode(messages.Call(number, MESH, "endpoint", None, b""))
        proc.received(link, memoryview(head), [])
    told, refused = link.sent
    assert told == messages.Credit(MESH, 0)
    assert (refused.call, refused.kind, refused.dequeued) == (7, "stopped", 0)
    assert peer.counts() == []


@pytest.mark.parametrize("end", [messages.Credit(MESH, 0), messages.Refused(1, MESH, 0, "stopped", "")])
async def test_what_waits_for_room_leaves_when_its_actor_has_ended(proc: Proc, end: messages.Message):
    """S07: it is refused over there, instead of waiting for room for ever; nothing is kept of the actor."""
    peer, link = meet(proc, 2)
    target = Target(peer, MESH)
    calls = [
        OutgoingCall(proc, CallId(1 + number), REQUEST, [target], fail_fast=False)
        for number in range(limits.MAILBOX_MESSAGES + 2)
    ]
    for call in calls:
        call.start(parcel())
    assert len(link.sent) == limits.MAILBOX_MESSAGES
    proc.received(link, memoryview(messages.encode(end)), [])
    assert len(link.sent) == len(calls)
    assert peer.outboxes() == []


async def test_late_news_of_an_actor_that_has_ended_does_no_harm(proc: Proc):
    """E12: an answer that was overtaken counts by its own messages, a credit that was overtaken may be too high."""
    peer, link = meet(proc, 2)
    calls = [
        OutgoingCall(proc, CallId(1 + number), REQUEST, [Target(peer, MESH)], fail_fast=False) for number in range(5)
    ]
    for call in calls[:3]:
        call.start(parcel())
    proc.received(link, memoryview(messages.encode(messages.Credit(MESH, 0))), [])
    calls[3].start(parcel())
    late = [
        *(messages.Credit(MESH, total) for total in (2, 3)),
        *(messages.Return(1 + index, MESH, 1 + index, b"") for index in range(3)),
        messages.Return(99, MESH, 3, b""),
    ]
    for message in late:
        proc.received(link, memoryview(messages.encode(message)), [])
    assert not link.aborted
    assert [call.collector.is_complete for call in calls[:4]] == [True, True, True, False]
    proc.received(link, memoryview(messages.encode(messages.Refused(4, MESH, 0, "stopped", ""))), [])
    assert calls[3].collector.is_complete
    assert peer.outboxes() == []


async def test_outbox_that_was_never_used_is_not_kept(proc: Proc):
    """With one rank dead, the others are not called: they will not tell of the end of their actors."""
    alive, _ = meet(proc, 2)
    dead, _ = meet(proc, 3)
    proc.declare_gone(dead, ProcDeath("gone"))
    call = OutgoingCall(proc, CallId(1), REQUEST, [Target(dead, MESH), Target(alive, MESH)], fail_fast=True)
    call.start(parcel())
    assert call.collector.is_complete
    assert alive.outboxes() == []


async def test_cancel_of_a_call_that_is_refused_is_forgotten(proc: Proc):
    """C02: one that has overtaken its call is kept for that call alone."""
    peer, link = meet(proc, 2)
    proc.received(link, memoryview(messages.encode(messages.Cancel(7, 1, "early"))), [])
    assert peer.early_cancels == {7: "early"}
    proc.received(link, memoryview(messages.encode(messages.Call(7, MESH, "endpoint", None, b""))), [])
    assert peer.early_cancels == {}
    proc.received(link, memoryview(messages.encode(messages.Cancel(7, 1, "late"))), [])
    assert peer.early_cancels == {}


async def test_end_of_a_link_takes_it_out_of_service(proc: Proc):
    peer, link = meet(proc, 2)
    call = OutgoingCall(proc, CallId(1), REQUEST, [Target(peer, MESH)], fail_fast=False)
    call.start(parcel())
    proc.link_down(link, LinkDown(DownReason.EOF))
    assert peer.link is None
    proc.declare_gone(peer, ProcDeath("gone"))
    with trio.fail_after(HANG_SECONDS):
        await call.wait()
    assert proc.unended_calls() == []


async def test_peer_with_two_links_is_lost_with_the_last(proc: Proc):
    """Both sides may have made one: what came by either is read first."""
    peer, first = meet(proc, 2)
    _, second = meet(proc, 2)
    assert peer.link is first
    proc.link_down(first, LinkDown(DownReason.EOF))
    assert peer.link is second
    proc.link_down(second, LinkDown(DownReason.EOF))
    assert peer.link is None


async def test_link_that_ends_hands_over_to_the_next(proc: Proc):
    """What it was given before it came up may still go: a peer without a descriptor for its end tries again."""
    peer, first = meet(proc, 2)
    _, second = meet(proc, 2)
    proc.link_down(first, LinkDown(DownReason.EOF))
    assert first.heirs == [second]
    assert peer.link is second
    proc.link_down(second, LinkDown(DownReason.EOF))
    assert second.heirs == [None]


async def test_peer_that_breaks_the_protocol_is_heard_by_no_link(proc: Proc):
    peer, first = meet(proc, 2)
    _, second = meet(proc, 2)
    proc.received(second, memoryview(b"nonsense"), [])
    assert first.aborted
    assert second.aborted
    assert peer.link is None


async def test_peer_that_is_gone_has_no_link(proc: Proc):
    peer, first = meet(proc, 2)
    _, second = meet(proc, 2)
    proc.declare_gone(peer, ProcDeath("gone"))
    assert first.aborted
    assert second.aborted
