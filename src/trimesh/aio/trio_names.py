"""Private names of Trio that drivers and stand-ins need, looked up once.

Where a release of Trio lacks one, `NAMES` is None. Then Trio is an ordinary guest, which waits in a thread, and Trio
tasks do the work of asyncio tasks.
"""

from __future__ import annotations

import types
from typing import Any, Final, NamedTuple

import trio

RUN: Final[dict[str, tuple[str, ...]]] = {
    "Runner": (
        "runq",
        "deadlines",
        "clock",
        "io_manager",
        "guest_tick_scheduled",
        "waiting_for_idle",
        "is_guest",
        "main_task_outcome",
    ),
    "Deadlines": ("next_deadline",),
    "TheIOManager": ("_epoll", "get_events"),
    "Task": (
        "_abort_func",
        "_cancel_points",
        "_cancel_status",
        "_schedule_points",
        "_attempt_delivery_of_any_pending_cancel",
    ),
    "CancelStatus": ("effectively_cancelled",),
    "GuestState": ("unrolled_run_gen", "runner", "done_callback"),
}
"""Classes of `trio._core._run`, and the attributes of each that are used."""
TRAPS: Final[dict[str, tuple[str, ...]]] = {"WaitTaskRescheduled": ("abort_func",)}
"""Classes of `trio._core._traps`, likewise."""


class TrioNames(NamedTuple):
    """Private objects of Trio.

    Attributes:
        context: Thread-local; its attributes `task` and `runner` are the running task and run.
        library: Thread-local; its attribute `name` is that of the running library, for `sniffio`.
        waits: Class of the trap of `wait_task_rescheduled`.
        yields: Trap of `cancel_shielded_checkpoint`.
        run_code: Code of the run generator.
    """

    context: Any
    library: Any
    waits: type[Any]
    yields: Any
    run_code: types.CodeType


def find_names() -> TrioNames | None:
    """Return the private objects of this release of Trio; None if one is missing."""
    try:
        core: Any = trio._core  # noqa: SLF001 - as said above
        run, traps = core._run, core._traps  # noqa: SLF001
        has_all = all(_has(module, table) for module, table in ((run, RUN), (traps, TRAPS)))
        names = TrioNames(
            run.GLOBAL_RUN_CONTEXT,
            run.sniffio_library,
            traps.WaitTaskRescheduled,
            traps.CancelShieldedCheckpoint,
            getattr(run.unrolled_run, "__wrapped__", run.unrolled_run).__code__,
        )
        has_library = hasattr(names.library, "name") and hasattr(names.library, "__dict__")
        return names if has_all and has_library and _keeps_task(names.context) else None
    except (AttributeError, TypeError):
        return None


def _has(module: Any, table: dict[str, tuple[str, ...]]) -> bool:
    return all(_has_name(getattr(module, holder), name) for holder, names in table.items() for name in names)


def _has_name(holder: type[Any], name: str) -> bool:
    return hasattr(holder, name) or name in {field.name for field in getattr(holder, "__attrs_attrs__", ())}


def _keeps_task(context: Any) -> bool:
    """Return whether the running task of this thread is `context.task`."""
    here: dict[str, Any] = context.__dict__
    before, probe = here.get("task"), object()
    here["task"] = probe
    try:
        return trio.lowlevel.current_task() is probe
    except RuntimeError:
        return False
    finally:
        if before is None:
            del here["task"]
        else:
            here["task"] = before


NAMES: TrioNames | None = find_names()
