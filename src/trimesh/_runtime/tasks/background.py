"""Background tasks of the runtime in one process. None of them may fail: a failure is an internal error."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import trio
from trio.lowlevel import current_task

from trimesh.errors import ActorFailed, MeshStopped, RemoteCancelled, RestartLimit, leaves, origin


class Tasks:
    """A nursery whose first failure is reported at once, before everything that depends on it ends.

    Args:
        on_failure: Called with the exception of a task, before its nursery sees it.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], nursery: trio.Nursery) -> None:
        self._on_failure = on_failure
        self._nursery = nursery

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run a task until the process ends."""
        self._nursery.start_soon(self._run, function, args, name=function)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except BaseException as error:
            failure = split_cancelled(error)[1]
            if failure is not None:
                self._on_failure(failure)
            raise


# ---- separate `trio.Cancelled`, which belongs to Trio, from the rest, which is an error (E08) ------------------------


def split_cancelled(error: BaseException | None) -> tuple[BaseException | None, BaseException | None]:
    """Return (the `Cancelled` part of `error`, the rest); either may be None."""
    if isinstance(error, trio.Cancelled):
        return error, None
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        cancelled, rest = group.split(trio.Cancelled)
        return (None, group) if cancelled is None else (cancelled, rest)  # itself, not a copy
    return None, error


# ---- follow-on errors ------------------------------------------------------------------------------------------------

# Errors that only report the stop of something of ours: a block that is being left does not raise them.
#
# Background work, of a broadcast or of a lifespan, goes on while meshes are stopped one after another, and calls some
# that are gone already. Trio cancels all tasks of a nursery at once, so such errors do not arise there. An error that
# user code raises itself, even while it handles one of these, is a failure of its own.

BUDGET_REASON: Final = "budget at sending"
"""Reason of a `RemoteCancelled` whose budget has run out, which is unrelated to a stop (rule C3)."""


def is_consequence(leaf: BaseException) -> bool:
    """Return whether an exception that is not a group only reports that its target was stopped."""
    match leaf:
        case trio.BrokenResourceError() | trio.EndOfChannel():
            return True
        case MeshStopped():
            return _is_of_a_call(leaf)
        case RemoteCancelled(reason=reason):
            return reason != BUDGET_REASON and _is_of_a_call(leaf)
        case ActorFailed():  # the callee itself has ended by such an error
            return leaf.__cause__ is not None and all(map(is_consequence, leaves(leaf.__cause__)))
        case RestartLimit(causes=causes):
            return bool(causes) and all(is_consequence(one) for cause in causes for one in leaves(cause))
        case _:
            return False


def _is_of_a_call(leaf: MeshStopped | RemoteCancelled) -> bool:
    """Return whether a call has ended by the error: one raised by user code names no endpoint."""
    return origin(leaf).endpoint is not None


def without_consequences(error: Exception) -> Exception | None:
    """Return an error without follow-on errors of a stop, or None if nothing else is in it."""
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.split(is_consequence)[1]
    return None if is_consequence(error) else error


# ---- deadline --------------------------------------------------------------------------------------------------------

# Deadline of the running task, found for each call. A task is within many scopes: one of each nursery, of each block,
# of the run. Trio's own function costs four calls for each scope; this one walks the same chain in a loop. It reads
# attributes without public names: if a release of Trio keeps them elsewhere, Trio's function is `effective_deadline`.


def walked_deadline() -> float:
    """Return the same time as `trio.current_effective_deadline`."""
    task: Any = current_task()
    status = task._cancel_status  # noqa: SLF001 - as said above
    if status.effectively_cancelled:
        return -math.inf
    found: float = math.inf
    while status is not None:
        scope = status._scope  # noqa: SLF001
        if scope._deadline < found:  # noqa: PLR1730, SLF001 - a call for each scope, again
            found = scope._deadline  # noqa: SLF001
        if scope._shield:  # noqa: SLF001 - outer deadlines do not apply inside of a shield
            break
        status = status._parent  # noqa: SLF001
    return found


def _can_walk() -> bool:
    """Return whether this release of Trio keeps scopes where `walked_deadline` expects them."""
    run: Any = getattr(trio, "_core", None)
    run = getattr(run, "_run", None)
    parts = {"CancelStatus": ("_scope", "_parent", "effectively_cancelled"), "CancelScope": ("_deadline", "_shield")}
    for name, fields in parts.items():
        found = {field.name for field in getattr(getattr(run, name, None), "__attrs_attrs__", ())}
        if not found.issuperset(fields):
            return False
    return "_cancel_status" in {field.name for field in getattr(trio.lowlevel.Task, "__attrs_attrs__", ())}


effective_deadline: Callable[[], float] = walked_deadline if _can_walk() else trio.current_effective_deadline
"""Return the Trio time at which the waits of the running task end; `math.inf` for never, `-math.inf` if they have."""
