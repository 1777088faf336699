"""One call from elsewhere: queued, running, ended by exactly one terminal frame.

Its record exists from the moment the frame is read, before any task runs, so a cancel that comes early is kept. Its
cancel scope is that of the slot that runs it, for as long as it does.

    EY-1 a call waits until its actor is made, at most `limits.SPAWN_SECONDS`; then it is refused.
    EY-2 calls of one caller to one actor keep their order: those that come later find the actor, after these.
    EY-3 what waits is bounded; what comes beyond that, or to an actor that has ended here, is refused at once.
    EY-4 what ends before its actor is made counts as taken out of the mailbox, as the sender counts those to come.
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
from trimesh.ids import MeshId

if TYPE_CHECKING:
    from trimesh._runtime.actors.server import LateAnswer
    from trimesh._runtime.calls.started import StartedWork
    from trimesh._runtime.channels.ports import CarriedPorts
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


class ItemSender:
    """The producer's end of one stream.

    Attributes:
        window: Items that have been sent and not been taken.
        is_bounded: Whether the generator had a deadline when it began to wait for its consumer.
    """

    __slots__ = ("_task", "is_bounded", "window")

    def __init__(self, window: int) -> None:
        self.window = SendWindow(window, limits.STREAM_BYTES, limits.STREAM_REPORT_BYTES)
        self._task: trio.lowlevel.Task | None = None
        self.is_bounded = False

    def taken(self, total: int) -> None:
        """Learn how many items the consumer has taken.

        Raises:
            ProtocolError: More than were sent.
        """
        if self.window.acknowledged(total) and self._task is not None:
            task, self._task = self._task, None
            wake(task)

    async def send(self, call: IncomingCall, value: Encoded) -> None:
        """Send one item; return when the generator may go on to the next.

        The buffers of the item are the generator's again when this returns or raises.
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
        """Whether the generator waits for its consumer."""
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
    """Wait until the bytes of an item have left; for a moment also when cancelled, lest clean-up writes into them."""
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
        peer: Who sent it.
        link: Where it came from and where the reply goes.
        call_id: 0 for a broadcast.
        payload, bodies: The arguments, still encoded.
        nbytes: Of the whole message, as its sender counts them.
        count: What the actor has taken out of what its sender has sent it.
        deadline: When its budget ends (Trio time).
        received_at: Trio time.
        carried: Keeps the ports among the arguments alive until those are decoded.
        view, caller: What its sender says of where it goes to and where it comes from.
        scope: What it runs in: cancelled by the caller, by the budget, or by the stop of the actor.
        cancelled_by: "caller" or "other" once it was.
        asked_at: When they did (Trio time).
        running: Whether the endpoint has been started.
        ended: Whether its terminal frame has been sent.
        number: Of a broadcast that was asked for in a search for deadlocks; 0 before.
        items: Sends what a generator endpoint yields; None for any other endpoint.
        answering: What answers it, if that may happen after the endpoint has returned.
        started: Calls that the endpoint has started and that outlast it: cancelled with it while it runs.
        error_text: What it has raised, in words; empty if it has not.
        error_line: The line of the program that has raised it, if that is known.
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
        """Whether no reply is expected."""
        return self.call_id == 0

    @property
    def is_expired(self) -> bool:
        """Whether its budget has run out."""
        return self.deadline != math.inf and self.deadline <= trio.current_time()

    @property
    def is_cancelled(self) -> bool:
        """Whether it was asked to end, or its budget has run out."""
        return self.cancelled_by is not None or self.is_expired

    @property
    def cancelled_at(self) -> float:
        """When it was asked to end, or its budget runs out (Trio time); `math.inf` if neither."""
        return min(self.asked_at, self.deadline)

    def set_deadline(self, deadline: float) -> None:
        """Let it end by itself at `deadline` (Trio time)."""
        self.deadline = deadline
        if self.scope is not None:
            self.scope.deadline = deadline

    def cancel(self, by: str, reason: str) -> None:
        """Ask it to end; the first asker is the one that is named."""
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
        # Items of a stream go with order to all others, so nothing that ends a call passes them.
        return self._end(head, bodies, flow=0 if value.attachments else self.call_id)

    def failed(self, error: Encoded) -> None:
        """Reply with an error of the actor: the endpoint did not run, or not to its end."""
        if not self.running:
            self._take()
        self.raised(error)

    def cancelled(self) -> None:
        """Reply that it has unwound, or never ran."""
        if not self.running:
            self._take()
        if self.is_broadcast:  # what no frame tells must not count as told
            self._end(b"")
            return
        by = self.cancelled_by or ("budget" if self.is_expired else "other")
        reason = self.cancel_reason or ("budget at sending" if by == "budget" else "")
        self._end(
            messages.encode(messages.CancelAck(self.call_id, self.mesh, self.count.report(), self.running, by, reason))
        )

    def unwound(self) -> None:
        """Reply that it has unwound, unless a `Reply` has answered it while its endpoint went on."""
        if not self.ended:
            self.cancelled()

    def refused(self, kind: str, text: str) -> None:
        """Reply that it was not accepted."""
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
        # By the link that all other messages take to the caller: what a payload needs has gone ahead on that one.
        link = peer.link
        if link is None:
            return None
        return link.send(head, bodies, flow=number if flow is None else flow)

    def forget_arguments(self) -> None:
        """Let go of the arguments: they have been decoded, or never will be."""
        self.payload = b""
        if self.bodies or self.carried is not None:
            self.bodies, self.carried = (), None


