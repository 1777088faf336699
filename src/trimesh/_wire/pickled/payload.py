"""User values as bytes: pickle protocol 5, with arrays beside it and by-value definitions named.

The common value (numbers, strings, containers, objects whose class is imported by name) costs one run of the C
pickler and one of the C unpickler. A reducer is looked up once per object that is not a plain builtin, in one
dictionary; only classes that have one (arrays, tensors, by-value classes, handles) leave the C code.

    PL-1 Nothing is unpickled unless `Decoder.decode` is called.
    PL-2 A value that cannot be encoded is a `TypeError` that names it and its offending part; nothing was sent.
    PL-3 A value that cannot be decoded is a `PayloadError` with the cause: user data, not a broken protocol.

    BY-1 A large `bytes` is copied once on arrival, or not at all if the transport has already received it into a
         `bytes`.
    BY-2 A `bytearray` travels beside the pickle only if nothing else of the message can refer to it: one object
         arrives as one object.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, TypeGuard

import msgspec

from trimesh import limits
from trimesh._wire.memory import (
    STOP,
    Arrived,
    Buffer,
    DefinitionId,
    EntryMemory,
    Reducer,
    ReducerEntry,
    ReducerTable,
    SourceMemory,
    copied_bytes,
    lay_out,
    view_of,
    whole_bytes,
)
from trimesh._wire.pickled import arrays, exception_values
from trimesh._wire.pickled.by_value import DefinitionError, Definitions
from trimesh._wire.pickled.definition_bodies import DefinitionReducers, bindings_of
from trimesh.errors import PayloadError

_PROTOCOL = 5
_NOTHING = object()

_PLAIN = frozenset((int, float, bool, str, type(None)))
"""Types without parts, for which no reducer is looked up: plain `pickle.dumps` costs a third of our pickler."""

_PLAIN_OR_BYTES = _PLAIN | {bytes}
"""The same with `bytes`, which may be sent beside the pickle. Our pickler costs ten times as much after a large value,
because it is not kept then (`limits.ENCODER_KEEP_BYTES`)."""

Bindings = Mapping[tuple[str, str], Any]
"""Objects that one decoder uses for `(module, name)` in a pickle, in place of that global."""


class Encoded(msgspec.Struct, frozen=True):
    """A value as bytes.

    Attributes:
        payload: The pickle, with small buffers behind it.
        buffers: Memory of the sender that is sent beside it, at most `limits.BODIES_MAX` - 1; each keeps its memory
            alive.
        definitions: By-value definitions that the receiver must have first, each after those that it needs.
        attachments: Objects that reducers added with `Sink.attach`.
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
    """C pickler with the table of reducers; also the sink of the reducers it calls.

    Attributes:
        anonymous: Namespaces without a module, by id, begun in this pickle.
        subject: Object being defined: reduced by value here, named everywhere else.
        is_body: True while a definition is encoded, not a payload.
        bound: Set by reducers that write a name for the decoder's bindings to resolve.
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
        token = pickle.PickleBuffer(bytearray())  # writable: a read-only one would arrive read-only
        self.extents[id(token)] = SourceMemory(address, nbytes, read, space, compact)
        return token

    def define(self, definition: DefinitionId) -> None:
        """Record that the receiver needs `definition`."""
        self.definitions[definition] = None
        self.bound = True

    def attach(self, thing: object) -> None:
        self.attachments.append(thing)

    def nbytes(self) -> int:
        """Return a lower bound of the size of the value so far, in bytes."""
        beside = sum(self.extents[id(b)].nbytes if id(b) in self.extents else b.raw().nbytes for b in self.buffers)
        return self.file.tell() + beside

    def take(self, bodies_max: int = limits.BODIES_MAX - 1) -> Encoded:
        """Return the pickled value and reset for the next one."""
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
    """Wrap a reducer so that it marks its messages: the decoder's bindings resolve the names that it writes."""

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
        """Create an encoder.

        Args:
            definitions: Table of objects sent by value; without one all are sent by name.
            reducers: Reducers of this encoder only, which also serve subclasses; their rebuilders are looked up in the
                bindings of the decoder, so that they can return objects of the receiving process.
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
            what: Its name in errors: "argument 'batch' of add()".
            root: Start of the path to a part of it in errors: "batch".

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
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises, as one type of error
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
            endpoint: Object whose `str` names the endpoint in errors; it is computed only then.
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
        except Exception as error:  # noqa: BLE001 - returned, whatever the user's code raises
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
        """Create a decoder.

        Args:
            definitions: Table of definitions received by value; the one that the process's encoder uses.
            bindings: Rebuilders for this decoder only, by the module and name that reducers wrote.
        """
        self._bindings = dict(bindings or {})
        if definitions is not None:
            self._bindings |= bindings_of(definitions)
            definitions.unpickle = self._load

    def decode(self, payload: Buffer, buffers: Sequence[memoryview] = (), *, what: str = "a value") -> Any:
        """Decode a value; runs the unpickling code of its classes.

        Args:
            payload: As encoded; may be lent.
            buffers: As encoded, writable; arrays of the value keep using their memory.
            what: Its name in errors: "the result of add()".

        Raises:
            PayloadError: It cannot be rebuilt here; the cause is the original error.
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
        if buffers:  # two pickles are always the same and need not be read
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


