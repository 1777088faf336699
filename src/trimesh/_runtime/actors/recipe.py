"""What an actor is made from, kept as it was when it was first spawned: its replacements get the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from trimesh._runtime.values.codec import Values
from trimesh._runtime.values.endpoint_spec import ENDPOINTS
from trimesh._wire.memory import DefinitionId
from trimesh.errors import ProtocolError

Kept = tuple[bytes, Sequence[bytearray], Sequence[object]]
"""A recipe on its way."""


class Recipe(msgspec.Struct, frozen=True):
    """A class and the arguments of its `__init__`, encoded: what the caller changes later does not reach them.

    Attributes:
        payload: The encoded triple (class, args, kwargs).
        buffers: Memory beside it, copied.
        definitions: What goes by value and must be known to the process first.
        ports: Ports of channels among the arguments. They stay open here, so that each replacement gets them, too; one
            that its owner has closed cannot be sent any more (`TypeError`).
    """

    payload: bytes
    buffers: Sequence[bytearray]
    definitions: Sequence[DefinitionId]
    ports: Sequence[object] = ()

    @property
    def value(self) -> Kept:
        """What travels to the process."""
        return self.payload, self.buffers, self.ports


def keep(values: Values, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    """Encode what an actor is made from.

    Raises:
        TypeError: An argument cannot be serialised; the text names it.
    """
    encoded = values.encode_construction(cls, args, kwargs, name=name)
    buffers = [bytearray(buffer) for buffer in encoded.buffers]
    return Recipe(bytes(encoded.payload), buffers, encoded.definitions, encoded.attachments)


def argument_named(
    error: BaseException, values: Values, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BaseException:
    """Return the error of a spawn that was not sent; one of an argument names that, or the actor class."""
    if isinstance(error, TypeError):
        try:
            values.encode_construction(cls, args, kwargs, name=name)
        except TypeError as named:
            named.__suppress_context__ = True  # it says all that `error` does
            return named
    return error


def make_asked(values: Values, name: str, kept: Kept) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """As `make_from`, for a process that is not the owner of this one: it can have nothing imported here.

    Raises:
        PayloadError: They cannot be rebuilt here.
        ProtocolError: It is no class of actors.
    """
    payload, buffers, _ = kept
    memory = [memoryview(one) for one in buffers]
    cls, args, kwargs = values.decode_construction(payload, memory, name=name, may_import=False)
    if not isinstance(cls, type) or not hasattr(cls, ENDPOINTS):
        raise ProtocolError(f"what is spawned must be a class of actors, got {cls!r}")
    return cls, args, kwargs


def make_from(values: Values, name: str, kept: Kept) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """Return class, arguments and keyword arguments; runs user code.

    Raises:
        PayloadError: They cannot be rebuilt here.
    """
    payload, buffers, _ = kept  # the ports are held until those among the arguments have been made
    return values.decode_construction(payload, [memoryview(one) for one in buffers], name=name)
