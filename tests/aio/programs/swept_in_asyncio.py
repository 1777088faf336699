"""Get a second SIGINT before the n-th line that is executed while a mesh is being left, for one n after the other."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from types import FrameType
from typing import Any

import actors
from stage import plan, say

import trimesh

PLAN = plan(lines=[], after=None)  # `after`: of which function the lines are counted from; None: the first SIGINT

MODULES = ("asyncio.", "trio.", "trimesh.", "selectors", "outcome", "__main__")


class Strike:
    """A SIGINT before a line.

    The handler is called as Python would call it there. A real signal would be handled inside of the trace function.

    Args:
        line: Which, counted from 1.

    Attributes:
        seen: Lines until now.
    """

    def __init__(self, line: int) -> None:
        self.seen = 0
        self._line = line

    def begin(self) -> None:
        """Count from now on, in the frames that run already, too."""
        sys.settrace(self._enter)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self._enter(frame, "call", None)
            frame = frame.f_back

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._trace if str(frame.f_globals.get("__name__")).startswith(MODULES) else None

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and (self.seen or PLAN.after in (None, frame.f_code.co_name)):
            self.seen += 1
            if self.seen == self._line:
                say("struck", before=f"{frame.f_globals['__name__']}:{frame.f_lineno}", line=self._line)
                interrupt(frame)
        return self._trace


def interrupt(frame: FrameType) -> None:
    """Handle a SIGINT that has come in a frame."""
    handler: Any = signal.getsignal(signal.SIGINT)
    handler(signal.SIGINT, frame)


async def call_for_ever(held: actors.Quiet) -> None:
    """Call without a pause."""
    while True:
        await held.add.call(1, 1)


async def once(strike: Strike) -> None:
    """Open a block, be busy in it, get the first SIGINT."""
    async with trimesh.aio.spawn_procs({"n": 1}, grace=0.5) as procs:
        held = await procs.spawn("held", actors.Quiet)
        async with asyncio.TaskGroup() as group:
            group.create_task(call_for_ever(held))
            await held.add.call(1, 2)
            interrupt(sys._getframe())
            strike.begin()


raised = Counter[str]()
missed = 0
for line in PLAN.lines:
    strike = Strike(line)
    try:
        asyncio.run(once(strike))
    except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
        sys.settrace(None)
        raised[" ".join(sorted({type(leaf).__name__ for leaf in trimesh.leaves(error)}))] += 1
    missed += strike.seen < line
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
say("counted", raised=raised, missed=missed)
