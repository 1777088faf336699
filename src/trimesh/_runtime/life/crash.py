"""The end of a process whose own runtime has failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from trimesh.errors import TrimeshInternalError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.meshes.block import Block
    from trimesh._runtime.meshes.member import Member
    from trimesh._runtime.peers.deaths import DeathOf
    from trimesh._runtime.peers.peer import Peer

_log = logging.getLogger("trimesh")


class CrashingProc(Protocol):
    """The process, with all in it that may wait for it; see `Proc`."""

    pid: int
    has_crashed: bool

    @property
    def blocks(self) -> Sequence[Block]:
        """Its open blocks."""
        ...

    @property
    def members(self) -> Mapping[ProcId, Member]:
        """Its child processes."""
        ...

    def peers(self) -> Sequence[Peer]:
        """Return every process that it knows and that is not gone."""
        ...

    def declare_gone(self, peer: Peer, death: DeathOf) -> None:
        """Settle everything that waits for `peer`."""


def crash(proc: CrashingProc, cause: BaseException) -> None:
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
