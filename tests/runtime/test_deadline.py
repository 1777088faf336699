"""The deadline of the running task, walked through the scopes of Trio, is what Trio's own function says."""

# ruff: noqa: ASYNC100 - nothing waits in these scopes: they are looked at

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from trimesh._runtime.tasks import background
from trimesh._runtime.tasks.background import effective_deadline, walked_deadline

SOON, LATER = 10.0, 20.0  # of a clock that stands still


def found() -> float:
    assert walked_deadline() == trio.current_effective_deadline()
    return walked_deadline()


def test_scopes_of_this_release_of_trio_are_walked():
    assert effective_deadline is walked_deadline


async def test_earliest_deadline_counts(mock_clock: trio.testing.MockClock):
    assert found() == math.inf
    with trio.CancelScope(deadline=LATER):
        assert found() == LATER
        with trio.CancelScope(deadline=SOON):
            assert found() == SOON
        with trio.CancelScope(deadline=SOON) as inner:
            inner.deadline = math.inf
            assert found() == LATER
        with trio.move_on_after(SOON / 2), trio.CancelScope(deadline=SOON):
            assert found() == SOON / 2


async def test_what_is_around_a_shield_does_not_count(mock_clock: trio.testing.MockClock):
    with trio.CancelScope(deadline=SOON):
        with trio.CancelScope(shield=True) as scope:
            assert found() == math.inf
            scope.deadline = LATER
            assert found() == LATER
            scope.shield = False
            assert found() == SOON
        with trio.CancelScope(shield=True), trio.CancelScope(deadline=LATER):
            assert found() == LATER


async def test_cancelled_task_has_no_time_left(mock_clock: trio.testing.MockClock):
    with trio.CancelScope() as outer:
        outer.cancel()
        assert found() == -math.inf
        with trio.CancelScope(shield=True, deadline=LATER):
            assert found() == LATER
        with trio.CancelScope(deadline=LATER):
            assert found() == -math.inf


async def test_task_is_within_the_scopes_of_its_nursery(mock_clock: trio.testing.MockClock):
    seen: list[float] = []

    async def child() -> None:
        seen.append(found())
        with trio.CancelScope(deadline=SOON):
            seen.append(found())

    with trio.CancelScope(deadline=LATER):
        async with trio.open_nursery() as nursery:
            with trio.CancelScope(deadline=SOON):
                nursery.start_soon(child)  # it is not within this one
                await trio.testing.wait_all_tasks_blocked()

    assert seen == [LATER, SOON]


def test_another_release_of_trio_is_not_walked(monkeypatch: pytest.MonkeyPatch):
    assert background._can_walk()
    monkeypatch.setattr(trio._core._run.CancelScope, "__attrs_attrs__", ())
    assert not background._can_walk()
