"""Exceptions inside of values: returned, listed as causes, kept in a field.

They are pickled as part of the value, by the same rule as raised ones (X2): no `__init__` written in Python runs. Their
causes and contexts are dropped, as with plain pickle: one that cannot be pickled would make the whole value fail. A
remote traceback is text and travels along. A class that defines its own pickling keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType
from typing import Any, cast

from trimesh import limits
from trimesh._wire.memory import Sink, register_reducer
from trimesh.errors import (
    FAILURES,
    KEPT_TEXT,
    LOCAL_ENTRIES,
    RemoteTraceback,
    cause_of,
    class_of,
    context_of,
    entries_of,
    set_cause,
    set_context,
)

# Parts of an exception besides its class, read and written without code of its class (rule X2).
#
# A user's class may have a read-only `args`, a `__setattr__` that refuses, or an `__init__` with other parameters than
# `args`. So everything here uses the descriptors and constructors of the C-implemented bases.

_ARGS: Any = BaseException.__dict__["args"]
_SUPPRESS: Any = BaseException.__dict__["__suppress_context__"]
_MEMBERS: Any = BaseExceptionGroup.__dict__["exceptions"]
_MESSAGE: Any = BaseExceptionGroup.__dict__["message"]

_SKIPPED_OWNERS = (BaseException, BaseExceptionGroup)
_UNSET = object()
_SKIPPED_NAMES = frozenset(("__dict__", "__weakref__"))


def keep_text(error: BaseException, text: str) -> None:
    """Preserve an exception's original text, if its class computes another one here, or raises.

    The class computes the text from parts that may not have travelled, or that differ here. Then the exception gets a
    subclass of that class, of the same name, which stores the text.
    """
    entries = entries_of(error)
    kept = entries.get(KEPT_TEXT)
    if isinstance(kept, str):
        text = kept  # it was sent through several processes
    else:
        try:
            if plain_text(str(error)) == text:
                return
        except Exception:  # noqa: BLE001, S110 - a __str__ of the user's
            pass
    cls = type(error)
    names: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"__slots__": (), "__str__": _kept_text, "__reduce_ex__": _reduce_with_class, KEPT_TEXT: True}
    meta: Any = type(cls)
    try:
        object.__setattr__(error, "__class__", meta(cls.__name__, (cls,), names))
    except Exception:  # noqa: BLE001 - a class that cannot be derived from keeps the text that it computes
        return
    entries[KEPT_TEXT] = text


def _kept_text(error: BaseException) -> str:
    return str(entries_of(error).get(KEPT_TEXT, ""))


def _reduce_with_class(error: BaseException, protocol: Any) -> Any:
    cls = class_of(error)
    made = super(type(error), error).__reduce_ex__(protocol)
    if isinstance(made, tuple) and made and made[0] is type(error):
        return (cls, *made[1:])
    return made


def plain_text(text: str) -> str:
    """Return `text` with lone surrogates, which have no UTF-8 form, written as escapes; cut if it is too long."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode()
    return shortened(text)


def shortened(text: str) -> str:
    """Return `text` without its middle if it is longer than `limits.TRACEBACK_CHARS_MAX`."""
    surplus = len(text) - limits.TRACEBACK_CHARS_MAX
    if surplus <= 0:
        return text
    half = limits.TRACEBACK_CHARS_MAX // 2
    return f"{text[:half]}\n... ({surplus} characters left out) ...\n{text[-half:]}"


def args_of(error: BaseException) -> tuple[Any, ...]:
    """Return the true `args`."""
    args: tuple[Any, ...] = _ARGS.__get__(error)
    return args


def chain_of(error: BaseException) -> tuple[BaseException | None, BaseException | None, bool]:
    """Return the true `__cause__`, `__context__` and `__suppress_context__`."""
    return cause_of(error), context_of(error), bool(_SUPPRESS.__get__(error))


def set_chain(error: BaseException, cause: BaseException | None, context: BaseException | None, suppress: bool) -> None:  # noqa: FBT001 - mirrors chain_of
    set_cause(error, cause)
    set_context(error, context)
    _SUPPRESS.__set__(error, suppress)  # last: setting a cause sets it, too


