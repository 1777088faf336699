"""Start of the task of a call: its first step runs at once, as by `eager_start` of Python 3.12 (K05)."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from trimesh.aio import slots

shade: contextvars.ContextVar[str] = contextvars.ContextVar("shade", default="none")

Start = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


def run_with(test: Callable[[Start], Coroutine[Any, Any, None]]) -> None:
    """Run a test in a loop; it starts tasks in a context of their own."""

    async def main() -> None:
        running = asyncio.current_task()
        assert running is not None
        context = contextvars.copy_context()
        context.run(shade.set, "of the call")

        def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = slots.start_eagerly(asyncio.get_running_loop(), running, coroutine, context)
            assert asyncio.current_task() is running
            return task

        await test(start)

    asyncio.run(main())


def test_task_that_does_not_wait_has_ended_at_once() -> None:
    seen: list[Any] = []

    async def work() -> None:
        seen.append((asyncio.current_task(), shade.get()))

    async def test(start: Start) -> None:
        others = list[str]()
        asyncio.get_running_loop().call_soon(others.append, "other")
        task = start(work())
        assert task.done()
        assert task.result() is None
        assert seen == [(task, "of the call")]
        assert others == []
        await asyncio.sleep(0)
        assert others == ["other"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_with(test)
    assert shade.get() == "none"


@pytest.mark.parametrize("waits", ["event", "turn"])
def test_task_that_waits_goes_on_later(waits: str) -> None:
    """For a future, or for a turn of the loop."""
    seen: list[Any] = []

    async def test(start: Start) -> None:
        gate = asyncio.Event()

        async def work() -> None:
            for step in range(3):
                seen.append((step, asyncio.current_task(), shade.get()))
                await (gate.wait() if waits == "event" and step == 0 else asyncio.sleep(0))

        task = start(work())
        assert seen == [(0, task, "of the call")]
        assert not task.done()
        await asyncio.sleep(0)
        assert len(seen) == 1 + (waits == "turn")
        assert "work" in [frame.f_code.co_name for frame in task.get_stack()]
        assert "work() running at" in repr(task)
        gate.set()
        await task
        assert seen == [(step, task, "of the call") for step in range(3)]

    run_with(test)


@pytest.mark.parametrize("when", ["at once", "with the result", "later"])
def test_cancel_is_raised_where_the_task_waits(when: str) -> None:
    """NA-2: once, with its reason, which libraries look at."""
    seen: list[Any] = []

    async def test(start: Start) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                seen.append(await future)
            except asyncio.CancelledError as error:
                seen.append(error.args)
                await asyncio.sleep(0)
                seen.append("unwound")
                raise

        task = start(work())
        if when == "later":
            await asyncio.sleep(0)
        if when == "with the result":
            future.set_result("a result")
        task.cancel("enough")
        await asyncio.wait([task])
        assert task.cancelled()
        assert future.cancelled() is (when != "with the result")

    run_with(test)
    assert seen == [("enough",), "unwound"]


def test_coroutine_that_has_begun_is_one_for_other_libraries() -> None:
    """K05: which close it, or await it."""
    seen: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(0)
        finally:
            seen.append("left")
        return "result"

    async def main() -> None:
        begun = slots._Begun(work())
        begun.send(None)
        begun.close()
        assert seen == ["left"]
        assert await slots._Begun(work()) == "result"  # type: ignore[func-returns-value]

    asyncio.run(main())
    assert seen == ["left", "left"]


def test_loop_whose_callbacks_cannot_be_seen_runs_the_first_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """K05: as in a release of asyncio that lacks a name."""
    seen: list[Any] = []

    async def work() -> None:
        seen.append((asyncio.current_task(), shade.get()))
        await asyncio.sleep(0)

    async def main() -> None:
        context = contextvars.copy_context()
        context.run(shade.set, "of the call")
        running: Any = asyncio.current_task()
        task = slots._start_at_once(asyncio.get_running_loop(), running, work(), context)
        assert seen == []
        await task
        assert seen == [(task, "of the call")]

    monkeypatch.setattr(slots, "_HAS_TASKS", False)
    asyncio.run(main())
