"""Incoming calls: queued, running, ended by exactly one terminal frame.

A call's record exists from the moment its frame is read, before any task runs, so an early cancel is kept. While the
call runs, its cancel scope is that of its slot.

Calls that arrive before their actor exists:

    EY-1 a call waits until its actor is created, at most the setting `spawn_seconds`; then it is refused.
    EY-2 calls of one caller to one actor keep their order: later ones find the actor, after these.
    EY-3 waiting calls are bounded; excess calls, and calls to an actor that has ended here, are refused at once.
    EY-4 a call that ends before its actor is created counts as taken from the mailbox, as the sender counts it.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from trimesh import limits
from trimesh._routing.collector import ReceiveCount, SendWindow
from trimesh._runtime.peers.peer import Parcel
from trimesh._runtime.tasks.background import effective_deadline
from trimesh._runtime.tasks.crossing import wake
from trimesh._runtime.values.codec import place_payload
from trimesh._runtime.values.endpoint_spec import EndpointSpec
from trimesh._transport.interface import Buffer, Lane, Link
from trimesh._wire import messages
from trimesh._wire.messages import CallerPlace, SentView
from trimesh._wire.pickled.payload import Encoded
from trimesh.config import current
from trimesh.ids import MeshId

if TYPE_CHECKING:
    from trimesh._runtime.actors.server import LateAnswer
    from trimesh._runtime.calls.started import StartedWork
    from trimesh._runtime.channels.ports import CarriedPorts
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


class ItemSender:
    """Producer's end of one stream.

    Attributes:
        window: Items sent and not yet taken by the consumer.
        is_bounded: Whether the generator had a deadline when it began to wait for its consumer.
    """

    __slots__ = ("_task", "is_bounded", "window")

    def __init__(self, window: int) -> None:
        self.window = SendWindow(window, limits.STREAM_BYTES, limits.STREAM_REPORT_BYTES)
        self._task: trio.lowlevel.Task | None = None
        self.is_bounded = False

    def taken(self, total: int) -> None:
        """Update how many items the consumer has taken.

        Raises:
            ProtocolError: The count exceeds the items sent.
        """
        if self.window.acknowledged(total) and self._task is not None:
            task, self._task = self._task, None
            wake(task)

    async def send(self, call: IncomingCall, value: Encoded) -> None:
        """Send one item; return when the generator may produce the next.

        The item's buffers may be reused when this returns or raises.
        """
        nbytes = value.nbytes
        while not self.window.has_room(nbytes):
            await self._wait(call)
        payload, bodies = place_payload(value)
        head = messages.encode(messages.Item(call.call_id, payload))
        lent = call.peer.send(Parcel(head, bodies, value.definitions, nbytes, value.attachments))
        self.window.sent(nbytes)
        if lent is not None:
            await _wait_until_left(lent)
        while self.window.waiting >= self.window.messages_max:
            await self._wait(call)

    @property
    def is_waiting(self) -> bool:
        """True while the generator waits for its consumer."""
        return self._task is not None

    async def _wait(self, call: IncomingCall) -> None:
        self._task = trio.lowlevel.current_task()
        self.is_bounded = effective_deadline() != math.inf
        call.peer.proc.deadlocks.producer_waits(call)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


async def _wait_until_left(lent: trio.Event) -> None:
    """Wait until an item's bytes are sent; if cancelled, wait briefly so that clean-up does not overwrite them."""
    try:
        await lent.wait()
    except trio.Cancelled:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + limits.ITEM_LEAVE_SECONDS):
            await lent.wait()
        raise


# ---- incoming --------------------------------------------------------------------------------------------------------


