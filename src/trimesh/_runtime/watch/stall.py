"""What is said of a child process whose native thread answers while its Trio loop does not run.

It is no failure: a long computation in an endpoint looks like this, and so does a model that is being loaded. It is
logged with the stack of the main thread, which says what it is. Nothing is killed, no call ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.watch.stack import STACK_SECONDS, read_stack, request_stack

if TYPE_CHECKING:
    from trimesh._runtime.watch.process import WatchedMember

_log = logging.getLogger("trimesh")


class StallReport:
    """Reports the stalls of one child process, at most once in `limits.STALL_AGAIN_SECONDS`.

    Attributes:
        member: The process.
        seconds: For how long its loop had not run when it was last heard of; 0 when it runs.
        count: Stalls so far.
        listeners: Called with the seconds and the stack of the main thread ("" when there is none to be had).
    """

    def __init__(self, member: WatchedMember) -> None:
        self.member = member
        self.seconds = 0.0
        self.count = 0
        self.listeners: list[Callable[[float, str], None]] = []
        self._said_at: float = -math.inf

    def take(self, seconds: float) -> None:
        """Take what its transport says: seconds behind, or 0 when the loop runs again."""
        if not self.seconds and seconds:
            self.count += 1
        elif self.seconds and not seconds:
            _log.info("%s (pid %d) runs again", self.member.label, self.member.pid)
        self.seconds = seconds
        now = trio.current_time()
        if seconds and not self.member.gone.is_set() and now >= self._said_at + limits.STALL_AGAIN_SECONDS:
            self._said_at = now
            self.member.proc.nursery.start_soon(self._say, seconds)

    @trio.lowlevel.enable_ki_protection
    async def _say(self, seconds: float) -> None:
        from trimesh._runtime.system.fault_stack import shown_stack  # noqa: PLC0415 - only stalls need it

        member = self.member
        stack = ""
        if member.stack_fd >= 0:  # a simulated process has none
            request_stack(member.pid)
            await trio.sleep(STACK_SECONDS)
            stack = read_stack(member.pid, member.stack_fd)
        text = (
            f"{member.label} (pid {member.pid}) is stalled: its Trio loop has not run for {seconds:.1f} s. A call that "
            "blocks does this: await its counterpart of Trio, or write a plain `def` under @endpoint(thread=True)"
        )
        _log.warning("%s\n%s", text, shown_stack(stack) or "  its stack is not available")
        for listener in self.listeners:
            listener(seconds, stack)
