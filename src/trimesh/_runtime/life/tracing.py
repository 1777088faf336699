r"""The seam for tracing: what is done around calls and items while a tracer looks, and nothing at all otherwise.

`trace_calls` puts functions in the place of others, and what it returns puts those back. So a call of a process that is
not traced runs the same byte codes as if there were no such thing. Where only the sender is traced, the receiver takes
the call or the item out of its envelope, and that is all.

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
    from trimesh._runtime.channels.ports import CarriedPorts, Holding
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer


Seam: TypeAlias = tuple[Any, str, Any]
"""A class or module, the name of a function there, what is put in its place."""

_arriving: Final[ContextVar[str]] = ContextVar("trimesh_arriving_trace", default="")


class Tracing(Protocol):
    """What looks at calls and items."""

    def sends(self, call: OutgoingCall) -> str:
        """Learn of a call that is about to be sent; return the trace context that travels with it."""
        ...

    def settled(self, call: OutgoingCall) -> None:
        """Learn that a call has ended, or was given up."""

    def came(self, call: IncomingCall, trace: str) -> None:
        """Learn of a call that has come with a trace context, before it is queued."""

    def began(self, cell: Cell, call: IncomingCall) -> None:
        """Learn that a slot has taken a call."""

    def enter(self, call: IncomingCall, context: contextvars.Context) -> None:
        """Prepare the context that its endpoint runs in."""

    def ended(self, call: IncomingCall) -> None:
        """Learn that it runs no more."""

    def sends_item(self) -> str:
        """Learn that the running code sends an item; return the trace context that travels with it, or nothing."""
        ...

    def received_item(self, trace: str) -> None:
        """Learn that the running code has received an item that has come with a trace context."""


class _Recorder:
    """Tells the recorder of an actor, and a tracer, when its calls begin and end."""

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


class _ComeItem(messages.PortItem, frozen=True):
    """An item that was taken out of its envelope; never sent."""

    trace: str = ""


class _TracedWaitingItem(WaitingItem, frozen=True):
    """A waiting item of such a message."""

    trace: str = ""


def serve_traced(proc: Proc) -> None:
    """Take calls and items of processes that are traced."""
    proc.routes[messages.TracedCall] = take_traced
    proc.routes[messages.TracedItem] = take_traced_item


def take_traced(peer: Peer, message: messages.TracedCall, bodies: list[memoryview]) -> None:
    """Take a call out of its envelope.

    Raises:
        ProtocolError: There is none in it.
    """
    call = messages.decode(message.call)
    if type(call) is not messages.Call:
        raise ProtocolError(f"what is traced must be a Call, got a {type(call).__name__}")
    link = peer.link
    if link is None:
        return
    size = len(messages.encode(message))  # as it has come: nothing else encodes to the same message
    token = _arriving.set(message.trace)
    try:
        peer.proc.take_call(peer, link, call, size, bodies)
    finally:
        _arriving.reset(token)


def take_traced_item(peer: Peer, message: messages.TracedItem, bodies: list[memoryview]) -> None:
    """Take an item out of its envelope.

    Raises:
        ProtocolError: There is none in it, or its sender may not send it.
    """
    item = messages.decode(message.item)
    if type(item) is not messages.PortItem:
        raise ProtocolError(f"what is traced must be a PortItem, got a {type(item).__name__}")
    come = _ComeItem(item.channel, item.payload, message.trace)
    peer.proc.routes[messages.PortItem](peer, come, bodies)


def trace_calls(tracing: Tracing) -> Callable[[], None]:
    """Have a tracer look at the calls of this process, and at those that come to actors which are spawned from now on.

    It also looks at the items of channels that are sent and received here.

    Returns:
        What puts everything back.
    """
    seams = [*_seams_of_calls(tracing), *_seams_of_items(tracing)]
    before = [(place, name, getattr(place, name)) for place, name, _ in seams]
    for place, name, function in seams:
        setattr(place, name, function)

    def put_back() -> None:
        for place, name, function in before:
            setattr(place, name, function)

    return put_back


def _seams_of_calls(tracing: Tracing) -> list[Seam]:
    start, forget, deliver = OutgoingCall.start, OutgoingCall.forget, Cell.deliver
    deliver_all = Cell.deliver_all
    context_of, recorder_of = Server._context_of, Cell._call_recorder  # noqa: SLF001 - a seam of the same package

    def traced_start(self: OutgoingCall, parcel: Parcel) -> None:
        if self.request.spec is None:  # of an agent
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
        tracing.came(call, _arriving.get())
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
        (invocation, "_post_at_once", _never_at_once),  # broadcasts take the long way, by `start`
    ]


def _seams_of_items(tracing: Tracing) -> list[Seam]:
    port: Any = Port
    encode, arrived, decode = port._encode, Home.arrived, Home._decode  # noqa: SLF001 - a seam of the same package

    def traced_encode(self: Port[Any], holding: Holding, value: object) -> Parcel:
        parcel: Parcel = encode(self, holding, value)
        trace = tracing.sends_item()
        if not trace:
            return parcel
        # Room for items is counted in bytes of their values, so the envelope takes none.
        return msgspec.structs.replace(parcel, head=messages.encode(messages.TracedItem(trace, parcel.head)))

    def traced_arrived(
        self: Home, peer: Peer, message: messages.PortItem, bodies: list[memoryview], carried: CarriedPorts | None
    ) -> None:
        items = self._items
        waiting = len(items)
        arrived(self, peer, message, bodies, carried)
        if type(message) is _ComeItem and len(items) > waiting:  # a channel that is over keeps none
            items[-1] = _TracedWaitingItem(**msgspec.structs.asdict(items[-1]), trace=message.trace)

    def traced_decode(self: Home, item: WaitingItem | ReturnedItem) -> Any:
        if type(item) is _TracedWaitingItem:
            tracing.received_item(item.trace)
        return decode(self, item)

    return [(Port, "_encode", traced_encode), (Home, "arrived", traced_arrived), (Home, "_decode", traced_decode)]


def _never_at_once(*_: object) -> bool:
    return False


def _enclosed(parcel: Parcel, trace: str) -> Parcel:
    """Return a parcel whose head says whose trace its call belongs to."""
    if isinstance(parcel, SpreadParcel):
        each = [_enclosed(one, trace) for one in parcel.each]
        nbytes = max((one.nbytes for one in each), default=0)
        return msgspec.structs.replace(parcel, each=each, nbytes=nbytes)
    head = messages.encode(messages.TracedCall(trace, bytes(parcel.head)))
    return msgspec.structs.replace(parcel, head=head, nbytes=parcel.nbytes + len(head) - len(parcel.head))
