r"""A block of Trio whose body is elsewhere: it is entered, held while the body runs, and left, all in one Trio task.

    entering --> held --body ends-------------------> leaving --> left
                   \--cancelled in Trio--> body is told --^

BD-1 the block is entered and left in one Trio task, and calls of its body run in a nursery inside of it.
BD-2 what the body has raised goes through the block, whose error is raised instead.

What a cancel in Trio is to the body, those say who have one: `trimesh.aio.body`, for one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import trio

from trimesh._runtime.tasks.cancelled import split_cancelled
from trimesh._runtime.tasks.crossing import Site

T = TypeVar("T")


SiteT = TypeVar("SiteT", bound=Site[Any])


class HeldBlock(ABC, Generic[T, SiteT]):
    """Trio's side of a block whose body is elsewhere.

    Args:
        leave: Leaves it, in the same task; gets what the body has raised, returns whether that is settled.
    """

    _site: SiteT

    def __init__(
        self, enter: Callable[[], Awaitable[T]], leave: Callable[[BaseException | None], Awaitable[bool | None]]
    ) -> None:
        self._enter_block = enter
        self._leave_block = leave
        self._body_error: BaseException | None = None
        self._left = trio.Event()
        self._is_suppressed = False

    @abstractmethod
    def _entered(self, value: T) -> None:
        """Learn that the body may begin; called by `tell`."""

    @abstractmethod
    def _tell_cancel(self) -> bool:
        """Tell the body that the block was cancelled; return whether its end is to be waited for. In Trio."""

    def _let_go(self) -> None:
        """Let the block be left, from the outside."""
        with suppress(trio.RunFinishedError):
            self._site.run.post(self._left.set)

    @trio.lowlevel.enable_ki_protection
    async def _live(self) -> None:
        """Enter the block, hold it while the body runs, leave it."""
        value = await self._enter_block()
        error: BaseException | None = None
        try:
            await self._hold(value)
        except BaseException as raised:  # noqa: BLE001 - it goes through the block
            error = raised
        error = self._body_error or error
        try:
            if await self._leave_block(error):
                self._is_suppressed = True
            elif (cancelled := split_cancelled(error)[0]) is not None:
                raise cancelled
        finally:
            del error

    @trio.lowlevel.enable_ki_protection
    async def _hold(self, value: T) -> None:
        """Wait until the body has been left, and what it has started in Trio has ended.

        Raises:
            trio.Cancelled: The block was cancelled, and the body has been left after that.
        """
        cancelled: trio.Cancelled | None = None
        async with trio.open_nursery() as nursery:
            self._site.work_in(nursery)
            self._site.run.tell(partial(self._entered, value))
            try:
                await self._left.wait()
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled as error:
                cancelled = error
                if self._tell_cancel():
                    with trio.CancelScope(shield=True):
                        await self._left.wait()
            if self._body_error is not None or cancelled is not None:
                nursery.cancel_scope.cancel(reason="the body of the block was left")
        if cancelled is not None:
            raise cancelled
