"""Exceptions as bytes and back (rule X2): the original type, its parts, its chain and its remote traceback.

pickle rebuilds an exception by calling its class with `args`, which breaks on the first keyword-only parameter. Here
an exception is taken apart (`exception_values`) into records, each part encoded by itself, and
put together without running an `__init__` written in Python.

    EX-1 Encoding never raises, whatever the exception is made of.
    EX-2 Decoding raises `ProtocolError` for bytes that are not a table of records, and no other error.
    EX-3 The decoded object is an `Exception`: one that is not (KeyboardInterrupt, SystemExit, GeneratorExit, the
         Cancelled of Trio or asyncio), or whose class cannot be imported, becomes a `RemoteError` (E06).
    EX-4 A part that does not travel is replaced by its shortened repr; a string that is too long is cut.
    EX-5 An exception that was remote already keeps its first origin, and all its remote tracebacks, in one if
         no chain is between them.
"""

from collections import deque
from typing import Any, Protocol

import msgspec

from trimesh import limits
from trimesh._wire.exceptions.tracebacks import (
    is_plain,
    joined_tracebacks,
    message_of,
    notes_of,
    short_repr,
    traceback_text,
    type_name,
    with_local_sources,
)
from trimesh._wire.memory import Buffer, DefinitionId
from trimesh._wire.pickled.exception_values import (
    args_of,
    attributes_of,
    chain_of,
    group_members,
    group_message,
    keep_text,
    make,
    make_group,
    plain_text,
    set_args,
    set_attribute,
    set_chain,
)
from trimesh._wire.pickled.payload import Encoded
from trimesh.errors import (
    LOCAL_ENTRIES,
    MeshErrorGroup,
    Origin,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    add_note,
    class_of,
    entries_of,
    has_origin,
    origin,
    set_origin,
)

_ORIGIN_KEY = "__trimesh_origin__"  # kept by errors.set_origin; travels as a record of its own
_NOTES_KEY = "__notes__"
_NOT_STATE = LOCAL_ENTRIES.union((_ORIGIN_KEY, _NOTES_KEY))
_METHODS = _NOT_STATE.union(name for name in dir(BaseExceptionGroup) if callable(getattr(BaseExceptionGroup, name)))
"""Names that a peer must not replace: `except*` calls `split`, and code that catches an error `add_note`."""

_TEXTLESS = frozenset((int, float, bool, str, bytes, type(None)))  # they always arrive, so they need no repr


# ---- records: an exception in messages is a table of plain records that refer to each other by index -----------------

# Records hold no objects, so cycles, shared causes and deep chains need no recursion, and a part that cannot be rebuilt
# on the other side is replaced by its text.

