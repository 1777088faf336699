"""One call to one or many actors, frame by frame (C01, C02, C09, C11, C12, E02, S01; rules C1, C2)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import attrs
import msgspec
import pytest
import trio
import trio.testing
from tests.runtime.frames import RecordingLink, RecordingTransport

from trimesh import limits
from trimesh._routing.collector import LocalFailure, Raised, Returned, Withdrawn
from trimesh._runtime.calls.call_set import RepliedCall
from trimesh._runtime.calls.invocation import (
    Err,
    Request,
    value_of,
)
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._runtime.peers.peer import Parcel, Peer, Target
from trimesh._transport.interface import Lane
from trimesh._wire import messages
from trimesh.errors import (
    Origin,
    ProcDied,
    ProtocolError,
)
from trimesh.ids import CallId, MeshId, ProcId

MESH = MeshId(5)
REQUEST = Request("mesh", "endpoint", (), {}, lambda _: Origin(None, "mesh"))


@attrs.define(eq=False)
class Stage:
    """A process with links to some others, which say what the test has them say."""

    proc: Proc
    transport: RecordingTransport
    peers: list[Peer]
    links: list[RecordingLink]

    @classmethod
    def of(cls, count: int) -> Stage:
        transport = RecordingTransport()
        proc = Proc(ProcId(1), transport, seed=1)
        links = [RecordingLink() for _ in range(count)]
        peers = [proc.adopt_link(ProcId(10 + index), link) for index, link in enumerate(links)]
        return cls(proc, transport, peers, links)

    def call(
        self,
        nbytes: int = 10,
        *,
        fail_fast: bool = True,
        ranks: Sequence[int] | None = None,
        abandon_after: float | None = None,
        bodies: Sequence[bytes] = (),
    ) -> OutgoingCall:
        """Begin a call to some of the peers."""
        request = msgspec.structs.replace(REQUEST, abandon_after=abandon_after)
        return self.begin(
            self.proc.new_call_id(), nbytes, fail_fast=fail_fast, ranks=ranks, request=request, bodies=bodies
        )

    def broadcast(self, nbytes: int = 10, ranks: Sequence[int] | None = None) -> OutgoingCall:
        """Begin a broadcast."""
        return self.begin(CallId(0), nbytes, fail_fast=False, ranks=ranks)

    def begin(
        self,
        call_id: CallId,
        nbytes: int,
        *,
        fail_fast: bool,
        ranks: Sequence[int] | None,
        request: Request = REQUEST,
        bodies: Sequence[bytes] = (),
    ) -> OutgoingCall:
        targets = [Target(self.peers[rank], MESH) for rank in (range(len(self.peers)) if ranks is None else ranks)]
        call = OutgoingCall(self.proc, call_id, request, targets, fail_fast=fail_fast)
        head = messages.encode(messages.Call(call_id, MESH, "endpoint", None, b"x"))
        call.start(Parcel(head, bodies, (), nbytes))
        return call

    def say(self, rank: int, message: object) -> None:
        """Let a message come in from a peer."""
        self.proc.received(self.links[rank], memoryview(messages.encode(message)), [])

    def returned(self, rank: int, call: OutgoingCall, dequeued: int = 1) -> None:
        self.say(rank, messages.Return(call.call_id, MESH, dequeued, b"value"))

    def acknowledged(self, rank: int, call: OutgoingCall, *, started: bool = True) -> None:
        self.say(rank, messages.CancelAck(call.call_id, MESH, 1, started, "caller", ""))

    def cancels(self, rank: int) -> list[messages.Cancel]:
        return [message for message in self.links[rank].sent if isinstance(message, messages.Cancel)]

    def calls(self, rank: int) -> list[int]:
        return [message.call for message in self.links[rank].sent if isinstance(message, messages.Call)]

    def loads(self) -> list[int]:
        return [peer.outbox(MESH).load for peer in self.peers]

    def check_clean(self) -> None:
        assert self.proc.unended_calls() == []
        assert [list(peer.calls) for peer in self.peers] == [[] for _ in self.peers]
        assert self.loads() == [0] * len(self.peers)


# ---- sending ---------------------------------------------------------------------------------------------------------


async def test_call_to_one_waits_for_its_reply():
    stage = Stage.of(1)
    call = stage.call()
    assert stage.calls(0) == [call.call_id]
    assert stage.loads() == [1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.wait)
        await trio.testing.wait_all_tasks_blocked()
        stage.returned(0, call)
    assert call.collector.outcomes[0] == Returned(b"value")
    stage.check_clean()


@pytest.mark.parametrize(("bodies", "casts"), [((b"body",), [2]), ((), [])])
async def test_call_to_many_is_cast(bodies: Sequence[bytes], casts: list[int]):
    """One copy of its bodies for all, and the group is used again; a head alone is sent by each link."""
    stage = Stage.of(3)
    for _ in range(2):
        call = stage.call(bodies=bodies)
        for rank in range(3):
            stage.returned(rank, call, dequeued=call.call_id)
        await call.wait()
    assert [stage.calls(rank) for rank in range(3)] == [[1, 2]] * 3
    assert [group.casts for group in stage.transport.groups] == casts
    stage.check_clean()


async def test_call_of_nobody_is_a_checkpoint():
    """M6, K01."""
    stage = Stage.of(1)
    call = stage.call(ranks=[])
    with trio.testing.assert_checkpoints():
        await call.wait()
    stage.check_clean()


async def test_answer_that_comes_at_once_needs_no_turn_of_the_loop():
    """K01: it is a checkpoint all the same."""
    stage = Stage.of(2)
    call = stage.call()
    stage.transport.comes = [lambda: stage.returned(1, call), lambda: stage.returned(0, call)]
    turns: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note, turns)
        with trio.testing.assert_checkpoints():
            await call.wait()
        assert not turns
        assert call.collector.is_complete
        call = stage.call()
        stage.transport.comes = [lambda: stage.returned(1, call, 2), lambda: stage.returned(0, call, 2)]
        with trio.testing.assert_checkpoints():  # counted as one more, not as one less
            await call.wait()
            await trio.lowlevel.checkpoint()
    assert call.collector.is_complete
    stage.check_clean()


async def note(turns: list[str]) -> None:
    """Note that this task had its turn."""
    turns.append("turn")


async def test_answer_that_does_not_come_at_once_wakes_the_caller():
    stage = Stage.of(2)
    call = stage.call()
    waiters: list[trio.lowlevel.Task | None] = []
    stage.transport.comes = [lambda: waiters.append(call.waiter), lambda: stage.returned(1, call)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not call.collector.is_complete
        stage.returned(0, call)
    assert waiters[0] is not None
    stage.check_clean()


async def test_failure_that_comes_at_once_cancels_the_other_ranks():
    stage = Stage.of(2)
    call = stage.call()
    stage.transport.comes = [lambda: stage.say(0, messages.Refused(call.call_id, MESH, 1, "stopped", ""))]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert len(stage.cancels(1)) == 1
        stage.acknowledged(1, call)
    stage.check_clean()


async def test_message_waits_for_room_in_order():
    """S01, S07: the other ranks are not held up."""
    stage = Stage.of(2)
    fillers = [stage.broadcast(ranks=[0]) for _ in range(limits.MAILBOX_MESSAGES)]
    assert all(filler.collector.is_complete for filler in fillers)
    waiting = [stage.call(), stage.call(ranks=[0])]
    assert stage.calls(0) == [0] * limits.MAILBOX_MESSAGES
    assert stage.calls(1) == [waiting[0].call_id]
    stage.say(0, messages.Credit(MESH, 1))
    assert stage.calls(0)[-1] == waiting[0].call_id
    stage.say(0, messages.Credit(MESH, 2))
    assert stage.calls(0)[-1] == waiting[1].call_id
    for call in waiting:
        stage.say(0, messages.Return(call.call_id, MESH, 2, b""))
    stage.returned(1, waiting[0])
    for call in waiting:
        await call.wait()
    stage.check_clean()


async def test_message_that_is_taken_back_lets_a_smaller_one_pass():
    """C11."""
    stage = Stage.of(1)
    stage.broadcast(limits.MAILBOX_BYTES - 100)
    large, small = stage.call(1_000), stage.call(50)
    assert stage.calls(0) == [0]
    large.cancel_rest("enough")
    assert stage.calls(0) == [0, small.call_id]
    assert large.collector.outcomes[0] == Withdrawn()
    await large.wait()
    stage.say(0, messages.Return(small.call_id, MESH, 2, b""))
    await small.wait()
    stage.check_clean()


# ---- failing ---------------------------------------------------------------------------------------------------------


async def test_first_failure_cancels_the_others():
    """C1: those that were sent, by their position; those that were not are taken back."""
    stage = Stage.of(3)
    for _ in range(limits.MAILBOX_MESSAGES):
        stage.broadcast(ranks=[2])
    stage.broadcast(ranks=[1])
    call = stage.call()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert call.waiter is not None
        assert not call.is_given_up
        stage.say(0, messages.Error(call.call_id, MESH, 1, b"error"))
        assert call.waiter is None
        assert call.is_given_up
        assert call.collector.outcomes[2] == Withdrawn()
        assert stage.cancels(0) == stage.cancels(2) == []
        (cancel,) = stage.cancels(1)
        assert (cancel.call, cancel.position) == (call.call_id, 2)
        assert stage.links[1].lanes[-1] is Lane.CONTROL
        stage.acknowledged(1, call)
    assert call.collector.failures == (0,)
    assert isinstance(call.collector.outcomes[0], Raised)
    stage.check_clean()


async def test_dead_rank_fails_the_call_before_it_is_sent():
    """C1."""
    stage = Stage.of(3)
    stage.proc.declare_gone(stage.peers[1], ProcDeath("gone"))
    call = stage.call()
    assert stage.calls(0) == stage.calls(2) == []
    with trio.testing.assert_checkpoints():
        await call.wait()
    assert not any(peer.boxes for peer in stage.peers)
    (failed,) = call.collector.failed()
    assert isinstance(failed, LocalFailure)
    assert isinstance(failed.error, ProcDied)
    assert not failed.error.maybe_executed
    settled = stage.call(fail_fast=False)
    assert stage.calls(0) == stage.calls(2) == [settled.call_id]
    stage.returned(0, settled)
    stage.returned(2, settled)
    await settled.wait()
    stage.check_clean()


async def test_death_says_whether_the_message_had_left():
    """X3: `.maybe_executed`."""
    stage = Stage.of(1)
    sent = stage.call(fail_fast=False)
    for _ in range(limits.MAILBOX_MESSAGES - 1):
        stage.broadcast()
    queued = stage.call(fail_fast=False)
    stage.proc.declare_gone(stage.peers[0], ProcDeath("gone"))
    for call, maybe in ((sent, True), (queued, False)):
        await call.wait()
        outcome = call.collector.outcomes[0]
        assert isinstance(outcome, LocalFailure)
        assert isinstance(outcome.error, ProcDied)
        assert outcome.error.maybe_executed is maybe
    assert stage.links[0].aborted
    stage.check_clean()


@pytest.mark.parametrize("bodies", [(), (b"body",)])
async def test_death_of_one_of_several_says_whether_its_message_had_left(bodies: Sequence[bytes]):
    """X3: of each rank by itself, although one has no room, so that nothing is cast."""
    stage = Stage.of(2)
    for _ in range(limits.MAILBOX_MESSAGES):
        stage.call(ranks=[1], fail_fast=False)
    call = stage.call(fail_fast=False, bodies=bodies)
    assert [call.is_unsent_to(peer) for peer in stage.peers] == [False, True]
    for peer in stage.peers:
        stage.proc.declare_gone(peer, ProcDeath("gone"))
    await call.wait()
    maybe = []
    for outcome in call.collector.outcomes:
        assert isinstance(outcome, LocalFailure)
        assert isinstance(outcome.error, ProcDied)
        maybe.append(outcome.error.maybe_executed)
    assert maybe == [True, False]


@pytest.mark.parametrize("liar", ["twice", "not asked"])
async def test_reply_of_a_liar_breaks_the_protocol(liar: str):
    """E12: one terminal frame from each rank that was asked."""
    stage = Stage.of(2)
    call = stage.call(ranks=[0] if liar == "not asked" else None)
    if liar == "twice":
        stage.returned(1, call)
    with pytest.raises(ProtocolError):
        call.terminal(stage.peers[1], Returned(b""), 1)
    stage.proc.declare_gone(stage.peers[0], ProcDeath("gone"))
    await call.wait()


async def test_late_reply_is_counted():
    """C12."""
    stage = Stage.of(1)
    call = stage.call()
    with trio.CancelScope() as scope:
        scope.cancel()
        stage.acknowledged(0, call)
        await call.wait()
    stage.say(0, messages.Return(call.call_id, MESH, 1, b"late"))
    assert stage.proc.dropped_replies == 1
    assert not stage.links[0].aborted
    stage.check_clean()


# ---- cancelling ------------------------------------------------------------------------------------------------------


async def test_cancelled_caller_waits_for_the_acknowledgements():
    """C01, C04, C09."""
    stage = Stage.of(2)
    call = stage.call()
    left = trio.Event()
    scope = trio.CancelScope()

    async def wait() -> None:
        with scope:
            await call.wait()
        left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            scope.cancel(reason="enough")
            assert call.is_given_up  # before its task has run
            await trio.testing.wait_all_tasks_blocked()
        for rank in range(2):
            (cancel,) = stage.cancels(rank)
            assert cancel.reason == "caller cancelled @mesh.endpoint: enough"
        stage.acknowledged(0, call)
        await trio.testing.wait_all_tasks_blocked()
        assert not left.is_set()
        stage.acknowledged(1, call)
        await left.wait()
    assert scope.cancelled_caught
    stage.check_clean()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("has_left", [False, True])
async def test_cancel_of_a_message_that_is_leaving_names_the_last_position(count: int, *, has_left: bool):
    """C2, C9: others may have passed it."""
    stage = Stage.of(count)
    for link in stage.links:
        link.lent = trio.Event()
    call = stage.call(bodies=[b"body"])
    stage.call(ranks=[0])
    if has_left:
        for link in stage.links:
            assert link.lent is not None
            link.lent.set()
    call.cancel_rest("enough")
    [cancel] = stage.cancels(0)
    assert cancel.position == (1 if has_left else 2)


async def test_cancelled_caller_leaves_after_the_bound(autojump_clock: trio.abc.Clock):
    """C2: what is silent weighs until its end is known: a terminal frame, or a death."""
    stage = Stage.of(2)
    call = stage.call()
    with trio.move_on_after(1) as scope:
        await call.wait()
    assert scope.cancelled_caught
    assert trio.current_time() == 1 + limits.CANCEL_ACK_SECONDS
    assert call.silent() == [0, 1]
    assert stage.proc.unended_calls() == []
    assert stage.loads() == [1, 1]
    stage.acknowledged(0, call)
    assert stage.loads() == [0, 1]
    assert not list(stage.peers[0].abandoned)
    stage.proc.declare_gone(stage.peers[1], ProcDeath("gone"))
    assert not list(stage.peers[1].abandoned)
    stage.check_clean()


@pytest.mark.parametrize("seconds", [0, 0.5])
async def test_cancelled_caller_leaves_after_its_own_bound(autojump_clock: trio.abc.Clock, seconds: float):
    """C2: `abandon_after` is the bound instead; what answers in time is not said to be silent."""
    stage = Stage.of(1)
    call = stage.call(abandon_after=seconds)
    with trio.move_on_after(1) as scope:
        await call.wait()
    assert scope.cancelled_caught
    assert trio.current_time() == 1 + seconds
    assert [abandoned.call_id for abandoned in stage.peers[0].abandoned] == [call.call_id]
    stage.acknowledged(0, call)
    stage.check_clean()


async def test_stalled_members_are_not_waited_for_long(autojump_clock: trio.abc.Clock):
    """C2: while all that have not acknowledged are known to be stalled, none of them can."""
    stage = Stage.of(2)
    stage.peers[0].stalled(5.0)
    call = stage.call()
    with trio.move_on_after(1):
        await call.wait()
    assert trio.current_time() == 1 + limits.CANCEL_ACK_SECONDS
    late = stage.call()
    scope = trio.CancelScope(deadline=10)

    async def wait() -> None:
        with scope:
            await late.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep_until(11)
        stage.peers[1].stalled(5.0)
    assert trio.current_time() == 11
    assert late.silent() == [0, 1]


async def test_call_is_given_up_without_a_cancel(autojump_clock: trio.abc.Clock):
    """M3: a block that is left does not cancel the stop that it waits for."""
    stage = Stage.of(2)
    call = stage.call(fail_fast=False)
    stage.returned(0, call)
    await call.wait_until(3.0)
    assert trio.current_time() == 3.0
    assert call.silent() == [1]
    assert stage.cancels(1) == []
    stage.check_clean()


async def test_broadcast_waits_for_its_buffers():
    """C9: the caller may write into them again when it returns."""
    stage = Stage.of(1)
    stage.links[0].lent = trio.Event()
    call = stage.broadcast()
    assert call.collector.is_complete
    async with trio.open_nursery() as nursery:
        done = trio.Event()

        async def wait() -> None:
            await call.wait()
            done.set()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        stage.links[0].lent.set()
        await done.wait()
    stage.check_clean()


@pytest.mark.parametrize(("seconds", "waited"), [(2.0, 2.0), (100.0, limits.CANCEL_ACK_SECONDS)])
async def test_cancelled_broadcast_waits_for_its_buffers(autojump_clock: trio.abc.Clock, seconds: float, waited: float):
    """C9, C2: but no longer than the bound."""
    stage = Stage.of(1)
    stage.links[0].lent = lent = trio.Event()
    call = stage.broadcast()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _give_back() -> None:
            await trio.sleep(seconds)
            lent.set()

        with trio.CancelScope() as scope:
            scope.cancel()
            await call.wait()
        assert scope.cancelled_caught
        assert trio.current_time() == waited
        nursery.cancel_scope.cancel()
    stage.check_clean()


class Kept:
    """Something that arguments refer to."""


async def test_call_keeps_what_its_arguments_refer_to():
    """C9: until it has ended."""
    stage = Stage.of(1)
    target = Target(stage.peers[0], MESH)
    call = OutgoingCall(stage.proc, stage.proc.new_call_id(), REQUEST, [target], fail_fast=False)
    kept = Kept()
    alive = weakref.ref(kept)
    for _ in range(limits.MAILBOX_MESSAGES):
        stage.broadcast()
    call.start(Parcel(messages.encode(messages.Call(call.call_id, MESH, "endpoint", None, b"x")), attachments=[kept]))
    call.cancel_rest("enough")
    assert call.collector.is_complete
    del kept
    gc.collect()
    assert alive() is not None
    call.forget()


@pytest.mark.parametrize("end", ["sent", "dead", "cancelled"])
async def test_replied_call_says_once_that_no_message_waits(end: str):
    """C9: it was sent, or will not be."""
    stage = Stage.of(2)
    for _ in range(limits.MAILBOX_MESSAGES):
        stage.broadcast(ranks=[1])
    said: list[str] = []
    targets = [Target(peer, MESH) for peer in stage.peers]
    call = RepliedCall(stage.proc, stage.proc.new_call_id(), REQUEST, targets, on_sent=lambda: said.append("sent"))
    call.start(Parcel(messages.encode(messages.Call(call.call_id, MESH, "endpoint", None, b"x")), (), (), 10))
    assert said == []
    if end == "sent":
        stage.say(1, messages.Credit(MESH, 1))
        stage.returned(1, call, dequeued=2)
    elif end == "dead":
        stage.proc.declare_gone(stage.peers[1], ProcDeath("gone"))
    else:
        call.cancel_rest("enough")
    assert set(said) == {"sent"}
    assert await call.wait_settled() == [1]
    assert call.take_settled() == []
    assert call.take_rest() == [0]
    assert await call.wait_settled() == []
    if end == "cancelled":
        stage.acknowledged(0, call)
    else:
        stage.returned(0, call)
    await call.end("over")
    assert stage.proc.unended_calls() == []


async def test_report_of_a_deadlock_has_one_body():
    """E12."""
    stage = Stage.of(1)
    stage.say(0, messages.Circle((1,)))
    assert stage.links[0].aborted


@pytest.mark.parametrize("pickled", [True, False])
async def test_answer_without_a_payload_is_no_none(pickled: bool):
    """What a peer sends is decoded, whatever it is: only a broadcast has no value."""
    proc = Proc(ProcId(1), RecordingTransport(), seed=1, pickled=pickled)
    assert isinstance(value_of(OutgoingCall(proc, CallId(1), REQUEST, [], fail_fast=False), Returned(b""), 0), Err)


async def test_call_may_wait_for_itself_only_while_nothing_is_taken_before_it():
    """C8: what waits for room in a mailbox that is taken from gets its turn, and is not searched for deadlocks."""
    stage = Stage.of(1)
    first, second, third = calls = [stage.call(limits.MAILBOX_BYTES) for _ in range(3)]
    stuck = stage.proc.deadlocks._stuck
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert stuck() == []  # the first one counts what is taken from here on
        assert stuck() == stuck() == [second, third]
        stage.returned(0, first)
        assert [call.is_unsent for call in calls] == [False, False, True]
        assert stuck() == []
        assert stuck() == stuck() == [third]
        stage.returned(0, second, dequeued=2)
        assert stuck() == []
        stage.returned(0, third, dequeued=3)
    stage.check_clean()


async def test_deadlock_is_looked_for_soon_after_the_last_message_was_taken(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
):
    """C8: looks do not grow rarer while messages are taken."""
    stage = Stage.of(1)
    calls = [stage.call(limits.MAILBOX_BYTES) for _ in range(200)]
    stuck = stage.proc.deadlocks._stuck
    found_at: list[float] = []

    def noted() -> Sequence[OutgoingCall]:
        found = stuck()
        if found:
            found_at.append(trio.current_time())
        return found

    monkeypatch.setattr(stage.proc.deadlocks, "_stuck", noted)
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call.wait)
        nursery.start_soon(stage.proc.deadlocks._watch)
        for number, call in enumerate(calls[:-2], 1):
            await trio.sleep(limits.DEADLOCK_SEARCH_SECONDS)
            stage.returned(0, call, dequeued=number)
        stopped_at = trio.current_time()
        found_at.clear()
        await trio.sleep(10)
        assert found_at[0] - stopped_at < 5 * limits.DEADLOCK_SEARCH_SECONDS
        for number, call in enumerate(calls[-2:], len(calls) - 1):
            stage.returned(0, call, dequeued=number)
        nursery.cancel_scope.cancel()
    stage.check_clean()
