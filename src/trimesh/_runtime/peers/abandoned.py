r"""Calls that were given up before their end was known: what is remembered of them, and said.

    cancelled --the caller's patience--> abandoned --terminal frame, or death of the process--> forgotten
                                              \--limits.CANCEL_ACK_SECONDS after the cancel--> silent: said once

Whoever has made the call is gone. The callee may still run, hold its slot and change things; its answer is dropped. So
it counts as load of its member, and `trimesh.dump` shows it, until its end is known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.values.codec import describe
from trimesh.errors import Origin

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Outbox, Peer

_log = logging.getLogger("trimesh")


class AbandonedCall(msgspec.Struct, eq=False):
    """One call to one member that no task waits for any more.

    Attributes:
        call_id: Its number.
        box: What it was sent by, of which it is a load.
        what: `mesh.endpoint`, for people.
        where: Gives the coordinates of the member.
        started_at: When it was sent (Trio time).
        cancelled_at: When its cancel was (the same).
        on_silent: Tells the owner of the member.
        is_said: Whether its silence has been told.
    """

    call_id: int
    box: Outbox
    what: str
    where: Callable[[], Origin]
    started_at: float
    cancelled_at: float
    on_silent: Callable[[], None]
    is_said: bool = False

    @property
    def silent_at(self) -> float:
        """When it counts as silent (Trio time)."""
        return self.cancelled_at + limits.CANCEL_ACK_SECONDS


class AbandonedCalls:
    """Those to one process, until their ends are known."""

    __slots__ = ("_calls", "_is_watched", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._calls: dict[int, AbandonedCall] = {}
        self._is_watched = False

    def __iter__(self) -> Iterator[AbandonedCall]:
        """Iterate over them, oldest first."""
        return iter(list(self._calls.values()))

    def add(self, call: AbandonedCall) -> None:
        """Remember a call that is given up; say so once, when it has been silent for long (rule C2)."""
        self._calls[call.call_id] = call
        if call.silent_at <= trio.current_time():
            self._say(call)
        elif not self._is_watched:
            self._is_watched = self.peer.proc.serve(self._watch)
            if not self._is_watched:  # nothing more is to come
                self._say(call)

    def ended(self, call_id: int) -> None:
        """Learn that a call which is not waited for has ended there: its member has one call less."""
        found = self._calls.pop(call_id, None)
        if found is not None:
            found.box.load -= 1

    def clear(self) -> None:
        """Forget all: the process has ended."""
        self._calls.clear()

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        try:
            while unsaid := [call for call in self if not call.is_said]:
                await trio.sleep_until(min(call.silent_at for call in unsaid))
                for call in self:
                    if not call.is_said and call.silent_at <= trio.current_time():
                        self._say(call)
        finally:
            self._is_watched = False

    def _say(self, call: AbandonedCall) -> None:
        call.is_said = True
        now = trio.current_time()
        _log.warning(
            "%s was given up: it has not acknowledged its cancel for %.1f s, is %.1f s old and may still run; "
            "later messages to its actor may wait behind it (%s)",
            call.what,
            now - call.cancelled_at,
            now - call.started_at,
            describe(call.where()),
        )
        call.on_silent()
