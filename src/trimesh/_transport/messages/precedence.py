"""Which message of a link may pass a large one that is under way in chunks.

A *flow* is a number of the sender's: messages of one flow keep their order. Flow 0 keeps it with all others: such a
message passes nothing, and nothing passes it.

    PR-1 What has to wait is held in the order in which it was sent, and whatever may not pass it waits, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from trimesh import limits
from trimesh._transport.messages.casting import CastLeaf
from trimesh._transport.messages.chunked import ChunkedMessage
from trimesh._transport.messages.outgoing import Outgoing

ORDERED: Final = 0
"""The flow that keeps order with all others."""


class Precedence:
    """Chunked messages of one link, and what waits behind them.

    Attributes:
        under_way: Chunked messages that have not left, in the order of their turns.
        apart: Those among what is under way that send no chunks: see `casting`.
        busy: How many messages of each flow are under way or held, always the same object; empty: every message may
            go.
    """

    def __init__(self) -> None:
        self.under_way: deque[ChunkedMessage] = deque()
        self.apart: list[CastLeaf] = []
        self.busy: Counter[int] = Counter()
        self._held: deque[tuple[Outgoing | ChunkedMessage, int]] = deque()

    def may_pass(self, flow: int) -> bool:
        """Whether a message may go before all that is under way or held."""
        return _may_pass(self.busy, flow)

    def add(self, chunked: ChunkedMessage) -> bool:
        """Take a chunked message; return whether it is under way, and not held."""
        goes = self.may_pass(chunked.flow) and not self._is_full
        if goes:
            self.busy[chunked.flow] += 1
            self._go(chunked)
        else:
            self.hold(chunked, chunked.flow)
        return goes

    @property
    def _is_full(self) -> bool:
        return len(self.under_way) + len(self.apart) == limits.CHUNKED_MAX

    def _go(self, chunked: ChunkedMessage) -> None:
        if isinstance(chunked, CastLeaf) and chunked.is_apart:
            self.apart.append(chunked)
        else:
            self.under_way.append(chunked)

    def rejoin(self, leaf: CastLeaf) -> None:
        """Have a message send chunks that was apart."""
        self.apart.remove(leaf)
        self.under_way.append(leaf)

    def hold(self, one: Outgoing | ChunkedMessage, flow: int) -> None:
        """Keep a message that must not go now."""
        self.busy[flow] += 1
        self._held.append((one, flow))

    def out(self, chunked: ChunkedMessage, send: Callable[[Outgoing], object]) -> list[CastLeaf]:
        """Note that a chunked message has been sent, and send what has waited for that.

        Returns:
            What is apart now, and was not: they may begin.
        """
        if isinstance(chunked, CastLeaf) and chunked.is_apart:
            self.apart.remove(chunked)
        else:
            self.under_way.remove(chunked)
        before = len(self.apart)
        busy = Counter(other.flow for other in (*self.under_way, *self.apart))
        rest: deque[tuple[Outgoing | ChunkedMessage, int]] = deque()
        for one, flow in self._held:
            if not _may_pass(busy, flow) or (isinstance(one, ChunkedMessage) and self._is_full):
                busy[flow] += 1
                rest.append((one, flow))
            elif isinstance(one, ChunkedMessage):
                busy[flow] += 1
                self._go(one)
            else:
                send(one)
        self._held = rest
        self.busy.clear()
        self.busy.update(busy)
        return self.apart[before:]

    def take_all(self) -> list[tuple[Outgoing | ChunkedMessage, int]]:
        """Return everything, in order, and forget it."""
        found = [*((chunked, chunked.flow) for chunked in (*self.under_way, *self.apart)), *self._held]
        self.under_way.clear()
        self.apart.clear()
        self._held.clear()
        self.busy.clear()
        return found

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are in no chunk, and in no frame, yet."""
        going = sum(one.waiting_bytes for one in (*self.under_way, *self.apart))
        return going + sum(one.waiting_bytes for one, _ in self._held)


def _may_pass(busy: Counter[int], flow: int) -> bool:
    return not busy or (flow != ORDERED and ORDERED not in busy and flow not in busy)
