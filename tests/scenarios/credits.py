"""Credits: how a full mailbox, or a slow receiver of a channel, makes its sender wait.

window 4 bytes=100 report=2 report_bytes=50      a sender, and what counts at its receiver
channel 4                  the same, as a channel of that capacity counts
send 1 10                  one message of ten bytes, or as many as there are numbers
take 2                     the receiver takes two out, and tells the sender when that is due
reported 7                 a report with this total comes in, whoever made it up
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tests.scenarios.script import Command, Scene

from trimesh._routing.channel_accounts import Intake, port_window
from trimesh._routing.collector import ReceiveCount, SendWindow


class CreditScene(Scene):
    """One sender and its receiver; reports arrive at once."""

    def __init__(self) -> None:
        self.sender = SendWindow(1, 1)
        self.receiver: ReceiveCount | Intake = ReceiveCount(1, 1)
        self.queue: deque[int] = deque()

    def window(self, command: Command) -> str:
        options = {key: int(value) for key, value in command.options.items()}
        self.sender = SendWindow(command.numbers[0], options["bytes"], options["report_bytes"])
        self.receiver = ReceiveCount(options["report"], options["report_bytes"])
        self.queue.clear()
        return self._state()

    def channel(self, command: Command) -> str:
        self.sender, self.receiver = port_window(command.numbers[0]), Intake(command.numbers[0])
        self.queue.clear()
        return self._state()

    def send(self, command: Command) -> Iterator[str]:
        for nbytes in command.numbers:
            if not self.sender.has_room(nbytes):
                yield f"{nbytes} bytes must wait"
                break
            self.sender.sent(nbytes)
            self.queue.append(nbytes)
            if isinstance(self.receiver, Intake):
                self.receiver.arrived(nbytes)
                yield from self._report()
        yield self._state()

    def push(self, command: Command) -> str:
        """Send without having looked for room, as a peer that breaks the rule does."""
        assert isinstance(self.receiver, Intake)
        self.receiver.arrived(command.numbers[0])
        return self._state()

    def take(self, command: Command) -> Iterator[str]:
        for _ in range(command.numbers[0]):
            self.receiver.take(self.queue.popleft())
            yield from self._report()
        yield self._state()

    def _report(self) -> Iterator[str]:
        if self.receiver.is_due:
            total = self.receiver.report()
            room = "makes room" if self.sender.acknowledged(total) else "no news"
            yield f"told that {total} were taken: {room}"

    def reported(self, command: Command) -> Iterator[str]:
        yield "makes room" if self.sender.acknowledged(command.numbers[0]) else "no news"
        yield self._state()

    def _state(self) -> str:
        return f"{len(self.queue)} at the receiver; the sender knows of {self.sender.waiting}"
