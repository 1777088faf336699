"""Who waits for whom, as processes tell each other when a deadlock is looked for.

A *node* is something that may be unable to end. Each has a name that says in which process it is to be looked up, and
that is never given to anything else, so two equal looks at a node are one unchanged node.
"""

# Annotations are not texts here: msgspec would compile each of them in every new process.

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from trimesh import limits
from trimesh._wire.memory.regions import Buffer
from trimesh.errors import ProtocolError, ShapeError
from trimesh.shape.extent import Extent, Point


class NodeKind(enum.IntEnum):
    """What a node is, and so what the fields of its name mean."""

    CALL = 0
    """A call that `proc` has received: made by process `a`, which has numbered it `b`. Queued, it waits for one of the
    calls that hold the slots; running, for all that its own tasks wait for."""
    MESSAGE = 1
    """A broadcast that runs in `proc`, numbered `a` there."""
    CALLER = 2
    """The other end of a call: the task of `proc` that waits for its call `a` to process `b`."""
    UNSENT = 3
    """A message of `proc` to process `b`, numbered `a` here, that waits for room in a mailbox."""
    ROOM = 4
    """The mailbox of actor `a` of `proc`, full for process `b`, which knows that `c` messages were taken out of it."""
    CONSUMER = 5
    """Who takes what process `b` streams for call `a` of `proc`, and has told it that `c` items were taken."""
    NEXT = 6
    """The wait of a task of `proc`, numbered `a` there, for the next result of a stream or a map."""
    SOURCE = 7
    """The items that `proc` sends for call `b` of process `a`, where `c` have come."""


class NodeRef(NamedTuple):
    """The name of a node."""

    kind: NodeKind
    proc: int
    a: int = 0
    b: int = 0
    c: int = 0


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the records."""


class Place(_Record, frozen=True):
    """Which endpoint of which actor, for people.

    Attributes:
        mesh: Name of the actor mesh.
        actor: Name of the class.
        labels, sizes: The extent of the mesh as spawned.
        key: Of the mesh that the member belongs to.
    """

    mesh: str
    actor: str
    endpoint: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: int
    key: int | None

    def point(self) -> Point:
        """Return the coordinates.

        Raises:
            ProtocolError: They are none.
        """
        try:
            extent = Extent(dict(zip(self.labels, self.sizes, strict=True)))
            return Point(self.rank, extent, self.key, None if self.key is None else self.rank)
        except (ShapeError, TypeError, ValueError) as error:
            raise ProtocolError(f"a point must lie in its extent: {error}") from error


class NodeReport(_Record, frozen=True):
    """One node that waits; a node that does not is not reported.

    Attributes:
        needs_all: Whether it waits until all that it waits for has ended, else until any of it has.
        waits_for: What it waits for; never empty, but for a caller, where it is what the caller itself is part of.
        can_break: Whether an error can end it without touching anything else: it has not started.
        place: The endpoint, or None when it is none.
    """

    ref: NodeRef
    needs_all: bool
    waits_for: tuple[NodeRef, ...]
    can_break: bool = False
    place: Place | None = None


_DECODER: Final = msgspec.msgpack.Decoder(tuple[NodeReport, ...])

encode = msgspec.msgpack.Encoder().encode


def decode_reports(data: Buffer) -> Sequence[NodeReport]:
    """Decode the reports of one process.

    Raises:
        ProtocolError: `data` is none, or holds more than `limits.DEADLOCK_NODES_MAX`.
    """
    try:
        reports = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"reports of who waits for whom must be records, got {error}") from error
    if len(reports) > limits.DEADLOCK_NODES_MAX:
        raise ProtocolError(f"at most {limits.DEADLOCK_NODES_MAX} nodes may be reported, got {len(reports)}")
    return reports
