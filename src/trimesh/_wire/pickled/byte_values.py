"""`bytes` and `bytearray` that are the value itself, or an argument of a call: beside the pickle, not through it.

The pickler would copy them on both sides, and asks no reducer about them. So whoever encodes puts a `Beside` in their
place first; what it wraps travels as a body of the message, and arrives as what it was. What is left of a value that
holds one `bytes` and nothing else is the same each time, so that is pickled once.

    BY-1 A large `bytes` is copied out of where it has come to once, or not at all where a transport has put it into a
         `bytes` already.
    BY-2 A `bytearray` goes beside only where nothing else of the message can refer to it: what was one object
         arrives as one.
"""

from __future__ import annotations

import pickle
from typing import Any, Final, TypeGuard

import msgspec

from trimesh import limits
from trimesh._wire.memory.large_bytes import copied_bytes, whole_bytes
from trimesh._wire.memory.regions import EntryMemory, view_of

_CLOSED: Final = frozenset((bytes, bytearray, memoryview, str, int, float, complex, bool, type(None)))
"""Types whose objects refer to no others."""


class Beside(msgspec.Struct, frozen=True, eq=False):
    """Stands for a `bytes` or `bytearray` in a value that is about to be pickled."""

    data: bytes | bytearray

    def __reduce__(self) -> Any:
        rebuild = rebuild_bytes if type(self.data) is bytes else rebuild_bytearray
        return rebuild, (pickle.PickleBuffer(self.data),)


def is_large(value: object) -> TypeGuard[bytes | bytearray]:
    """Whether a value goes beside the pickle wherever it may."""
    return (type(value) is bytes or type(value) is bytearray) and len(value) >= limits.BYTES_BESIDE_MIN


def beside(value: object) -> object:
    """Return what to pickle in place of a value that is sent by itself."""
    return Beside(value) if is_large(value) else value


def arguments_beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what to pickle in place of the arguments of a call."""
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
        return found.setdefault(id(value), beside(value))  # one object stays one

    return tuple(map(placed, args)), {key: placed(value) for key, value in kwargs.items()}


def rebuild_bytes(data: EntryMemory | memoryview) -> bytes:
    view = view_of(data)
    return whole_bytes(view) or copied_bytes(view)


def rebuild_bytearray(data: EntryMemory | memoryview) -> bytearray:
    return bytearray(view_of(data))


def _stream(value: object) -> bytes:
    """Return the pickle of something with a `Beside` in it."""
    return pickle.dumps(value, 5, buffer_callback=lambda _: None)


VALUE_ALONE: Final = _stream(Beside(b""))
"""The pickle of a `bytes` that goes beside it."""

ARGUMENT_ALONE: Final = _stream(((Beside(b""),), dict[str, Any]()))
"""The pickle of a call with one argument, a `bytes` that goes beside it."""
