"""Sites: the place in Trio of each part of an asyncio program, and its spare stand-ins."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import outcome
import trio

from trimesh import limits
from trimesh._runtime.tasks import Site, split_cancelled, woken_elsewhere
from trimesh.aio.stand_in import StandIn, go_on, stepped, wait_in_trio

if TYPE_CHECKING:
    from trimesh.aio.slots import SlotCall
    from trimesh.aio.trio_run import TrioRun

T = TypeVar("T")

_NO_CONTEXT: Final = contextvars.Context()


class SpareStandIn(StandIn):
    """A reusable stand-in of a site, for any asyncio task.

    When the coroutine of the asyncio task is closed in the middle, the work is cancelled, and Trio runs the rest of it.

    Args:
        site: Its nursery holds the stand-in.
    """

    def __init__(self, site: AsyncioSite) -> None:
        assert site.run.driver is not None
        super().__init__(site.run.loop, site.run.driver)
        self.scope = trio.CancelScope()
        self._site = site
        self._is_idle = True
        self._is_over = False
        self._rest: Any = None

    # ---- Trio's side -----------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def live(self) -> None:
        """Run the Trio task: wait for work, for results of waits, and for the end."""
        self.begin()
        try:
            with self.scope:
                while not self._is_over:
                    sent = await wait_in_trio(self._abort)
                    if self._is_idle:
                        sent.unwrap()
                    elif self._rest is None:
                        self.rescheduled(sent)
                    else:
                        await self._finish_rest(sent)
                        return
        finally:
            woken_elsewhere.pop(self.task, None)

    async def _finish_rest(self, sent: outcome.Outcome[Any]) -> None:
        """Run the rest of abandoned work; drop its error: the task that would get it is gone."""
        try:
            await go_on(self._rest, sent)
        except BaseException as error:  # noqa: BLE001 - as said above
            cancelled = split_cancelled(error)[0]
            if cancelled is not None:
                raise cancelled from None
        finally:
            self._rest = None

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        return trio.lowlevel.Abort.SUCCEEDED if self._is_idle else trio.lowlevel.Abort.FAILED

    # ---- asyncio's side --------------------------------------------------------------------------------------

    @property
    def can_work(self) -> bool:
        """True while it is parked and not cancelled."""
        return self.task is not None and self.task._abort_func is not None

    async def perform(self, work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None = None) -> T:
        """Run `work` in the running asyncio task; see `crossing.run_in_trio`."""
        run = self._site.run
        run.users += 1
        self._is_idle = False
        context = self.task.context = contextvars.copy_context()
        try:
            return await stepped(self.do(work, put_back, context, self.scope))
        finally:
            del work, put_back
            self._give_back()
            if run.users > 1:
                run.users -= 1
            else:
                await run.release()

    def _give_back(self) -> None:
        if self._rest is not None:
            return
        task = self.task
        self._is_idle = True
        task.context = _NO_CONTEXT
        self.abort_by(self._abort)
        if self.scope.cancel_called or not self._site.keep(self):
            self.end()

    def end(self) -> None:
        """End it. It has no work."""
        self._is_over = True
        if self.can_work:  # else its cancel is under way
            trio.lowlevel.reschedule(self.task)

    def _abandon(self, coroutine: Any) -> None:
        self._rest = coroutine
        del woken_elsewhere[self.task]
        self.scope.cancel(reason="the asyncio task is gone")
        if self._sent is not None:  # what it has waited for had come
            sent, self._sent = self._sent, None
            trio.lowlevel.reschedule(self.task, sent)


class AsyncioSite(Site["TrioRun"]):
    """A site for asyncio tasks.

    Attributes:
        parent: The enclosing site.
        spare: Idle stand-ins.
    """

    parent: AsyncioSite | None

    def __init__(self, run: TrioRun, parent: AsyncioSite | None) -> None:
        super().__init__(run, parent)
        self.spare: list[SpareStandIn] = []

    def stand_in(self) -> SpareStandIn | SlotCall[Any] | None:
        """Return a stand-in for the running asyncio task; None where a Trio task has to do the work."""
        while self.spare:
            stand_in = self.spare.pop()
            if stand_in.can_work:
                return stand_in
        driver = self.run.driver
        if driver is None or driver.is_ticking or self.nursery is None:
            return None
        stand_in = SpareStandIn(self)
        try:
            self.nursery.start_soon(stand_in.live, name="a task of asyncio")
        except RuntimeError:  # the nursery is closed
            return None
        driver.tick()
        return stand_in if stand_in.can_work else None

    def keep(self, stand_in: SpareStandIn) -> bool:
        """Keep an idle stand-in; return False if the site is closed or has enough."""
        if not self.is_open or len(self.spare) >= limits.SPARE_STAND_INS_MAX:
            return False
        self.spare.append(stand_in)
        return True

    def end_spare(self) -> None:
        """End all idle stand-ins."""
        for stand_in in self.spare:
            stand_in.end()
        self.spare.clear()


class TaskSite(AsyncioSite):
    """A site for one asyncio task: a cancel of its work in Trio cancels that task, too."""

    task: asyncio.Task[Any] | None = None

    @property
    def is_here(self) -> bool:
        """True in the task of the site."""
        return self.task is not None and self.task is asyncio.current_task()

    def stand_in(self) -> SpareStandIn | SlotCall[Any] | None:
        return None
