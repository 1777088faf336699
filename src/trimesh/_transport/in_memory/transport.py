"""In-memory transport: the links of many processes inside one Trio run, deterministic under a virtual clock.

Where the interface leaves a choice, this transport makes the one that exposes mistakes soonest:

    MT-1  A head is released when the handler returns; a handler that kept a view of it ends the run with
          `TrimeshInternalError`.
    MT-2  A message whose sender has ended is delivered if it was copied in full, else never.
    MT-3  Links are served in the order in which messages arrived for them; nothing depends on a hash or a clock.
    MT-4  A batch delivers the messages present when it began. Messages caused by its handlers go into the next one.

A `Delivery` decides the time of each arrival; faults are built on it and on `MemoryNetwork.sever`, `inject` and
`MemoryTransport.lag`.

One direction of an in-memory link has two lanes that wait for room, and a wire that carries copies.

    put ----> waiting ----> wire ----> take
              (lent)        (copied)

A message waits, lent by its sender, until it fits the window of its lane (`limits.RING_BYTES`, and for CONTROL
`limits.RING_CONTROL_RESERVE_BYTES`). On the wire its bodies are copies that belong to the receiver. A message that is
larger than the window enters an empty wire uncopied, as a stream of fragments would, and is copied when it is taken.

Messages are taken in the order of their arrival; at equal times, in the order in which they entered the wire. So
CONTROL overtakes waiting DATA and the rest of a large message, as on a ring; if a `Delivery` makes DATA slow, CONTROL
overtakes DATA on the wire, too.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import trio

from trimesh import limits
from trimesh._transport.in_memory.mover import MemoryMover, MemoryTable
from trimesh._transport.interface import (
    Buffer,
    DownReason,
    Lane,
    Link,
    LinkDown,
    LinkGroup,
    LinkHandler,
    LinkStatistics,
    Transport,
    checked_size,
)
from trimesh.errors import TrimeshInternalError
from trimesh.ids import ProcId

__all__ = ["Delivery", "Fate", "MemoryGroup", "MemoryLink", "MemoryNetwork", "MemoryTransport"]


class _State(enum.Enum):
    UP = enum.auto()
    CLOSING = enum.auto()
    """Goodbye is queued; messages of the peer are still delivered."""
    DOWN = enum.auto()


class MemoryLink(Link):
    """One end of a connection between two transports of one `MemoryNetwork`.

    Attributes:
        transport: The transport that this end belongs to.
        peer: The process at the other end.
        outgoing, incoming: The two directions.
    """

    def __init__(self, transport: MemoryTransport, peer: ProcId, outgoing: Pipe, incoming: Pipe) -> None:
        self.transport = transport
        self.peer = peer
        self.outgoing = outgoing
        self.incoming = incoming
        self.other: MemoryLink
        self._state: _State = _State.UP
        self._messages_received = 0
        self._bytes_received = 0
        self._dropped_frames = 0
        self._stall_told = 0.0  # the last stall of the other end's loop that the handler was notified of, in seconds

    @property
    def is_up(self) -> bool:
        """True if messages sent now can reach the peer."""
        return self._state is _State.UP

    @property
    def is_down(self) -> bool:
        """True if no more messages will arrive."""
        return self._state is _State.DOWN

    def send(
        self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA, flow: int = 0
    ) -> trio.Event | None:
        """Send a message; see `Link.send`. Messages of one lane keep their order, whatever their flow.

        Raises:
            LimitExceeded: The head, or the number or size of the bodies, is above its limit.
            ValueError: A CONTROL message has bodies.
        """
        del flow
        lender = Countdown(1)
        self.put(PipeMessage(self.transport.proc_id, head, bodies, _checked_size(head, bodies, lane), lender), lane)
        return lender.event if lender.remaining else None

    def put(self, message: PipeMessage, lane: Lane) -> None:
        """Pass a message to the pipe and wake the receiver."""
        self.outgoing.put(message, lane)
        self.other.wake()

    def close(self) -> None:
        """Send queued messages and a goodbye, then end; see `Link.close`."""
        if self.is_up:
            self._state = _State.CLOSING
            self.outgoing.finish()
            self.other.wake()

    def abort(self) -> None:
        """End now; see `Link.abort`. Messages on the wire still arrive at the peer, then EOF."""
        if not self.is_down:
            self._go_down(DownReason.EOF)

    def sever(self) -> None:
        """Deliver EOF to this end, after the messages on the wire to it."""
        if not self.is_down:
            self.incoming.cut(LinkDown(DownReason.EOF))
            self.wake()

    def hold(self, *, held: bool) -> None:
        """Hold back everything that arrives at this end, also the end of the link, until it is released."""
        self.incoming.is_held = held
        self.wake()

    def statistics(self) -> LinkStatistics:
        """Return the counters of this link. A message counts as sent when its bodies have been copied."""
        return LinkStatistics(
            messages_sent=self.outgoing.messages_sent,
            messages_received=self._messages_received,
            bytes_sent=self.outgoing.bytes_sent,
            bytes_received=self._bytes_received,
            queued_bytes=self.outgoing.queued_bytes,
            dropped_frames=self._dropped_frames,
        )

    def wake(self) -> None:
        """Let the transport of this end poll it."""
        if not self.is_down:
            self.transport.wake(self)

    def deliver(self, handler: LinkHandler) -> float:
        """Deliver the messages present, then the end if no message precedes it.

        Returns:
            Time of the next call: `NOW` for at once, inf to wait for `wake`.
        """
        stall_news = self._tell_stall(handler)
        lent = self.incoming.queued_bytes
        for _ in range(self.incoming.depth):  # MT-4
            message = self.incoming.take()
            if message is None:
                break
            if message.epoch != self.peer or message.is_repeat:
                self._dropped_frames += 1
                continue
            self._messages_received += 1
            self._bytes_received += message.size
            _hand_over(handler, self, message)
            if self.is_down:
                return math.inf
        if lent and not self.incoming.queued_bytes:
            self.other.wake()  # it may be closing, and wait until its last message is taken
        down = self.incoming.end
        if down is None or not self.incoming.has_ended:
            return min(stall_news, self.incoming.next_arrival())
        if self._state is _State.CLOSING and down.reason is DownReason.CLOSED and self.outgoing.queued_bytes:
            return math.inf  # both sides are closing; our goodbye follows messages that the peer has yet to take
        self._go_down(down.reason)
        handler.link_down(self, down)
        return math.inf

    def _tell_stall(self, handler: LinkHandler) -> float:
        """Report stalls of the other end's loop; return the time of the next report, or inf."""
        span = self.other.transport.lag_span
        if span is None:
            if self._stall_told:
                self._stall_told = 0.0
                handler.link_stalled(self, 0.0)
            return math.inf
        since, until = span
        due = max(limits.STALL_SECONDS, 2 * self._stall_told)
        if trio.current_time() >= since + due:
            self._stall_told = due
            handler.link_stalled(self, due)
            due *= 2
        return min(until, since + due)

    def _go_down(self, told: DownReason) -> None:
        """Go down; the peer gets the reason after the messages on the wire."""
        self._state = _State.DOWN
        self.incoming.drop()
        self.outgoing.cut(LinkDown(told))
        self.transport.forget(self)
        self.other.wake()


