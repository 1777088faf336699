"""One actor in its process, frame by frame: each call gets one terminal frame, whatever ends it (CE-1 to CE-4)."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from tests.runtime.frames import Caller

from trimesh import Actor, ActorFailed, endpoint
from trimesh._runtime.actors.cell import ActorSpec, Cell
from trimesh._runtime.life.current import current_proc
from trimesh._wire import messages
from trimesh.errors import leaves
from trimesh.ids import MeshId
from trimesh.shape.extent import Extent
from trimesh.testing.simulated.host import open_world


class Subject(Actor):
    """Writes down its life."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gate = trio.Event()
        self.fuse = trio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        self.log.append("set-up")
        async with trio.open_nursery() as self.nursery:
            self.nursery.start_soon(self.watch)
            yield
            self.nursery.cancel_scope.cancel()
        self.log.append("clean-up")

    async def watch(self) -> None:
        await self.fuse.wait()
        raise OSError("fuse")

    @endpoint(concurrency=10)
    async def wait(self, note: str) -> str:
        self.log.append(note)
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.log.append(f"{note} cancelled")
            raise
        return note

    @endpoint
    async def queue(self, note: str) -> str:
        return await self.wait(note)

    @endpoint
    async def fail(self) -> None:
        raise LookupError("endpoint")

    @endpoint
    def inline(self, note: str) -> str:
        self.log.append(note)
        return note

    @endpoint
    async def at_once(self, note: str) -> str:
        return self.inline(note)

    @endpoint
    def stop_iterating(self) -> None:
        raise StopIteration

    @endpoint
    def forget_async(self) -> object:
        return self.hidden()

    async def hidden(self) -> None: ...


