"""Codec for the values and exceptions of one process: one encoder, one decoder, one table of definitions."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from trimesh import limits
from trimesh._runtime.values import torch_values
from trimesh._runtime.values.endpoint_spec import (
    EndpointKind,
    EndpointSpec,
    bind_hint,
    bound_variables,
    class_of,
    signature_of,
)
from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.exceptions.tracebacks import type_name
from trimesh._wire.memory import Buffer, DefinitionId, Reducer
from trimesh._wire.pickled.by_value import DefinitionBytes, Definitions
from trimesh._wire.pickled.payload import Bindings, Decoder, Encoded, Encoder
from trimesh._wire.typed import known_kinds as typed_kinds
from trimesh._wire.typed.annotations import (
    WHAT,
    Arguments,
    Field,
    ItemType,
    constructor_hints,
    item_type_of,
    resolved_hints,
    result_of,
)
from trimesh._wire.typed.codec import DecodeSource, Reader, Writer
from trimesh._wire.typed.known_kinds import TypedDecoder, TypedEncoder, name_of
from trimesh.errors import Origin, ProtocolError, RemoteError, TrimeshInternalError, place_name, set_origin, text_of
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Peer


class Values:
    """Encodes and decodes for one process.

    Args:
        proc_id: The process; it numbers its definitions under this name.
        main: Module for classes of another process's `__main__` (rule V2); None for none.
        reducers: Reducers of objects that stand for something of this process, such as ports.
        bindings: Rebuild those objects, in the form that `Decoder` takes.

    Attributes:
        is_pickled: Whether values are pickled; else they go by the annotations of endpoints (`TypedValues`).
    """

    is_pickled = True

    def __init__(
        self,
        proc_id: ProcId,
        main: ModuleType | None = None,
        reducers: Mapping[type, Reducer] | None = None,
        bindings: Bindings | None = None,
    ) -> None:
        torch_values.register()
        self._definitions = Definitions(proc_id, main)
        self._encoder = Encoder(self._definitions, reducers=reducers)
        self._decoder = Decoder(self._definitions, bindings=bindings)

    def sent_class(self, cls: Any) -> Any:
        """Return an actor class as it is sent: without type arguments, which nothing pickled needs."""
        return class_of(cls)

    def encode(self, value: object, *, what: str) -> Encoded:
        """Encode a value; `TypeError` names `what` and the part that cannot be serialised."""
        encoded = self._encoder.encode(value, what=what)
        if encoded.attachments:
            _refuse_guarded(encoded, what)
        return encoded

    def item_type(self, annotation: Any) -> ItemType | None:
        """Return the type of items of a channel that is opened here; None if each item carries its own type."""
        del annotation
        return None

    def encode_sent(self, value: object, item_type: ItemType | None) -> Encoded:
        """Encode an item of a channel; see `encode`."""
        del item_type
        return self.encode(value, what=WHAT)

    def decode_sent(self, payload: Buffer, bodies: Sequence[memoryview], item_type: ItemType | None) -> Any:
        """Decode an item of a channel; see `decode`."""
        del item_type
        return self.decode(payload, bodies, what=WHAT)

    def encode_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        endpoint: object,
        spec: EndpointSpec | None = None,
    ) -> Encoded:
        """Encode the arguments of a call; `TypeError` names the argument that cannot be serialised."""
        return self._encoder.encode_call(args, kwargs, endpoint, () if spec is None else spec.parameters)

    def decode(self, payload: Buffer, bodies: Sequence[memoryview], *, what: str = "a value") -> Any:
        """Decode a value; runs user code. Raises `PayloadError` when it cannot be rebuilt here."""
        return self._decoder.decode(payload, bodies, what=what)

    def decode_call(
        self, payload: Buffer, bodies: Sequence[memoryview], spec: EndpointSpec, peer: Peer
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode the arguments of a call of `peer`; see `decode`."""
        del peer
        arguments: tuple[tuple[Any, ...], dict[str, Any]]
        arguments = self._decoder.decode(payload, bodies, what=spec.arguments_text)
        return arguments

    def encode_construction(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> Encoded:
        """Encode a class and its arguments; `TypeError` names the argument that cannot be serialised."""
        try:
            encoded = self._encoder.encode((cls, args, kwargs), what=f"the arguments of {name}")
        except TypeError as error:
            whole = error
        else:
            _refuse_guarded(encoded, f"the arguments of {name}")
            return encoded
        self._encoder.encode(cls, what=f"the actor class {cls.__qualname__}")
        self._encoder.encode_call(args, kwargs, endpoint=f"{name}.spawn", names=_parameters(cls))  # names the argument
        raise whole

    def decode_construction(
        self, payload: Buffer, bodies: Sequence[memoryview], *, name: str, may_import: bool = True
    ) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        """Decode them; see `decode`. A pickle imports the modules that it names, whatever `may_import` is."""
        del may_import
        cls, args, kwargs = self._decoder.decode(payload, bodies, what=f"the arguments of {name}")
        return cls, args, kwargs

    def encode_result(self, value: object, spec: EndpointSpec) -> Encoded:
        """Encode the result of an endpoint; see `encode`."""
        encoded = self._encoder.encode(value, what=spec.result_text)
        if encoded.attachments:
            _refuse_guarded(encoded, spec.result_text)
        return encoded

    def encode_item(self, value: object, spec: EndpointSpec) -> Encoded:
        """Encode an item of a generator endpoint; see `encode`."""
        return self.encode(value, what=spec.item_text)

    def decode_result(self, payload: Buffer, bodies: Sequence[memoryview], spec: EndpointSpec | None) -> Any:
        """Decode a result or an item; see `decode`."""
        del spec
        return self._decoder.decode(payload, bodies, what="a result")

    def encode_error(self, error: BaseException, origin: Origin) -> Encoded:
        """Encode an exception with its traceback and coordinates. Never raises."""
        return encode_exception(error, self._encoder, where=origin, note=describe(origin))

    def decode_error(self, payload: Buffer) -> Exception:
        """Rebuild an exception; `ProtocolError` for invalid bytes."""
        return decode_exception(payload, self._decoder)

    def local_error(self, error: BaseException, origin: Origin) -> Exception:
        """Return an exception of this process with coordinates, equal to its copy elsewhere (E06)."""
        if not isinstance(error, Exception):
            found: Exception = RemoteError(type_name(type(error)), text_of(error))
            found.__cause__ = error
        else:
            found = error
        set_origin(found, origin)
        return found

    def definition(self, definition: DefinitionId) -> DefinitionBytes:
        """Return the bytes of a definition, as a peer must receive them."""
        return self._definitions.bytes_of(definition)

    def define(
        self, definition: DefinitionId, payload: Buffer, carried: object = None, attachments: tuple[object, ...] = ()
    ) -> None:
        """Add a definition of a peer; see `Definitions.define`. `ProtocolError` for invalid bytes."""
        self._definitions.define(definition, payload, carried, attachments)


def _parameters(cls: type) -> tuple[str, ...]:
    try:
        return tuple(signature_of(cls).parameters)
    except (TypeError, ValueError):
        return ()


def _refuse_guarded(encoded: Encoded, what: str) -> None:
    """Refuse objects that may travel in calls only, where they are kept until the calls have ended."""
    if any(isinstance(thing, Guarded) for thing in encoded.attachments):
        raise TypeError(
            f"a mesh tensor can be sent only as an argument of a call, got one in {what}: send its value "
            "(`await trimesh.fetch(tensor)`), or pass it in a call"
        )


def describe(origin: Origin) -> str:
    """Return one line on the origin of an error."""
    parts = [f"at {place_name(origin.mesh, origin.point)}" if origin.point is not None else f"in {origin.mesh}"]
    if origin.actor is not None:
        parts.append(f"actor {origin.actor}")
    if origin.endpoint is not None:
        parts.append(f"endpoint {origin.endpoint}")
    if origin.pid is not None:
        parts.append(f"pid {origin.pid} on {origin.host}")
    return ", ".join(parts)


# ---- codec of a family in which nothing is pickled (`pickle="off"`) --------------------------------------------------

# The counterpart of `Values` that encodes by annotations: the signature of an endpoint gives the types of its arguments
# and its result, on both sides. Everything else carries its type. Classes and functions go by name, never by value.


class TypedValues(Values):
    """Encodes and decodes for one process, by annotations.

    Args:
        bindings: Rebuild objects that stand for something of this process, in the form that `DecodeSource` takes.
        constructing: The endpoint's function whose parameters `cls`, `args` and `kwargs` are a class and its
            arguments: these go by the annotations of that class. None for no such endpoint.
    """

    is_pickled = False

    def __init__(self, bindings: Bindings | None = None, constructing: Callable[..., Any] | None = None) -> None:
        self._constructing = constructing
        self._bindings = dict(bindings or {})
        self._typed_encoder = TypedEncoder()
        self._typed_decoder = TypedDecoder(DecodeSource(bindings=self._bindings))
        # By function, not by endpoint: a collected class takes its entries with it.
        self._arguments: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, Arguments]]
        self._arguments = weakref.WeakKeyDictionary()
        self._constructors: weakref.WeakKeyDictionary[Any, Arguments] = weakref.WeakKeyDictionary()
        self._results: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, Field]] = weakref.WeakKeyDictionary()

    # ---- by type ----

    def sent_class(self, cls: Any) -> Any:
        """Return an actor class as it is sent: with type arguments, by which values are encoded."""
        return cls

    def encode(self, value: object, *, what: str) -> Encoded:
        """Encode a value by its own type; `TypeError` names `what` and why it cannot travel."""
        return self._typed_encoder.encode(value, what=what)

    def decode(self, payload: Buffer, bodies: Sequence[memoryview], *, what: str = "a value") -> Any:
        """Decode such a value; `ProtocolError` for invalid bytes."""
        return self._typed_decoder.decode(payload, bodies, what=what)

    # ---- by annotations ----

    def encode_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        endpoint: object,
        spec: EndpointSpec | None = None,
    ) -> Encoded:
        """Encode the arguments of a call; `TypeError` names the argument that does not fit its annotation."""
        if spec is None:
            return self.encode((args, kwargs), what=f"the arguments of {endpoint}()")
        writer = Writer()
        arguments = self._arguments_of(spec)
        applies = self._applies(spec)
        if applies:
            bound = spec.signature.bind(*args, **kwargs)
            made = bound.arguments[applies]
            inner = self._construction(writer, made, bound.arguments["args"], bound.arguments["kwargs"])
            bound.arguments |= {"args": (inner,), "kwargs": {}}
            args, kwargs = bound.args, {}
        return writer.finish(arguments.write(writer, args, kwargs, str(endpoint)))

    def decode_call(
        self, payload: Buffer, bodies: Sequence[memoryview], spec: EndpointSpec, peer: Peer
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode the arguments of a call; `ProtocolError` for bytes that do not fit the endpoint."""
        reader = Reader.of_message(payload, bodies, DecodeSource(peer.is_owner, self._bindings))
        try:
            args, kwargs = self._arguments_of(spec).read(reader)
            applies = self._applies(spec)
            if applies:
                bound = spec.signature.bind(*args, **kwargs)
                inner = reader.part(*bound.arguments["args"])
                found = self._constructor(bound.arguments[applies]).read(inner)
                bound.arguments |= dict(zip(("args", "kwargs"), found, strict=True))
                args, kwargs = bound.args, {}
        except ProtocolError as error:
            raise ProtocolError(f"{spec.arguments_text} do not fit its signature: {error}") from error
        return args, kwargs

    def encode_construction(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> Encoded:
        """Encode a class and its arguments; `TypeError` names the argument that does not fit."""
        writer = Writer()
        inner = self._construction(writer, cls, args, kwargs)
        return writer.finish(writer.plain((cls, inner)))

    def decode_construction(
        self, payload: Buffer, bodies: Sequence[memoryview], *, name: str, may_import: bool = True
    ) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        """Decode them; `may_import` admits classes not imported here yet. `ProtocolError` for bytes that do not fit."""
        reader = Reader.of_message(payload, bodies, DecodeSource(may_import=may_import, bindings=self._bindings))
        try:
            cls, inner = reader.value()
            return cls, *self._constructor(cls).read(reader.part(inner))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a kept actor must be a class and its arguments: {error}") from error
        except ProtocolError as error:
            raise ProtocolError(f"the arguments of {name} do not fit its class: {error}") from error

    def _construction(self, writer: Writer, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        made = class_of(cls)
        if made is None:  # a function
            name_of(cls, f"the function {getattr(cls, '__qualname__', cls)}")
            return self._constructor(cls).write(writer, args, kwargs, cls.__qualname__)
        name_of(made, f"the actor class {made.__qualname__}")
        return self._constructor(cls).write(writer, args, kwargs, made.__qualname__)

    def encode_result(self, value: object, spec: EndpointSpec) -> Encoded:
        """Encode the result of an endpoint; `TypeError` when it does not fit its annotation."""
        if spec.kind is EndpointKind.GENERATOR:
            return self.encode(value, what=f"the end of {spec.name}()")  # the annotation is that of its items
        writer = Writer()
        if spec.applies:
            function, value = cast("tuple[Any, Any]", value)
            text = f"the result of {function.__qualname__}()"
            return writer.finish(self._result_of_function(function).write(writer, value, text))
        return writer.finish(self._result_of(spec).write(writer, value, spec.result_text))

    def encode_item(self, value: object, spec: EndpointSpec) -> Encoded:
        """Encode an item of a generator endpoint; `TypeError` when it does not fit its annotation."""
        writer = Writer()
        return writer.finish(self._result_of(spec).write(writer, value, spec.item_text))

    def decode_result(self, payload: Buffer, bodies: Sequence[memoryview], spec: EndpointSpec | None) -> Any:
        """Decode a result or an item; `ProtocolError` for bytes that do not fit."""
        if spec is None:
            return self.decode(payload, bodies, what="a result")
        field = self._result_of(spec) if spec.applied is None else self._result_of_function(spec.applied)
        return field.read(Reader.of_message(payload, bodies, DecodeSource(bindings=self._bindings)))

    def item_type(self, annotation: Any) -> ItemType | None:
        """Return the type of items of a channel; `TypeError` when nothing of that type can travel."""
        return None if annotation is None else item_type_of(annotation)

    def encode_sent(self, value: object, item_type: ItemType | None) -> Encoded:
        """Encode an item of a channel; `TypeError` when it does not fit, `PayloadError` for a type unknown here."""
        if item_type is None:
            return super().encode_sent(value, item_type)
        writer = Writer()
        return writer.finish(item_type.field.write(writer, value, WHAT))

    def decode_sent(self, payload: Buffer, bodies: Sequence[memoryview], item_type: ItemType | None) -> Any:
        """Decode an item of a channel; `ProtocolError` for bytes that do not fit."""
        if item_type is None:
            return super().decode_sent(payload, bodies, item_type)
        return item_type.field.read(Reader.of_message(payload, bodies, DecodeSource(bindings=self._bindings)))

    def _applies(self, spec: EndpointSpec) -> str:
        """Return the parameter with a class or function by whose annotations `args` and `kwargs` travel, or ""."""
        return "cls" if spec.fn is self._constructing else spec.applies

    def _result_of_function(self, function: Callable[..., Any]) -> Field:
        found = self._results.setdefault(function, {}).get(())
        if found is None:
            found = self._results[function][()] = result_of(function, function.__qualname__)
        return found

    def _arguments_of(self, spec: EndpointSpec) -> Arguments:
        found = self._arguments.setdefault(spec.fn, {}).get(spec.bound)
        if found is None:
            hints = _bound(resolved_hints(spec.fn, spec.name), dict(spec.bound))
            found = self._arguments[spec.fn][spec.bound] = Arguments(hints, spec.signature, spec.name)
        return found

    def _constructor(self, cls: Any) -> Arguments:
        found = self._constructors.get(cls)
        if found is None:
            made = class_of(cls) or cls
            is_class = isinstance(made, type)
            hints = _bound(constructor_hints(made), bound_variables(cls)) if is_class else _hints_of(made)
            found = self._constructors[cls] = Arguments(hints, inspect.signature(made), made.__qualname__)
        return found

    def _result_of(self, spec: EndpointSpec) -> Field:
        found = self._results.setdefault(spec.fn, {}).get(spec.bound)
        if found is None:
            bind = partial(bind_hint, bound=dict(spec.bound))
            made = result_of(spec.fn, spec.name, is_later=spec.answers_later, bind=bind)
            found = self._results[spec.fn][spec.bound] = made
        return found

    # ---- exceptions and definitions ----

    def encode_error(self, error: BaseException, origin: Origin) -> Encoded:
        return encode_exception(error, self._typed_encoder, where=origin, note=describe(origin))

    def decode_error(self, payload: Buffer) -> Exception:
        return decode_exception(payload, self._typed_decoder)

    def definition(self, definition: DefinitionId) -> DefinitionBytes:
        """Refuse: nothing goes by value."""
        raise TrimeshInternalError(f"definitions must not be sent with pickle='off', got {definition}")

    def define(
        self, definition: DefinitionId, payload: Buffer, carried: object = None, attachments: tuple[object, ...] = ()
    ) -> None:
        """Refuse: nothing comes by value."""
        del payload, carried, attachments
        raise ProtocolError(f"a peer must send no definitions with pickle='off', got {definition}")


def _hints_of(function: Any) -> Mapping[str, Any]:
    return resolved_hints(function, function.__qualname__)


def _bound(hints: Mapping[str, Any], bound: Mapping[Any, Any]) -> Mapping[str, Any]:
    return {name: bind_hint(hint, bound) for name, hint in hints.items()} if bound else hints


def make_values(
    proc_id: ProcId,
    main: ModuleType | None,
    reducers: Mapping[type, Reducer],
    bindings: Bindings,
    constructing: Callable[..., Any],
    *,
    pickled: bool,
) -> Values:
    """Return the codec of a process; see `Values` and `TypedValues`."""
    return Values(proc_id, main, reducers, bindings) if pickled else TypedValues(bindings, constructing)


typed_kinds.register()
torch_values.register_kinds()


# ---- guarded ---------------------------------------------------------------------------------------------------------

# Arguments of a call that may be sent to some actors only, and that must be kept until the call has ended.


class Guarded(ABC):
    """Attachment of a reducer to a message, for such an argument."""

    @abstractmethod
    def check(self, peers: AbstractSet[object], *, is_broadcast: bool) -> None:
        """Refuse a call, before any of it is sent.

        Args:
            peers: The processes of the actors that are called, each a `Peer`.
            is_broadcast: Whether no caller learns of its end.

        Raises:
            TypeError: It cannot be sent there, or in this way.
        """


# ---- payload of a message: in its head, or, if it is large, as the first of its bodies -------------------------------


def place_payload(value: Encoded) -> tuple[bytes, Sequence[Buffer]]:
    """Return (part for the head, bodies): a large payload becomes the first body."""
    if len(value.payload) <= limits.HEAD_PAYLOAD_BYTES_MAX:
        return value.payload, value.buffers
    return b"", [value.payload, *value.buffers]


def take_payload(payload: bytes, bodies: list[memoryview]) -> tuple[Buffer, list[memoryview]]:
    """Undo `place_payload`: return (payload, buffers). A message without any payload gives an empty one."""
    if payload or not bodies:
        return payload, bodies
    return bodies[0], bodies[1:]
