"""One direction of an in-memory link: two lanes that wait for room, and a wire that carries copies.

    put ----> waiting ----> wire ----> take
              (lent)        (copied)

A message waits, lent by its sender, until it fits the window of its lane (`limits.RING_BYTES`, and for CONTROL
`limits.RING_CONTROL_RESERVE_BYTES`). On the wire its bodies are copies that belong to the receiver. One that is larger
than the whole window enters an empty wire uncopied, as a stream of fragments would, and is copied when it is taken.

Messages are taken in the order of their arrival, and of entering the wire where that is the same. So CONTROL overtakes
the DATA that waits and the rest of a large message, as on a ring; where a `Delivery` makes DATA slow, it overtakes what
is on the wire, too.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import trio

from trimesh import limits
from trimesh._transport.interface.base import Buffer, DownReason, Lane, LinkDown
from trimesh.ids import ProcId

NOW = -math.inf
"""Arrival time of what is there at once: it is compared without reading a clock."""


class Fate(enum.Enum):
    """What becomes of a message on the wire."""

    ARRIVES = enum.auto()
    LOST = enum.auto()
    """And the link with it, for links are reliable: both ends see EOF."""
    REPEATED = enum.auto()
    """The reader takes it once, then sees the number of a frame again, and drops that."""
    DAMAGED = enum.auto()
    """Its first byte is one that no message begins with."""


_LANES = tuple(Lane)

_DAMAGED_BYTE = b"\xc1"
"""The one byte that msgpack never uses."""


class Delivery:
    """Says when a message arrives; this one: at once. Subclass it to make a network slow, or faulty."""

    def fate(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> Fate:
        """Return what becomes of a message; called once for each, before `delay`."""
        del source, target, lane, size
        return Fate.ARRIVES

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        """Return for how many (virtual) seconds a message is under way.

        Called once for each message when it enters the wire, and once, on the DATA lane with size 0, for the end of a
        link. A lane stays first in, first out: nothing arrives before what was sent ahead of it.
        """
        del source, target, lane, size
        return 0.0


class Countdown:
    """An event that is set when `remaining` messages have left their sender's buffers."""

    __slots__ = ("event", "remaining")

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.event = trio.Event()

    def count(self) -> None:
        """Note that one has left."""
        self.remaining -= 1
        if self.remaining == 0:
            self.event.set()


class PipeMessage:
    """What travels.

    Attributes:
        epoch: The incarnation that sent it.
        head, bodies: As given to `Link.send`; from the wire on, the bodies are copies.
        size: Bytes of head and bodies.
        lender: Who is told when the bodies have been copied, or lost.
        is_copied: Whether the bodies are copies.
        arrives_at, order: When it can be taken, and its place among those of the same moment.
        is_repeat: Whether it has come before.
    """

    __slots__ = ("arrives_at", "bodies", "epoch", "head", "is_copied", "is_repeat", "lender", "order", "size")

    def __init__(
        self,
        epoch: ProcId,
        head: bytes,
        bodies: Sequence[Buffer],
        size: int,
        lender: Countdown,
        *,
        is_copied: bool = False,
        is_repeat: bool = False,
    ) -> None:
        self.epoch = epoch
        self.head = head
        self.bodies = bodies
        self.size = size
        self.lender = lender
        self.is_copied = is_copied
        self.arrives_at: float = NOW
        self.order = 0
        self.is_repeat = is_repeat