# ---- byte values -----------------------------------------------------------------------------------------------------

# `bytes` and `bytearray` that are the value itself, or an argument of a call: sent beside the pickle, not in it.
#
# The pickler would copy them on both sides, and calls no reducer for them. So the encoder first replaces them by a
# `Beside`, whose content travels as a body of the message and arrives with its type. The remaining pickle of a value
# that holds one `bytes` and nothing else is always the same, so it is cached.

_CLOSED: Final = frozenset((bytes, bytearray, memoryview, str, int, float, complex, bool, type(None)))
"""Types whose objects refer to no others."""


class Beside(msgspec.Struct, frozen=True, eq=False):
    """Placeholder for a `bytes` or `bytearray` in a value that is about to be pickled."""

    data: bytes | bytearray

    def __reduce__(self) -> Any:
        rebuild = rebuild_bytes if type(self.data) is bytes else rebuild_bytearray
        return rebuild, (pickle.PickleBuffer(self.data),)


def is_large(value: object) -> TypeGuard[bytes | bytearray]:
    """Return whether a value is large enough to be sent beside the pickle."""
    return (type(value) is bytes or type(value) is bytearray) and len(value) >= limits.BYTES_BESIDE_MIN


def beside(value: object) -> object:
    """Return the object to pickle in place of a value."""
    return Beside(value) if is_large(value) else value


def arguments_beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the objects to pickle in place of the arguments of a call."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if is_large(value):
            break
    else:
        return args, kwargs
    closed = _CLOSED.issuperset(map(type, args)) and _CLOSED.issuperset(map(type, kwargs.values()))
    found: dict[int, object] = {}

    def placed(value: object) -> object:
        if type(value) is bytearray and not closed:  # BY-2
            return value
        return found.setdefault(id(value), beside(value))  # one object arrives as one object

    return tuple(map(placed, args)), {key: placed(value) for key, value in kwargs.items()}


def rebuild_bytes(data: EntryMemory | memoryview) -> bytes:
    view = view_of(data)
    return whole_bytes(view) or copied_bytes(view)


def rebuild_bytearray(data: EntryMemory | memoryview) -> bytearray:
    return bytearray(view_of(data))


def _stream(value: object) -> bytes:
    """Return the pickle of a value that contains a `Beside`."""
    return pickle.dumps(value, 5, buffer_callback=lambda _: None)


VALUE_ALONE: Final = _stream(Beside(b""))
"""The pickle of a `bytes` that is sent beside it."""

ARGUMENT_ALONE: Final = _stream(((Beside(b""),), dict[str, Any]()))
"""The pickle of a call with one argument, a `bytes` that is sent beside it."""


# ---- diagnosis: the part of a value that cannot be serialised, for the text of the error -----------------------------

_TEXT_CHARS_MAX = 300

_REMEDIES: Final = {
    "_contextvars.ContextVar": "send its value, `.get()`",
    "_io._IOBase": "send its path, and open it where it is used",
    "_socket.socket": "send its address, and connect where it is used",
    "_thread.RLock": "a lock works in one process: leave it out in __getstate__, and make one where it is used",
    "_thread.lock": "a lock works in one process: leave it out in __getstate__, and make one where it is used",
    "builtins.async_generator": "send a list of its items, or one call for each (`map`)",
    "builtins.coroutine": "write `await` before it, to send its result",
    "builtins.generator": "send a list of its items, or one call for each (`map`)",
    "threading.Thread": "start it where it is used",
}
"""Alternatives to values that cannot leave their process, by the names of their classes."""

_BY_VALUE_REMEDY: Final = (
    "what a script, notebook or function defines travels by value: move the definition into a module, or create that "
    "part in __init__"
)
_REMEDY: Final = "send plain data, or give the class a __reduce__"

_PICKLES: Final = sys.stdlib_module_names | {"cloudpickle", "trimesh"}


