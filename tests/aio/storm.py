"""Calls that are cut at drawn moments, by tasks of asyncio and by scopes of Trio, and what must hold after them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

import trio
from tests.aio.counted import Tally

AT_ONCE = 50
"""Calls of one round, which run together."""

ROUNDS = 10
"""Of each storm: 500 calls."""

DOUBLINGS = 8
"""How far the moments reach at which calls are cut: before they leave, under way, when the answer is there."""

SECONDS = 0.0002
"""The least time until a cut; the greatest is `2 ** DOUBLINGS` as long."""

Outcomes = dict[int, str]


class Sibling(Exception):
    """Fails a task group."""


async def let_pass(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def draw_turns(dice: Random) -> int:
    """Draw after how many turns of the loop a call is cut: few as often as many."""
    return int(2 ** (DOUBLINGS * dice.random())) - 1


def draw_seconds(dice: Random) -> float:
    """Draw after how much time a call is cut."""
    return SECONDS * float(2 ** (DOUBLINGS * dice.random()))


class Storm:
    """Calls of numbers, each of which is cut in a drawn way.

    Attributes:
        outcomes: How each call has ended at its caller; none of a task that was cancelled before its first step.
        relayed: Those that went through the other actor.
    """

    def __init__(self, actor: Any, relay: Any, dice: Random) -> None:
        self.actor, self.relay, self.dice = actor, relay, dice
        self.outcomes: Outcomes = {}
        self.relayed: set[int] = set()
        self._numbers = 0

    # ---- one call ----------------------------------------------------------------------------------------------------

    def hold(self) -> tuple[int, Coroutine[Any, Any, None]]:
        """Return the number of a call that runs until it is cut, and the call."""
        number = self._numbers = self._numbers + 1
        return number, self._noted(number, partial(self.actor.hold.call_one, number))

    def draw(self, *, ends: bool = False) -> Coroutine[Any, Any, None]:
        """Return a drawn call; with `ends` one that ends by itself."""
        number = self._numbers = self._numbers + 1
        kinds = ["turns", "one_by_one"] if ends else ["hold", "turns", "one_by_one"]
        kind = self.dice.choice(kinds)
        args = (self.dice.randrange(20),) if kind == "turns" else ()
        if self.dice.random() < 0.7:
            return self._noted(number, partial(getattr(self.actor, kind).call_one, number, *args))
        self.relayed.add(number)
        return self._noted(number, partial(self.relay.relay.call_one, self.actor, number, kind, *args))

    async def _noted(self, number: int, call: Callable[[], Coroutine[Any, Any, int]]) -> None:
        assert number not in self.outcomes
        self.outcomes[number] = "unended"
        try:
            found = await call()
        except asyncio.CancelledError:
            self.outcomes[number] = "cancelled"
            raise
        self.outcomes[number] = "value" if found == number else f"value {found}"

    # ---- ways to cut it ----------------------------------------------------------------------------------------------

    async def cancel_after_turns(self) -> None:
        task = asyncio.create_task(self.draw())
        await let_pass(draw_turns(self.dice))
        task.cancel()
        if self.dice.random() < 0.3:
            await let_pass(self.dice.randrange(5))
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.result() is None

    async def cancel_after_time(self) -> None:
        task = asyncio.create_task(self.draw())
        timer = asyncio.get_running_loop().call_later(draw_seconds(self.dice), task.cancel)
        await asyncio.wait([task])
        timer.cancel()
        assert task.cancelled() or task.result() is None

    async def time_out(self) -> None:
        try:
            async with asyncio.timeout(draw_seconds(self.dice)):
                await self.draw()
        except TimeoutError:
            pass

    async def wait_for(self) -> None:
        try:
            await asyncio.wait_for(self.draw(), draw_seconds(self.dice))
        except TimeoutError:
            pass

    async def fail_a_sibling(self) -> None:
        turns = draw_turns(self.dice)

        async def fail() -> None:
            await let_pass(turns)
            raise Sibling

        async def together() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.draw())
                group.create_task(fail())

        # In a task of its own: before Python 3.13 a TaskGroup may forget to take back its cancel of this one.
        [result] = await asyncio.gather(asyncio.create_task(together()), return_exceptions=True)
        assert isinstance(result, ExceptionGroup)
        assert [type(error) for error in result.exceptions] == [Sibling]

    async def cancel_under_way(self) -> None:
        number, call = self.hold()
        task = asyncio.create_task(call)
        await self.actor.wait_begun.call_one(number)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    async def time_out_under_way(self) -> None:
        number, call = self.hold()
        limit = asyncio.timeout(None)

        async def limited() -> None:
            async with limit:
                await call

        task = asyncio.create_task(limited())
        await self.actor.wait_begun.call_one(number)
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.wait([task])
        assert isinstance(task.exception(), TimeoutError)

    async def let_be(self) -> None:
        await self.draw(ends=True)

    # ---- all of them -------------------------------------------------------------------------------------------------

    async def run(self, ways: list[Callable[[], Coroutine[Any, Any, None]]], rounds: int = ROUNDS) -> None:
        for _ in range(rounds):
            tasks = [asyncio.create_task(self.dice.choice(ways)()) for _ in range(AT_ONCE)]
            await asyncio.gather(*tasks)

    @property
    def cancels(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [
            self.cancel_after_turns,
            self.cancel_after_time,
            self.cancel_under_way,
            self.fail_a_sibling,
            self.let_be,
        ]

    @property
    def deadlines(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [self.time_out, self.wait_for, self.time_out_under_way, self.let_be]


def check(outcomes: Outcomes, tally: Tally, relayed: set[int] | None = None) -> None:
    """Compare the outcomes of calls with what an actor has counted, when all calls are over.

    Args:
        outcomes: Of all calls.
        tally: Of the actor.
        relayed: Those that the actor was sent; without it, all.
    """
    values = {number for number, outcome in outcomes.items() if outcome == "value"}
    assert set(outcomes.values()) <= {"value", "cancelled"}
    assert set(tally.begun) <= (set(outcomes) if relayed is None else relayed)
    assert set(tally.begun.values()) <= {1}  # no call has begun twice
    assert tally.returned | tally.cancelled == set(tally.begun)  # each that has begun has ended
    assert tally.returned & tally.cancelled == set()
    assert values & (values if relayed is None else relayed) <= tally.returned
    assert (tally.failed, tally.unclean) == (set(), [])
    assert (tally.calls_queued, tally.calls_running) == (0, 1)  # the call that asks


def check_idle(*meshes: Any) -> None:
    """Check that this process has no call under way to any of the meshes."""
    for mesh in meshes:
        statistics = mesh.statistics()
        assert (statistics.calls_unended, statistics.calls_waiting) == (0, 0)


class TrioStorm:
    """Calls of a Trio program, each of which is cut by a scope."""

    def __init__(self, actor: Any, relay: Any, dice: Random) -> None:
        self.actor, self.relay, self.dice = actor, relay, dice
        self.outcomes: Outcomes = {}

    async def call(self, number: int) -> None:
        self.outcomes[number] = "cancelled"
        kind = self.dice.choice(["hold", "turns", "one_by_one"])
        args = (self.dice.randrange(20),) if kind == "turns" else ()
        turns, seconds = draw_turns(self.dice), draw_seconds(self.dice)
        has_deadline, is_relayed = self.dice.random() < 0.5, self.dice.random() < 0.3
        async with trio.open_nursery() as nursery:
            if has_deadline:
                nursery.cancel_scope.deadline = trio.current_time() + seconds
            else:
                nursery.start_soon(self._cancel, nursery.cancel_scope, turns)
            if is_relayed:
                found = await self.relay.relay.call_one(self.actor, number, kind, *args)
            else:
                found = await getattr(self.actor, kind).call_one(number, *args)
            self.outcomes[number] = "value" if found == number else f"value {found}"

    async def _cancel(self, scope: trio.CancelScope, turns: int) -> None:
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        scope.cancel()