def _hand_over(handler: LinkHandler, link: MemoryLink, message: PipeMessage) -> None:
    scratch = bytearray(message.head)
    with memoryview(scratch).toreadonly() as head:
        handler.received(link, head, [memoryview(body) for body in message.bodies])
    try:
        scratch.clear()
    except BufferError as error:  # MT-1
        raise TrimeshInternalError("a link handler must not keep a view of the borrowed head: copy it") from error


def _checked_size(head: bytes, bodies: Sequence[Buffer], lane: Lane) -> int:
    size = checked_size(head, bodies)
    if bodies and lane is Lane.CONTROL:
        raise ValueError(f"a CONTROL message carries no bodies, got {len(bodies)}: send them on Lane.DATA")
    return size


class MemoryGroup(LinkGroup):
    """A fixed set of links; each receiver gets a copy of its own."""

    def __init__(self, links: tuple[MemoryLink, ...]) -> None:
        self._links = links

    def cast(self, head: bytes, bodies: Sequence[Buffer] = (), *, flow: int = 0) -> trio.Event | None:
        """Send one message on the DATA lane of every link that is up; see `LinkGroup.cast`.

        Raises:
            LimitExceeded: The head, or the number or size of the bodies, is above its limit.
        """
        del flow
        size = checked_size(head, bodies)
        links = [link for link in self._links if link.is_up]
        lender = Countdown(len(links))
        for link in links:
            link.put(PipeMessage(link.transport.proc_id, head, bodies, size, lender), Lane.DATA)
        return lender.event if lender.remaining else None

    def close(self) -> None:
        """Drop the group; its links stay open, and casts have no effect."""
        self._links = ()


