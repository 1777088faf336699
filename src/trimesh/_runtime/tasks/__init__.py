"""Task utilities: contexts, callers of other loops, interrupts, follow-on errors of a stop."""

from trimesh._runtime.tasks.background import effective_deadline, split_cancelled
from trimesh._runtime.tasks.coroutines import await_chain, hidden_awaits, set_outside_tasks
from trimesh._runtime.tasks.crossing import (
    HeldBlock,
    Site,
    TrioBlock,
    Waiting,
    in_trio,
    in_trio_block,
    in_trio_now,
    in_trio_taking,
    place_outside,
    wake,
    woken_elsewhere,
)
from trimesh._runtime.tasks.interrupt import cancel_on, open_heard_signals, run_to_end

__all__ = [
    "HeldBlock",
    "Site",
    "TrioBlock",
    "Waiting",
    "await_chain",
    "cancel_on",
    "effective_deadline",
    "hidden_awaits",
    "in_trio",
    "in_trio_block",
    "in_trio_now",
    "in_trio_taking",
    "open_heard_signals",
    "place_outside",
    "run_to_end",
    "set_outside_tasks",
    "split_cancelled",
    "wake",
    "woken_elsewhere",
]
