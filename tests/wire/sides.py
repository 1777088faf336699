"""Processes of a test that talk by value, all in this one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs

from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.memory import DefinitionId
from trimesh._wire.pickled.by_value import Definitions
from trimesh._wire.pickled.payload import Decoder, Encoder


@attrs.define(eq=False)
class Side:
    """One process: its table, and what it has sent to whom."""

    name: str
    definitions: Definitions
    encoder: Encoder
    decoder: Decoder
    main: ModuleType
    sent: list[tuple[str, DefinitionId]] = attrs.field(factory=list[tuple[str, DefinitionId]])

    def deliver(self, definitions: tuple[DefinitionId, ...], to: Side) -> None:
        """Send definitions as a link does: each once, with those that it needs."""
        for definition in definitions:
            if (to.name, definition) not in self.sent:
                self.sent.append((to.name, definition))
                data = self.definitions.bytes_of(definition)
                self.deliver(data.definitions, to)
                to.definitions.define(definition, data.payload)

    def send(self, value: Any, to: Side) -> Any:
        encoded = self.encoder.encode(value, what="the value")
        self.deliver(encoded.definitions, to)
        return to.decoder.decode(encoded.payload, [memoryview(bytearray(b)) for b in encoded.buffers])

    def throw(self, error: BaseException, to: Side) -> Exception:
        encoded = encode_exception(error, self.encoder)
        self.deliver(encoded.definitions, to)
        return decode_exception(encoded.payload, to.decoder)


def side(name: str, owner: int, *, is_worker: bool = True) -> Side:
    main = ModuleType("__main__")
    definitions = Definitions(owner, main if is_worker else None)
    return Side(name, definitions, Encoder(definitions), Decoder(definitions), main)