# Annotations are not texts here: msgspec would compile each of them in every new process.


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the records."""


class ExceptionValue(_Record, frozen=True):
    """One value of an exception.

    Attributes:
        payload: The encoded value, or None if it cannot be sent.
        text: Its shortened repr, which replaces it if it cannot be rebuilt.
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
        cls: Its class, without a payload if that cannot be sent.
        message: `str(error)`.
        args: Its `args`; for a group without the members.
        attributes: Attributes of its C-implemented bases and `__slots__`, by name.
        state: Its `__dict__`, without notes and origin.
        cause: Index of its `__cause__`, or -1.
        context: Index of its `__context__`, or -1.
        suppress: Its `__suppress_context__`.
        members: Indices of the exceptions of a group, or None if it is not a group.
        traceback: Text of its remote traceback; "" for further exceptions of a chain, which that of the first contains.
        origin: Its `Origin`.
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
    """Return a table whose indices are all in range.

    Raises:
        ProtocolError: The bytes are not such a table. No other exception is raised.
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
            raise ProtocolError(
                f"cause and context of an exception must be among its {count} records, got {record.cause} and "
                f"{record.context}"
            )
        members = record.members
        if members is not None and not (members and all(0 <= m < count for m in members)):
            raise ProtocolError(f"members of a group must be one or more of its {count} records, got {members!r:.50}")
        if members is not None and len(members) > limits.EXCEPTION_CHAIN_MAX:
            raise ProtocolError(f"a group must have at most {limits.EXCEPTION_CHAIN_MAX} members, got {len(members)}")
    return records


# ---- an exception taken apart, and put together ----------------------------------------------------------------------


class PartEncoder(Protocol):
    """Encodes the parts of an exception."""

    def encode_within(self, value: object, bytes_max: int, /) -> Encoded | None:
        """Encode a value into the payload alone, or return None when it cannot be encoded or is too large."""
        ...


class PartDecoder(Protocol):
    """Decodes the parts of an exception."""

    def decode(self, payload: Buffer, /) -> Any:
        """Decode a value; raises any exception if that fails."""
        ...


def encode_exception(
    error: BaseException, encoder: PartEncoder, *, where: Origin | None = None, note: str = ""
) -> Encoded:
    """Encode an exception that was raised here, with its traceback.

    Args:
        error: The exception; not changed.
        where: Origin of the exceptions in it that have none yet.
        note: Added to those, and to the exception itself if it is a group.

    Returns:
        The payload, never with buffers. Never raises.
    """
    writer = _Writer(encoder, where, note)
    try:
        payload = encode_records(writer.write(error))
    except Exception:  # noqa: BLE001 - EX-1: a class of the user's that breaks the most basic promises
        writer = _Writer(encoder, where, note)
        payload = encode_records([writer.text_only(error)])
    return Encoded(payload, (), tuple(writer.definitions), tuple(writer.attachments))


class _Writer:
    """Makes the records of one exception, breadth first."""

    def __init__(self, encoder: PartEncoder, where: Origin | None, note: str) -> None:
        self.definitions: dict[DefinitionId, None] = {}
        self.attachments: list[object] = []
        self._encoder = encoder
        self._where = where
        self._note = plain_text(note)
        self._indices: dict[int, int] = {}
        self._pending: deque[tuple[BaseException, int, bool]] = deque()

    def write(self, error: BaseException) -> list[ExceptionRecord]:
        """Return the records of `error`; it is the first."""
        records: list[ExceptionRecord] = []
        self._index(error, 0, top=True)
        while self._pending:
            records.append(self._record(*self._pending.popleft()))
        return records

    def text_only(self, error: BaseException) -> ExceptionRecord:
        """Return a record of nothing but texts."""
        return ExceptionRecord(
            cls=ExceptionValue(None, type_name(class_of(error))),
            message=message_of(error),
            args=[],
            attributes=[],
            state=[],
            notes=[self._note] if self._note else [],
            cause=-1,
            context=-1,
            suppress=False,
            members=None,
            traceback=type_name(type(error)),
            origin=self._origin(self._where),
        )

    def _index(self, error: BaseException, depth: int, *, top: bool) -> int:
        """Return the index of an exception, to be written if it is new, or -1 if there are too many."""
        index = self._indices.get(id(error))
        if index is None:
            if depth >= limits.EXCEPTION_CHAIN_MAX or len(self._indices) >= limits.EXCEPTION_RECORDS_MAX:
                return -1
            index = self._indices[id(error)] = len(self._indices)
            self._pending.append((error, depth, top))
        return index

    def _record(self, error: BaseException, depth: int, top: bool) -> ExceptionRecord:  # noqa: FBT001 - from _index
        cause, context, suppress = chain_of(error)
        cause_index = -1 if cause is None else self._index(cause, depth + 1, top=False)
        context_index = -1 if context is None else self._index(context, depth + 1, top=False)
        notes = self._notes(error, top=top)
        if (cause is not None and cause_index < 0) or (context is not None and context_index < 0):
            notes.append(f"(this exception has causes that were left out: more than {limits.EXCEPTION_CHAIN_MAX})")
        cls = self._part(class_of(error), type_name(class_of(error)))
        args: tuple[Any, ...] = args_of(error)
        members = self._members(error, depth, notes)
        if members is not None:
            args = (group_message(error), *args[2:])
        if members == []:  # the table is full
            members, cls = None, ExceptionValue(None, cls.text)
        return ExceptionRecord(
            cls=cls,
            message=message_of(error),
            args=[self._part(value) for value in args],
            attributes=[(name, self._part(value)) for name, value in attributes_of(error)],
            state=[
                (name, self._part(value))
                for name, value in list(entries_of(error).items())
                if name not in _NOT_STATE and is_plain(name)
            ],
            notes=notes,
            cause=cause_index,
            context=context_index,
            suppress=suppress,
            members=members,
            traceback=traceback_text(error) if top else "",
            origin=self._origin(self._origin_of(error, top=top)),
        )

    def _members(self, error: BaseException, depth: int, notes: list[str]) -> list[int] | None:
        children = group_members(error)
        if children is None:
            return None
        members = [self._index(child, depth, top=True) for child in children[: limits.EXCEPTION_CHAIN_MAX]]
        members = [index for index in members if index >= 0]
        if len(members) < len(children):
            notes.append(f"({len(children) - len(members)} more exceptions of this group were left out)")
        return members

    def _origin_of(self, error: BaseException, *, top: bool) -> Origin | None:
        if has_origin(error):
            return origin(error)
        return self._where if self._is_new_leaf(error, top=top) else None

    def _is_new_leaf(self, error: BaseException, *, top: bool) -> bool:
        return top and group_members(error) is None and not has_origin(error)

    def _notes(self, error: BaseException, *, top: bool) -> list[str]:
        notes = notes_of(error)
        new_group = self._indices[id(error)] == 0 and group_members(error) is not None
        if self._note and (new_group or self._is_new_leaf(error, top=top)):
            notes.append(self._note)
        return notes

    def _part(self, value: Any, text: str | None = None) -> ExceptionValue:
        encoded = self._encoder.encode_within(value, limits.EXCEPTION_PAYLOAD_BYTES_MAX)
        if encoded is None and type(value) in {str, bytes}:
            encoded = self._encoder.encode_within(
                value[: limits.TRACEBACK_CHARS_MAX], limits.EXCEPTION_PAYLOAD_BYTES_MAX
            )
        if text is None:
            text = "" if type(value) in _TEXTLESS else short_repr(value)
        if encoded is None:
            return ExceptionValue(None, text)
        self.definitions.update(dict.fromkeys(encoded.definitions))
        self.attachments += encoded.attachments
        return ExceptionValue(encoded.payload, text)

    def _origin(self, where: Origin | None) -> OriginRecord | None:
        if where is None:
            return None
        return OriginRecord(
            point=self._part(where.point),
            mesh=plain_text(where.mesh),
            actor=None if where.actor is None else plain_text(where.actor),
            endpoint=None if where.endpoint is None else plain_text(where.endpoint),
            host=plain_text(where.host),
            pid=where.pid or 0,
            incarnation=where.incarnation,
        )


def decode_exception(payload: Buffer, decoder: PartDecoder) -> Exception:
    """Rebuild an exception.

    Returns:
        An exception of the original class with `RemoteTraceback` at the end of its chain, or a `RemoteError`, or an
        `ExceptionGroup` in place of a group whose class cannot be rebuilt here.

    Raises:
        ProtocolError: The bytes are not an encoded exception. No other exception is raised.
    """
    records = decode_records(payload)
    errors: dict[int, Exception] = {}
    sizes: dict[int, int] = {}
    for index in _members_first(records):
        record = records[index]
        sizes[index] = 1 + sum(sizes[m] for m in record.members or () if m in sizes)
        if sizes[index] > limits.EXCEPTION_LEAVES_MAX:
            raise ProtocolError(f"groups must hold at most {limits.EXCEPTION_LEAVES_MAX} exceptions with repetitions")
        try:
            error = _rebuild(record, [errors[m] for m in record.members or () if m in errors], decoder)
        except Exception:  # noqa: BLE001 - EX-3
            error = _stand_in(record)
        errors[index] = error
    for index, record in enumerate(records):
        try:
            _complete(errors[index], record, decoder)
        except Exception:  # noqa: BLE001, S110 - EX-2: the class refuses the rest of its attributes
            pass
        if record.members is None and type_name(type(errors[index])) == record.cls.text:  # a stand-in has its own
            keep_text(errors[index], record.message)
        set_chain(errors[index], errors.get(record.cause), errors.get(record.context), record.suppress)
    # From the last to the first, so that the exception that was caught prints its own traceback nearest to itself.
    for index in reversed(range(len(records))):
        if records[index].traceback:
            _attach_traceback(errors[index], records[index].traceback)
    error = errors[0]
    return error.folded() if isinstance(error, MeshErrorGroup) else error


def _members_first(records: list[ExceptionRecord]) -> list[int]:
    """Return all indices, members before their groups; a member that contains its own group is left out of it."""
    order: dict[int, None] = {}
    is_open = [False] * len(records)
    for root in range(len(records)):
        stack = [(root, False)]
        while stack:
            index, expanded = stack.pop()
            if expanded:
                order[index] = None
            elif index not in order and not is_open[index]:
                is_open[index] = True
                stack.append((index, True))
                stack.extend((m, False) for m in records[index].members or () if m not in order and not is_open[m])
    return list(order)


def _rebuild(record: ExceptionRecord, members: list[Exception], decoder: PartDecoder) -> Exception:
    """Create the exception; `_complete` sets the rest."""
    cls = _value(record.cls, decoder)
    args = tuple(_value(part, decoder) for part in record.args)
    if members:
        message = args[0] if args and isinstance(args[0], str) else record.message
        try:
            group = make_group(cls, message, members)
        except Exception:  # noqa: BLE001 - EX-3: the class is not available, its members are
            group = ExceptionGroup(message, members)
            if record.cls.text not in {"ExceptionGroup", "BaseExceptionGroup"}:
                add_note(group, f"(this was a {record.cls.text}, which cannot be rebuilt here)")
        set_args(group, (message, members, *args[1:]))
        return group
    if isinstance(cls, type) and not issubclass(cls, Exception):
        return RemoteError(record.cls.text, record.message)  # a KeyboardInterrupt or the like
    if not isinstance(cls, type) or record.members is not None:
        return _stand_in(record)
    error = make(cls, args)
    return error if isinstance(error, Exception) else _stand_in(record)


def _stand_in(record: ExceptionRecord) -> RemoteError:
    """Return the substitute for an exception whose class cannot be used here."""
    error = RemoteError(record.cls.text, record.message)
    error.add_note(f"{record.cls.text} cannot be imported or made here: define it in a module that this process has")
    return error


def _complete(error: Exception, record: ExceptionRecord, decoder: PartDecoder) -> None:
    """Set attributes, `__dict__`, notes and origin."""
    if type_name(type(error)) == record.cls.text:  # a stand-in has attributes of its own
        for name, part in record.attributes:
            set_attribute(error, name, _value(part, decoder))
        state = entries_of(error)
        for name, part in record.state:
            if name not in _METHODS:
                state[name] = _value(part, decoder)
        if isinstance(error, MeshErrorGroup) and isinstance(error.partial, str):
            error.partial = None  # a repr in place of results would pass for a result
    if record.notes:
        for note in record.notes:
            add_note(error, note)
    if record.origin is not None:
        found = record.origin
        where = Origin(
            point=_value(found.point, decoder),
            mesh=found.mesh,
            actor=found.actor,
            endpoint=found.endpoint,
            host=found.host,
            pid=found.pid or None,
            incarnation=found.incarnation,
        )
        set_origin(error, where)


def _value(part: ExceptionValue, decoder: PartDecoder) -> Any:
    if part.payload is None:
        return part.text
    try:
        return decoder.decode(part.payload)
    except Exception:  # noqa: BLE001 - EX-4
        return part.text


def _attach_traceback(error: BaseException, text: str) -> None:
    """Make `text` the cause of the last exception of the chain, before remote tracebacks that it has already."""
    seen = {id(error)}
    while True:
        cause, context, suppress = chain_of(error)
        following = cause if cause is not None else None if suppress else context
        if following is None or id(following) in seen or isinstance(following, RemoteTraceback):
            break
        seen.add(id(following))
        error = following
    text = with_local_sources(text)
    inner = cause if isinstance(cause, RemoteTraceback) else None
    whole = None if inner is None else joined_tracebacks(text, inner.text)
    remote = RemoteTraceback(text if whole is None else whole)
    if whole is None and inner is not None:
        set_chain(remote, inner, None, suppress=True)
    set_chain(error, remote, context, suppress)
