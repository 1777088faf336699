"""The link of a process to itself: messages to own actors take the same road as all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import trio

from trimesh._transport.interface import Buffer, Lane, Link, LinkHandler, LinkStatistics


class LoopbackLink(Link):
    """Delivers to the handler of this very process, from a task of its own, CONTROL first."""

    def __init__(self, handler: LinkHandler) -> None:
        self._handler = handler
        self._lanes: tuple[deque[tuple[bytes, list[bytearray]]], ...] = (deque(), deque())
        self._task: trio.lowlevel.Task | None = None
        self._messages = 0
        self._bytes = 0

    def send(
        self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA, flow: int = 0
    ) -> trio.Event | None:
        """Queue a copy; credits of the floors above bound the queue."""
        del flow
        copies = [bytearray(body) for body in bodies]
        self._lanes[lane].append((head, copies))
        self._messages += 1
        self._bytes += len(head) + sum(map(len, copies))
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)
        return None

    def close(self) -> None:
        """Do nothing: the link lives as long as its process."""

    def abort(self) -> None:
        """Drop what is queued."""
        for lane in self._lanes:
            lane.clear()

    def statistics(self) -> LinkStatistics:
        """Return the counters; what was sent is what was received."""
        return LinkStatistics(self._messages, self._messages, self._bytes, self._bytes, 0, 0)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Deliver until cancelled."""
        control, data = self._lanes
        while True:
            for _ in range(len(control) + len(data)):
                head, bodies = (control or data).popleft()
                self._handler.received(self, memoryview(head), [memoryview(body) for body in bodies])
                if not control and not data:
                    break
            if control or data:
                await trio.lowlevel.checkpoint()
            else:
                await self._wait_for_message()

    async def _wait_for_message(self) -> None:
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