class IncomingCall(msgspec.Struct, eq=False, weakref=True):
    """A message for an actor of this process.

    Attributes:
        peer: Its sender.
        link: Link that it arrived on and that the reply takes.
        call_id: 0 for a broadcast.
        payload, bodies: The arguments, still encoded.
        nbytes: Size of the whole message, as the sender counts it.
        count: Count of this sender's messages that the actor has taken out.
        deadline: When its budget ends (Trio time).
        received_at: When its frame was read (Trio time).
        carried: Keeps the ports among the arguments alive until those are decoded.
        view, caller: Target view and caller, as stated by the sender.
        scope: Scope that it runs in; cancelled by the caller, the budget, or the stop of the actor.
        cancelled_by: "caller" or "other" once it was cancelled.
        asked_at: When it was cancelled (Trio time).
        running: Whether the endpoint has been started.
        ended: Whether its terminal frame has been sent.
        number: Number given to a broadcast by a deadlock search; 0 before.
        items: Sends what a generator endpoint yields; None for any other endpoint.
        answering: Replier of a call that may be answered after its endpoint returned, or None.
        started: Calls that the endpoint has started and that outlast it: cancelled with it while it runs.
        error_text: Text of the error that it raised; empty if none.
        error_line: Line of the program that raised it, if known.
        thread: Identifier of the thread in which the endpoint runs; 0 for none.
    """

    peer: Peer
    link: Link
    call_id: int
    mesh: MeshId
    spec: EndpointSpec
    payload: Buffer
    bodies: Sequence[memoryview]
    nbytes: int
    count: ReceiveCount
    deadline: float
    received_at: float
    carried: CarriedPorts | None = None
    view: SentView | None = None
    caller: CallerPlace | None = None
    scope: trio.CancelScope | None = None
    cancelled_by: str | None = None
    cancel_reason: str = ""
    asked_at: float = math.inf
    running: bool = False
    ended: bool = False
    number: int = 0
    items: ItemSender | None = None
    started: Sequence[StartedWork] = ()
    answering: LateAnswer | None = None
    error_text: str = ""
    error_line: str = ""
    thread: int = 0

    @property
    def is_broadcast(self) -> bool:
        """True for a broadcast, which expects no reply."""
        return self.call_id == 0

    @property
    def is_expired(self) -> bool:
        """True once its budget has run out."""
        return self.deadline != math.inf and self.deadline <= trio.current_time()

    @property
    def is_cancelled(self) -> bool:
        """True once it was cancelled or its budget has run out."""
        return self.cancelled_by is not None or self.is_expired

    @property
    def cancelled_at(self) -> float:
        """When it was cancelled or its budget runs out (Trio time); `math.inf` if neither."""
        return min(self.asked_at, self.deadline)

    def set_deadline(self, deadline: float) -> None:
        """Cancel the call at `deadline` (Trio time)."""
        self.deadline = deadline
        if self.scope is not None:
            self.scope.deadline = deadline

    def cancel(self, by: str, reason: str) -> None:
        """Cancel the call; errors name the first canceller."""
        if self.cancelled_by is None:
            self.cancelled_by = by
            self.cancel_reason = reason
            self.asked_at = trio.current_time()
            if self.answering is not None:
                self.answering.cut()
        if self.scope is not None:
            self.scope.cancel(reason=reason)
            for one in self.started:
                one.cancel(reason)

    def start(self) -> None:
        """Note that it has left the mailbox and runs."""
        self.running = True
        count = self.count
        count.take(self.nbytes)
        if count.is_due:
            report_taken(self.link, self.mesh, count)

    def _take(self) -> None:
        take_one(self.link, self.mesh, self.count, self.nbytes)

    def returned(self, value: Encoded) -> trio.Event | None:
        """Reply with the value of the endpoint."""
        payload = value.payload
        if len(payload) > limits.HEAD_PAYLOAD_BYTES_MAX or value.definitions or value.attachments:
            return self._reply_payload(messages.Return, value)
        head = messages.encode(messages.Return(self.call_id, self.mesh, self.count.report(), payload))
        return self._end(head, value.buffers)

    def raised(self, error: Encoded) -> trio.Event | None:
        """Reply with the exception of the endpoint."""
        return self._reply_payload(messages.Error, error)

    def _reply_payload(self, kind: type[messages.Return | messages.Error], value: Encoded) -> trio.Event | None:
        if value.definitions or value.attachments:
            self.peer.prepare(value.definitions, value.attachments)
        payload, bodies = place_payload(value)
        head = messages.encode(kind(self.call_id, self.mesh, self.count.report(), payload))
        # Items of a stream are ordered with all other messages, so a terminal frame does not overtake them.
        return self._end(head, bodies, flow=0 if value.attachments else self.call_id)

    def failed(self, error: Encoded) -> None:
        """Reply with an error of the actor: the endpoint did not run or did not finish."""
        if not self.running:
            self._take()
        self.raised(error)

    def cancelled(self) -> None:
        """Reply that the call has unwound or never ran."""
        if not self.running:
            self._take()
        if self.is_broadcast:  # no frame carries the count, which must not be marked as reported
            self._end(b"")
            return
        by = self.cancelled_by or ("budget" if self.is_expired else "other")
        reason = self.cancel_reason or ("budget at sending" if by == "budget" else "")
        self._end(
            messages.encode(messages.CancelAck(self.call_id, self.mesh, self.count.report(), self.running, by, reason))
        )

    def unwound(self) -> None:
        """Reply that the call has unwound, unless a `Reply` answered it while its endpoint still ran."""
        if not self.ended:
            self.cancelled()

    def refused(self, kind: str, text: str) -> None:
        """Reply that the call was not accepted."""
        self._take()
        if self.is_broadcast:
            self._end(b"")
        else:
            self._end(messages.encode(messages.Refused(self.call_id, self.mesh, self.count.report(), kind, text)))

    def _end(self, head: bytes, bodies: Sequence[Buffer] = (), *, flow: int | None = None) -> trio.Event | None:
        assert not self.ended, self.spec.name
        self.ended = True
        if self.payload:  # they have not been decoded
            self.forget_arguments()
        number, peer = self.call_id, self.peer
        if not number:
            return None
        peer.inbound.pop(number, None)
        # By the link of all other messages to the caller: definitions and ports of the payload precede it there.
        link = peer.link
        if link is None:
            return None
        lent = link.send(head, bodies, flow=number if flow is None else flow)
        sites = peer.proc.sites
        if sites is not None:
            sites.answered(self)
        return lent

    def forget_arguments(self) -> None:
        """Drop the encoded arguments: they were decoded or never will be."""
        self.payload = b""
        if self.bodies or self.carried is not None:
            self.bodies, self.carried = (), None