class MemoryTransport(Transport):
    """All links of one process of a `MemoryNetwork`.

    Attributes:
        proc_id: The process; its messages carry this number as epoch.
    """

    def __init__(self, proc_id: ProcId, network: MemoryNetwork) -> None:
        self.proc_id = proc_id
        self.network = network
        self._links: dict[MemoryLink, None] = {}
        self._woken: dict[MemoryLink, None] = {}  # to be polled, in the order in which they were woken (MT-3)
        self._bell = trio.Event()
        self._is_running = False
        self._is_closed = False
        self._lags_from: float = math.inf
        self._lags_until: float = -math.inf
        self._lag_over = trio.Event()
        self._mover: MemoryMover | None = None
        self._has_ended = False

    def define_group(self, links: Sequence[Link]) -> MemoryGroup:
        """Return a group of `links`.

        Raises:
            ValueError: One of them is not a link of this transport.
        """
        own: list[MemoryLink] = []
        for link in links:
            if not isinstance(link, MemoryLink) or link.transport is not self:
                raise ValueError(f"a group takes links of its own transport (process {self.proc_id}), got {link!r}")
            own.append(link)
        return MemoryGroup(tuple(own))

    def flush(self) -> None:
        """Do nothing: whatever is sent wakes its receiver."""

    @trio.lowlevel.enable_ki_protection
    async def run(self, handler: LinkHandler) -> None:
        """Serve until cancelled; see `Transport.run`.

        Raises:
            trio.BusyResourceError: It has been started before.
            trio.ClosedResourceError: The transport is closed.
            TrimeshInternalError: The handler kept a view of a head (MT-1).
        """
        if self._is_closed:
            raise trio.ClosedResourceError("this transport is closed")
        if self._is_running:
            raise trio.BusyResourceError("a transport must be run by one task, once, got a second run()")
        self._is_running = True
        while True:
            if trio.current_time() < self._lags_until:
                with trio.move_on_at(self._lags_until):
                    await self._lag_over.wait()
                continue
            self._bell = trio.Event()
            again = self._deliver_batch(handler)
            if again == NOW:
                await trio.lowlevel.checkpoint()
            else:
                with trio.move_on_at(again):
                    await self._bell.wait()

    def lag(self, seconds: float) -> None:
        """Receive nothing for `seconds`, as if the Trio loop of this process were stuck; peers are notified."""
        now = trio.current_time()
        if self._lags_until <= now:
            self._lags_from = now
        self._lags_until = max(self._lags_until, now + seconds)
        if self._lag_over.is_set():
            self._lag_over = trio.Event()
        self._bell.set()
        for link in self._links:
            link.other.wake()

    def stop_lagging(self) -> None:
        """End the lag early and receive the messages that have arrived."""
        self._lags_until = min(self._lags_until, trio.current_time())
        self._lag_over.set()

    @property
    def lag_span(self) -> tuple[float, float] | None:
        """Start and end (Trio time) of the current lag of this process; None without one."""
        return (self._lags_from, self._lags_until) if trio.current_time() < self._lags_until else None

    @property
    def mover(self) -> MemoryMover:
        """The mover of this process; see `Transport.mover`.

        Raises:
            trio.ClosedResourceError: The transport is closed.
        """
        if self._is_closed:
            raise trio.ClosedResourceError("this transport is closed")
        if self._mover is None:
            self._mover = MemoryMover(self.proc_id, self.network.memory, has_ended=self._has_ended)
            if not self._has_ended:
                self.network.memory.movers[self.proc_id] = self._mover
        return self._mover

    def end(self) -> None:
        """Let others see that the process has ended; its tasks may still unwind, without access to granted memory."""
        self._has_ended = True
        if self._mover is not None:
            self._mover.end()

    def close(self) -> None:
        """End all links at once: each peer sees EOF. Idempotent."""
        self._is_closed = True
        if self._mover is not None:
            self._mover.close()
        for link in tuple(self._links):
            link.abort()
        self.network.forget(self)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def attach(self, link: MemoryLink) -> None:
        """Add a new link."""
        self._links[link] = None

    def wake(self, link: MemoryLink) -> None:
        """Let `run` poll `link`."""
        self._woken[link] = None
        self._bell.set()

    def forget(self, link: MemoryLink) -> None:
        """Remove a link that is down."""
        self._links.pop(link, None)
        self._woken.pop(link, None)

    def _deliver_batch(self, handler: LinkHandler) -> float:
        batch, self._woken = self._woken, {}
        again = math.inf
        for link in batch:
            arrival = math.inf if link.is_down else link.deliver(handler)
            if arrival < math.inf:
                self._woken[link] = None
                again = min(again, arrival)
        return again


