"""User values as bytes: pickle protocol 5, with arrays beside it and by-value definitions named.

The common value (numbers, strings, containers, objects whose class is imported by name) costs one run of the C
pickler and one of the C unpickler. A reducer is asked once per object that is no plain builtin, by one dictionary
lookup; only classes that have one (arrays, tensors, by-value classes, handles) leave the C code.

    PL-1 Nothing is unpickled unless `Decoder.decode` is called.
    PL-2 A value that cannot be encoded is a `TypeError` that names it and its offending part; nothing was sent.
    PL-3 A value that cannot be decoded is a `PayloadError` with the cause: user data, not a broken protocol.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trimesh import limits
from trimesh._wire.memory.reducers import DefinitionId, Reducer, ReducerEntry, ReducerTable
from trimesh._wire.memory.regions import STOP, Arrived, Buffer, SourceMemory, lay_out
from trimesh._wire.pickled import arrays, exception_values
from trimesh._wire.pickled.by_value import DefinitionError, Definitions
from trimesh._wire.pickled.byte_values import (
    ARGUMENT_ALONE,
    VALUE_ALONE,
    arguments_beside,
    beside,
    is_large,
    rebuild_bytes,
)
from trimesh._wire.pickled.definition_rebuild import Rebuilder
from trimesh._wire.pickled.definition_reduce import DefinitionReducers
from trimesh._wire.pickled.diagnosis import offending_attribute, offending_part, shown_cause
from trimesh.errors import PayloadError

_PROTOCOL = 5
_NOTHING = object()

_PLAIN = frozenset((int, float, bool, str, type(None)))
"""Types that the pickler asks no reducer about and that hold nothing: a pickler of their own costs a third of ours."""

_PLAIN_OR_BYTES = _PLAIN | {bytes}
"""The same with what may go beside the pickle. A pickler of ours costs ten times as much after a large value, for it
is not kept then (`limits.ENCODER_KEEP_BYTES`)."""

Bindings = Mapping[tuple[str, str], Any]
"""What `(module, name)` in a pickle means to one decoder, in place of that global."""


class Encoded(msgspec.Struct, frozen=True):
    """A value as bytes.

    Attributes:
        payload: The pickle, with small buffers behind it.
        buffers: Memory of the sender that travels beside it, at most `limits.BODIES_MAX` - 1; it keeps what it
            points at alive.
        definitions: By-value definitions the receiver must have been sent first, each after those it needs.
        attachments: What reducers noted with `Sink.attach`.
    """

    payload: bytes
    buffers: tuple[memoryview, ...] = ()
    definitions: tuple[DefinitionId, ...] = ()
    attachments: tuple[object, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.payload) + (sum(buffer.nbytes for buffer in self.buffers) if self.buffers else 0)


class _Overflow(Exception):
    """A value is larger than its bound."""


class _BoundedFile(io.BytesIO):
    """A file that is full at some size; a pickler writes to it in pieces of 64 KiB, or whole large strings."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = bytes_max

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._bytes_max:
            raise _Overflow
        return super().write(data)


class _Pickler(pickle.Pickler):
    """The C pickler, asking the table of reducers; also the sink of the reducers it calls.

    Attributes:
        anonymous: Namespaces of no module, by id, as they were begun in this pickle.
        subject: What is being defined: it is taken apart where it is met, and named everywhere else.
        is_body: Whether a definition is being encoded, and not a payload.
        bound: To be set when something is written that the decoder's bindings must resolve.
    """

    def __init__(self, table: ReducerTable, file: io.BytesIO | None = None) -> None:
        self.file = file or io.BytesIO()
        self.buffers: list[pickle.PickleBuffer] = []
        self.extents: dict[int, SourceMemory] = {}
        self.definitions: dict[DefinitionId, None] = {}
        self.attachments: list[object] = []
        self.anonymous: dict[int, dict[str, Any]] = {}
        self.subject: Any = _NOTHING
        self.is_body = False
        self.bound = False
        self._table = table
        self._found = table.found
        super().__init__(self.file, _PROTOCOL, buffer_callback=self.buffers.append)

    def reducer_override(self, obj: object, /) -> Any:
        cls = type(obj)
        try:
            reducer = self._found[cls]
        except KeyError:
            reducer = self._table.find(cls)
        return NotImplemented if reducer is None else reducer(obj, self)

    def memory(
        self,
        address: int,
        nbytes: int,
        read: Callable[[int, int], memoryview],
        *,
        space: str = "cpu",
        compact: Callable[[], memoryview] | None = None,
    ) -> pickle.PickleBuffer:
        token = pickle.PickleBuffer(bytearray())  # writable, or pickle would have it arrive read-only
        self.extents[id(token)] = SourceMemory(address, nbytes, read, space, compact)
        return token

    def define(self, definition: DefinitionId) -> None:
        """Note that the receiver must know `definition`."""
        self.definitions[definition] = None
        self.bound = True

    def attach(self, thing: object) -> None:
        self.attachments.append(thing)

    def nbytes(self) -> int:
        """Return at least the bytes that the value has so far."""
        beside = sum(self.extents[id(b)].nbytes if id(b) in self.extents else b.raw().nbytes for b in self.buffers)
        return self.file.tell() + beside

    def take(self, bodies_max: int = limits.BODIES_MAX - 1) -> Encoded:
        """Return what was pickled and be ready for the next value."""
        stream = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        self.clear_memo()
        if not (self.buffers or self.definitions or self.attachments or self.bound):
            return Encoded(stream)
        payload, bodies = lay_out(stream, self.buffers, self.extents, bound=self.bound, bodies_max=bodies_max)
        encoded = Encoded(payload, bodies, tuple(self.definitions), tuple(self.attachments))
        self.buffers.clear()
        self.extents.clear()
        self.definitions.clear()
        self.attachments.clear()
        self.anonymous.clear()
        self.bound = False
        return encoded


