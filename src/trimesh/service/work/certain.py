"""Calls to the owner of a service that a cancel does not leave in doubt: they have happened, or they have not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import trio

from trimesh import limits
from trimesh.config import current
from trimesh.errors import MeshError

R = TypeVar("R")


async def certainly(call: Callable[[], Awaitable[R]], withdraw: Callable[[], Awaitable[object]] | None = None) -> R:
    """Make a call; if the caller is cancelled meanwhile, wait for its outcome and return it all the same.

    The next checkpoint of the caller raises `Cancelled` then. An owner that does not answer is waited for as long as
    for the acknowledgement of any cancel (`abandon_after`); then `Cancelled` is raised, and the outcome is not known.

    Args:
        call: Runs shielded. Nothing is begun for a caller that is cancelled already.
        withdraw: Asks the owner, after a cancel, to end the call soon; without it the call is one that does not wait.
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
                    await withdraw()  # what is wrong with the owner, the call says
    try:
        if errors:
            raise errors[0]
        if cut is not None and (not results or not isinstance(cut, trio.Cancelled)):
            raise cut
        return results[0]
    finally:
        errors.clear()
        del cut  # no cycle of an error, its traceback and this frame