def take_one(link: Link, mesh: MeshId, count: ReceiveCount, nbytes: int) -> None:
    """Count a message that left the mailbox; report to the sender if no recent terminal frame has."""
    count.take(nbytes)
    if count.is_due:
        report_taken(link, mesh, count)


def report_taken(link: Link, mesh: MeshId, count: ReceiveCount) -> None:
    """Report to the sender how many of its messages have left the mailbox."""
    link.send(messages.encode(messages.Credit(mesh, count.report())), lane=Lane.CONTROL)


def refuse(link: Link, call_id: int, mesh: MeshId, count: ReceiveCount, nbytes: int, kind: str, text: str) -> None:
    """Refuse a message that no actor here can take."""
    take_one(link, mesh, count, nbytes)
    if call_id:
        link.send(messages.encode(messages.Refused(call_id, mesh, count.report(), kind, text)))


def refuse_unaddressed(peer: Peer, call_id: int, mesh: MeshId) -> None:
    """Refuse a message to an actor that is not here, without counting it: no state is kept for that actor."""
    if not call_id:
        peer.refuse_credit(mesh)
    elif peer.link is not None:
        text = "the mesh has stopped, or has no member in this process"
        peer.link.send(messages.encode(messages.Refused(call_id, mesh, 0, "stopped", text)))


# ---- early calls: they wait, in order, for an actor that is still being spawned --------------------------------------

# The members of a mesh are created concurrently. One that already serves may call a sibling whose spawn has not yet
# reached this process. That must not look like a call to a stopped mesh: this process knows which of its actors ended.


class _EarlyCall(msgspec.Struct, frozen=True, eq=False):
    """A call that arrived before its actor, with the context in which it was read; `came_at` is in Trio time."""

    peer: Peer
    link: Link
    message: messages.Call
    size: int
    bodies: list[memoryview]
    carried: CarriedPorts | None
    came_at: float
    context: contextvars.Context

    @property
    def nbytes(self) -> int:
        return self.size + sum(body.nbytes for body in self.bodies)