def group_members(error: BaseException) -> tuple[BaseException, ...] | None:
    """Return the exceptions of a group, or None if it is not a group."""
    if not isinstance(error, BaseExceptionGroup):
        return None
    group = cast("BaseExceptionGroup[BaseException]", error)
    members: tuple[BaseException, ...] = entries_of(group).get(FAILURES) or _MEMBERS.__get__(group)
    return members


def group_message(error: BaseException) -> str:
    return str(_MESSAGE.__get__(error))


def attributes_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield attributes that C-implemented bases and `__slots__` keep outside of `__dict__`, such as `OSError.filename`.

    Without `AttributeError.obj`: it serves the interpreter's suggestions, and would send the object of the failed
    lookup, such as an actor with its model.
    """
    for name, descriptor in _descriptors(class_of(error)):
        if name == "obj" and isinstance(error, AttributeError):
            continue
        value = _get(descriptor, error)
        if value is not _UNSET:
            yield name, value


def set_attribute(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute that `attributes_of` yielded; one that the class refuses keeps its constructor's value."""
    for found, descriptor in _descriptors(type(error)):
        if found == name:
            try:
                # An OSError whose filename was never set reads None, but prints differently from one set to None.
                if _get(descriptor, error) is not value:
                    descriptor.__set__(error, value)
            except (AttributeError, TypeError, ValueError):
                pass
            return


def _get(descriptor: Any, error: BaseException) -> Any:
    try:
        return descriptor.__get__(error)
    except AttributeError:
        return _UNSET


def _descriptors(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        if base in _SKIPPED_OWNERS or not issubclass(base, BaseException):
            continue
        for name, value in base.__dict__.items():
            if isinstance(value, MemberDescriptorType | GetSetDescriptorType) and name not in _SKIPPED_NAMES:
                yield name, value


def make(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Create an exception of `cls` with `args`, without running an `__init__` written in Python.

    Raises:
        TypeError: The class cannot be instantiated even by its C-implemented base.
    """
    try:
        error = cls.__new__(cls, *args)
        if type(error) is not cls:
            error = _native_new(cls, args)
    except Exception:  # noqa: BLE001 - a __new__ of the user's that wants other arguments
        error = _native_new(cls, args)
    try:
        _native_init(cls)(error, *args)
    except Exception:  # noqa: BLE001, S110 - arguments that its base does not accept; they are set below
        pass
    set_args(error, args)
    return error


def set_args(error: BaseException, args: tuple[Any, ...]) -> None:
    _ARGS.__set__(error, args)


def make_group(cls: type[BaseExceptionGroup[Any]], message: str, members: list[Exception]) -> Exception:
    """Create a group of `cls`; its own `__new__` may need more than a message and members, so it is not called.

    Raises:
        TypeError: The class does not accept such members.
    """
    error = BaseExceptionGroup.__new__(cls, message, members)
    if not isinstance(error, Exception):
        raise TypeError(f"the class of a group must be an Exception, got {cls}")
    return error


def _native_new(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    found = (base.__dict__["__new__"] for base in cls.__mro__ if "__new__" in base.__dict__)
    native = next(new for new in found if not isinstance(new, staticmethod))  # BaseException has one at the latest
    error: BaseException = native(cls, *args)
    return error


def _native_init(cls: type[BaseException]) -> Any:
    found = (base.__dict__.get("__init__") for base in cls.__mro__)
    return next(init for init in found if isinstance(init, WrapperDescriptorType))


# ---- exception values ------------------------------------------------------------------------------------------------

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
    """Rebuild an exception reduced by `reduce_exception`."""
    if group is None:
        return make(cls, args)
    error: BaseException = BaseExceptionGroup.__new__(cls, *group)
    set_args(error, args)
    return error


def set_state(error: BaseException, state: tuple[dict[str, Any], dict[str, Any], str | None]) -> None:
    """Set the parts of an exception other than its class and arguments."""
    attributes, entries, remote = state
    for name, value in attributes.items():
        set_attribute(error, name, value)
    entries_of(error).update(entries)
    if KEPT_TEXT in entries:
        keep_text(error, "")
    if remote is not None:
        _, context, suppress = chain_of(error)
        set_chain(error, RemoteTraceback(remote), context, suppress)
