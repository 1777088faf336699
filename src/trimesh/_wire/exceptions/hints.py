"""Hints for common mistakes: notes on errors whose own text does not say what to write instead.

A forgotten `await`, asyncio in a Trio actor, Trio in an asyncio actor, a verb on a live actor. The hint is found by the
type, the text and the frames of the error, so a call that succeeds costs no check.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import CoroutineType, FrameType, FunctionType, TracebackType
from typing import Any, Final

from trimesh.errors import add_note, has_origin, leaves, notes_on

_LEAVES_MAX: Final = 100
"""Failures of a group that get a hint; a reader needs one."""

_VERBS: Final = frozenset(
    ("broadcast", "broadcast_nowait", "call", "call_one", "call_reduced", "call_settled", "choose", "map", "stream")
)

_IN_TRIO: Final = {
    "Event": "trio.Event",
    "Lock": "trio.Lock",
    "Queue": "trio.open_memory_channel",
    "Semaphore": "trio.Semaphore",
    "TaskGroup": "trio.open_nursery",
    "Timeout": "trio.fail_after",
    "create_task": "trio.open_nursery",
    "timeout": "trio.fail_after",
    "gather": "trio.open_nursery",
    "open_connection": "trio.open_tcp_stream",
    "sleep": "trio.sleep",
    "to_thread": "trio.to_thread.run_sync",
    "wait_for": "trio.fail_after",
}
"""Functions and classes of Trio that replace those of asyncio."""

_IN_ASYNCIO: Final = {
    "Event": "asyncio.Event",
    "Lock": "asyncio.Lock",
    "NurseryManager": "asyncio.TaskGroup",
    "fail_after": "trimesh.aio.fail_after",
    "move_on_after": "trimesh.aio.move_on_after",
    "sleep": "asyncio.sleep",
    "to_thread_run_sync": "asyncio.to_thread",
}

_NO_LOOP: Final = ("no running event loop", "There is no current event loop")
_NO_TRIO: Final = "must be called from async context"
_NO_TRAP: Final = "trio.run received unrecognized yield message"


def add_hints(error: BaseException) -> None:
    """Add a note to an error, or the members of a group, where a common mistake of the user explains it."""
    for count, leaf in enumerate(leaves(error)):
        if count >= _LEAVES_MAX:
            return
        if has_origin(leaf):
            continue  # its hint was found where it was raised
        hint = None
        with suppress(Exception):  # the text and the variables are the user's: their methods may fail
            hint = hint_for(leaf)
        if hint is not None and hint not in notes_on(leaf):
            add_note(leaf, hint)


def hint_for(error: BaseException) -> str | None:
    """Return a text with what to write instead, if a common mistake explains an error."""
    match error:
        case AttributeError(name=str(name), obj=FunctionType(__name__=function)) if name in _VERBS:
            return (
                f"{function} of a live actor is a plain method: call it by `{function}(...)`; verbs such as {name} "
                "belong to the handle that `await procs.spawn(...)` returns"
            )
        case AttributeError() | TypeError() if "coroutine" in str(error):
            return _unawaited(error)
        case AttributeError() | RuntimeError() | TypeError():
            return _other_loop(error)
        case _:
            return None


def _frames(error: BaseException) -> Iterator[FrameType]:
    return _walk(error.__traceback__)


def _walk(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


# ---- calls that were not awaited -------------------------------------------------------------------------------


def _unawaited(error: AttributeError | TypeError) -> str | None:
    used: Any = error.obj if isinstance(error, AttributeError) else None
    frames = list(_frames(error))
    values: list[Any] = [used]
    if not isinstance(used, CoroutineType) and frames:
        values = list(frames[-1].f_locals.values())
    for value in values:
        call = _call_of(value)
        if call is not None:
            value.close()  # else Python would warn, too, without the name of the call
            return f"{call}(...) is a coroutine until it is awaited: write `await {call}(...)`"
    return None


def _call_of(coroutine: Any) -> str | None:
    """Return the spelling of a call that has not begun; None for any other value."""
    if not issubclass(type(coroutine), CoroutineType) or inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED:
        return None
    verb: Any = inspect.getcoroutinelocals(coroutine).get("self")
    if not str(type(verb).__module__).startswith("trimesh."):
        return None
    spelling = getattr(verb, "spelling", None)
    return None if spelling is None else str(spelling)


# ---- code of the other loop ------------------------------------------------------------------------------------


def _other_loop(error: BaseException) -> str | None:
    text = str(error)
    frames = list(_frames(error))
    is_in_asyncio = any(str(frame.f_globals.get("__name__", "")).startswith("trimesh.aio.") for frame in frames)
    if isinstance(error, RuntimeError) and text == _NO_TRIO and is_in_asyncio:
        what, instead = _called(error, "trio", _IN_ASYNCIO)
        return f"this runs in asyncio, where {what} does not work: {instead}derive the actor from trimesh.Actor"
    is_of_asyncio = bool(frames) and _package(frames[-1]) == "asyncio"
    is_without_loop = text.startswith(_NO_LOOP) or "'create_future'" in text or "'call_later'" in text
    if is_in_asyncio or not ((is_of_asyncio and is_without_loop) or text.startswith((*_NO_LOOP, _NO_TRAP))):
        return None
    for frame in frames:
        if _package(frame) == "asyncio":
            _close_coroutines(frame)
    what, instead = _called(error, "asyncio", _IN_TRIO)
    return f"this runs in Trio, where {what} does not work: {instead}derive the actor from trimesh.aio.Actor"


def _called(error: BaseException, package: str, table: Mapping[str, str]) -> tuple[str, str]:
    """Return the function of a package that the user called, and its replacement; cut the frames below."""
    links: list[TracebackType] = []
    link = error.__traceback__
    while link is not None:
        frame = link.tb_frame
        is_user = _package(frame) not in (package, "trimesh", "trio", "outcome", "contextlib")
        if is_user and link.tb_next is not None and _package(link.tb_next.tb_frame) in (package, "contextlib"):
            inner = (one for one in _walk(link.tb_next) if _package(one) == package)
            name = next((one.f_code.co_qualname for one in inner), "")
            short = None
            for one in reversed([*links, link]):
                short = TracebackType(short, one.tb_frame, one.tb_lasti, one.tb_lineno)
            BaseException.with_traceback(error, short)
            instead = table.get(name.partition(".")[0])
            return f"{package}.{name}", f"write {instead}, or " if instead else ""
        links.append(link)
        link = link.tb_next
    return package, ""


def _close_coroutines(frame: FrameType) -> None:
    """Close coroutines that asyncio was given and has not begun: Python would warn of each."""
    for value in frame.f_locals.values():
        if isinstance(value, CoroutineType) and value.cr_frame is not None and not value.cr_running:
            value.close()