def _bound(reducer: Reducer) -> ReducerEntry:
    """Mark the message: what this reducer writes is resolved by the bindings of the decoder."""

    def reduce(obj: Any, sink: Any) -> Any:
        reduced = reducer(obj, sink)
        if reduced is not NotImplemented:
            sink.bound = True
        return reduced

    return ReducerEntry(reduce, subclasses=True)


def _encode_bytes(data: bytes, stream_alone: bytes, value: object) -> Encoded:
    """Encode `value`, which holds `data` and nothing else; `stream_alone` is its pickle with that beside it."""
    if len(data) >= limits.BYTES_ALONE_MIN:
        return Encoded(stream_alone, (memoryview(data),))
    return Encoded(pickle.dumps(value, _PROTOCOL))


class Encoder:
    """Turns values into bytes for the links of one process."""

    def __init__(
        self, definitions: Definitions | None = None, *, reducers: Mapping[type, Reducer] | None = None
    ) -> None:
        """Make an encoder.

        Args:
            definitions: Table of what goes by value; without one everything goes by name.
            reducers: Reducers of this encoder alone, which serve subclasses too; their rebuilders are looked up in
                the bindings of the decoder, so that they can hand out objects of the receiving process.
        """
        table: dict[type, ReducerEntry] = {}
        if definitions is not None:
            table |= DefinitionReducers(definitions).table()
            definitions.pickle = self._encode_body
        table |= {cls: _bound(reducer) for cls, reducer in (reducers or {}).items()}
        self._table = ReducerTable(table)
        self._idle: list[_Pickler] = []

    def encode(self, value: object, *, what: str, root: str = "") -> Encoded:
        """Encode a value.

        Buffers of arrays are lent: their contents are read when they are sent, or now if they are small.

        Args:
            value: Anything that can be pickled.
            what: How an error names it: "argument 'batch' of add()".
            root: How an error begins the path to a part of it: "batch".

        Raises:
            TypeError: It cannot be serialised; the text names `what` and the offending part.
        """
        if type(value) in _PLAIN:
            return Encoded(pickle.dumps(value, _PROTOCOL))
        if type(value) is bytes:
            return _encode_bytes(value, VALUE_ALONE, value)
        self._table.refresh()
        # Encoding may be entered again from a user's __reduce__, or on another thread: each run has its own pickler.
        try:
            pickler = self._idle.pop()
        except IndexError:
            pickler = _Pickler(self._table)
        try:
            pickler.dump(beside(value))
            is_short = pickler.file.tell() <= limits.ENCODER_KEEP_BYTES
            encoded = pickler.take()
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises, in our words
            raise TypeError(offending_part(value, what, error, self._fails, root)) from shown_cause(error)
        if is_short:
            self._idle.append(pickler)
        return encoded

    def encode_within(self, value: object, bytes_max: int) -> Encoded | None:
        """Encode a value into the payload alone, or return None when it cannot be encoded or is too large."""
        self._table.refresh()
        pickler = _Pickler(self._table, _BoundedFile(bytes_max))
        try:
            pickler.dump(value)
            return None if pickler.nbytes() > bytes_max else pickler.take(bodies_max=0)
        except Exception:  # noqa: BLE001 - whatever the user's code raises, the value does not travel
            return None

    def encode_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], endpoint: object, names: Sequence[str] = ()
    ) -> Encoded:
        """Encode the arguments of a call, as the pair `(args, kwargs)`.

        Args:
            args: The positional arguments.
            endpoint: What the endpoint is called, for errors: its `str`, which is asked for only then.
            names: Names of the positional parameters, for errors.

        Raises:
            TypeError: An argument cannot be serialised; the text names it.
        """
        if not kwargs and _PLAIN.issuperset(map(type, args)):
            return Encoded(pickle.dumps((args, kwargs), _PROTOCOL))
        if not kwargs and _PLAIN_OR_BYTES.issuperset(map(type, args)):
            if len(args) == 1:
                return _encode_bytes(args[0], ARGUMENT_ALONE, (args, kwargs))
            if not any(map(is_large, args)):
                return Encoded(pickle.dumps((args, kwargs), _PROTOCOL))
        try:
            return self.encode(arguments_beside(args, kwargs), what=f"the arguments of {endpoint}()")
        except TypeError as error:
            whole = error
        for index, value in enumerate(args):
            name = names[index] if index < len(names) else ""
            self.encode(value, what=f"argument {repr(name) if name else index} of {endpoint}()", root=name)
        for key, value in kwargs.items():
            self.encode(value, what=f"argument {key!r} of {endpoint}()", root=key)
        raise whole

    def _encode_body(self, body: object, subject: object) -> tuple[bytes, tuple[DefinitionId, ...], tuple[object, ...]]:
        """Encode the body of a definition; see `Definitions.pickle`."""
        pickler = _Pickler(self._table)
        pickler.subject = subject
        pickler.is_body = True
        try:
            pickler.dump(body)
            encoded = pickler.take(bodies_max=0)
        except DefinitionError:
            raise  # of another definition, which it names
        except Exception as error:  # noqa: BLE001 - as above
            part = offending_attribute(body, self._fails) if body is subject else None
            text = f"{part} cannot be serialised: {error}" if part else str(error)
            raise TypeError(text) from shown_cause(error)
        return encoded.payload, encoded.definitions, encoded.attachments

    def _fails(self, value: object) -> Exception | None:
        """Return the error of encoding `value` by itself, or None."""
        try:
            _Pickler(self._table).dump(value)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises is the answer
            return error
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Buffer, entries: Sequence[Any], bindings: Bindings) -> None:
        super().__init__(io.BytesIO(stream), buffers=entries)
        self._bindings = bindings

    def find_class(self, module: str, name: str, /) -> Any:
        bound = self._bindings.get((module, name))
        return super().find_class(module, name) if bound is None else bound