class EarlyCalls:
    """Calls to one process that arrived before their actors."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._waiting: dict[MeshId, list[_EarlyCall]] = {}
        self._ended: dict[MeshId, None] = {}
        self._count = self._nbytes = 0
        self._is_watched = False

    @property
    def waiting(self) -> Sequence[messages.Call]:
        return [call.message for calls in self._waiting.values() for call in calls]

    def hold(
        self,
        peer: Peer,
        link: Link,
        message: messages.Call,
        size: int,
        bodies: list[memoryview],
        carried: CarriedPorts | None,
        cancel: str | None,
    ) -> None:
        """Keep a call until its actor is here, or refuse it (EY-3); `cancel` is a cancel that overtook it."""
        call = _EarlyCall(peer, link, message, size, bodies, carried, self._proc.now(), contextvars.copy_context())
        is_full = self._count >= limits.EARLY_CALLS_MAX or self._nbytes + call.nbytes > limits.MAILBOX_BYTES
        if not message.mesh or message.mesh in self._ended or is_full or not self._watch():
            refuse_unaddressed(peer, message.call, message.mesh)
            return
        if cancel is not None:
            _acknowledge(call, cancel)
            return
        self._waiting.setdefault(message.mesh, []).append(call)
        self._count += 1
        self._nbytes += call.nbytes

    def made(self, mesh: MeshId) -> None:
        """Deliver the calls that waited for an actor that now exists."""
        self._ended.pop(mesh, None)
        for call in self._take(mesh):
            message = call.message
            if message.budget is not None:
                left = max(0.0, message.budget - (self._proc.now() - call.came_at))
                message = msgspec.structs.replace(message, budget=left)
            call.peer.calls_received -= 1  # it is counted again
            call.peer.carried = call.carried
            call.context.run(self._proc.take_call, call.peer, call.link, message, call.size, call.bodies)

    def ended(self, mesh: MeshId) -> None:
        """Refuse the calls that wait for an actor that has ended for good or will not be created."""
        self._ended[mesh] = None
        if len(self._ended) > limits.ENDED_ACTORS:
            del self._ended[next(iter(self._ended))]
        for call in self._take(mesh):
            refuse_unaddressed(call.peer, call.message.call, mesh)

    def cancel(self, peer: Peer, number: int, reason: str) -> bool:
        """Cancel a waiting call for its caller; return False if no call has that number."""
        for calls in self._waiting.values():
            for call in calls:
                if call.peer is peer and call.message.call == number:
                    self._drop(call)
                    _acknowledge(call, reason)
                    return True
        return False

    def forget(self, peer: Peer) -> None:
        """Drop the calls of a process that has ended."""
        for call in [call for calls in self._waiting.values() for call in calls if call.peer is peer]:
            self._drop(call)

    def _take(self, mesh: MeshId) -> Sequence[_EarlyCall]:
        calls = self._waiting.pop(mesh, ())
        self._count -= len(calls)
        self._nbytes -= sum(call.nbytes for call in calls)
        return calls

    def _drop(self, call: _EarlyCall) -> None:
        mesh = call.message.mesh
        self._waiting[mesh].remove(call)
        if not self._waiting[mesh]:
            del self._waiting[mesh]
        self._count -= 1
        self._nbytes -= call.nbytes

    def _watch(self) -> bool:
        """Start the task that expires waiting calls; return False if this process no longer serves links."""
        if not self._is_watched:
            self._is_watched = self._proc.serve(self._expire)
        return self._is_watched

    async def _expire(self) -> None:
        try:
            while self._waiting:
                first = min(calls[0].came_at for calls in self._waiting.values())
                await trio.sleep_until(first + current().spawn_seconds)
                late = self._proc.now() - current().spawn_seconds
                for call in [call for calls in self._waiting.values() for call in calls if call.came_at <= late]:
                    self._drop(call)
                    self._refuse_late(call)
        finally:
            self._is_watched = False

    def _refuse_late(self, call: _EarlyCall) -> None:
        peer, mesh = call.peer, call.message.mesh
        text = f"the mesh has no member in this process, and none was spawned within {current().spawn_seconds:g} s"
        refuse(call.link, call.message.call, mesh, peer.count_of(mesh), call.nbytes, "stopped", text)
        if not any(other.peer is peer for other in self._waiting.get(mesh, ())):
            peer.end_count(mesh)


def _acknowledge(call: _EarlyCall, reason: str) -> None:
    """Acknowledge the cancel of a call that never reached an actor."""
    peer, message = call.peer, call.message
    count = peer.count_of(message.mesh)
    take_one(call.link, message.mesh, count, call.nbytes)
    if message.call:
        ack = messages.CancelAck(message.call, message.mesh, count.report(), started=False, by="caller", reason=reason)
        call.link.send(messages.encode(ack))
