"""State that one process keeps about another: link, credits, calls in both directions.

A `Peer` outlives its link: after a death, current and later users of it find the death in it, so that messages to the
same incarnation fail at once, with the diagnosis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh._routing.collector import ReceiveCount, SendWindow
from trimesh._runtime.peers.deaths import AbandonedCalls
from trimesh._runtime.values.codec import take_payload
from trimesh._transport.interface import Buffer, Lane, Link, LinkHandler, LinkStatistics
from trimesh._wire import messages
from trimesh._wire.memory import DefinitionId
from trimesh.ids import AGENT, CallId, MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.calls.call_set import CallBatch
    from trimesh._runtime.calls.outgoing import OutgoingCall
    from trimesh._runtime.channels.ports import CarriedPorts
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.deaths import ProcDeath
    from trimesh._runtime.peers.incoming import IncomingCall


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """An encoded message, immutable, shared by all peers that it is sent to.

    Attributes:
        head: The control struct.
        bodies: Buffers lent by the sender.
        definitions: Code sent by value that the peer must have first.
        nbytes: Size, for the credit window.
        attachments: Objects that the payload refers to (`Encoded.attachments`); ports among them are lent to the peer.
        flow: Order relative to other messages, as `Link.send` takes it; 0 with attachments, because messages that
            announce those must arrive right before it.
    """

    head: bytes
    bodies: Sequence[Buffer] = ()
    definitions: Sequence[DefinitionId] = ()
    nbytes: int = 0
    attachments: Sequence[object] = ()
    flow: int = 0


class SpreadParcel(Parcel, frozen=True, eq=False):
    """A message that differs for each target.

    Attributes:
        nbytes: Size of the largest.
        attachments: Attachments of all.
        each: Parcels by the index of the target.
    """

    each: Sequence[Parcel] = ()


# ---- peer ------------------------------------------------------------------------------------------------------------


class Pending(msgspec.Struct, frozen=True, eq=False):
    """A message that waits for room in a mailbox.

    Attributes:
        index: Index of the target in its call.
        on_sent: Called with it, the position on the link and the event of `Link.send` when the message is sent.
    """

    parcel: Parcel
    index: int
    on_sent: Callable[[int, int, trio.Event | None], None]


_UNBOUNDED: Final = (2**31, 2**62)
"""Credit (messages, bytes) towards a receiver that queues none."""


class Outbox:
    """Outgoing queue of this process to one remote actor: in order, within its credits.

    Attributes:
        peer, mesh: The actor.
        load: Calls sent to it that have not ended.
        alone, index, targets: Prebuilt outboxes, peer indices and targets of a call to this actor alone.
        batch: Calls that are counted and will be sent before anything else.
    """

    __slots__ = ("_queue", "alone", "batch", "index", "load", "mesh", "peer", "targets", "window")

    def __init__(self, peer: Peer, mesh: MeshId, window: SendWindow) -> None:
        self.peer = peer
        self.mesh = mesh
        self.window = window
        self.load = 0
        self.alone: Final = (self,)
        self.index: Final = {peer: 0}
        self.targets: Final = (Target(peer, mesh),)
        self.batch: CallBatch | None = None
        self._queue: deque[Pending] = deque()

    @property
    def is_waiting(self) -> bool:
        """True while messages wait for room."""
        return bool(self._queue)

    @property
    def waiting(self) -> int:
        """Number of messages that wait for room."""
        return len(self._queue)

    def has_room(self, nbytes: int) -> bool:
        """Return whether a message of `nbytes` would be sent at once."""
        if self.batch is not None:
            self.batch.leave()
        return not self._queue and self.window.has_room(nbytes)

    def count(self, nbytes: int) -> int:
        """Count a message that the caller sends itself (a cast); return its position on the link."""
        self.window.sent(nbytes)
        self.peer.calls_sent += 1
        return self.peer.calls_sent

    def try_send(self, parcel: Parcel) -> tuple[int, trio.Event | None] | None:
        """Send a message like `send` if there is room for it; else return None."""
        if self.batch is not None:
            self.batch.leave()
        if self._queue or not self.window.try_sent(parcel.nbytes):
            return None
        peer = self.peer
        peer.calls_sent = position = peer.calls_sent + 1
        link = peer.link
        if link is None:
            return position, None
        if parcel.definitions or parcel.attachments:
            peer.prepare(parcel.definitions, parcel.attachments)
        return position, link.send(parcel.head, parcel.bodies, flow=parcel.flow)

    def queue(self, parcel: Parcel, index: int, on_sent: Callable[[int, int, trio.Event | None], None]) -> Pending:
        """Queue a message that `try_send` found no room for; see `Pending`."""
        pending = Pending(parcel, index, on_sent)
        self._queue.append(pending)
        return pending

    def acknowledged(self, total: int) -> None:
        """Process the actor's count of messages taken out; send what now has room. 0 means that the actor has ended."""
        if self.window.acknowledged(total):
            if self._queue:
                self._send_queued()
        elif not total:
            self.end()

    def told(self, total: int) -> None:
        """Process a count that may belong to an earlier outbox whose actor has ended, and so may be too high."""
        if total <= self.window.sent_total:
            self.acknowledged(total)

    def end(self) -> None:
        """End the outbox: its actor is gone. Waiting messages are sent, and will be refused. Idempotent."""
        self.window.messages_max, self.window.bytes_max = _UNBOUNDED
        self.peer.drop_outbox(self)
        self._send_queued()

    def drop_unused(self) -> None:
        """Drop this outbox if it never sent a message: no message will then report the end of the actor."""
        if not (self._queue or self.window.sent_total):
            self.peer.drop_outbox(self)

    def withdraw(self, pending: Pending) -> None:
        """Withdraw a waiting message; later, smaller ones may be sent then."""
        self._queue.remove(pending)
        self._send_queued()

    def _send_queued(self) -> None:
        queue, peer = self._queue, self.peer
        while queue and self.window.try_sent(queue[0].parcel.nbytes):
            pending = queue.popleft()
            peer.calls_sent = position = peer.calls_sent + 1
            pending.on_sent(pending.index, position, peer.send(pending.parcel))


