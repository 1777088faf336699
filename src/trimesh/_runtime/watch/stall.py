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
    from trimesh._runtime.meshes.member import Member

_log = logging.getLogger("trimesh")


class StallReport:
    """Reports the stalls of one child process, at most once in `limits.STALL_AGAIN_SECONDS`.

    Attributes:
        count: Stalls so far.
        listeners: Called with the seconds and the stack of the main thread ("" when there is none to be had).
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.count = 0
        self.listeners: list[Callable[[float, str], None]] = []
        self._said_at: float = -math.inf
        self._behind = 0.0  # as the process has told last, which it does whenever that has doubled
        self._behind_at = 0.0

    @property
    def seconds(self) -> float:
        """For how long its loop has not run by now; 0 when it runs."""
        return self._behind + self.member.proc.now() - self._behind_at if self._behind else 0.0

    def take(self, seconds: float) -> None:
        """Take what its transport says: seconds behind, or 0 when the loop runs again."""
        if not self._behind and seconds:
            self.count += 1
        elif self._behind and not seconds:
            _log.info("%s (pid %d) runs again", self.member.label, self.member.pid)
        now = self.member.proc.now()
        self._behind, self._behind_at = seconds, now
        if seconds and not self.member.gone.is_set() and now >= self._said_at + limits.STALL_AGAIN_SECONDS:
            self._said_at = now
            self.member.proc.nursery.start_soon(self._say, seconds)

    @trio.lowlevel.enable_ki_protection
    async def _say(self, seconds: float) -> None:
        from trimesh._wire.exceptions.tracebacks import shown_stack  # noqa: PLC0415 - only stalls need it

        member = self.member
        stack = ""
        if member.stack_fd >= 0:  # a simulated process has none
            request_stack(member.pid)
            await trio.sleep(STACK_SECONDS)
            stack = read_stack(member.pid, member.stack_fd)
        text = (
            f"{member.label} (pid {member.pid}) is stalled: its Trio loop has not run for {seconds:.1f} s. A call that "
            "blocks does this: await its async counterpart, or write a plain `def` under @endpoint(thread=True)"
        )
        _log.warning("%s\n%s", text, shown_stack(stack) or "  its stack is not available")
        for listener in self.listeners:
            listener(seconds, stack)