class Decoder:
    """Turns bytes back into values, for one process."""

    def __init__(self, definitions: Definitions | None = None, *, bindings: Bindings | None = None) -> None:
        """Make a decoder.

        Args:
            definitions: Table of what came by value; the one that the process's encoder uses.
            bindings: Rebuilders of this decoder alone, by the module and name that reducers gave.
        """
        self._bindings = dict(bindings or {})
        if definitions is not None:
            self._bindings |= Rebuilder(definitions).bindings()
            definitions.unpickle = self._load

    def decode(self, payload: Buffer, buffers: Sequence[memoryview] = (), *, what: str = "a value") -> Any:
        """Decode a value; runs what its classes run when they are unpickled.

        Args:
            payload: As encoded; may be lent.
            buffers: As encoded, writable; arrays of the value keep pointing into them.
            what: How an error names it: "the result of add()".

        Raises:
            PayloadError: It cannot be rebuilt here; the cause is the error that was met.
        """
        try:
            if not buffers and len(payload) and payload[-1] == STOP:
                return pickle.loads(payload)
            return self._load(payload, buffers)
        except Exception as error:
            raise PayloadError(
                f"{what} arrived but cannot be rebuilt in this process: {type(error).__name__}: {error}"
            ) from error

    def _load(self, payload: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
        if buffers:  # the two that are always the same need not be read
            if payload == VALUE_ALONE:
                return rebuild_bytes(buffers[0])
            if payload == ARGUMENT_ALONE:
                return (rebuild_bytes(buffers[0]),), {}
        if len(payload) and payload[-1] == STOP:
            return pickle.loads(payload, buffers=buffers) if buffers else pickle.loads(payload)
        arrived = Arrived(memoryview(payload), buffers)
        if arrived.bound:
            return _Unpickler(arrived.stream, arrived.entries, self._bindings).load()
        return pickle.loads(arrived.stream, buffers=arrived.entries)


arrays.register()
exception_values.register()
