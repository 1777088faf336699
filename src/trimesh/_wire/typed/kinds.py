"""What values may be, where nothing is pickled, beyond what msgspec knows: one table for the process.

A *kind* is a name that both sides know, a function that takes an object apart into plain values, and one that puts it
together again. Only these functions run on what a peer sends. Kinds of classes whose module may never be imported are
registered by dotted name, as reducers are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trimesh import limits
from trimesh._wire.memory.reducers import Sink


class DecodeSource(msgspec.Struct, frozen=True):
    """Where what is being put together has come from.

    Attributes:
        may_import: Whether it may name modules that are not imported yet: only the owner of a process may, which can
            run anything there anyway.
        bindings: What stands for something of the receiving process, as `Decoder` takes it.
        depth: How many exceptions it is inside of.
    """

    may_import: bool = False
    bindings: Mapping[tuple[str, str], Any] = msgspec.field(default_factory=dict[tuple[str, str], Any])
    depth: int = 0


def _nothing(_: type) -> bool:
    return False


class ValueKind(msgspec.Struct, frozen=True):
    """One kind of value.

    Attributes:
        name: What it is called on the wire.
        cls: The class, or its dotted name; subclasses are of the same kind.
        reduce: Called with an object and the sink for its memory; returns what `rebuild` is called with, of builtin
            types and what the sink has returned.
        rebuild: Called with the source and those values. They come from a peer: whatever they are, it makes an object
            of the class or raises.
        stands_for: Whether an annotation names this kind by another class (handles are annotated as their actors).
        plain: What an object becomes where there is an annotation: of the builtin type that it wants.
        is_known: Whether msgspec knows the class, so that with an annotation it is left to that.
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
    """Let values of a kind travel in every process of a family where nothing is pickled. Idempotent."""
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
