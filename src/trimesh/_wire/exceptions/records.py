"""The form in which an exception travels: a table of plain records that refer to each other by index.

Records hold no objects, so that cycles, shared causes and deep chains cost nothing, and a part that cannot be rebuilt
on the other side is replaced by its text alone.
"""

# Annotations are not texts here: msgspec would compile each of them in every new process.

import msgspec

from trimesh import limits
from trimesh.errors import ProtocolError


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the records."""


class ExceptionValue(_Record, frozen=True):
    """One value of an exception.

    Attributes:
        payload: The value by itself, or None when it does not travel.
        text: Its shortened repr, which takes its place when it cannot be rebuilt.
    """

    payload: bytes | None
    text: str


class OriginRecord(_Record, frozen=True):
    """An `errors.Origin`; the point may be of any class that pickles."""

    point: ExceptionValue
    mesh: str
    actor: str | None
    endpoint: str | None
    host: str
    pid: int
    incarnation: int


class ExceptionRecord(_Record, frozen=True):
    """One exception.

    Attributes:
        cls: Its class, or one with no payload when that does not travel.
        message: `str(error)`.
        args: Its `args`; for a group without the message and the members.
        attributes: What its C-implemented bases and `__slots__` keep, by name.
        state: Its `__dict__`, without notes and origin.
        cause: Index of its `__cause__`, or -1.
        context: Index of its `__context__`, or -1.
        suppress: Its `__suppress_context__`.
        members: Indices of the exceptions of a group, or None when it is no group.
        traceback: What is printed as its remote traceback; "" for exceptions of a chain, whose first has it.
        origin: Where it came from.
    """

    cls: ExceptionValue
    message: str
    args: list[ExceptionValue]
    attributes: list[tuple[str, ExceptionValue]]
    state: list[tuple[str, ExceptionValue]]
    notes: list[str]
    cause: int
    context: int
    suppress: bool
    members: list[int] | None
    traceback: str
    origin: OriginRecord | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[ExceptionRecord])


def encode_records(records: list[ExceptionRecord]) -> bytes:
    """Return the bytes of a table; the first record is the exception that travels."""
    return _ENCODER.encode(records)


def decode_records(payload: bytes | bytearray | memoryview) -> list[ExceptionRecord]:
    """Return the table, whose indices are then all in range.

    Raises:
        ProtocolError: These bytes are no such table. Nothing else is ever raised.
    """
    try:
        records = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"an exception record cannot be read: {error}") from error
    count = len(records)
    if not 0 < count <= limits.EXCEPTION_RECORDS_MAX:
        raise ProtocolError(f"an exception must come as 1 to {limits.EXCEPTION_RECORDS_MAX} records, got {count}")
    for record in records:
        if not (-1 <= record.cause < count and -1 <= record.context < count):
            raise ProtocolError(f"an exception record refers to a cause or context outside of {count} records")
        members = record.members
        if members is not None and not (members and all(0 <= m < count for m in members)):
            raise ProtocolError(f"an exception record has no members, or some outside of {count} records")
        if members is not None and len(members) > limits.EXCEPTION_CHAIN_MAX:
            raise ProtocolError(f"a group must have at most {limits.EXCEPTION_CHAIN_MAX} members, got {len(members)}")
    return records
