r"""Hooks around calls and channel items while a tracer or a carrier of context variables is installed.

`trace_calls` and `carry_values` replace functions. A process without either therefore runs the same bytecode as without
this module. If only the sender has one, the receiver just takes the call or item out of its envelope.

    caller   `OutgoingCall.start` --head in a TracedCall--> callee `take_traced` -> `Cell.deliver`
             `OutgoingCall.forget` <--outcome--             slot: `began`, `_context_of`, endpoint, `ended`
    port     `Port._encode` --head in a TracedItem--> home `take_traced_item` -> `Home.arrived`
                                                      receiver: `Home._decode`
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.actors.server import Server
from trimesh._runtime.calls import invocation
from trimesh._runtime.calls.call_set import CallSet
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.channels.ports import Port
from trimesh._runtime.channels.receiver import Home, ReturnedItem, WaitingItem
from trimesh._runtime.peers.peer import Parcel, SpreadParcel
from trimesh._wire import messages
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.calls.invocation import Request
    from trimesh._runtime.channels.ports import CarriedPorts, Holding
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer, Target
    from trimesh._wire.pickled.payload import Encoded


Seam: TypeAlias = tuple[Any, str, Any]
"""A class or module, the name of one of its functions, the replacement."""

_arriving: Final[ContextVar[tuple[str, bytes]]] = ContextVar("trimesh_arriving_trace", default=("", b""))


class Tracing(Protocol):
    """Observer of calls and channel items."""

    def sends(self, call: OutgoingCall) -> str:
        """Handle a call that is about to be sent; return the trace context to send with it."""
        ...

    def settled(self, call: OutgoingCall) -> None:
        """Handle the end of a call, or its abandonment."""

    def came(self, call: IncomingCall, trace: str) -> None:
        """Handle the arrival of a call with a trace context, before it is queued."""

    def began(self, cell: Cell, call: IncomingCall) -> None:
        """Handle the start of a call in a slot."""

    def enter(self, call: IncomingCall, context: contextvars.Context) -> None:
        """Prepare the context of its endpoint."""

    def ended(self, call: IncomingCall) -> None:
        """Handle the end of its endpoint."""

    def sends_item(self) -> str:
        """Handle the sending of an item by the running code; return the trace context to send with it, or nothing."""
        ...

    def received_item(self, trace: str) -> None:
        """Handle the receipt of an item with a trace context by the running code."""


class ContextCarrier(Protocol):
    """Sender and receiver of values of context variables."""

    def is_laden(self) -> bool:
        """Return whether the running context has values to send."""
        ...

    def sends(self, call: OutgoingCall) -> Encoded | None:
        """Return the encoded values of the running context; None for none.

        Raises:
            TypeError, ValueError: A value cannot be sent.
        """
        ...

    def came(self, call: IncomingCall, values: bytes) -> None:
        """Handle the arrival of a call with values, before it is queued."""

    def enter(self, server: Server, call: IncomingCall, context: contextvars.Context) -> None:
        """Set the values in the context of its endpoint."""


class _Recorder:
    """Reports the begin and end of calls to the recorder of an actor, and to a tracer."""

    def __init__(self, cell: Cell, recorder: Any, tracing: Tracing) -> None:
        def began(call: IncomingCall) -> int:
            tracing.began(cell, call)
            return 0 if recorder is None else int(recorder.began(call))

        def ended(number: int, call: IncomingCall) -> None:
            if recorder is not None:
                recorder.ended(number, call)
            tracing.ended(call)

        self.began = began
        self.ended = ended


class _UnwrappedItem(messages.PortItem, frozen=True):
    """An item taken out of its envelope; never sent."""

    trace: str = ""


class _TracedWaitingItem(WaitingItem, frozen=True):
    """A waiting item that was taken out of its envelope."""

    trace: str = ""


def serve_traced(proc: Proc) -> None:
    """Accept calls and items of traced processes."""
    proc.routes[messages.TracedCall] = take_traced
    proc.routes[messages.TracedItem] = take_traced_item


def take_traced(peer: Peer, message: messages.TracedCall, bodies: list[memoryview]) -> None:
    """Take a call out of its envelope.

    Raises:
        ProtocolError: The envelope holds no call.
    """
    call, trace, values = messages.decode(message.call), message.trace, message.values
    if type(call) is messages.TracedCall:  # a tracer and a carrier have each put one around it
        trace, values = trace or call.trace, values or call.values
        call = messages.decode(call.call)
    if type(call) is not messages.Call:
        raise ProtocolError(f"TracedCall must hold a Call, got a {type(call).__name__}")
    link = peer.link
    if link is None:
        return
    if values and _Installed.carrier is None:
        from trimesh._runtime.life.propagation import receive  # noqa: PLC0415 - few programs need it

        receive()  # code by value in the arguments may register the variable
    size = len(messages.encode(message))  # as received: nothing else encodes to the same message
    token = _arriving.set((trace, values))
    try:
        peer.proc.take_call(peer, link, call, size, bodies)
    finally:
        _arriving.reset(token)


def take_traced_item(peer: Peer, message: messages.TracedItem, bodies: list[memoryview]) -> None:
    """Take an item out of its envelope.

    Raises:
        ProtocolError: The envelope holds no item, or its sender may not send it.
    """
    item = messages.decode(message.item)
    if type(item) is not messages.PortItem:
        raise ProtocolError(f"TracedItem must hold a PortItem, got a {type(item).__name__}")
    come = _UnwrappedItem(item.channel, item.payload, message.trace)
    peer.proc.routes[messages.PortItem](peer, come, bodies)


class _Installed:
    """What is installed in this process, and the functions that it has replaced, in this order."""

    tracing: Tracing | None = None
    carrier: ContextCarrier | None = None
    replaced: Sequence[Seam] = ()


def trace_calls(tracing: Tracing) -> Callable[[], None]:
    """Install a tracer for the calls of this process, and for calls to actors that are spawned from now on.

    It also observes channel items that are sent and received here.

    Returns:
        Function that removes it.
    """
    _Installed.tracing = tracing
    _install()

    def put_back() -> None:
        _Installed.tracing = None
        _install()

    return put_back


def carry_values(carrier: ContextCarrier | None) -> None:
    """Install a carrier of context variables for the calls of this process and to its actors; None removes it."""
    _Installed.carrier = carrier
    _install()


def _install() -> None:
    """Replace functions for the tracer and the carrier that there are, after restoring those replaced before."""
    for place, name, function in reversed(_Installed.replaced):
        setattr(place, name, function)
    replaced: list[Seam] = []
    tracing, carrier = _Installed.tracing, _Installed.carrier
    if tracing is not None:
        _replace([*_seams_of_calls(tracing), *_seams_of_items(tracing)], replaced)
    if carrier is not None:
        _replace(_seams_of_values(carrier), replaced)
    _Installed.replaced = replaced


def _replace(seams: Sequence[Seam], replaced: list[Seam]) -> None:
    replaced += [(place, name, getattr(place, name)) for place, name, _ in seams]
    for place, name, function in seams:
        setattr(place, name, function)


def _seams_of_values(carrier: ContextCarrier) -> list[Seam]:
    start, deliver, sender = OutgoingCall.start, Cell.deliver, CallSet.sender
    post_at_once, context_of = invocation._post_at_once, Server._context_of  # noqa: SLF001 - a seam of the same package

    def start_with_values(self: OutgoingCall, parcel: Parcel) -> None:
        values = None if self.request.spec is None else carrier.sends(self)
        start(self, parcel if values is None else _enclosed(parcel, "", values))

    def deliver_with_values(self: Cell, call: IncomingCall) -> None:
        values = _arriving.get()[1]
        if values:
            carrier.came(call, values)
        deliver(self, call)

    def context_with_values(self: Server, call: IncomingCall) -> contextvars.Context:
        context = context_of(self, call)
        carrier.enter(self, call, context)
        return context

    def sender_of(self: CallSet, proc: Proc, target: Target, request: Request, deadline: float) -> Any:
        make = CallSet.sender_alone if carrier.is_laden() else sender
        return make(self, proc, target, request, deadline)

    def post_with_values(proc: Proc, targets: Sequence[Target], parcel: Parcel) -> bool:
        return not carrier.is_laden() and post_at_once(proc, targets, parcel)

    return [
        (OutgoingCall, "start", start_with_values),
        (Cell, "deliver", deliver_with_values),
        (Server, "_context_of", context_with_values),
        (CallSet, "sender", sender_of),
        (invocation, "_post_at_once", post_with_values),
    ]


def _seams_of_calls(tracing: Tracing) -> list[Seam]:
    start, forget, deliver = OutgoingCall.start, OutgoingCall.forget, Cell.deliver
    deliver_all = Cell.deliver_all
    context_of, recorder_of = Server._context_of, Cell._call_recorder  # noqa: SLF001 - a seam of the same package

    def traced_start(self: OutgoingCall, parcel: Parcel) -> None:
        if self.request.spec is None:  # a call of an agent
            start(self, parcel)
            return
        trace = tracing.sends(self)
        try:
            start(self, _enclosed(parcel, trace) if trace else parcel)
        except BaseException:
            tracing.settled(self)
            raise

    def traced_forget(self: OutgoingCall) -> None:
        forget(self)
        tracing.settled(self)

    def traced_deliver(self: Cell, call: IncomingCall) -> None:
        tracing.came(call, _arriving.get()[0])
        deliver(self, call)

    def traced_deliver_all(self: Cell, calls: Sequence[IncomingCall]) -> None:
        for call in calls:
            tracing.came(call, "")
        deliver_all(self, calls)

    def traced_context(self: Server, call: IncomingCall) -> contextvars.Context:
        context = context_of(self, call)
        tracing.enter(call, context)
        return context

    def traced_recorder(self: Cell) -> Any:
        recorder = recorder_of(self)
        return recorder if self.spec.home is None else _Recorder(self, recorder, tracing)

    return [
        (OutgoingCall, "start", traced_start),
        (OutgoingCall, "forget", traced_forget),
        (Cell, "deliver", traced_deliver),
        (Cell, "deliver_all", traced_deliver_all),
        (CallSet, "sender", CallSet.sender_alone),  # each call has an envelope of its own
        (Server, "_context_of", traced_context),
        (Cell, "_call_recorder", traced_recorder),
        (invocation, "_post_at_once", _never_at_once),  # broadcasts go through `start`, too
    ]


def _seams_of_items(tracing: Tracing) -> list[Seam]:
    port: Any = Port
    encode, arrived, decode = port._encode, Home.arrived, Home._decode  # noqa: SLF001 - a seam of the same package

    def traced_encode(self: Port[Any], holding: Holding, value: object) -> Parcel:
        parcel: Parcel = encode(self, holding, value)
        trace = tracing.sends_item()
        if not trace:
            return parcel
        # Credit for items counts the bytes of their values, so the envelope needs none.
        return msgspec.structs.replace(parcel, head=messages.encode(messages.TracedItem(trace, parcel.head)))

    def traced_arrived(
        self: Home, peer: Peer, message: messages.PortItem, bodies: list[memoryview], carried: CarriedPorts | None
    ) -> None:
        items = self._items
        waiting = len(items)
        arrived(self, peer, message, bodies, carried)
        if type(message) is _UnwrappedItem and len(items) > waiting:  # a channel that is over keeps none
            items[-1] = _TracedWaitingItem(**msgspec.structs.asdict(items[-1]), trace=message.trace)

    def traced_decode(self: Home, item: WaitingItem | ReturnedItem) -> Any:
        if type(item) is _TracedWaitingItem:
            tracing.received_item(item.trace)
        return decode(self, item)

    return [(Port, "_encode", traced_encode), (Home, "arrived", traced_arrived), (Home, "_decode", traced_decode)]


def _never_at_once(*_: object) -> bool:
    return False


def _enclosed(parcel: Parcel, trace: str, values: Encoded | None = None) -> Parcel:
    """Return a parcel whose head carries the trace context of its call, or values."""
    if isinstance(parcel, SpreadParcel):
        each = [_enclosed(one, trace, values) for one in parcel.each]
        nbytes = max((one.nbytes for one in each), default=0)
        return msgspec.structs.replace(parcel, each=each, nbytes=nbytes)
    payload = b"" if values is None else bytes(values.payload)
    head = messages.encode(messages.TracedCall(trace, bytes(parcel.head), payload))
    nbytes = parcel.nbytes + len(head) - len(parcel.head)
    if values is None or not values.definitions:
        return msgspec.structs.replace(parcel, head=head, nbytes=nbytes)
    definitions = (*parcel.definitions, *values.definitions)
    return msgspec.structs.replace(parcel, head=head, nbytes=nbytes, definitions=definitions)