def take_one(link: Link, mesh: MeshId, count: ReceiveCount, nbytes: int) -> None:
    """Count a message that left the mailbox; tell the sender when no terminal frame has told it for long."""
    count.take(nbytes)
    if count.is_due:
        report_taken(link, mesh, count)


def report_taken(link: Link, mesh: MeshId, count: ReceiveCount) -> None:
    """Tell the sender how many of its messages have left the mailbox."""
    link.send(messages.encode(messages.Credit(mesh, count.report())), lane=Lane.CONTROL)


def refuse(link: Link, call_id: int, mesh: MeshId, count: ReceiveCount, nbytes: int, kind: str, text: str) -> None:
    """Answer a message that nothing here can take."""
    take_one(link, mesh, count, nbytes)
    if call_id:
        link.send(messages.encode(messages.Refused(call_id, mesh, count.report(), kind, text)))


def refuse_unaddressed(peer: Peer, call_id: int, mesh: MeshId) -> None:
    """Answer a message to an actor that is not here: nothing is kept of it, so nothing is counted."""
    if not call_id:
        peer.refuse_credit(mesh)
    elif peer.link is not None:
        text = "the mesh has stopped, or has no member in this process"
        peer.link.send(messages.encode(messages.Refused(call_id, mesh, 0, "stopped", text)))


# ---- calls to an actor that is still being spawned: they wait for it, in the order in which they came ----------------

# The members of a mesh are made side by side. One that serves already may call a sibling whose own spawn is still on
# its way to this process. That is no call to a mesh that has stopped: of those whose actor has ended here this process
# knows.


class _EarlyCall(msgspec.Struct, frozen=True, eq=False):
    """One of them, as it has come, and with the context in which it was read; `came_at` is in Trio time."""

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
    """Those of one process."""

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
        """Keep a call to an actor that is not here until it is, or refuse it (EY-3); `cancel` has overtaken it."""
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
        """Deliver the calls that have waited for an actor, which is there now."""
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
        """Learn that an actor has ended for good, or will not come: what waits for it is refused."""
        self._ended[mesh] = None
        if len(self._ended) > limits.ENDED_ACTORS:
            del self._ended[next(iter(self._ended))]
        for call in self._take(mesh):
            refuse_unaddressed(call.peer, call.message.call, mesh)

    def cancel(self, peer: Peer, number: int, reason: str) -> bool:
        """End a call that waits, for its caller; return False when there is none of that number."""
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
        """See to it that nothing waits for ever; return False when this process serves no links any more."""
        if not self._is_watched:
            self._is_watched = self._proc.serve(self._expire)
        return self._is_watched

    async def _expire(self) -> None:
        try:
            while self._waiting:
                first = min(calls[0].came_at for calls in self._waiting.values())
                await trio.sleep_until(first + limits.SPAWN_SECONDS)
                late = self._proc.now() - limits.SPAWN_SECONDS
                for call in [call for calls in self._waiting.values() for call in calls if call.came_at <= late]:
                    self._drop(call)
                    self._refuse_late(call)
        finally:
            self._is_watched = False

    def _refuse_late(self, call: _EarlyCall) -> None:
        peer, mesh = call.peer, call.message.mesh
        text = f"the mesh has no member in this process, and none came within {limits.SPAWN_SECONDS:g} s"
        refuse(call.link, call.message.call, mesh, peer.count_of(mesh), call.nbytes, "stopped", text)
        if not any(other.peer is peer for other in self._waiting.get(mesh, ())):
            peer.end_count(mesh)


def _acknowledge(call: _EarlyCall, reason: str) -> None:
    """Tell the caller that its cancel has ended a call that no actor has seen."""
    peer, message = call.peer, call.message
    count = peer.count_of(message.mesh)
    take_one(call.link, message.mesh, count, call.nbytes)
    if message.call:
        ack = messages.CancelAck(message.call, message.mesh, count.report(), started=False, by="caller", reason=reason)
        call.link.send(messages.encode(ack))
