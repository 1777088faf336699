"""User values as bytes without pickle: msgpack by msgspec, with arrays beside it.

The annotation chooses one of two encodings (`annotations`). *Typed*: msgspec writes dataclasses, attrs classes,
structs, enums, dates and containers, and the receiver builds the type of its own annotation. *Plain*, without an
annotation: only builtin values and kinds travel, and keep their type (a tuple stays a tuple).

    payload = msgpack "."                                  or with memory beside it: as `_wire.memory` lays it out
    extension types: 1 memory (number of the entry)   2 kind (its name, its parts)
                     3 tuple   4 set   5 frozenset   6 bytearray   7 dict as pairs

    TY-1 Bytes of a peer name no code except classes, by module and name, which must be imported already.
    TY-2 A value that cannot be encoded is a `TypeError` at the caller.
    TY-3 Bytes that cannot be decoded are a `ProtocolError`, whatever they are.
"""

from __future__ import annotations

import pickle  # for PickleBuffer, which the reducers of arrays use to stand for memory
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_origin

import msgspec

from trimesh import limits
from trimesh._wire.memory import STOP, Arrived, Buffer, DefinitionId, Sink, SourceMemory, lay_out
from trimesh._wire.pickled.payload import Encoded
from trimesh.errors import PayloadError, ProtocolError

# Kinds: types of values that can be sent without pickle, beyond those of msgspec. One table for the process.
#
# A *kind* is a name that both sides know, a function that reduces an object to plain values, and one that rebuilds it.
# Only these functions run on the data of a peer. Kinds of classes whose module may never be imported are registered by
# dotted name, as reducers are.


class DecodeSource(msgspec.Struct, frozen=True):
    """Origin of the value being decoded.

    Attributes:
        may_import: True if it may name modules that are not imported yet. Only the owner of a process may, because it
            can run any code there anyway.
        bindings: Rebuilders bound to the receiving process, as `Decoder` takes them.
        depth: Nesting depth of exceptions.
    """

    may_import: bool = False
    bindings: Mapping[tuple[str, str], Any] = msgspec.field(default_factory=dict[tuple[str, str], Any])
    depth: int = 0


def _nothing(_: type) -> bool:
    return False


class ValueKind(msgspec.Struct, frozen=True):
    """One kind of value.

    Attributes:
        name: Its name in messages.
        cls: The class, or its dotted name; subclasses are of the same kind.
        reduce: Called with an object and the sink for its memory; returns the arguments of `rebuild`: values of builtin
            types, and results of the sink.
        rebuild: Called with the source and those values. They come from a peer: whatever they are, it returns an object
            of the class or raises.
        stands_for: Whether an annotation names this kind by another class (handles are annotated as their actors).
        plain: Converts an object to the builtin type of its annotation; None if it stays of this kind.
        is_known: Whether msgspec encodes the class itself where there is an annotation.
    """

    name: str
    cls: type | str
    reduce: Callable[[Any, Sink], Sequence[Any]]
    rebuild: Callable[..., Any]
    stands_for: Callable[[type], bool] = _nothing
    plain: Callable[[Any], Any] | None = None
    is_known: bool = False


_by_wire_name: dict[str, ValueKind] = {}
_by_class: dict[type, ValueKind] = {}
_by_class_name: dict[str, ValueKind] = {}
_found: dict[type, ValueKind | None] = {}


def register_kind(kind: ValueKind) -> None:
    """Let values of a kind be sent by every process of a family where nothing is pickled. Idempotent."""
    if _by_wire_name.get(kind.name) is kind:
        return
    _by_wire_name[kind.name] = kind
    if isinstance(kind.cls, str):
        _by_class_name[kind.cls] = kind
    else:
        _by_class[kind.cls] = kind
    _found.clear()


def kind_named(name: object) -> ValueKind | None:
    return _by_wire_name.get(name) if isinstance(name, str) else None


