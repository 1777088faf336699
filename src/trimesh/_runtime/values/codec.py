"""How the values and exceptions of one process travel: one encoder, one decoder, one table of definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trimesh._runtime.values import torch_values
from trimesh._runtime.values.endpoint_spec import EndpointSpec, signature_of
from trimesh._runtime.values.guarded import Guarded
from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.exceptions.tracebacks import type_name
from trimesh._wire.memory import Buffer, DefinitionId, Reducer
from trimesh._wire.pickled.by_value import DefinitionBytes, Definitions
from trimesh._wire.pickled.payload import Bindings, Decoder, Encoded, Encoder
from trimesh._wire.typed.annotations import WHAT, ItemType
from trimesh.errors import Origin, RemoteError, place_name, set_origin, text_of
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Peer


class Values:
    """Encodes and decodes for one process.

    Args:
        proc_id: The process; it numbers its definitions under this name.
        main: Where classes of another process's `__main__` are put (rule V2); None for nowhere.
        reducers: How objects of this process travel that stand for something of it, such as ports.
        bindings: What rebuilds them, as `Decoder` takes it.

    Attributes:
        is_pickled: Whether values are pickled; else they go by the annotations of endpoints (`typed_values`).
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

    def encode(self, value: object, *, what: str) -> Encoded:
        """Encode a value; `TypeError` names `what` and the part that cannot be serialised."""
        encoded = self._encoder.encode(value, what=what)
        if encoded.attachments:
            _refuse_guarded(encoded, what)
        return encoded

    def item_type(self, annotation: Any) -> ItemType | None:
        """Return what the items of a channel are that is opened here; None where each says itself what it is."""
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
        names: Sequence[str] = (),
        spec: EndpointSpec | None = None,
    ) -> Encoded:
        """Encode the arguments of a call; `TypeError` names the argument that cannot be serialised."""
        del spec  # a pickle says itself what it is
        return self._encoder.encode_call(args, kwargs, endpoint, names)

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
        """Encode a class and what it is called with; `TypeError` names the argument that cannot be serialised."""
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
        """Decode them; see `decode`. A pickle imports what it names, whatever `may_import` says."""
        del may_import
        cls, args, kwargs = self._decoder.decode(payload, bodies, what=f"the arguments of {name}")
        return cls, args, kwargs

    def encode_result(self, value: object, spec: EndpointSpec) -> Encoded:
        """Encode what an endpoint has returned; see `encode`."""
        encoded = self._encoder.encode(value, what=spec.result_text)
        if encoded.attachments:
            _refuse_guarded(encoded, spec.result_text)
        return encoded

    def encode_item(self, value: object, spec: EndpointSpec) -> Encoded:
        """Encode what a generator endpoint has yielded; see `encode`."""
        return self.encode(value, what=spec.item_text)

    def decode_result(self, payload: Buffer, bodies: Sequence[memoryview], spec: EndpointSpec | None) -> Any:
        """Decode a result or an item; see `decode`."""
        del spec
        return self._decoder.decode(payload, bodies, what="a result")

    def encode_error(self, error: BaseException, origin: Origin) -> Encoded:
        """Encode an exception with its traceback and coordinates. Never raises."""
        return encode_exception(error, self._encoder, where=origin, note=describe(origin))

    def decode_error(self, payload: Buffer) -> Exception:
        """Rebuild an exception; `ProtocolError` for bytes that are none."""
        return decode_exception(payload, self._decoder)

    def local_error(self, error: BaseException, origin: Origin) -> Exception:
        """Return an exception of this process with coordinates, as it would arrive elsewhere (E06)."""
        if not isinstance(error, Exception):
            found: Exception = RemoteError(type_name(type(error)), text_of(error))
            found.__cause__ = error
        else:
            found = error
        set_origin(found, origin)
        return found

    def definition(self, definition: DefinitionId) -> DefinitionBytes:
        """Return what a peer must be sent for a definition."""
        return self._definitions.bytes_of(definition)

    def define(
        self, definition: DefinitionId, payload: Buffer, carried: object = None, attachments: tuple[object, ...] = ()
    ) -> None:
        """Take a definition of a peer; see `Definitions.define`. `ProtocolError` for bytes that are none."""
        self._definitions.define(definition, payload, carried, attachments)


def _parameters(cls: type) -> tuple[str, ...]:
    try:
        return tuple(signature_of(cls).parameters)
    except (TypeError, ValueError):
        return ()


def _refuse_guarded(encoded: Encoded, what: str) -> None:
    """Refuse what travels in calls alone, where it is kept until they have ended."""
    if any(isinstance(thing, Guarded) for thing in encoded.attachments):
        raise TypeError(f"a mesh tensor travels as an argument of a call, got one in {what}: send its value, or call")


def describe(origin: Origin) -> str:
    """Say in one line where an error came from."""
    parts = [f"at {place_name(origin.mesh, origin.point)}" if origin.point is not None else f"in {origin.mesh}"]
    if origin.actor is not None:
        parts.append(f"actor {origin.actor}")
    if origin.endpoint is not None:
        parts.append(f"endpoint {origin.endpoint}")
    if origin.pid is not None:
        parts.append(f"pid {origin.pid} on {origin.host}")
    return ", ".join(parts)