class MemoryNetwork:
    """Network of the processes of one simulation; for one Trio run.

    Attributes:
        delivery: Decides when messages arrive; by default at once.
        memory: Memory that the processes have granted to each other.

    Example:
        network = MemoryNetwork()
        here, there = network.connect(network.transport(ProcId(1)), network.transport(ProcId(2)))
        here.send(b"hello")         # delivered to the handler of the other transport's `run`
    """

    def __init__(self, delivery: Delivery | None = None) -> None:
        self.delivery = Delivery() if delivery is None else delivery
        self.memory = MemoryTable()
        self._transports: dict[ProcId, MemoryTransport] = {}

    def transport(self, proc_id: ProcId) -> MemoryTransport:
        """Return a new transport for one process.

        Raises:
            ValueError: The process has an open transport.
        """
        if proc_id in self._transports:
            raise ValueError(f"a process must have one open transport, got a second one for process {proc_id}")
        made = self._transports[proc_id] = MemoryTransport(proc_id, self)
        return made

    def connect(self, a: MemoryTransport, b: MemoryTransport) -> tuple[MemoryLink, MemoryLink]:
        """Join two processes; return the end of `a` and the end of `b`.

        Raises:
            trio.ClosedResourceError: One of them is closed.
        """
        for transport in (a, b):
            if transport.is_closed:
                raise trio.ClosedResourceError(f"the transport of process {transport.proc_id} is closed")
        forth = Pipe(a.proc_id, b.proc_id, self.delivery)
        back = Pipe(b.proc_id, a.proc_id, self.delivery)
        here, there = MemoryLink(a, b.proc_id, forth, back), MemoryLink(b, a.proc_id, back, forth)
        here.other, there.other = there, here
        forth.on_lost = back.on_lost = lambda: self.sever(here)
        a.attach(here)
        b.attach(there)
        return here, there

    def sever(self, link: MemoryLink) -> None:
        """Cut a connection, as a broken cable does: both ends see EOF after the messages on the wire to them."""
        link.sever()
        link.other.sever()

    def inject(
        self, link: MemoryLink, head: bytes, bodies: Sequence[Buffer] = (), *, epoch: ProcId, lane: Lane = Lane.DATA
    ) -> None:
        """Put a message of another epoch on the wire to `link`, as a dead incarnation's would arrive."""
        size = _checked_size(head, bodies, lane)
        link.other.put(PipeMessage(epoch, head, bodies, size, Countdown(1)), lane)

    def forget(self, transport: MemoryTransport) -> None:
        """Remove a closed transport; its id may be reused."""
        self._transports.pop(transport.proc_id, None)


# ---- one direction of an in-memory link: two lanes that wait for room, and a wire that carries copies ----------------

NOW = -math.inf
"""Arrival time of immediate messages: it is compared without reading a clock."""


