"""The tasks of the runtime in one process. None of them may fail: one that does has met a bug of ours."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from trimesh._runtime.tasks.cancelled import split_cancelled
from trimesh.errors import TrimeshInternalError

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_log = logging.getLogger("trimesh")


class Tasks:
    """A nursery whose first failure is told while it is one, before all that depends on it comes apart."""

    def __init__(self, proc: Proc, nursery: trio.Nursery) -> None:
        self._proc = proc
        self._nursery = nursery

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run a task until the process ends."""
        self._nursery.start_soon(self._run, function, args, name=function)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except BaseException as error:
            failure = split_cancelled(error)[1]
            if failure is not None:
                crash(self._proc, failure)
            raise


def crash(proc: Proc, cause: BaseException) -> None:
    """Let nobody wait for a process whose own runtime has failed; log the failure, whatever else comes of it."""

    def broken(maybe_executed: bool) -> Exception:  # noqa: FBT001 - a DeathOf
        del maybe_executed
        error = TrimeshInternalError("the runtime of this process has failed; please report this")
        error.__cause__ = cause
        return error

    if not proc.has_crashed:
        _log.critical("the runtime of process %d has failed; please report this", proc.pid, exc_info=cause)
    proc.has_crashed = True
    for block in proc.blocks:
        block.fail(broken(maybe_executed=False))
    for member in proc.members.values():
        member.gone.set()
    for peer in proc.peers():
        proc.declare_gone(peer, broken)