class _Queue:
    """One lane. What is on the wire was sent before what waits; where something waits, something is on the wire."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.waiting: deque[PipeMessage] = deque()
        self.wire: deque[PipeMessage] = deque()
        self.wire_bytes = 0
        self.last_arrival: float = NOW

    def __iter__(self) -> Iterator[PipeMessage]:
        yield from self.wire
        yield from self.waiting

    def has_room(self, size: int) -> bool:
        return not self.wire or self.wire_bytes + size <= self.window


def _two_lanes() -> tuple[_Queue, _Queue]:
    return _Queue(limits.RING_CONTROL_RESERVE_BYTES), _Queue(limits.RING_BYTES)


class Pipe:
    """One direction of a link.

    Attributes:
        source, target: The processes it joins.
        delivery: Says when messages arrive.
        end: What the reader is told after the last message; None while the writer may send.
        queued_bytes: Lent by the writer, not yet copied.
        messages_sent, bytes_sent: Copied so far.
        is_held: Whether nothing can be taken, not even the end, until it is released.
        on_lost: Called when a message was lost on the wire; ends both directions.
    """

    def __init__(self, source: ProcId, target: ProcId, delivery: Delivery) -> None:
        self.source = source
        self.target = target
        self.delivery = delivery
        self.end: LinkDown | None = None
        self.queued_bytes = 0
        self.messages_sent = 0
        self.bytes_sent = 0
        self.is_held = False
        self.on_lost: Callable[[], None] | None = None
        self._lanes: tuple[_Queue, _Queue] = _two_lanes()
        self._numbers: Iterator[int] = itertools.count()
        self._end_arrives_at: float = NOW
        self._reader_gone = False

    @property
    def depth(self) -> int:
        """Number of messages that the reader has yet to take."""
        return sum(len(queue.wire) + len(queue.waiting) for queue in self._lanes)

    @property
    def has_ended(self) -> bool:
        """Whether the reader is to see the end now: all was taken, and the end has come."""
        return self.end is not None and not self.is_held and not self.depth and _has_come(self._end_arrives_at)

    def put(self, message: PipeMessage, lane: Lane) -> None:
        """Take a message from the writer; dropped after the end."""
        if self.end is None and not self._reader_gone:
            self._lanes[lane].waiting.append(message)
            self.queued_bytes += message.size
            self._admit(lane)
        else:
            message.lender.count()

    def take(self) -> PipeMessage | None:
        """Give the reader the next message that has come; its bodies are the reader's."""
        if self.is_held:
            return None
        fronts = [
            (not message.is_copied, message.arrives_at, message.order, lane)
            for lane, message in ((lane, queue.wire[0]) for lane, queue in self._by_lane() if queue.wire)
            if _has_come(message.arrives_at)
        ]
        if not fronts:
            return None
        lane = min(fronts)[-1]  # what is not copied yet is still on its way, fragment by fragment
        queue = self._lanes[lane]
        message = queue.wire.popleft()
        queue.wire_bytes -= message.size
        self._copy(message)
        self._admit(lane)
        return message

    def next_arrival(self) -> float:
        """Return when there will be something to take or the end to see: `NOW` for at once, inf for not yet known."""
        if self.is_held:
            return math.inf
        if self.depth:
            return min(queue.wire[0].arrives_at for queue in self._lanes if queue.wire)
        return math.inf if self.end is None else self._end_arrives_at

    def finish(self) -> None:
        """Let the writer say goodbye after everything that was put."""
        self._end(LinkDown(DownReason.CLOSED))

    def cut(self, down: LinkDown) -> None:
        """End the writer now: what has not been copied in full is lost, the reader is told `down` after the rest."""
        for queue in self._lanes:
            self._give_back(queue)
            queue.waiting.clear()
            queue.wire = deque(message for message in queue.wire if message.is_copied)
        self._end(down)

    def drop(self) -> None:
        """End the reader: everything is lost."""
        self._reader_gone = True
        for queue in self._lanes:
            self._give_back(queue)
            queue.waiting.clear()
            queue.wire.clear()

    def _by_lane(self) -> Iterator[tuple[Lane, _Queue]]:
        return zip(_LANES, self._lanes, strict=True)

    def _admit(self, lane: Lane) -> None:
        queue = self._lanes[lane]
        while queue.waiting and queue.has_room(queue.waiting[0].size):
            message = queue.waiting.popleft()
            fate = self.delivery.fate(self.source, self.target, lane, message.size)
            if fate is Fate.LOST and self.on_lost is not None:
                queue.waiting.appendleft(message)
                self.on_lost()
                return
            if fate is Fate.DAMAGED:
                message.head = _DAMAGED_BYTE + message.head[1:]
            message.arrives_at = queue.last_arrival = max(queue.last_arrival, self._arrival(lane, message.size))
            message.order = next(self._numbers)
            queue.wire.append(message)
            queue.wire_bytes += message.size
            if message.size <= queue.window:
                self._copy(message)
            if fate is Fate.REPEATED:
                again = PipeMessage(message.epoch, b"", (), 0, Countdown(1), is_copied=True, is_repeat=True)
                again.arrives_at, again.order = message.arrives_at, next(self._numbers)
                queue.wire.append(again)

    def _copy(self, message: PipeMessage) -> None:
        if not message.is_copied:
            message.bodies = [bytearray(body) for body in message.bodies]
            message.lender.count()
            message.is_copied = True
            self.queued_bytes -= message.size
            self.messages_sent += 1
            self.bytes_sent += message.size

    def _give_back(self, queue: _Queue) -> None:
        for message in queue:
            if not message.is_copied:
                message.lender.count()
                self.queued_bytes -= message.size

    def _end(self, down: LinkDown) -> None:
        self.end = down
        self._end_arrives_at = max(self._arrival(Lane.DATA, 0), *(queue.last_arrival for queue in self._lanes))

    def _arrival(self, lane: Lane, size: int) -> float:
        delay = self.delivery.delay(self.source, self.target, lane, size)
        return trio.current_time() + delay if delay > 0 else NOW


def _has_come(arrival: float) -> bool:
    return arrival == NOW or arrival <= trio.current_time()