class Fate(enum.Enum):
    """Fate of a message on the wire."""

    ARRIVES = enum.auto()
    LOST = enum.auto()
    """The link ends with it, because links are reliable: both ends see EOF."""
    REPEATED = enum.auto()
    """The reader receives it once, then gets the number of its frame again, and drops that."""
    DAMAGED = enum.auto()
    """Its first byte is replaced by one that no message begins with."""


_LANES = tuple(Lane)

_DAMAGED_BYTE = b"\xc1"
"""The one byte that msgpack never uses."""


class Delivery:
    """Decides when messages arrive; in this class at once. Subclass it to make a network slow or faulty."""

    def fate(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> Fate:
        """Return the fate of a message; called once for each, before `delay`."""
        del source, target, lane, size
        return Fate.ARRIVES

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        """Return the transit time of a message, in virtual seconds.

        Called once for each message when it enters the wire, and once, on the DATA lane with size 0, for the end of a
        link. A lane stays first in, first out: no message arrives before one sent ahead of it.
        """
        del source, target, lane, size
        return 0.0


class Countdown:
    """An event that is set when `remaining` messages no longer use their sender's buffers."""

    __slots__ = ("event", "remaining")

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.event = trio.Event()

    def count(self) -> None:
        """Note that one message no longer uses them."""
        self.remaining -= 1
        if self.remaining == 0:
            self.event.set()


class PipeMessage:
    """Message in a pipe.

    Attributes:
        epoch: The incarnation that sent it.
        head, bodies: As given to `Link.send`; from the wire on, the bodies are copies.
        size: Bytes of head and bodies.
        lender: Notified when the bodies have been copied, or lost.
        is_copied: True if the bodies are copies.
        arrives_at, order: Time of arrival, and rank among messages of the same time.
        is_repeat: True for a repetition of an earlier message.
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
    """One lane. Messages on the wire were sent before waiting ones; if messages wait, some are on the wire."""

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
        source, target: The processes that it connects.
        delivery: Decides when messages arrive.
        end: The end that the reader sees after the last message; None while the writer may send.
        queued_bytes: Bytes lent by the writer and not yet copied.
        messages_sent, bytes_sent: Copied so far.
        is_held: Whether everything is held back, also the end, until it is released.
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
        """True if the reader must see the end now: it has arrived, and all messages were taken."""
        return self.end is not None and not self.is_held and not self.depth and _has_come(self._end_arrives_at)

    def put(self, message: PipeMessage, lane: Lane) -> None:
        """Accept a message of the writer; dropped after the end."""
        if self.end is None and not self._reader_gone:
            self._lanes[lane].waiting.append(message)
            self.queued_bytes += message.size
            self._admit(lane)
        else:
            message.lender.count()

    def take(self) -> PipeMessage | None:
        """Return the next message that has arrived, whose bodies the reader owns; None if there is none."""
        if self.is_held:
            return None
        fronts = [
            (not message.is_copied, message.arrives_at, message.order, lane)
            for lane, message in ((lane, queue.wire[0]) for lane, queue in self._by_lane() if queue.wire)
            if _has_come(message.arrives_at)
        ]
        if not fronts:
            return None
        lane = min(fronts)[-1]  # copied messages first: an uncopied one arrives fragment by fragment
        queue = self._lanes[lane]
        message = queue.wire.popleft()
        queue.wire_bytes -= message.size
        self._copy(message)
        self._admit(lane)
        return message

    def next_arrival(self) -> float:
        """Return the time of the next message or of the end: `NOW` for at once, inf if not known yet."""
        if self.is_held:
            return math.inf
        if self.depth:
            return min(queue.wire[0].arrives_at for queue in self._lanes if queue.wire)
        return math.inf if self.end is None else self._end_arrives_at

    def finish(self) -> None:
        """End the writer in good order: a goodbye follows all its messages."""
        self._end(LinkDown(DownReason.CLOSED))

    def cut(self, down: LinkDown) -> None:
        """End the writer at once: messages not copied in full are lost; the reader gets `down` after the others."""
        for queue in self._lanes:
            self._give_back(queue)
            queue.waiting.clear()
            queue.wire = deque(message for message in queue.wire if message.is_copied)
        self._end(down)

    def drop(self) -> None:
        """End the reader: all messages are lost."""
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
