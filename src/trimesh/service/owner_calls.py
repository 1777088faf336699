"""Calls from the handles of a service to its owner, and transfer of the owner's state to the actor beside it.

After a cancel the caller knows the outcome of a call: it returns, or `Cancelled` means that nothing was changed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio, in_trio_now
from trimesh.config import current
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshError

R = TypeVar("R")
T = TypeVar("T")

_things: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def hand_over(thing: Any) -> int:
    """Register an object while it lives, and return its number: an actor gets copies of objects, so pass the number."""
    number = next(_numbers)
    _things[number] = thing
    return number


def take_over(number: int) -> Any:
    """Return the object registered under a number."""
    return _things[number]


async def change(own: Callable[[int], None] | None, front: Callable[[int], Awaitable[Any]], number: int) -> None:
    """Change a service's state: locally in the owner (`own`), else by its actor (`front`); a checkpoint."""
    if own is None:
        await in_trio(certainly)(partial(front, number))
        return
    in_trio_now(own)(number)
    await in_trio(trio.lowlevel.checkpoint)()


class StreamHolds(Generic[T]):
    """Items that consumers in other processes hold until they confirm; a stream of the actor carries each."""

    def __init__(self, put_back: Callable[[T], object]) -> None:
        self._put_back = put_back
        self._numbers = count(1)
        self._held: dict[int, tuple[T, trio.Event]] = {}

    @asynccontextmanager
    async def hold(self, thing: T) -> AsyncGenerator[int, None]:
        """Yield the number of a hold; put the item back if the consumer leaves before `confirm`, or dies."""
        number, confirmed = next(self._numbers), trio.Event()
        self._held[number] = thing, confirmed
        try:
            yield number
            await confirmed.wait()
        finally:
            if self._held.pop(number, None) is not None:
                self._put_back(thing)

    def confirm(self, number: int) -> T:
        """Confirm a hold; return its item."""
        thing, confirmed = self._held.pop(number)
        confirmed.set()
        return thing


@asynccontextmanager
async def held(stream: Any, confirm: Callable[[int], Awaitable[Any]]) -> AsyncGenerator[Any, None]:
    """Hold an item of `StreamHolds`, by a stream of number and value; confirm it if the body ends without error."""
    with trio.CancelScope() as leaving:
        async with stream as replies:
            _, (number, given) = await anext(replies)
            yield given
            await certainly(partial(confirm, number))
            leaving.shield = True  # the body succeeded, so a later cancel does not undo it


async def certainly(call: Callable[[], Awaitable[R]], withdraw: Callable[[], Awaitable[object]] | None = None) -> R:
    """Make a call; if the caller is cancelled meanwhile, still wait for its outcome and return it.

    Then the caller's next checkpoint raises `Cancelled`. This waits for an owner that does not answer as long as for
    the acknowledgement of any cancel (`abandon_after`); then it raises `Cancelled`, and the outcome is unknown.

    Args:
        call: The call, run shielded. Not started if the caller is cancelled already.
        withdraw: Requests, after a cancel, that the owner end the call soon; not needed for a call that never waits.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    results: list[R] = []
    errors: list[Exception] = []
    cut: BaseException | None = None
    ended = trio.Event()
    bound = trio.CancelScope(shield=True)

    async def run() -> None:
        with bound:
            try:
                results.append(await call())
            except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery
                errors.append(error)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            await ended.wait()
        except (trio.Cancelled, KeyboardInterrupt) as raised:
            cut = raised
            patience = current().abandon_after
            bound.deadline = trio.current_time() + (limits.CANCEL_ACK_SECONDS if patience is None else patience)
            if withdraw is not None:
                with trio.CancelScope(shield=True, deadline=bound.deadline), suppress(MeshError):
                    await withdraw()  # the call itself reports failures of the owner
    try:
        if errors:
            raise errors[0]
        if cut is not None and (not results or not isinstance(cut, trio.Cancelled)):
            raise cut
        return results[0]
    finally:
        errors.clear()
        del cut  # avoids a reference cycle of the error, its traceback and this frame
