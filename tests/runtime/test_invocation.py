"""Calls as all verbs make them: what is sent, and which results come of the outcomes (rules C1, C3, C9, E02, E08)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from tests.rows import rows
from tests.runtime.frames import RecordingTransport
from tests.runtime.test_outgoing import MESH, REQUEST, Stage

from trimesh import limits
from trimesh._routing.collector import LocalFailure
from trimesh._runtime.calls.invocation import (
    Cut,
    Err,
    Ok,
    budget_until,
    invoke,
    post,
    post_nowait,
    results_of,
    yield_to_cancel,
)
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._runtime.peers.peer import Target
from trimesh._wire import messages
from trimesh.errors import (
    ActorFailed,
    MembershipChanged,
    MeshError,
    MeshStopped,
    Origin,
    ProcDied,
    RemoteCancelled,
    Unresponsive,
    origin,
)
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent


@pytest.mark.parametrize("verb", [partial(invoke, fail_fast=True), post])
async def test_caller_that_is_cancelled_already_sends_nothing(verb: Any):
    """C01."""
    stage = Stage.of(2)
    with trio.CancelScope() as scope:
        scope.cancel()
        await verb(stage.proc, [Target(peer, MESH) for peer in stage.peers], REQUEST)
    assert scope.cancelled_caught
    assert [link.sent for link in stage.links] == [[], []]
    stage.check_clean()


@pytest.mark.parametrize("ranks", [[0], [0, 1], []])
async def test_broadcast_is_sent_once_to_each(ranks: list[int]):
    """C9: with or without a wait, which is a checkpoint; a full mailbox keeps it from all, and a dead one from none."""
    stage = Stage.of(2)
    targets = [Target(stage.peers[rank], MESH) for rank in ranks]
    assert post_nowait(stage.proc, targets, REQUEST) == [Ok(None)] * len(ranks)
    with trio.testing.assert_checkpoints():
        assert await post(stage.proc, targets, REQUEST) == [Ok(None)] * len(ranks)
    assert [len(stage.calls(rank)) for rank in ranks] == [2] * len(ranks)
    assert [stage.peers[rank].outbox(MESH).window.waiting for rank in ranks] == [2] * len(ranks)
    if not ranks:
        return
    for _ in range(limits.MAILBOX_MESSAGES - 2):
        stage.broadcast(ranks=[0])
    sent = [len(stage.calls(rank)) for rank in ranks]
    with pytest.raises(trio.WouldBlock):
        post_nowait(stage.proc, targets, REQUEST)
    assert [len(stage.calls(rank)) for rank in ranks] == sent
    async with trio.open_nursery() as nursery:
        nursery.start_soon(post, stage.proc, targets, REQUEST)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        assert [len(stage.calls(rank)) for rank in ranks[1:]] == [count + 1 for count in sent[1:]]
        stage.say(0, messages.Credit(MESH, 1))
    assert [len(stage.calls(rank)) for rank in ranks] == [count + 1 for count in sent]
    stage.proc.declare_gone(stage.peers[0], ProcDeath("gone"))
    for results in (post_nowait(stage.proc, targets, REQUEST), await post(stage.proc, targets, REQUEST)):
        assert isinstance(results[0], Err)
        assert isinstance(results[0].error, ProcDied)
        assert results[1:] == [Ok(None)] * len(ranks[1:])
    assert [len(stage.calls(rank)) for rank in ranks[1:]] == [count + 3 for count in sent[1:]]
    stage.check_clean()


POINT = Extent({"gpus": 2}).point(1)


def ack(by: str, *, started: bool = True) -> Callable[[OutgoingCall], messages.Message]:
    return lambda call: messages.CancelAck(call.call_id, MESH, 1, started, by, "why")


def refused(kind: str) -> Callable[[OutgoingCall], messages.Message]:
    return lambda call: messages.Refused(call.call_id, MESH, 1, kind, "why")


@rows(
    ("made", "kind", "text", "maybe"),
    [
        (ack("stopped"), MeshStopped, "mesh was stopped before endpoint ended: why", None),
        (ack("left"), MembershipChanged, "member that mesh.endpoint was called on has left .*current_view", True),
        (ack("left", started=False), MembershipChanged, "current_view", False),
        (ack("budget"), RemoteCancelled, "why", None),
        (ack("other"), RemoteCancelled, "why", None),
        (refused("stopped"), MeshStopped, "accepts no more messages: why", None),
        (refused("left"), MembershipChanged, "current_view", False),
        (refused("unknown"), MeshError, "refused a message: why", None),
        (None, Unresponsive, "mesh.endpoint did not acknowledge its cancel in time", None),
    ],
)
async def test_outcome_without_a_value_is_an_error_with_coordinates(made: Any, kind: type, text: str, maybe: bool):
    """E02, M3, C1: raised to a caller; one that was cancelled itself gets none."""
    stage = Stage.of(1)
    request = msgspec.structs.replace(REQUEST, origin=lambda _: Origin(POINT, "mesh"))
    call = stage.begin(stage.proc.new_call_id(), 10, fail_fast=False, ranks=None, request=request)
    if made is not None:
        stage.say(0, made(call))
    assert results_of(call, cancelled=True) == [Cut()]
    [result] = results_of(call)
    assert isinstance(result, Err)
    assert not result.is_raised
    assert type(result.error) is kind
    assert re.search(text, str(result.error))
    assert (origin(result.error).point, origin(result.error).endpoint) == (POINT, "endpoint")
    assert any("mesh[gpus=1]" in note for note in result.error.__notes__)
    assert getattr(result.error, "maybe_executed", maybe) is maybe
    call.forget()


async def test_cancelled_caller_gets_errors_of_endpoints_only():
    """E08, C1: not the end of the actor that ran the call, which its owner reports; that of another one counts."""
    stage = Stage.of(1)
    request = msgspec.structs.replace(REQUEST, origin=lambda _: Origin(POINT, "mesh"))
    for error, where, is_told in (
        (ValueError(), Origin(POINT, "mesh", endpoint="endpoint"), True),
        (ActorFailed(), Origin(POINT, "mesh"), False),
        (ActorFailed(), Origin(POINT, "other"), True),
        (ActorFailed(), Origin(POINT, "mesh", endpoint="endpoint"), True),
        (ValueError(), Origin(POINT, "mesh"), True),
    ):
        call = stage.begin(stage.proc.new_call_id(), 10, fail_fast=False, ranks=None, request=request)
        payload = stage.proc.values.encode_error(error, where).payload
        stage.say(0, messages.Error(call.call_id, MESH, call.call_id, bytes(payload)))
        [result] = results_of(call, cancelled=True)
        assert isinstance(result, Err) is is_told
        assert isinstance(results_of(call)[0], Err)
    stage.say(0, ack("caller")(call := stage.call()))
    assert results_of(call) == [Cut()]


async def test_failure_by_the_callers_deadline_or_cancel_is_left_to_that(autojump_clock: trio.abc.Clock):
    """C3, X3: a budget that has ended one of the ranks is the caller's own; a death may have cancelled it."""
    by_budget = messages.CancelAck(1, MESH, 1, True, "budget", "")
    other = messages.Refused(1, MESH, 1, "stopped", "")
    for outcomes, seconds, is_cut in (
        ([by_budget, other], limits.DEADLINE_SKEW_SECONDS, True),
        ([by_budget, other], limits.DEADLINE_SKEW_SECONDS + 0.01, False),
        ([other], 0.1, False),
    ):
        start = trio.current_time()
        with trio.move_on_after(seconds) as scope:
            await yield_to_cancel(outcomes)
        assert scope.cancelled_caught is is_cut
        assert trio.current_time() - start == (seconds if is_cut else 0)
    for some, is_cut in (([other, LocalFailure(ProcDied("gone"))], True), ([other], False)):
        with trio.CancelScope() as scope:
            scope.cancel()
            await yield_to_cancel(some)
        assert scope.cancelled_caught is is_cut


async def test_budget_is_the_time_that_is_left():
    """C3."""
    proc = Proc(ProcId(1), RecordingTransport())
    assert budget_until(proc, math.inf) is None
    assert budget_until(proc, trio.current_time() - 1) == 0.0
    left = budget_until(proc, trio.current_time() + 100)
    assert left is not None
    assert 90 < left <= 100


async def test_virtual_seconds_are_sent_in_simulation_only(autojump_clock: trio.abc.Clock):
    """C3."""
    proc = Proc(ProcId(1), RecordingTransport())
    assert budget_until(proc, trio.current_time() + 100) is None
    proc.is_simulated = True
    assert budget_until(proc, trio.current_time() + 100) == 100
