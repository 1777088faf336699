"""Control structs, which travel in the heads of messages.

Every struct is an array of its fields behind a small integer tag; unknown tags, fields and types are refused. A call
travels as `Call`, or with others as `Calls`, on the DATA lane and ends in exactly one terminal frame of the callee -
`Return`, `Error`, `CancelAck` or `Refused` - or in the death of its process. The call of a generator endpoint sends any
number of `Item` before that. `Cancel`, `Credit` and `Taken` use the CONTROL lane.

Cumulative counts make the frames idempotent: `dequeued` is how many messages of this sender the actor has taken out of
its mailbox so far, so a lost or repeated credit does no harm. 0 means that there is no such actor, and that no count is
kept (docs/design/calls.md).
"""

from typing import Annotated, Final

import msgspec

from trimesh import limits
from trimesh._wire.memory import DefinitionId
from trimesh._wire.observed import NodeRef
from trimesh.errors import Origin, ProtocolError, ShapeError, place_name
from trimesh.ids import MeshId
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region

# Annotations are not texts here: msgspec would compile each of them in every new process.


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the control structs."""


class Observe(Message, frozen=True, tag=42):
    """Query for the state of the receiver and of the processes that it owns.

    Attributes:
        number: Number of the query at its sender.
        seconds: Time for which the sender waits for the answer.
        takes: Whether the answer contains samples of metrics, which are then removed there.
    """

    number: int
    seconds: float
    takes: bool = False


class Observed(Message, frozen=True, tag=43):
    """The answer to `Observe`; its one body is encoded by `_wire.observed`."""

    number: int


class Interrupt(Message, frozen=True, tag=44):
    """Cancel a call that runs or waits in the receiver, by a user's command: its caller gets a `RemoteCancelled`.

    Attributes:
        caller: The calling process.
        call: Its number there.
        reason: Text for the error.
    """

    caller: int
    call: int
    reason: str


class HoldNews(Message, frozen=True, tag=48):
    """News of a thread held by a debugger, passed from owner to owner up to the controller.

    Attributes:
        proc: The process of the thread.
        hold: Number of the hold there.
        kind: "held"; then "output", "prompt" (a line is awaited) and at last "ended".
        text: The output; for "held" the row that describes the thread.
    """

    proc: int
    hold: int
    kind: str
    text: str


class Steer(Message, frozen=True, tag=49):
    """Command of a terminal to a thread held by a debugger, passed from the controller down to its process.

    Attributes:
        proc, hold: The thread, as in `HoldNews`.
        kind: "attach", "line", "detach", or "leave", which leaves the thread held.
    """

    proc: int
    hold: int
    kind: str
    text: str


class Pause(Message, frozen=True, tag=51):
    """Suspend the deadlines of the receiver's calls to the sender that wait for a thread held by a debugger.

    Attributes:
        calls: Their numbers; None for all current and future calls; empty when none waits any more.
    """

    calls: tuple[int, ...] | None


WatchMessage = Observe | Observed | Interrupt | HoldNews | Steer | Pause


# ---- call places -----------------------------------------------------------------------------------------------------

# Target view and caller of a message, as in its head; and `Calls`, which states them once for several calls.
#
# A view is sent if it differs from the mesh as spawned: its extent, and the ranks in its order. A caller is sent if it
# is an actor. Both are claims of the sender: programs may read them, but they grant no rights.

# Annotations are not texts here: msgspec would compile each of them in every new process.


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class SentView(_Place, frozen=True):
    """The view that a message was sent to.

    Attributes:
        labels, sizes: Its extent.
        ranks: Ranks in the mesh as spawned, in the order of the view; of an arithmetic progression the first two.
    """

    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def point_of(self, point: Point) -> Point:
        """Return the point in this view of a member at `point` of the mesh as spawned.

        Raises:
            ProtocolError: The member is not in the view, or the view is invalid.
        """
        try:
            extent = Extent(dict(zip(self.labels, self.sizes, strict=True)))
            ranks = self.ranks
            if len(ranks) == 2 and extent.nelements > 2:
                step = ranks[1] - ranks[0]
                rank = (point.rank - ranks[0]) // step if (point.rank - ranks[0]) % step == 0 else -1
            else:
                rank = ranks.index(point.rank)
            return Point(rank, extent, point.mesh, point.rank)
        except (ShapeError, ValueError, TypeError, ArithmeticError) as error:
            where = place_name("", point)
            raise ProtocolError(f"a message must be sent to a view of its mesh, got {self!r} at {where}") from error


class CallerPlace(_Place, frozen=True):
    """The actor that has sent a message.

    Attributes:
        mesh, actor, endpoint: As in an `Origin`.
        labels, sizes: Extent of its mesh as spawned.
        rank: Its place there.
        incarnation: 0 for the first process at that place.
    """

    mesh: str
    actor: str | None
    endpoint: str | None
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: int
    incarnation: int

    @property
    def origin(self) -> Origin:
        """The place as an `Origin`.

        Raises:
            ProtocolError: The place is invalid.
        """
        try:
            point = Point(self.rank, Extent(dict(zip(self.labels, self.sizes, strict=True))))
        except (ShapeError, ValueError, TypeError) as error:
            raise ProtocolError(f"a caller must be at a point of its mesh, got {self!r}") from error
        return Origin(point, self.mesh, self.actor, self.endpoint, incarnation=self.incarnation)


def sent_view(region: Region) -> SentView | None:
    """Return the wire form of a view; None for a mesh as spawned, even if members are missing."""
    table = region.table
    if region.extent == region.base and table == range(region.base.nelements):
        return None
    is_short = isinstance(table, range) and len(table) > 2
    return SentView(region.extent.labels, region.extent.sizes, tuple(table[:2] if is_short else table))


class Calls(Message, frozen=True, tag=14):
    """Several `Call` messages in one, in this order, without bodies and ports.

    Attributes:
        mesh, endpoint, budget, view, caller: As in `Call`; the endpoint is not a generator.
        calls: Number and payload of each. The credits count a call by the bytes of its payload.
    """

    mesh: MeshId
    endpoint: str
    budget: float | None
    calls: Annotated[tuple[tuple[int, bytes], ...], msgspec.Meta(min_length=1, max_length=limits.CALLS_PER_MESSAGE)]
    view: SentView | None = None
    caller: CallerPlace | None = None


# ---- transfers by messages; see `_runtime/services/linked_moves.py` --------------------------------------------------

# Annotations are not texts here: msgspec would compile each of them in every new process.


Number = Annotated[int, msgspec.Meta(ge=0)]
"""Unsigned number of 64 bits, as in msgpack."""

Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""Index in a table."""