def kind_of(cls: type) -> ValueKind | None:
    try:
        return _found[cls]
    except KeyError:
        if len(_found) >= limits.REDUCER_CACHE_CLASSES:
            _found.clear()
        found = _found[cls] = _search(cls)
        return found


def kind_meant(cls: type) -> ValueKind | None:
    """Return the kind that a class means in an annotation, or None."""
    found = kind_of(cls)
    if found is not None:
        return None if found.is_known else found
    return next((kind for kind in _by_wire_name.values() if kind.stands_for(cls)), None)


def _search(cls: type) -> ValueKind | None:
    for base in cls.__mro__:
        found = _by_class.get(base) or _by_class_name.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    return None


# ---- codec -----------------------------------------------------------------------------------------------------------

MEMORY, KIND, TUPLE, SET, FROZENSET, BYTEARRAY, PAIRS = range(1, 8)

_PLAIN: Final = frozenset((type(None), bool, int, float, str, bytes))
_CONTAINERS: Final[dict[type, int]] = {tuple: TUPLE, set: SET, frozenset: FROZENSET}

ADVICE: Final = "with pickle='off' make it a dataclass, an attrs class or a msgspec.Struct, and annotate it"

_MAKERS: Final[dict[int, Callable[[Any], Any]]] = {
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
    BYTEARRAY: bytearray,
    PAIRS: dict,
}


class Writer:
    """One message in the making; also the sink of the kinds in it."""

    def __init__(self) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._indices: dict[int, int] = {}
        self._extents: dict[int, SourceMemory] = {}
        self._attachments: list[object] = []

    # ---- the sink ----

    def memory(
        self,
        address: int,
        nbytes: int,
        read: Callable[[int, int], memoryview],
        *,
        space: str = "cpu",
        compact: Callable[[], memoryview] | None = None,
    ) -> pickle.PickleBuffer:
        token = pickle.PickleBuffer(bytearray())
        self._extents[id(token)] = SourceMemory(address, nbytes, read, space, compact)
        self._indices[id(token)] = len(self._buffers)
        self._buffers.append(token)
        return token

    def attach(self, thing: object) -> None:
        self._attachments.append(thing)

    def define(self, definition: DefinitionId) -> None:
        """Refuse: nothing is sent by value here."""
        raise TypeError(f"definitions cannot be sent by value with pickle='off', got {definition}")

    # ---- values ----

    def plain(self, value: object) -> bytes:
        """Encode a value of builtin types and kinds, each by its own type.

        Raises:
            TypeError: Something in it is of another type.
        """
        return self._encode(self._plain(value))

    def typed(self, value: object) -> bytes:
        """Encode a value that the receiver decodes by its annotation.

        Raises:
            TypeError: Something in it cannot be encoded.
        """
        return self._encode(self._typed(value))

    def named(self, fields: dict[str, bytes]) -> bytes:
        """Encode a mapping of names to values that are encoded already."""
        return self._encode({name: msgspec.Raw(raw) for name, raw in fields.items()})

    def _encode(self, value: Any) -> bytes:
        # A cached encoder would refer to this writer, and the sent values would live until the next garbage collection.
        return msgspec.msgpack.Encoder(enc_hook=self._unknown).encode(value)

    def _plain(self, value: Any) -> Any:
        cls = _class_of(value)
        if cls in _PLAIN:
            return value
        if cls is list:
            return value if _PLAIN.issuperset(map(type, value)) else [self._plain(item) for item in value]
        if cls is dict:
            if _PLAIN.issuperset(map(type, value)):
                return value if _PLAIN.issuperset(map(type, value.values())) else _mapped(value, self._plain)
            return self._ext(PAIRS, [self._plain(pair) for pair in value.items()])
        code = _CONTAINERS.get(cls)
        if code is not None:
            return self._ext(code, [self._plain(item) for item in value])
        if cls is bytearray:
            return self._ext(BYTEARRAY, bytes(value))
        if cls is pickle.PickleBuffer:
            return self._ext(MEMORY, self._indices[id(value)])
        kind = kind_of(cls)
        if kind is None:
            raise TypeError(f"a {cls.__qualname__} cannot be sent without an annotation that names its type: {ADVICE}")
        return self._kind(kind, value)

    def _typed(self, value: Any) -> Any:
        """Replace values that msgspec would encode as another type."""
        cls = _class_of(value)
        if cls in _PLAIN:
            return value
        if cls is list or cls in _CONTAINERS:
            return value if _PLAIN.issuperset(map(type, value)) else [self._typed(item) for item in value]
        if cls is dict:
            return value if _PLAIN.issuperset(map(type, value.values())) else _mapped(value, self._typed)
        kind = kind_of(cls)
        if kind is None or kind.is_known:
            return value
        return kind.plain(value) if kind.plain is not None else self._kind(kind, value)

    def _unknown(self, value: Any) -> Any:
        cls = _class_of(value)
        kind = kind_of(cls)
        if kind is None:
            raise TypeError(f"a {cls.__qualname__} cannot be sent: {ADVICE}")
        return kind.plain(value) if kind.plain is not None else self._kind(kind, value)

    def _kind(self, kind: ValueKind, value: Any) -> msgspec.msgpack.Ext:
        return self._ext(KIND, [kind.name, *(self._plain(part) for part in kind.reduce(value, self))])

    def _ext(self, code: int, value: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, self._encode(value))

    def finish(self, stream: bytes, bodies_max: int = limits.BODIES_MAX - 1) -> Encoded:
        """Return the message with `stream` as its value."""
        if not self._buffers:
            return Encoded(stream + bytes((STOP,)), (), (), tuple(self._attachments))
        payload, bodies = lay_out(stream, self._buffers, self._extents, bound=True, bodies_max=bodies_max)
        return Encoded(payload, bodies, (), tuple(self._attachments))