_STAYING = frozenset(("__dict__", "__weakref__", "__annotate_func__"))
"""Attributes of a class that are not sent."""


def offending_part(
    value: object, what: str, error: Exception, fails: Callable[[object], Exception | None], root: str = ""
) -> str:
    """Return the text of the error for a value that could not be encoded.

    Args:
        what: Its name for the user.
        error: The error of encoding it.
        fails: Encodes a part by itself and returns its error, or None.
        root: Start of the path to the part.
    """
    path = ""
    budget = limits.DIAGNOSIS_OBJECTS
    overflows = limits.DIAGNOSIS_OVERFLOWS
    _forget_levels(error)
    seen: set[int] = set()
    while id(value) not in seen:
        if isinstance(error, DefinitionError) and isinstance(value, type | FunctionType):
            break  # the error already names the part of the definition
        seen.add(id(value))
        for step, part in _parts(value):
            budget -= 1
            if budget < 0:
                break
            found = fails(part)
            if found is not None:
                path, value, error = path + step, part, found
                break
        else:
            break
        overflows -= isinstance(error, RecursionError)
        if budget < 0 or overflows <= 0:
            break
    cls = type(value)
    where = f" at {root}{path if root else path.lstrip(', .')}" if path else ""
    if isinstance(error, DefinitionError):
        return f"{what} cannot be serialised: {_short(error)}{where}; {_BY_VALUE_REMEDY}"
    advice = "" if _says_itself(value) else f"; {_remedy(value)}"
    return f"{what} cannot be serialised: {_short(error)}{where} (a {cls.__module__}.{cls.__qualname__}){advice}"


def _remedy(value: object) -> str:
    """Return a text with what to send in place of a value."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__)
    return next((_REMEDIES[name] for name in names if name in _REMEDIES), _REMEDY)


def shown_cause(error: Exception) -> BaseException | None:
    """Return the cause to show behind the text of the error; None if the text already quotes pickle."""
    if isinstance(error, DefinitionError):
        return error.__cause__
    if not isinstance(error, TypeError | pickle.PicklingError):
        return error
    link = error.__traceback__
    while link is not None:
        if str(link.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in _PICKLES:
            return error  # code of the user has raised it
        link = link.tb_next
    return None


def offending_attribute(thing: object, fails: Callable[[object], Exception | None]) -> str | None:
    """Return the name of the part of a class or function that cannot be encoded; None if none fails by itself."""
    for name, part in list(getattr(thing, "__dict__", {}).items()):
        if name not in _STAYING and fails(part) is not None:
            function = getattr(part, "__wrapped__", part)  # of an endpoint, a static method
            inside = next((step for step, value in _captures(function) if fails(value) is not None), "")
            return f"its attribute {name!r}{inside}"
    return next((f"its{step.removeprefix(',')}" for step, part in _captures(thing) if fails(part) is not None), None)


def _captures(function: object) -> Iterator[tuple[str, Any]]:
    """Yield the defaults and the closure of a function, each with a text that locates it."""
    for default in getattr(function, "__defaults__", None) or ():
        yield f", default {_name(default)}", default
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield f", closure's {name!r}", cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _forget_levels(error: Exception) -> None:
    """Drop the notes of a stack overflow: since Python 3.14 pickle adds one for each level, tens of thousands."""
    if isinstance(error, RecursionError):
        error.__dict__.pop("__notes__", None)


def _short(error: Exception) -> str:
    text = f"{error}" if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _TEXT_CHARS_MAX else text[: _TEXT_CHARS_MAX - 3] + "..."


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of a value with the step that leads to each."""
    whole: Any = value
    if isinstance(value, type):
        return
    if isinstance(value, Mapping):
        yield from _items(whole)
    elif isinstance(value, list | tuple):
        yield from _members(whole)
    elif isinstance(value, set | frozenset):
        yield from ((f" member {_name(part)}", part) for _, part in _members(whole))
    elif isinstance(value, FunctionType):
        yield from _captures(value)
    if not _says_itself(whole):
        yield from _attributes(whole)


def _says_itself(value: object) -> bool:
    """Return whether the class of a value states itself why it cannot be sent."""
    return isinstance(type(value).__reduce_ex__, FunctionType)


def _items(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, part in list(value.items()):
        yield f" key {_name(key)}", key
        yield f"[{_name(key)}]", part


def _members(value: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for index, part in enumerate(list(value)):
        yield f"[{index}]", part


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    for name, part in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", part
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                yield f".{name}", getattr(value, name)
            except AttributeError:
                continue


def _name(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 - a user's repr; the error is about something else
        return f"<{type(key).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."