class MovePiece(Message, frozen=True, tag=54):
    """Perform a piece of a transfer on memory that the receiver has granted; the bytes of a write are its bodies.

    Attributes:
        number: Number of the piece at its sender.
        kind: A `TransferKind`.
        place, generation, secret: The grant.
        offset: Offset of the first byte.
        nbytes: Size of the piece.
        operand, expected: Operands of atomic operations.
    """

    number: int
    kind: Annotated[int, msgspec.Meta(ge=1, le=4)]
    place: Place
    generation: Place
    secret: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=limits.LINKED_PIECE_BYTES)]
    operand: Number
    expected: Number


class PieceMoved(Message, frozen=True, tag=55):
    """A piece of a transfer has ended; the bytes of a read are its bodies.

    Attributes:
        number: Number of the piece.
        value: Old value of an atomic operation.
        end: Cause of a failure, a name of `End`; empty if it succeeded.
    """

    number: int
    value: Number
    end: str


MoveMessage = MovePiece | PieceMoved


# ---- messages --------------------------------------------------------------------------------------------------------

# Annotations are not texts here: msgspec would compile each of them in every new process.


class Call(Message, frozen=True, tag=1):
    """Run an endpoint.

    Attributes:
        call: Number of the call at its sender, or 0 for a broadcast, which has no reply.
        mesh: The actor mesh that is addressed.
        budget: Seconds left of the caller's deadline, or None.
        payload: Pickled (args, kwargs); empty when the first body holds it.
        window: Items that a generator endpoint may be ahead of its consumer, or 0 for any other endpoint.
        view: The addressed view; None for the mesh as spawned.
        caller: The calling actor; None if the caller is not an actor.
    """

    call: int
    mesh: MeshId
    endpoint: str
    budget: float | None
    payload: bytes
    window: Annotated[int, msgspec.Meta(ge=0, le=limits.STREAM_WINDOW_MAX)] = 0
    view: SentView | None = None
    caller: CallerPlace | None = None


class TracedCall(Message, frozen=True, tag=12):
    """A `Call` with what its sender's context adds: a trace, or values of propagated context variables.

    Attributes:
        trace: Its `traceparent`, and after a space its `tracestate`, as W3C Trace Context has them; empty for none.
        values: Encoded dict of the values by the names of their variables; empty for none.
    """

    trace: Annotated[str, msgspec.Meta(max_length=limits.TRACE_CONTEXT_CHARS_MAX)]
    call: bytes
    values: Annotated[bytes, msgspec.Meta(max_length=limits.PROPAGATED_BYTES_MAX)] = b""


class Return(Message, frozen=True, tag=2):
    """The endpoint returned."""

    call: int
    mesh: MeshId
    dequeued: int
    payload: bytes


class Error(Message, frozen=True, tag=3):
    """The endpoint raised; the payload is an encoded exception."""

    call: int
    mesh: MeshId
    dequeued: int
    payload: bytes