class Peer:
    """Another process incarnation, or this one by its loopback link.

    Attributes:
        link: Link for messages to it; None before there is one and after it is gone.
        death: Its death, which creates the errors of messages to it; None while it is not gone.
        no_link: Error while this process lacks memory or descriptors for a link; the next message tries again.
        calls: Unfinished calls of this process that involve it, oldest first.
        inbound: Its unfinished calls here.
        abandoned: Abandoned calls of this process to it that may still run.
        is_stalled: Whether its last report said that its Trio loop was stalled.
        early_cancels: Cancels that overtook their calls, by call id.
        calls_received, calls_sent: Number of `Call` frames so far.
        boxes: Outboxes, by mesh, of its actors that a message was ever sent to; see `outbox`.
        carried: Ports that its next message carries; see `take_carried`.
    """

    __slots__ = (
        "_counts",
        "_defined",
        "abandoned",
        "boxes",
        "calls",
        "calls_received",
        "calls_sent",
        "carried",
        "death",
        "early_cancels",
        "inbound",
        "is_stalled",
        "link",
        "no_link",
        "proc",
        "proc_id",
    )

    def __init__(self, proc: Proc, proc_id: ProcId, death: ProcDeath | None = None) -> None:
        self.proc = proc
        self.proc_id = proc_id
        self.link: Link | None = None
        self.death = death
        self.no_link: ProcDeath | None = None
        self.calls: dict[OutgoingCall, None] = {}
        self.abandoned = AbandonedCalls(self)
        self.is_stalled = False
        self.inbound: dict[int, IncomingCall] = {}
        self.early_cancels: dict[int, str] = {}
        self.calls_received = 0
        self.calls_sent = 0
        self.carried: CarriedPorts | None = None
        self.boxes: dict[MeshId, Outbox] = {}
        self._counts: dict[MeshId, ReceiveCount] = {}
        self._defined: set[DefinitionId] = set()

    @property
    def is_owner(self) -> bool:
        """True for the process that started this one, and for this process itself."""
        family = self.proc.family
        return self.proc_id == self.proc.proc_id or (family is not None and self.proc_id == family.parent)

    @property
    def waiting(self) -> int:
        """Number of messages that wait here for room in its actors' mailboxes."""
        return sum(box.waiting for box in self.boxes.values())

    def find_outbox(self, mesh: MeshId) -> Outbox | None:
        """Return the outbox of one of its actors, or None if no message was ever sent to it."""
        return self.boxes.get(mesh)

    def outbox(self, mesh: MeshId) -> Outbox:
        found = self.boxes.get(mesh)
        if found is None:
            # The agent obeys its owner only and never lets a message wait, so it needs no bound.
            messages_max, bytes_max = (limits.MAILBOX_MESSAGES, limits.MAILBOX_BYTES) if mesh != AGENT else _UNBOUNDED
            found = Outbox(self, mesh, SendWindow(messages_max, bytes_max, limits.MAILBOX_REPORT_BYTES))
            self.boxes[mesh] = found
        return found

    def drop_outbox(self, box: Outbox) -> None:
        """Drop an outbox whose actor has ended; later messages to that actor get a new one. Idempotent."""
        if self.boxes.get(box.mesh) is box:
            del self.boxes[box.mesh]

    def shed(self) -> None:
        """Release state that only a living process needs."""
        self.boxes = {}
        self._counts = {}
        self._defined = set()
        self.abandoned.clear()
        self.early_cancels = {}

    def outboxes(self) -> Sequence[tuple[MeshId, Outbox]]:
        return list(self.boxes.items())

    def count_of(self, mesh: MeshId) -> ReceiveCount:
        """Return the count of its messages that the actor `mesh` of this process has taken out."""
        found = self._counts.get(mesh)
        if found is None:
            found = self._counts[mesh] = ReceiveCount(limits.MAILBOX_MESSAGES // 4, limits.MAILBOX_REPORT_BYTES)
        return found

    def find_count(self, mesh: MeshId) -> ReceiveCount | None:
        """Return the count of `count_of`; None if the peer has sent that actor no message."""
        return self._counts.get(mesh)

    def counts(self) -> Sequence[MeshId]:
        """Return the actor meshes of this process that it has sent messages to and that have not ended."""
        return list(self._counts)

    def end_count(self, mesh: MeshId) -> None:
        """Drop the count of an actor that has ended for good, and let the peer drop its outbox."""
        if self._counts.pop(mesh, None) is not None:
            self.refuse_credit(mesh)

    def refuse_credit(self, mesh: MeshId) -> None:
        """Notify it that messages to an actor are no longer counted, because the actor does not exist."""
        if self.link is not None:
            self.link.send(messages.encode(messages.Credit(mesh, 0)), lane=Lane.CONTROL)

    def stalled(self, seconds: float) -> None:
        """Record how many seconds its Trio loop has been stalled; 0 when it runs again."""
        self.is_stalled = seconds > 0
        if self.is_stalled:
            for call in list(self.calls):
                call.peer_stalled()

    def send(self, parcel: Parcel) -> trio.Event | None:
        """Send a message, preceded by its definitions and ports; dropped when the link is gone."""
        link = self.link
        if link is None:
            return None
        if parcel.definitions or parcel.attachments:
            self.prepare(parcel.definitions, parcel.attachments)
        return link.send(parcel.head, parcel.bodies, flow=parcel.flow)

    def prepare(self, definitions: Sequence[DefinitionId], attachments: Sequence[object]) -> None:
        """Send what the peer needs before a payload: definitions, then the ports that it carries.

        The payload must be the next message on this lane of the peer's sending link.
        """
        self.define(definitions)
        if attachments and self.link is not None:
            self.proc.channels.send(self, self.link, attachments)

    def take_carried(self) -> CarriedPorts | None:
        """Return the object that keeps the ports of the message being read alive until it is decoded.

        Keep it with the message's payload, and drop it when the payload was decoded or never will be. Ports of which
        no object was created are then given back.
        """
        carried, self.carried = self.carried, None
        return carried

    def define(self, definitions: Sequence[DefinitionId]) -> None:
        """Send those of `definitions` that the peer does not have yet."""
        if self.link is None:
            return
        for definition in definitions:
            if definition not in self._defined:
                self._defined.add(definition)
                data = self.proc.values.definition(definition)
                self.prepare(data.definitions, data.attachments)
                if len(data.payload) <= limits.HEAD_PAYLOAD_BYTES_MAX:
                    self.link.send(messages.encode(messages.Define(definition, data.payload)))
                else:
                    self.link.send(messages.encode(messages.Define(definition, b"")), [data.payload])

    def knows(self, definitions: Sequence[DefinitionId]) -> None:
        """Record definitions that the peer sent, so that they are not sent back."""
        self._defined.update(definitions)

    def take_definition(self, message: messages.Define, bodies: list[memoryview]) -> None:
        """Receive a definition from the peer: a `Route`."""
        payload, _ = take_payload(message.payload, bodies)
        self.knows([message.definition])
        carried = self.take_carried()
        self.proc.values.define(
            message.definition, payload, carried, () if carried is None else tuple(carried.holdings)
        )

    def cancel(self, call: CallId, position: int, reason: str, *, is_leaving: bool = False) -> None:
        """Request that the peer cancel one of our calls.

        Args:
            call: Id of the call.
            position: Position of its message among the calls of the link.
            reason: Text for errors.
            is_leaving: Whether part of the message is still here. Other messages may pass it, so the cancel names the
                position of the last message instead.
        """
        if self.link is not None:
            position = self.calls_sent if is_leaving else position
            self.link.send(messages.encode(messages.Cancel(call, position, reason)), lane=Lane.CONTROL)


Route = Callable[[Peer, Any, list[memoryview]], None]
"""Handler of one kind of message from a peer; it owns the bodies.

It raises `ProtocolError` when a message breaks the rules. If messages carry user values, it takes `peer.take_carried()`
with each and keeps that as long as the payload.
"""


# ---- target ----------------------------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True):
    """Address of one actor: its process and its mesh."""

    peer: Peer
    mesh: MeshId


# ---- loopback: messages of a process to its own actors take the same path as all others ------------------------------


class LoopbackLink(Link):
    """Link of a process to itself: a task delivers to its own handler, CONTROL first."""

    def __init__(self, handler: LinkHandler) -> None:
        self._handler = handler
        self._lanes: tuple[deque[tuple[bytes, list[bytearray]]], ...] = (deque(), deque())
        self._task: trio.lowlevel.Task | None = None
        self._messages = 0
        self._bytes = 0

    def send(
        self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA, flow: int = 0
    ) -> trio.Event | None:
        """Queue a copy; credits of higher layers bound the queue."""
        del flow
        copies = [bytearray(body) for body in bodies]
        self._lanes[lane].append((head, copies))
        self._messages += 1
        self._bytes += len(head) + sum(map(len, copies))
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)
        return None

    def close(self) -> None:
        """Do nothing: the link lives as long as its process."""

    def abort(self) -> None:
        """Drop queued messages."""
        for lane in self._lanes:
            lane.clear()

    def statistics(self) -> LinkStatistics:
        """Return the counters; sent and received are equal."""
        return LinkStatistics(self._messages, self._messages, self._bytes, self._bytes, 0, 0)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Deliver until cancelled."""
        control, data = self._lanes
        while True:
            for _ in range(len(control) + len(data)):
                head, bodies = (control or data).popleft()
                self._handler.received(self, memoryview(head), [memoryview(body) for body in bodies])
                if not control and not data:
                    break
            if control or data:
                await trio.lowlevel.checkpoint()
            else:
                await self._wait_for_message()

    async def _wait_for_message(self) -> None:
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
