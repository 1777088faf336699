"""When the waits of the running task end by themselves, found without a function of Trio's for each scope around it.

Each call has to know, and a task is within many scopes: one of each nursery, of each block, of the run. Trio's own
function costs four calls for each; this walks the same chain. What it reads has no public name: where a release of Trio
keeps it elsewhere, `effective_deadline` is Trio's own function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import trio
from trio.lowlevel import current_task


def walked_deadline() -> float:
    """Return what `trio.current_effective_deadline` does."""
    task: Any = current_task()
    status = task._cancel_status  # noqa: SLF001 - as said above
    if status.effectively_cancelled:
        return -math.inf
    found: float = math.inf
    while status is not None:
        scope = status._scope  # noqa: SLF001
        if scope._deadline < found:  # noqa: PLR1730, SLF001 - a call for each scope, again
            found = scope._deadline  # noqa: SLF001
        if scope._shield:  # noqa: SLF001 - what is around it ends nothing within
            break
        status = status._parent  # noqa: SLF001
    return found


def _can_walk() -> bool:
    """Return whether this release of Trio keeps scopes where `walked_deadline` looks for them."""
    run: Any = getattr(trio, "_core", None)
    run = getattr(run, "_run", None)
    parts = {"CancelStatus": ("_scope", "_parent", "effectively_cancelled"), "CancelScope": ("_deadline", "_shield")}
    for name, fields in parts.items():
        found = {field.name for field in getattr(getattr(run, name, None), "__attrs_attrs__", ())}
        if not found.issuperset(fields):
            return False
    return "_cancel_status" in {field.name for field in getattr(trio.lowlevel.Task, "__attrs_attrs__", ())}


effective_deadline: Callable[[], float] = walked_deadline if _can_walk() else trio.current_effective_deadline
"""Return the Trio time at which the waits of the running task end; `math.inf` for never, `-math.inf` when they have."""