class CancelAck(Message, frozen=True, tag=4):
    """The endpoint was cancelled and has unwound.

    Attributes:
        started: False when it was still in the mailbox and never ran.
        by: "caller", "budget", "stopped" (the member was taken down to be restarted), "left" (it was taken out of its
            mesh) or "other".
    """

    call: int
    mesh: MeshId
    dequeued: int
    started: bool
    by: str
    reason: str


class Refused(Message, frozen=True, tag=5):
    """The message was not accepted; the endpoint did not run.

    Attributes:
        kind: "stopped" (the mesh stops or has stopped), "left" (the member was taken out of it) or "unknown" (no such
            endpoint).
        text: For people.
    """

    call: int
    mesh: MeshId
    dequeued: int
    kind: str
    text: str


class Cancel(Message, frozen=True, tag=6):
    """Cancel a call.

    Attributes:
        position: Number of `Call` frames sent on this link up to the cancelled one, this included. It distinguishes a
            cancel that overtakes its call from one that arrives too late.
        reason: Reason in the `trio.Cancelled` of the endpoint.
    """

    call: int
    position: int
    reason: str


class Credit(Message, frozen=True, tag=7):
    """Number of the receiver's messages that an actor has taken out of its mailbox."""

    mesh: MeshId
    dequeued: int


class Define(Message, frozen=True, tag=8):
    """A class or function sent by value, ahead of the first payload on this link that needs it."""

    definition: DefinitionId
    payload: bytes


class ActorFailure(Message, frozen=True, tag=9):
    """A failure that has no caller, for the owner of the actor mesh.

    Attributes:
        endpoint: Endpoint that failed, or "" for the life of the actor itself.
        ended: True when the actor has ended by it.
        payload: An encoded exception.
    """

    mesh: int
    endpoint: str
    ended: bool
    payload: bytes


class Finished(Message, frozen=True, tag=25):
    """An actor has ended by itself, without an error and without a stop; for its owner."""

    mesh: int


class Silent(Message, frozen=True, tag=26):
    """A member did not acknowledge a cancel in time; for the owner of the mesh.

    Attributes:
        what: `mesh.endpoint`, for people.
    """

    mesh: int
    proc: int
    what: str


class Item(Message, frozen=True, tag=10):
    """One value of a generator endpoint; any number may precede the terminal frame of its call."""

    call: int
    payload: bytes


class Taken(Message, frozen=True, tag=11):
    """Number of items of a call that the consumer has taken.

    Attributes:
        call: The call, as its sender numbers it.
        count: Items of this rank so far.
    """

    call: int
    count: int


class Transit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One port that a message carries.

    Attributes:
        home: The process that receives items sent to the port.
        channel: The channel's number there.
        transit: The sender's number for this one transit.
        capacity: Items of one process that may wait at home.
    """

    home: int
    channel: int
    transit: int
    capacity: int


class Carried(Message, frozen=True, tag=15):
    """Ports that the next message of this lane carries: a `Call`, `Return`, `Error`, an item or the like.

    They are named outside of its payload, so that a message that is never decoded releases them, too.
    """

    transits: tuple[Transit, ...]


class InTransit(Message, frozen=True, tag=16):
    """Sender to home: a message that carries a port is about to leave for `holder`."""

    channel: int
    transit: int
    holder: int


class Accepted(Message, frozen=True, tag=17):
    """Holder to home: the message has arrived, and this process holds one unit more.

    Attributes:
        sender: Process that sent the message.
        transit: Its number there.
        holding: The holder's number for its holding of the channel, until it is dropped; used by `Room`.
    """

    channel: int
    sender: int
    transit: int
    holding: int


class Dropped(Message, frozen=True, tag=18):
    """Holder to home: no port is left here; all units taken so far are returned."""

    channel: int
    units: int


class Settle(Message, frozen=True, tag=19):
    """Home to holder: `sender` is gone; reply `Settled` when everything that it has sent to the holder is processed."""

    channel: int
    sender: int


class Settled(Message, frozen=True, tag=20):
    """Holder to home: nothing more will arrive from `sender`."""

    channel: int
    sender: int


class PortItem(Message, frozen=True, tag=21):
    """Holder to home: one item."""

    channel: int
    payload: bytes


class TracedItem(Message, frozen=True, tag=13):
    """A `PortItem` that was sent within a span.

    Attributes:
        trace: As in `TracedCall`.
    """

    trace: Annotated[str, msgspec.Meta(max_length=limits.TRACE_CONTEXT_CHARS_MAX)]
    item: bytes


class Room(Message, frozen=True, tag=22):
    """Home to holder: number of items of this holding that the receiver has taken so far.

    Attributes:
        holding: As in `Accepted`.
        recalled: True if the last one was returned, not taken: the answer to a `Recall` that arrived in time.
    """

    holding: int
    taken: int
    recalled: bool


class Ended(Message, frozen=True, tag=23):
    """Home to holder: the receiver is closed."""

    channel: int


class Recall(Message, frozen=True, tag=24):
    """Holder to home: return the holder's item if it still waits. For channels of capacity 0, where one may wait."""

    channel: int


