"""A call whose outcomes are taken one by one, as they come, each exactly once: the collector settles a rank once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from trimesh._routing.collector import Outcome
from trimesh._runtime.calls.invocation import encode_request
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.calls.request import Request
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.peers.peer import Outbox, Peer
from trimesh._runtime.peers.target import Target
from trimesh.ids import AGENT, CallId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


class RepliedCall(OutgoingCall):
    """A call that has been sent, and whose outcomes are taken by one task.

    Args:
        on_sent: Called once when no message of it waits for room.
    """

    __slots__ = ("_on_sent", "_untaken")

    def __init__(
        self,
        proc: Proc,
        call_id: CallId,
        request: Request,
        targets: Sequence[Target],
        *,
        on_sent: Callable[[], None],
    ) -> None:
        super().__init__(proc, call_id, request, targets, fail_fast=False)
        self._on_sent = on_sent
        self._untaken = dict.fromkeys(range(len(targets)))

    def start(self, parcel: Parcel) -> None:
        super().start(parcel)
        self._note_sent()

    def _sent(self, index: int, position: int, lent: trio.Event | None) -> None:
        had_to_wait = bool(self._pending)
        super()._sent(index, position, lent)
        if had_to_wait:
            self._note_sent()

    def _withdraw(self, index: int) -> None:
        super()._withdraw(index)
        self._note_sent()

    def _note_sent(self) -> None:
        if not self._pending:
            self._on_sent()

    def terminal(self, peer: Peer, outcome: Outcome) -> Outbox:
        box = super().terminal(peer, outcome)
        self._wake()
        return box

    def _progress(self) -> None:
        super()._progress()
        self._wake()

    def take_settled(self) -> list[int]:
        """Return the indices of the ranks that have settled and were not taken before."""
        outcomes = self.collector.outcomes
        found = [index for index in self._untaken if outcomes[index] is not None]
        for index in found:
            del self._untaken[index]
        return found

    def take_rest(self) -> list[int]:
        """Return the indices of all ranks that were not taken before."""
        found = list(self._untaken)
        self._untaken.clear()
        return found

    async def wait_settled(self) -> list[int]:
        """Wait until ranks have settled that were not taken before, and take them; none when all were."""
        while self._untaken:
            found = self.take_settled()
            if found:
                return found
            await self._park()
        return []

    async def end(self, reason: str) -> None:
        """Cancel what runs, and wait, shielded, until it has unwound or was given up. Idempotent."""
        if not self.collector.is_complete:
            self.cancel_rest(reason)
            await self._wait_for_acknowledgements()
        self._give_up()


def begin_replied(proc: Proc, targets: Sequence[Target], request: Request, on_sent: Callable[[], None]) -> RepliedCall:
    """Send a call without a deadline, which the caller has to `end`.

    Raises:
        TypeError: An argument cannot be serialised; nothing was sent.
    """
    call_id = proc.new_call_id()
    parcel = encode_request(proc, request, call_id, targets[0].mesh if targets else AGENT, None)
    call = RepliedCall(proc, call_id, request, targets, on_sent=on_sent)
    proc.begin(call, parcel)
    return call
