"""Which objects leave a pickle in a way of their own: one table for the process, and the sink they write to.

A *reducer* answers as `object.__reduce__` does, and may besides hand memory to the `Sink` so that it travels beside
the pickle. Types are registered by the class, or by its dotted name when the module that defines it may never be
imported ("torch.Tensor"): this floor imports neither torch nor numpy, and a name costs nothing until an object of
that class is met.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, NewType, Protocol

from trimesh import limits

DefinitionId = NewType("DefinitionId", str)
"""Name of one class, function or global that travels by value: "<owner>.<number>", the process that first encoded it
in hexadecimal, counted there from 1."""


class Sink(Protocol):
    """What a reducer may tell the message that is being encoded."""

    def memory(
        self,
        address: int,
        nbytes: int,
        read: Callable[[int, int], memoryview],
        *,
        space: str = "cpu",
        compact: Callable[[], memoryview] | None = None,
    ) -> pickle.PickleBuffer:
        """Send `nbytes` bytes at `address` beside the pickle; put the result among the arguments of the rebuilder.

        Memory that overlaps other memory of the same message and `space` is sent once and stays shared. The rebuilder
        gets an `EntryMemory`, or a writable memoryview when the bytes overlap no others.

        Args:
            address: First byte, as a number that is comparable within `space`.
            nbytes: Extent. May be 0.
            read: Called as `read(address, nbytes)` for this range, or a larger one that overlaps it, after the pickle
                is complete; must keep the memory alive through the view it returns.
            space: "cpu", or the name of a device's own address space.
            compact: Called when nothing else of the message overlaps, to send these bytes instead; the rebuilder
                sees from the length which of the two came.
        """
        ...

    def attach(self, thing: object) -> None:
        """Note something that the message refers to (a port, a handle) in `Encoded.attachments`.

        A reducer must have no other side effect: encoding may be repeated to find out what cannot be serialised.
        """
        ...


Reduced = str | tuple[Any, ...]
Reducer = Callable[[Any, Any], Any]
"""Called with the object and the `Sink`; returns what `__reduce__` may return, or `NotImplemented` to leave the
object to pickle."""


class ReducerEntry(NamedTuple):
    """A reducer, and whether it serves subclasses of the class that it is registered for."""

    reducer: Reducer
    subclasses: bool


_by_class: dict[type, ReducerEntry] = {}
_by_name: dict[str, ReducerEntry] = {}
_generation = [0]  # moves with each registration, so that encoders forget what they found


def register_reducer(cls: type | str, reducer: Reducer, *, subclasses: bool = False) -> None:
    """Let `reducer` encode the objects of a class in every message of this process.

    Args:
        cls: The class, or its dotted name ("torch.Tensor").
        reducer: See `Reducer`.
        subclasses: Whether it also serves subclasses that have no reducer of their own.
    """
    if isinstance(cls, str):
        _by_name[cls] = ReducerEntry(reducer, subclasses)
    else:
        _by_class[cls] = ReducerEntry(reducer, subclasses)
    _generation[0] += 1


class ReducerTable:
    """The reducers of one encoder: its own first, then those of the process; remembers what it found per class."""

    def __init__(self, own: dict[type, ReducerEntry]) -> None:
        self._own = own
        self._generation = -1
        self.found: dict[type, Reducer | None] = {}

    def refresh(self) -> None:
        """Forget what was found if a reducer was registered since, or if throw-away classes have filled the table."""
        if self._generation != _generation[0] or len(self.found) > limits.REDUCER_CACHE_CLASSES:
            self._generation = _generation[0]
            self.found.clear()

    def find(self, cls: type) -> Reducer | None:
        """Return the reducer for exactly `cls`, or None, and remember it."""
        reducer = self._search(cls)
        self.found[cls] = reducer
        return reducer

    def _search(self, cls: type) -> Reducer | None:
        for base in cls.__mro__:
            entry = self._own.get(base) or _by_class.get(base) or _by_name.get(f"{base.__module__}.{base.__qualname__}")
            if entry is not None and (entry.subclasses or base is cls):
                return entry.reducer
        return None
