"""The loops that the asyncio tests run on, and what must be left of each: nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh.aio import trio_run

Test = Callable[[], Coroutine[Any, Any, None]]


async def watched(test: Test) -> None:
    """Run a test, then look at what it has left in its loop."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANG_SECONDS):
        await test()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
    assert asyncio.all_tasks() == {current}
    assert trio_run._runs == {}
    assert not trio.lowlevel.in_trio_run()
    selector = getattr(loop, "_selector", None)
    assert selector is None or "select" not in vars(selector)
    await asyncio.sleep(0)
    # A thread tells the loop something, then wakes it: the loop may have been awake, and be woken for nothing.
    woken = getattr(loop, "_read_from_self", None)
    assert [handle for handle in getattr(loop, "_ready", ()) if handle._callback != woken] == []
    # asyncio drops cancelled timers when they come up or outnumber the others
    assert [timer for timer in getattr(loop, "_scheduled", ()) if not timer.cancelled()] == []


def run_as_host(test: Test) -> None:
    """Trio is the guest of asyncio's own loop."""
    handler = signal.getsignal(signal.SIGINT)
    asyncio.run(watched(test))
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.set_wakeup_fd(-1) == -1


def run_on_uvloop(test: Test) -> None:
    """Trio is the guest of uvloop."""
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(watched(test))


def run_in_thread(test: Test) -> None:
    """The loop is in a thread of a Trio program, whose run does the work."""
    trio.run(partial(trio.to_thread.run_sync, lambda: asyncio.run(watched(test))))


def run_beside_trio(test: Test) -> None:
    """The program itself has made Trio a guest of its loop."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        over, done = loop.create_future(), trio.Event()
        trio.lowlevel.start_guest_run(
            done.wait,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=over.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await test()
            assert trio_run._runs == {}
        finally:
            done.set()
            (await over).unwrap()

    asyncio.run(main())


LOOPS: dict[str, Callable[[Test], None]] = {"guest": run_as_host, "uvloop": run_on_uvloop, "thread": run_in_thread}


async def expire(limit: asyncio.Timeout) -> None:
    """Let a timeout be over, at a moment that no busy machine can change."""
    limit.reschedule(asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    assert limit.expired()


class Attempt:
    """An await in a task of its own that keeps whatever comes of it."""

    def __init__(self, work: Awaitable[Any]) -> None:
        self.error: BaseException | None = None
        self.value: Any = None
        self.task = asyncio.create_task(self._run(work))

    async def _run(self, work: Awaitable[Any]) -> None:
        try:
            self.value = await work
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):
                raise

    async def over(self) -> BaseException | None:
        """Wait for its end; return what it has raised."""
        await asyncio.wait([self.task])
        return self.error
