"""Exceptions inside of values: returned, listed as causes, kept in a field.

They are pickled as the part of the value that they are, by the same rule as raised ones (X2): no `__init__` written
in Python runs. Their causes and contexts stay behind, as they do with plain pickle, for these may not travel and would
take the whole value with them; a remote traceback is text and goes along. A class that says itself how it pickles is
left to it.
"""

from __future__ import annotations

from typing import Any

from trimesh._wire.memory.reducers import Sink, register_reducer
from trimesh._wire.pickled.exception_parts import (
    args_of,
    attributes_of,
    chain_of,
    group_members,
    group_message,
    keep_text,
    make,
    set_args,
    set_attribute,
    set_chain,
)
from trimesh.errors import KEPT_TEXT, LOCAL_ENTRIES, RemoteTraceback, class_of, entries_of

_OWN_WAYS = (
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: written in Python, or asking to be taken for it


def register() -> None:
    register_reducer(BaseException, reduce_exception, subclasses=True)


def reduce_exception(error: BaseException, _: Sink) -> Any:
    for base in class_of(error).__mro__:
        if base.__flags__ & _HEAP_TYPE and any(name in base.__dict__ for name in _OWN_WAYS):
            return NotImplemented
    cause = chain_of(error)[0]
    remote = cause.text if isinstance(cause, RemoteTraceback) else None
    entries = {name: value for name, value in entries_of(error).items() if name not in LOCAL_ENTRIES}
    state = (dict(attributes_of(error)), entries, remote)
    members = group_members(error)
    group = None if members is None else (group_message(error), members)
    return rebuild_exception, (class_of(error), args_of(error), group), state, None, None, set_state


def rebuild_exception(
    cls: type[Any], args: tuple[Any, ...], group: tuple[str, tuple[BaseException, ...]] | None
) -> BaseException:
    """Make the exception that `reduce_exception` described."""
    if group is None:
        return make(cls, args)
    error: BaseException = BaseExceptionGroup.__new__(cls, *group)
    set_args(error, args)
    return error


def set_state(error: BaseException, state: tuple[dict[str, Any], dict[str, Any], str | None]) -> None:
    """Set what the exception has besides its class and arguments."""
    attributes, entries, remote = state
    for name, value in attributes.items():
        set_attribute(error, name, value)
    entries_of(error).update(entries)
    if KEPT_TEXT in entries:
        keep_text(error, "")
    if remote is not None:
        _, context, suppress = chain_of(error)
        set_chain(error, RemoteTraceback(remote), context, suppress)
