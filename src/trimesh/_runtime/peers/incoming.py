"""One call from elsewhere: queued, running, ended by exactly one terminal frame.

Its record exists from the moment the frame is read, before any task runs, so a cancel that comes early is kept. Its
cancel scope is that of the slot that runs it, for as long as it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from trimesh import limits
from trimesh._routing.collector import ReceiveCount
from trimesh._runtime.values.endpoint_spec import EndpointSpec
from trimesh._runtime.values.payload import place_payload
from trimesh._transport.interface import Buffer, Lane, Link
from trimesh._wire import messages
from trimesh._wire.messages import CallerPlace, SentView
from trimesh._wire.pickled.payload import Encoded
from trimesh.ids import MeshId

if TYPE_CHECKING:
    from trimesh._runtime.actors.reply import LateAnswer
    from trimesh._runtime.calls.started import StartedWork
    from trimesh._runtime.channels.registry import CarriedPorts
    from trimesh._runtime.peers.item_sender import ItemSender
    from trimesh._runtime.peers.peer import Peer


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
