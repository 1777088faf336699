"""`History`: what clients asked of an object and what came back, as a test records it, for a check afterwards."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import Any, NoReturn, Self

import trio

from trimesh.testing.histories.history_table import table
from trimesh.testing.histories.linearizability import check_linearizable
from trimesh.testing.histories.model import Model
from trimesh.testing.histories.operation import Moment, Operation, Status


class History:
    """The operations of one run, with the times at which they began and ended; simulated or over real processes.

    It stays in the process of the test: clocks of other processes cannot be compared. Record around the calls that the
    test makes; a client that is an actor is called for each of its operations.

    Example:
        ```python
        history = History()
        with history.invoke(point, "add", 1) as adding:
            adding.ok(await counter.add.call_one(1))
        history.check(Model.counter())
        ```
    """

    def __init__(self) -> None:
        self._recorded: list[Recorded] = []
        self._events = 0

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What has been recorded, in the order in which it began."""
        return tuple(one.operation for one in self._recorded)

    def invoke(self, client: Hashable, name: str, *arguments: Any) -> Recorded:
        """Record that an operation begins now.

        Args:
            client: Who asks: a point, or any name.
            name: Of the operation, as the model knows it.
            arguments: Of the operation.

        Returns:
            What is told of the end; as a context manager it records an unknown outcome when none was told.

        Raises:
            RuntimeError: No Trio runs.
        """
        made = Recorded(self, Operation(client, (name, *arguments), self._now()))
        self._recorded.append(made)
        return made

    def check(self, model: Model) -> None:
        """Check that the operations are linearizable: `check_linearizable`, with all that it raises."""
        check_linearizable(self.operations, model)

    def _now(self) -> Moment:
        self._events += 1
        return trio.current_time(), self._events

    def __str__(self) -> str:
        return "\n".join(table(self.operations))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a History stays in the process that records it, as clocks of others cannot be compared with its own: "
            "record around the calls that the test makes"
        )


class Recorded:
    """One operation under way: tell what came of it by `ok`, `fail` or `unknown`, once.

    As a context manager it passes every exception on, and records an unknown outcome if nothing was told: a call that
    raised `ProcDied`, or was cancelled, may have happened all the same, or may happen yet.

    Attributes:
        operation: What is known of it.
    """

    def __init__(self, history: History, operation: Operation) -> None:
        self._history = history
        self.operation = operation

    def ok(self, result: Any = None) -> None:
        """Record that it has happened, and what came back."""
        self._end("ok", result)

    def fail(self) -> None:
        """Record that it has surely not happened, and never will: it was refused."""
        self._end("fail", None)

    def unknown(self) -> None:
        """Record that it is unknown: it may have happened, or may happen at any later time."""
        self._end("unknown", None)

    def _end(self, status: Status, result: Any) -> None:
        begun = self.operation
        if begun.end is not None:
            raise RuntimeError(f"an operation ends once; {begun} has ended before this {status}")
        moment = self._history._now()  # noqa: SLF001 - it counts the events for its parts
        self.operation = Operation(begun.client, begun.call, begun.begin, status, result, moment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.operation.end is None:
            self.unknown()
