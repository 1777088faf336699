"""The end of a process whose own runtime has failed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trimesh.errors import TrimeshInternalError

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc

_log = logging.getLogger("trimesh")


def crash(proc: Proc, cause: BaseException) -> None:
    """Let no process wait for one whose own runtime has failed; log the failure, whatever else comes of it."""

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
