"""Items of many ranks on their way to one consumer.

stream 2 window=4          two generator endpoints, each at most four items ahead
yields 0 a b c             rank 0 yields these, as far as its window allows
takes 2                    the consumer takes two, and tells whom it is due
leaves                     the consumer leaves the stream
forces 0 x                 an item of a rank that does not look at its window
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tests.scenarios.script import Command, Scene

from trimesh import limits
from trimesh._routing.collector import Merge, MergedItem, SendWindow


class StreamScene(Scene):
    """The merge at the consumer, and the windows of its producers."""

    def __init__(self) -> None:
        self.merge = Merge(0, 1)
        self.windows: list[SendWindow] = []
        self.waiting: list[deque[str]] = []

    def stream(self, command: Command) -> str:
        size, window = command.numbers[0], int(command.options["window"])
        self.merge = Merge(size, window)
        self.windows = [SendWindow(window, limits.STREAM_BYTES, limits.STREAM_REPORT_BYTES) for _ in range(size)]
        self.waiting = [deque() for _ in range(size)]
        return self._state()

    def yields(self, command: Command) -> Iterator[str]:
        rank = int(command.words[0])
        self.waiting[rank] += command.words[1:]
        yield from self._send(rank)
        yield self._state()

    def _send(self, rank: int) -> Iterator[str]:
        while self.waiting[rank] and self.windows[rank].has_room(1):
            self.windows[rank].sent(1)
            self.merge.put(MergedItem(rank, self.waiting[rank].popleft().encode()))
        if self.waiting[rank]:
            yield f"{rank} waits in its yield with {' '.join(self.waiting[rank])}"

    def forces(self, command: Command) -> str:
        rank = int(command.words[0])
        self.merge.put(MergedItem(rank, command.words[1].encode()))
        self.windows[rank].sent(1)
        return self._state()

    def takes(self, command: Command) -> Iterator[str]:
        for _ in range(command.numbers[0]):
            item, total = self.merge.take()
            yield f"{item.index}: {bytes(item.payload).decode()}"
            if total is not None:
                yield f"  {item.index} is told that {total} were taken"
                self.windows[item.index].acknowledged(total)
                yield from self._send(item.index)
        yield self._state()

    def leaves(self, _: Command) -> str:
        self.merge.close()
        return self._state()

    def _state(self) -> str:
        came = ", ".join(f"{rank} sent {self.merge.received(rank)}" for rank in range(self.merge.size))
        return f"{len(self.merge)} wait for the consumer; {came}"
