"""Threads of simulated actors: a function runs inline after a seeded delay, and sleeps in virtual time (rule S1).

A real thread would go on in real time. So `trio.to_thread.run_sync` of an actor, and what Trio does with it (its files,
its paths), calls the function in Trio's thread, and so does an endpoint with `thread=True`. The time that the function
sleeps by `time.sleep` passes when it has returned: until then its caller waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, TypeVar

import attrs
import trio

from trimesh.testing.simulated.guards import is_in_actor
from trimesh.testing.simulated.own_modules import Change
from trimesh.testing.simulated.time import SimTime

T = TypeVar("T")

THREAD_SECONDS: Final = 0.01
"""A thread starts late by up to this."""


@attrs.define(eq=False)
class SimThreads:
    """The threads of one simulated run.

    Attributes:
        draw: Random numbers of the delays.
        time: The clocks that code in a thread reads.
    """

    draw: random.Random
    time: SimTime

    async def run(self, function: Callable[[], T], *, is_left: bool = False) -> T:
        """Run a function as a thread would.

        Args:
            function: What.
            is_left: Whether a caller that is cancelled leaves it behind.
        """
        await trio.sleep(self.draw.uniform(0, THREAD_SECONDS))
        before, self.time.in_thread = self.time.in_thread, 0.0
        try:
            result = function()
        finally:
            slept, self.time.in_thread = self.time.in_thread, before
        if slept:
            with trio.CancelScope(shield=not is_left):
                await trio.sleep(slept)
        return result

    def changes(self) -> list[Change]:
        """Return what runs in this way what actors give to `trio.to_thread`."""
        real, back, back_sync = trio.to_thread.run_sync, trio.from_thread.run, trio.from_thread.run_sync
        check = trio.from_thread.check_cancelled

        async def run_sync(
            function: Callable[..., Any],
            *args: Any,
            abandon_on_cancel: bool = False,
            limiter: trio.CapacityLimiter | None = None,
            **options: Any,
        ) -> Any:
            if not is_in_actor():
                return await real(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter, **options)
            slot: AbstractAsyncContextManager[Any] = nullcontext() if limiter is None else limiter
            async with slot:
                return await self.run(lambda: function(*args), is_left=abandon_on_cancel)

        def run_back(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if self.time.in_thread is None:
                return back(function, *args, **options)
            raise RuntimeError(
                "the thread of a simulated actor cannot wait for Trio, in whose own thread it runs: return to the "
                'endpoint and await there, or test it over real processes: `@pytest.mark.mesh_backend("proc")`'
            )

        def run_back_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return back_sync(function, *args, **options) if self.time.in_thread is None else function(*args)

        def check_cancelled() -> None:
            if self.time.in_thread is None:  # else it runs while nothing else does, a cancel included
                check()

        path: Any = trio._path  # noqa: SLF001 - it has the function by its own name
        return [
            (trio.to_thread, "run_sync", run_sync),
            (path, "run_sync", run_sync),
            (trio.from_thread, "run", run_back),
            (trio.from_thread, "run_sync", run_back_sync),
            (trio.from_thread, "check_cancelled", check_cancelled),
        ]