class Steps(trio.abc.Instrument):
    """Counts the steps of tasks that serve mailboxes."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name.endswith("_slot")


@attrs.define(eq=False)
class Stage:
    """A live cell, its actor, two callers, and what its owner was told."""

    cell: Cell
    actor: Subject
    owner: Caller
    other: Caller

    def failures(self) -> list[messages.ActorFailure]:
        return [message for message in self.owner.link.sent if isinstance(message, messages.ActorFailure)]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_world():
        proc = current_proc()
        owner, other = Caller.of(proc, 77), Caller.of(proc, 88)
        actor = Subject()
        spec = ActorSpec(MeshId(5), "subject", Subject, lambda: actor, Extent(gpus=1).point(0))
        cell = proc.cells[MeshId(5)] = Cell(proc, spec, owner.peer)
        await proc.actors.start(cell.run)
        yield Stage(cell, actor, owner, other)
        if not cell.ended.is_set():
            await cell.stop(1.0)
        assert not owner.peer.inbound
        assert not other.peer.inbound


# ---- ends ------------------------------------------------------------------------------------------------------------


async def test_value_is_returned(stage: Stage):
    stage.actor.gate.set()
    call = stage.owner.call(stage.cell, "wait", "a")
    await trio.testing.wait_all_tasks_blocked()
    (reply,) = stage.owner.link.sent
    assert isinstance(reply, messages.Return)
    assert (reply.call, reply.mesh, reply.dequeued) == (1, 5, 1)
    assert stage.cell.proc.values.decode(reply.payload, []) == "a"
    assert call.ended


async def test_error_is_returned(stage: Stage):
    stage.owner.call(stage.cell, "fail")
    await trio.testing.wait_all_tasks_blocked()
    (reply,) = stage.owner.link.sent
    assert isinstance(reply, messages.Error)


async def test_broadcast_has_no_reply(stage: Stage):
    stage.actor.gate.set()
    stage.owner.call(stage.cell, "wait", "a", broadcast=True)
    await trio.testing.wait_all_tasks_blocked()
    assert stage.owner.link.sent == []
    assert stage.actor.log == ["set-up", "a"]


async def test_broadcast_that_fails_is_told_to_the_owner(stage: Stage):
    """E10: whoever has sent it; the actor lives on."""
    stage.other.call(stage.cell, "fail", broadcast=True)
    await trio.testing.wait_all_tasks_blocked()
    assert stage.other.link.sent == []
    (failure,) = stage.failures()
    assert (failure.mesh, failure.endpoint, failure.ended) == (5, "fail", False)
    assert not stage.cell.ended.is_set()


@pytest.mark.parametrize(("name", "started"), [("wait", True), ("queue", False)])
async def test_cancel_is_acknowledged(stage: Stage, name: str, started: bool):
    """C01, C11: when it has unwound, or at once when it had not begun."""
    stage.other.call(stage.cell, "queue", "first")
    await trio.testing.wait_all_tasks_blocked()
    call = stage.owner.call(stage.cell, name, "a")
    await trio.testing.wait_all_tasks_blocked()
    stage.cell.cancel(call, "caller", "enough")
    stage.cell.cancel(call, "caller", "again")
    await trio.testing.wait_all_tasks_blocked()
    (ack,) = stage.owner.link.sent
    assert isinstance(ack, messages.CancelAck)
    assert (ack.call, ack.started, ack.by, ack.reason) == (1, started, "caller", "enough")
    assert ("a cancelled" in stage.actor.log) == started
    stage.cell.cancel(call, "caller", "late")
    assert len(stage.owner.link.sent) == 1


async def test_budget_ends_a_call(stage: Stage, autojump_clock: trio.abc.Clock):
    """C3."""
    stage.owner.call(stage.cell, "wait", "a", budget=2.0)
    await trio.sleep(3)
    (ack,) = stage.owner.link.sent
    assert (ack.by, ack.reason, ack.started) == ("budget", "budget at sending", True)


async def test_call_whose_budget_is_over_never_starts(stage: Stage, autojump_clock: trio.abc.Clock):
    """D04."""
    stage.other.call(stage.cell, "queue", "first")
    await trio.testing.wait_all_tasks_blocked()
    stage.owner.call(stage.cell, "queue", "late", budget=2.0)
    await trio.sleep(3)
    assert stage.owner.link.sent == []
    stage.actor.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    (ack,) = stage.owner.link.sent
    assert (ack.by, ack.started) == ("budget", False)
    assert "late" not in stage.actor.log


async def test_credit_is_reported_when_there_are_no_replies(stage: Stage):
    """S07: on the control lane."""
    caller = Caller.of(stage.cell.proc, 99, every=4)
    for number in range(9):
        caller.call(stage.cell, "inline", str(number), broadcast=True)
    await trio.testing.wait_all_tasks_blocked()
    assert caller.link.sent == [messages.Credit(5, 4), messages.Credit(5, 8)]
    assert {lane.name for lane in caller.link.lanes} == {"CONTROL"}


# ---- many calls, one slot --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["inline", "at_once"])
async def test_calls_that_never_wait_cost_no_switch_of_tasks_each(stage: Stage, name: str):
    """A slot runs what has come one after the other, and lets other tasks run now and then."""
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    caller = Caller.of(stage.cell.proc, 99)
    for number in range(64):
        caller.call(stage.cell, name, str(number), broadcast=True)
    await trio.testing.wait_all_tasks_blocked()
    trio.lowlevel.remove_instrument(steps)
    assert stage.actor.log[1:] == [str(number) for number in range(64)]
    assert 64 / 16 <= steps.count <= 64 / 16 + 2


async def test_cancel_of_a_call_is_not_left_for_the_next(stage: Stage):
    """MB-1."""
    first = stage.owner.call(stage.cell, "queue", "a")
    stage.owner.call(stage.cell, "queue", "b")
    await trio.testing.wait_all_tasks_blocked()
    stage.cell.cancel(first, "caller", "enough")
    await trio.testing.wait_all_tasks_blocked()
    assert stage.actor.log == ["set-up", "a", "a cancelled", "b"]
    stage.actor.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    ack, reply = stage.owner.link.sent
    assert isinstance(ack, messages.CancelAck)
    assert isinstance(reply, messages.Return)


async def test_budget_of_a_call_is_not_left_for_the_next(stage: Stage, autojump_clock: trio.abc.Clock):
    """MB-1: neither when the call has ended in time, nor when it has not."""
    stage.actor.gate.set()
    stage.owner.call(stage.cell, "queue", "in time", budget=2.0)
    await trio.testing.wait_all_tasks_blocked()
    stage.actor.gate = trio.Event()
    stage.owner.call(stage.cell, "queue", "late", budget=4.0)
    stage.owner.call(stage.cell, "queue", "last")
    await trio.sleep(100)
    assert [type(message).__name__ for message in stage.owner.link.sent] == ["Return", "CancelAck"]
    stage.actor.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(stage.owner.link.sent[2], messages.Return)


async def test_stop_iteration_is_told_as_an_error(stage: Stage):
    """Nothing that is awaited can raise it."""
    stage.owner.call(stage.cell, "stop_iterating")
    await trio.testing.wait_all_tasks_blocked()
    (reply,) = stage.owner.link.sent
    assert isinstance(reply, messages.Error)
    error = stage.cell.proc.values.decode_error(reply.payload)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, StopIteration)


async def test_coroutine_of_a_plain_function_is_refused(stage: Stage):
    """It is closed: no warning says that it was not awaited."""
    stage.owner.call(stage.cell, "forget_async")
    await trio.testing.wait_all_tasks_blocked()
    (reply,) = stage.owner.link.sent
    assert isinstance(reply, messages.Error)
    error = stage.cell.proc.values.decode_error(reply.payload)
    assert str(error).startswith("a plain def endpoint must return a value, got a coroutine from forget_async()")


# ---- the actor ends --------------------------------------------------------------------------------------------------


async def test_drain_serves_the_owner_and_refuses_others(stage: Stage):
    """CE-4, M3."""
    cell = stage.cell
    stage.owner.call(cell, "queue", "owner")
    stage.other.call(cell, "wait", "other")
    stage.other.call(cell, "queue", "never")
    stage.owner.call(cell, "queue", "owner too")
    await trio.testing.wait_all_tasks_blocked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cell.drain, 5.0)
        await trio.testing.wait_all_tasks_blocked()
        assert [(type(end), end.call) for end in stage.other.link.sent] == [
            (messages.CancelAck, 2),
            (messages.CancelAck, 1),
        ]
        assert {end.by for end in stage.other.link.sent} == {"other"}
        stage.other.call(cell, "wait", "late")
        assert stage.other.link.sent[-1].kind == "stopped"
        assert stage.owner.link.sent == []
        stage.actor.gate.set()
    assert [type(end) for end in stage.owner.link.sent] == [messages.Return] * 2
    assert "never" not in stage.actor.log


async def test_stop_cancels_everything_then_cleans_up(stage: Stage):
    """CE-3."""
    cell = stage.cell
    stage.owner.call(cell, "queue", "runs")
    stage.owner.call(cell, "queue", "waits")
    await trio.testing.wait_all_tasks_blocked()
    await cell.stop(5.0)
    assert cell.ended.is_set()
    assert stage.actor.log == ["set-up", "runs", "runs cancelled", "clean-up"]
    assert sorted((end.call, end.started, end.by) for end in stage.owner.link.terminals()) == [
        (1, True, "other"),
        (2, False, "other"),
    ]
    assert stage.failures() == []
    stage.owner.call(cell, "queue", "late")
    assert stage.owner.link.sent[-1].kind == "stopped"


async def test_failure_of_the_actor_is_told_first(stage: Stage):
    """E14, X3: then its callers get it as the cause; also those that come later."""
    cell = stage.cell
    stage.owner.call(cell, "wait", "runs")
    stage.owner.call(cell, "queue", "runs too")
    stage.owner.call(cell, "queue", "waits")
    await trio.testing.wait_all_tasks_blocked()
    stage.actor.fuse.set()
    await cell.ended.wait()
    stage.owner.call(cell, "wait", "late")
    first, *ends = stage.owner.link.sent
    assert isinstance(first, messages.ActorFailure)
    assert (first.endpoint, first.ended) == ("", True)
    assert sorted(end.call for end in ends) == [1, 2, 3, 4]
    for end in ends:
        assert isinstance(end, messages.Error)
        error = cell.proc.values.decode_error(end.payload)
        assert isinstance(error, ActorFailed)
        assert error.__cause__ is not None
        assert any(isinstance(leaf, OSError) for leaf in leaves(error.__cause__))
    assert "waits" not in stage.actor.log
    assert isinstance(cell.cause, ExceptionGroup)


async def test_actor_that_ends_by_itself_tells_its_callers(stage: Stage):
    """C06: and is no failure."""
    cell = stage.cell
    stage.owner.call(cell, "queue", "runs")
    stage.owner.call(cell, "queue", "waits")
    await trio.testing.wait_all_tasks_blocked()
    stage.actor.nursery.cancel_scope.cancel()
    await cell.ended.wait()
    stage.owner.call(cell, "queue", "late")
    assert stage.failures() == []
    kinds: list[Callable[..., Any]] = [type(end) for end in stage.owner.link.sent]
    assert kinds == [messages.Finished, messages.CancelAck, messages.Refused, messages.Refused]
    assert stage.owner.link.sent[1].by == "other"


async def test_message_during_the_clean_up_waits_for_the_end(stage: Stage):
    """E14: an actor that is ending by itself starts nothing; a cancel of the message is obeyed at once."""
    cell, actor = stage.cell, stage.actor
    release = trio.Event()

    async def slow_clean_up() -> None:
        with trio.CancelScope(shield=True):
            await release.wait()

    async def hold() -> None:
        try:
            await trio.sleep_forever()
        finally:
            await slow_clean_up()

    actor.nursery.start_soon(hold)
    await trio.testing.wait_all_tasks_blocked()
    actor.fuse.set()
    await trio.testing.wait_all_tasks_blocked()
    stage.owner.call(cell, "wait", "waits")
    cancelled = stage.owner.call(cell, "wait", "cancelled")
    await trio.testing.wait_all_tasks_blocked()
    assert stage.owner.link.terminals() == []
    cell.cancel(cancelled, "caller", "enough")
    (ack,) = stage.owner.link.terminals()
    assert (ack.call, ack.started, ack.by) == (2, False, "caller")
    release.set()
    await cell.ended.wait()
    assert isinstance(stage.owner.link.sent[-1], messages.Error)
    assert "waits" not in actor.log


async def test_stop_that_takes_too_long_is_cancelled(stage: Stage, autojump_clock: trio.abc.Clock):
    """Z14: by whoever cannot kill the process; infinite grace waits."""
    actor = stage.actor

    async def stubborn() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(20)

    actor.nursery.start_soon(stubborn)
    start = trio.current_time()
    with pytest.raises(ActorFailed, match="grace"):
        await stage.cell.stop(3.0)
    assert stage.cell.ended.is_set()
    assert trio.current_time() == start + 20


async def test_infinite_grace_waits(stage: Stage, autojump_clock: trio.abc.Clock):
    actor = stage.actor

    async def stubborn() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(20)

    actor.nursery.start_soon(stubborn)
    await stage.cell.stop(math.inf)
    assert stage.cell.ended.is_set()