def _shown(value: object) -> str:
    if _class_of(value) is not Stand:
        return _class_of(value).__qualname__
    assert isinstance(value, Stand)
    cls = "memory" if value.kind is None else value.kind.cls
    return cls if isinstance(cls, str) else cls.__qualname__


def _class_of(value: object) -> type[Any]:
    return type(value)


def _mapped(value: dict[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any]:
    return {key: change(item) for key, item in value.items()}


class Stand:
    """Placeholder for a value of a kind, when bytes are only checked.

    msgspec checks that the value of a field is an instance of its annotation; a placeholder passes for one.
    """

    def __init__(self, kind: ValueKind | None, meant: type | None = None) -> None:
        self.kind = kind
        self._meant = meant or Stand

    @property  # type: ignore[misc]  # it is never set
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The class that this passes for."""
        return self._meant


class Reader:
    """One received message, or, to be checked, one that is about to be sent."""

    def __init__(
        self, stream: Buffer, entries: Sequence[Any] = (), source: DecodeSource | None = None, *, checking: bool = False
    ) -> None:
        self.stream = stream
        self._entries = entries
        self._source = source or DecodeSource()
        self._checking = checking

    @classmethod
    def of_message(cls, payload: Buffer, bodies: Sequence[memoryview], source: DecodeSource | None = None) -> Reader:
        """Parse a message.

        Raises:
            ProtocolError: Its form is invalid.
        """
        if len(payload) and payload[-1] == STOP:
            return cls(memoryview(payload)[:-1], (), source)
        try:
            arrived = Arrived(memoryview(payload), bodies)
        except ValueError as error:
            raise ProtocolError(f"a typed payload must end with a valid trailer: {error}") from error
        return cls(arrived.stream, arrived.entries, source)

    def value(self, wire_type: Any = Any, stream: Buffer | msgspec.Raw | None = None) -> Any:
        """Decode the message, or a part of it.

        Raises:
            PayloadError: It is valid, but cannot be rebuilt in this process.
            ProtocolError: The bytes do not fit. No other exception is raised.
        """
        data = self.stream if stream is None else stream
        try:
            return msgspec.msgpack.Decoder(wire_type, dec_hook=_fit, ext_hook=self._extension).decode(data)
        except (PayloadError, ProtocolError):
            raise
        except msgspec.MsgspecError as error:
            raise ProtocolError(str(error)) from error
        except Exception as error:
            # msgspec also raises UnicodeDecodeError and RecursionError; a class of the user's may raise anything.
            raise ProtocolError(f"{type(error).__name__}: {error}") from error

    def part(self, stream: object) -> Reader:
        """Return a reader of bytes inside this message, with the same memory beside it.

        Raises:
            ProtocolError: `stream` is not bytes.
        """
        if not isinstance(stream, bytes):
            raise ProtocolError(f"a part of a message must be bytes, got {type(stream).__qualname__}")
        return Reader(stream, self._entries, self._source)

    def fields(self) -> dict[str, msgspec.Raw]:
        """Decode a mapping of names to values that stay encoded."""
        found: dict[str, msgspec.Raw] = self.value(dict[str, msgspec.Raw])
        return found

    def _extension(self, code: int, data: memoryview) -> Any:
        inner: Any = msgspec.msgpack.Decoder(ext_hook=self._extension).decode(data)
        if code == MEMORY:
            return Stand(None) if self._checking else self._memory(inner)
        if code == KIND:
            return self._of_kind(inner)
        make = _MAKERS.get(code)
        if make is None or not isinstance(inner, bytes if code == BYTEARRAY else list):
            raise ProtocolError(
                f"a value must be of a known extension type with fitting contents, got type {code} with a "
                f"{type(inner).__qualname__}"
            )
        return make(inner)

    def _memory(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self._entries):
            raise ProtocolError(f"a value must name one of the {len(self._entries)} pieces of memory, got {number!r}")
        return self._entries[number]

    def _of_kind(self, parts: Any) -> Any:
        try:
            name, *values = parts
        except (TypeError, ValueError):
            raise ProtocolError("a value of a kind must be a list that begins with the name of the kind") from None
        kind = kind_named(name)
        if kind is None:
            raise ProtocolError(f"a value must be of a known kind, got {name!r}")
        if self._checking:
            return Stand(kind)
        return kind.rebuild(self._source, *values)


class _AnyInstance(type):
    """Metaclass of placeholder classes in types given to msgspec: accepts any instance, as those are checked before."""

    kind: ValueKind
    meant: type

    def __instancecheck__(cls, instance: object) -> bool:
        return True


def stand_in(kind: ValueKind, meant: type) -> type:
    """Return the class given to msgspec instead of `meant`, whose objects are of a kind."""
    made = _AnyInstance(meant.__name__, (), {})
    made.kind, made.meant = kind, meant
    return made


def _fit(wire_type: Any, value: Any) -> Any:
    """Check a value of a kind; msgspec calls this for every class that it does not know."""
    kind: ValueKind | None
    if isinstance(wire_type, _AnyInstance):
        kind, meant = wire_type.kind, wire_type.meant
    else:  # the annotation of a field of a record
        meant = get_origin(wire_type) or wire_type
        kind = kind_of(meant) if isinstance(meant, type) else None
    if kind is None:
        raise TypeError(f"a {getattr(meant, '__qualname__', meant)} cannot be sent: {ADVICE}")
    cls = _class_of(value)
    if cls is Stand:
        fits = value.kind is kind
    else:
        fits = kind_of(cls) is kind and (isinstance(value, meant) or kind.stands_for(meant))
    if not fits:
        raise TypeError(f"expected {meant.__qualname__}, got {_shown(value)}")
    return Stand(kind, meant) if cls is Stand else value
