"""Calls that wait for themselves until a deadline (rule C8): the deadline ends them, and it is said why."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, attempt, only_sim
from tests.conformance.nodes import Node, no_deadline
from tests.conformance.test_stalls import listening
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, DeadlockError, endpoint


class Visitor(Node):
    """Calls others within a time of its own."""

    @endpoint
    async def visit_within(self, seconds: float, other: Any) -> int:
        with trio.fail_after(seconds) as self.scope:
            return await other.ping.call_one()

    @endpoint(group="watch", concurrency=100)
    async def expire(self) -> None:
        """Let the time of `visit_within` be over."""
        self.scope.deadline = trio.current_time()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged of deadlocks."""
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in found if "waits for itself" in text]


async def test_deadlock_that_a_deadline_ends_is_said(backend: Backend, caplog: pytest.LogCaptureFixture):
    """C8: a line in the log, and a note on the error that the deadline has made."""
    async with listening() as said, no_deadline() as nursery, backend.procs() as procs:
        nodes = await procs.spawn("nodes", Visitor)
        one = nodes.slice(gpus=1)
        visiting = attempt(nursery, one.visit_within.call_one, HANG_SECONDS, one)
        await said.wait(1)
        await one.wait_entered.call_one(0)  # what is logged is told to the callers in the next step
        await one.expire.call_one()
        with pytest.raises(trio.TooSlowError) as caught:
            await visiting.result()
        assert await one.ping.call_one() == 1
    heading = "nodes[gpus=1].ping waits for itself"
    assert [text.splitlines()[0] for text in told(caplog)] == [f"{heading}, until a deadline ends it:"]
    assert [note.splitlines()[0] for note in caught.value.__notes__ if "itself" in note] == [
        f"a deadline has ended a deadlock: {heading}:"
    ]


@only_sim
async def test_crossing_calls_within_a_budget_are_said_once(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """C8, C3: also when the deadline is that of a caller further up, whose own error shows it."""
    caught: list[BaseException] = []
    async with no_deadline(), backend.procs() as procs:
        nodes = await procs.spawn("nodes", Visitor)
        with pytest.raises(trio.TooSlowError) as raised, trio.fail_after(1):
            async with trio.open_nursery() as nursery:
                for rank in (0, 1):
                    nursery.start_soon(nodes.slice(gpus=rank).meet.call_one, nodes.slice(gpus=1 - rank))
                await nodes.wait_entered.call(1)
                await nodes.open_gate.call()
                await trio.sleep(0.5)
                assert len(told(caplog)) == 1  # long before the deadline
                for rank in (0, 1):  # more that queue there bring no news
                    nursery.start_soon(nodes.slice(gpus=rank).ping.call_one)
        assert raised.value.__context__ is not None
        caught += trimesh.leaves(raised.value.__context__)
    assert len(told(caplog)) == 1
    notes = [note for leaf in caught for note in getattr(leaf, "__notes__", ())]
    assert len([note for note in notes if "a deadline has ended a deadlock" in note]) >= 2


@only_sim
async def test_deadlock_without_a_deadline_has_its_victim_beside_one_with(
    backend: SimBackend, caplog: pytest.LogCaptureFixture
):
    """C8: one has to be ended, the other ends by itself."""
    async with no_deadline(), backend.procs() as procs:
        nodes = await procs.spawn("nodes", Visitor)
        zero, one = nodes.slice(gpus=0), nodes.slice(gpus=1)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def _wait_for_itself() -> None:
                with pytest.raises(trio.TooSlowError):
                    await one.visit_within.call_one(5, one)

            with pytest.raises(DeadlockError):
                await zero.visit.call_one(zero)
    assert [text.splitlines()[0] for text in told(caplog)] == [
        "nodes[gpus=1].ping waits for itself, until a deadline ends it:"
    ]


@only_sim
async def test_wait_behind_work_with_a_deadline_is_no_deadlock(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """C8: calls that wait for one that works are none, with or without a deadline."""

    class Relay(Actor):
        @endpoint
        async def ask(self, other: Any) -> int:
            with trio.fail_after(20):
                return await other.work.call_one()

    class Worker(Actor):
        @endpoint
        async def work(self) -> int:
            await trio.sleep(2)
            return 1

    async with no_deadline(), backend.procs() as procs:
        relays = await procs.spawn("relays", Relay)
        workers = await procs.spawn("workers", Worker)
        one = relays.slice(gpus=0)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one.ask.call_one, workers.slice(gpus=1))
    assert told(caplog) == []