class Suspect(Message, frozen=True, tag=35):
    """Report of a possible deadlock to the controller, which searches for the cycle (rule C8)."""

    refs: tuple[NodeRef, ...]


class Look(Message, frozen=True, tag=36):
    """Query of the controller for the waits of these nodes, and of the nodes in this process that they wait for.

    Attributes:
        look: Number of the query, returned with the answer.
        refs: The nodes.
        bounded: True to include waits that a deadline will end.
    """

    look: int
    refs: tuple[NodeRef, ...]
    bounded: bool = False


class Seen(Message, frozen=True, tag=37):
    """Answer to `Look`; the body holds the reports (`_wire/observed.py`)."""

    look: int


class Break(Message, frozen=True, tag=38):
    """End a call that can never start with a `DeadlockError`. From the controller; the body has the cycle's reports.

    Attributes:
        look: Number of the request, returned with the answer.
        victim: A queued call, or an unsent message.
        holders: The nodes that it waits for; if they have changed, the message has no effect.
    """

    look: int
    victim: NodeRef
    holders: tuple[NodeRef, ...]


class Broken(Message, frozen=True, tag=39):
    """Answer to `Break`: the victim got its error, or was already gone."""

    look: int


class Circle(Message, frozen=True, tag=40):
    """Calls of the receiver wait for themselves until a deadline. From the controller; the body has the reports.

    Attributes:
        calls: Their numbers.
    """

    calls: tuple[int, ...]


class Disconnect(Message, frozen=True, tag=41):
    """End the link to a process of another program, which has disconnected. From the controller."""

    proc: int


class Subscribe(Message, frozen=True, tag=50):
    """Request news of the versions of a publication of the receiver."""

    publication: int


class Published(Message, frozen=True, tag=52):
    """News for readers and for queries: the latest version, 0 for none yet; or the end of the publication."""

    publication: int
    version: int
    is_closed: bool


class Unpinned(Message, frozen=True, tag=53):
    """A reader has cleared one of its cells; the publisher may wait for that."""

    publication: int


class Service(Message, frozen=True, tag=60):
    """A message of a package above the runtime to the same package in another process.

    Attributes:
        payload: Contents for the package; empty when the first body holds it.
        failure: Set instead of a payload: why the sender lacks the package and cannot handle its messages.
    """

    service: str
    payload: bytes
    failure: str = ""


class Arm(Message, frozen=True, tag=45):
    """A planned fault, for a process that was armed when it was spawned; refused by any other.

    Attributes:
        index: Number of the fault in the plan of the sender.
        payload: Encoded fault; empty when the first body holds it.
    """

    token: str
    index: int
    payload: bytes


class Fired(Message, frozen=True, tag=46):
    """A planned fault happens; with index -1, the process is armed."""

    index: int
    site: str
    where: str


class Heal(Message, frozen=True, tag=47):
    """End a planned fault that the process got by `Arm`."""

    token: str
    index: int


Terminal = Return | Error | CancelAck | Refused
"""Messages that end a call."""

_Calls = (
    Call | TracedCall | Return | Error | CancelAck | Refused | Cancel | Credit | Define | ActorFailure | Item | Taken
)
_Channels = Carried | InTransit | Accepted | Dropped | Settle | Settled | PortItem | TracedItem | Room | Ended | Recall
_Supervision = Finished | Silent
_Deadlocks = Suspect | Look | Seen | Break | Broken | Circle
_Publications = Subscribe | Published | Unpinned
_Above = Service
_Programs = Disconnect
_Testing = Arm | Fired | Heal
"""Messages that only processes armed by a test accept."""

_Apart = MoveMessage | WatchMessage | Calls

AnyMessage = _Calls | _Channels | _Supervision | _Deadlocks | _Publications | _Apart | _Above | _Programs | _Testing

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(AnyMessage)

encode = _ENCODER.encode


def decode(head: bytes | memoryview) -> AnyMessage:
    """Decode one head.

    Raises:
        ProtocolError: `head` is not a control struct. No other exception is raised, whatever the bytes.
    """
    try:
        decoded: AnyMessage = _DECODER.decode(head)
    # msgspec raises UnicodeDecodeError and RecursionError besides its own errors.
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(
            f"a message head must be one of the control structs, got {len(head)} bytes: {error}"
        ) from error
    return decoded
