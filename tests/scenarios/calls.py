"""One call to many ranks, as its collector sees it.

call 3 fail-fast           three ranks are addressed
sent 0 1                   the messages of these have left
returns 0   raises 1   dies 2   refused 0   cancelled 0 by=caller      a terminal frame, or a death
withdraw                   what has not been sent never will be
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.script import Command, Scene

from trimesh._routing.collector import Collector, LocalFailure, Outcome, Raised, Returned
from trimesh._wire import messages
from trimesh.errors import ProcDied


class CallScene(Scene):
    """One collector."""

    def __init__(self) -> None:
        self.collector = Collector(0, fail_fast=False)

    def call(self, command: Command) -> str:
        self.collector = Collector(int(command.words[0]), "fail-fast" in command.words)
        return self._state()

    def sent(self, command: Command) -> str:
        for rank in command.numbers:
            self.collector.sent(rank)
        return self._state()

    def returns(self, command: Command) -> Iterator[str]:
        return self._settle(command, Returned(b""))

    def raises(self, command: Command) -> Iterator[str]:
        return self._settle(command, Raised(b""))

    def dies(self, command: Command) -> Iterator[str]:
        return self._settle(command, LocalFailure(ProcDied()))

    def refused(self, command: Command) -> Iterator[str]:
        return self._settle(command, messages.Refused(1, 1, 0, "stopped", ""))

    def cancelled(self, command: Command) -> Iterator[str]:
        return self._settle(command, messages.CancelAck(1, 1, 0, started=True, by=command.options["by"], reason=""))

    def _settle(self, command: Command, outcome: Outcome) -> Iterator[str]:
        for rank in command.numbers:
            if not self.collector.settle(rank, outcome):
                yield f"{rank} had its outcome: dropped"
        yield self._state()

    def withdraw(self, _: Command) -> str:
        self.collector.withdraw_unsent()
        return self._state()

    def outcomes(self, _: Command) -> Iterator[str]:
        for rank in range(self.collector.size):
            outcome = self.collector.outcomes[rank]
            yield f"{rank}: {'runs' if outcome is None else type(outcome).__name__}"

    def _state(self) -> str:
        collector = self.collector
        parts = [f"{rank} {state.name.lower()}" for rank, state in enumerate(collector.states())]
        if collector.failures:
            parts.append(f"failed: {','.join(map(str, collector.failures))}")
        if collector.wants_cancel:
            parts.append(f"cancel {','.join(map(str, collector.running())) or 'nobody'}")
        if collector.is_complete:
            parts.append("complete")
        return "; ".join(parts)
