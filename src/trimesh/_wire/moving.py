"""The control structs of transfers that are made by messages; see `messages`."""

# Annotations are not texts here: msgspec would compile each of them in every new process.

from typing import Annotated

import msgspec

from trimesh import limits
from trimesh._wire.watching import Message

Number = Annotated[int, msgspec.Meta(ge=0)]
"""Of 64 bits, as msgpack has them."""

Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""Of a table."""


class MovePiece(Message, frozen=True, tag=54):
    """Make a piece of a transfer on memory that you have granted; the bytes of a write are its bodies.

    Attributes:
        number: Of the piece at its sender.
        kind: A `TransferKind`.
        place, generation, secret: The grant.
        offset: Of the first byte.
        nbytes: Size of the piece.
        operand, expected: Of atomic operations.
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
        number: Of the piece.
        value: Old value of an atomic operation.
        end: Why it has failed, a name of `End`; empty if it has not.
    """

    number: int
    value: Number
    end: str


AnyMessage = MovePiece | PieceMoved
