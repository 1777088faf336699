"""How the ends of a channel travel in a family where nothing is pickled (`pickle="off"`)."""

from __future__ import annotations

from typing import Any, Final

import trio

from trimesh._runtime.channels.port import Port
from trimesh._runtime.channels.receiver import Receiver
from trimesh._wire.memory import Sink
from trimesh._wire.typed.annotations import item_type_described
from trimesh._wire.typed.codec import DecodeSource, ValueKind, register_kind
from trimesh.errors import ProtocolError


def _take_port_apart(port: Port[Any], sink: Sink) -> tuple[Any, ...]:
    if port.holding is None:
        raise TypeError("a port must be open to be sent, got a closed one")
    rebuild, parts = port.holding.channels.reducers()[Port](port, sink)
    item_type = port.holding.item_type
    return rebuild.__module__, rebuild.__qualname__, None if item_type is None else item_type.described, *parts


def _put_port_together(source: DecodeSource, module: Any, name: Any, described: Any, *parts: Any) -> Any:
    rebuild = source.bindings.get((module, name))
    if rebuild is None:
        raise ProtocolError(f"a port must be rebuilt by what this process has, got {module}.{name}")
    item_type = None if described is None else item_type_described(described, may_import=source.may_import)
    port: Port[Any] = rebuild(*parts)
    if port.holding is not None and port.holding.item_type is None:
        port.holding.item_type = item_type
    return port


def _refuse_receiver(_: DecodeSource, *parts: Any) -> Receiver[Any]:
    raise ProtocolError(f"a receiver stays where its channel was opened, got one with {parts!r:.100}")


_KINDS: Final = (
    ValueKind("receiver", Receiver, lambda receiver, _: receiver.__reduce_ex__(5), _refuse_receiver),
    ValueKind("port", Port, _take_port_apart, _put_port_together, stands_for=lambda cls: cls is trio.abc.SendChannel),
)


def register_kinds() -> None:
    """Register the kinds of a receiver and of a port. Idempotent."""
    for kind in _KINDS:
        register_kind(kind)
