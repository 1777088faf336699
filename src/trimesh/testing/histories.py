"""`History`: operations that clients ran on an object and their results, recorded by a test; a linearizability checker.

A history is linearizable if one order explains all results and no operation moves before one that ended earlier. PURE.

Each object (`Model.key`) is checked separately: if each is linearizable, the whole is. The search is Wing and Gong's
with Lowe's memoization: it takes operations in any order that their times allow, as long as the model returns the
recorded results, and backtracks when it cannot continue. A pair (operations taken, state) is tried once. A failed
operation is left out; one whose outcome is unknown may be taken at any time after it began, with any result, or never.

    event    0      1       2        3        4
    a        add(1) ......... -> 1                     the first return bounds the next choice: an operation begun
    b               read() .................. -> 0     after it comes after it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self, cast

import attrs
import trio

from trimesh import limits
from trimesh.errors import place_name


class History:
    """The operations of one run, with the times at which they began and ended; simulated or over real processes.

    It stays in the process of the test, because clocks of other processes cannot be compared. Record around the calls
    that the test makes; to let an actor be a client, call it for each of its operations.

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
        """Return the recorded operations in the order in which they began."""
        return tuple(one.operation for one in self._recorded)

    def invoke(self, client: Hashable, name: str, *arguments: Any) -> Recorded:
        """Record that an operation begins now.

        Args:
            client: The client: a point, or any name.
            name: Name of the operation in the model.
            arguments: Its arguments.

        Returns:
            A recorder for the outcome; as a context manager it records "unknown" if no outcome was recorded.

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
            "a History cannot be sent to another process, whose clock cannot be compared with this one's: record "
            "around the calls that the test makes"
        )


class Recorded:
    """Operation under way: record its outcome by `ok`, `fail` or `unknown`, once.

    As a context manager it passes every exception on, and records "unknown" if no outcome was recorded: a call that
    raised `ProcDied`, or was cancelled, may still have happened, or may happen later.

    Attributes:
        operation: The operation as recorded so far.
    """

    def __init__(self, history: History, operation: Operation) -> None:
        self._history = history
        self.operation = operation

    def ok(self, result: Any = None) -> None:
        """Record that it happened, with its result."""
        self._end("ok", result)

    def fail(self) -> None:
        """Record that it has not happened and never will, because it was refused."""
        self._end("fail", None)

    def unknown(self) -> None:
        """Record an unknown outcome: it may have happened, or may happen at any later time."""
        self._end("unknown", None)

    def _end(self, status: Status, result: Any) -> None:
        begun = self.operation
        if begun.end is not None:
            raise RuntimeError(f"an operation ends once, got {status} after {begun}: record one outcome of each")
        moment = self._history._now()  # noqa: SLF001 - it counts the events for its parts
        self.operation = Operation(begun.client, begun.call, begun.begin, status, result, moment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.operation.end is None:
            self.unknown()


# ---- a history as a table: clients are columns, time goes down. PURE -------------------------------------------------


def table(operations: Sequence[Operation], marked: Operation | None = None) -> Iterator[str]:
    """Yield the lines of a table of operations; a client with several at one time has several columns.

    Args:
        operations: Operations to show; of a long history the last `limits.HISTORY_ROWS` events.
        marked: The operation whose end gets an arrow.
    """
    columns = _columns(operations)
    names = [client_text(client) for client, _ in columns]
    events = sorted(
        [(one.begin, 0, column, one) for column, (_, lane) in enumerate(columns) for one in lane]
        + [
            (one.end, 1, column, one) for column, (_, lane) in enumerate(columns) for one in lane if one.end is not None
        ],
        key=lambda event: event[:3],
    )
    rows: list[tuple[str, list[str], str]] = []
    running = [False] * len(columns)
    for moment, kind, column, operation in events:
        cells = ["|" if is_running else "" for is_running in running]
        cells[column] = _cut(operation.outcome if kind else call_text(operation.call))
        running[column] = not kind
        rows.append((f"{moment[0]:.6f}", cells, "  <--" if kind and operation is marked else ""))
    shown = rows[-limits.HISTORY_ROWS :]
    widths = (
        [max(len(name), *(len(cells[at]) for _, cells, _ in shown)) for at, name in enumerate(names)] if shown else []
    )
    yield _line("time", names, widths, "")
    if len(shown) < len(rows):
        yield f"{'...':>14}  ({len(rows) - len(shown)} events before)"
    for time, cells, mark in shown:
        yield _line(time, cells, widths, mark)


def _columns(operations: Sequence[Operation]) -> list[tuple[Hashable, list[Operation]]]:
    """Return clients in order of their first operation, each with operations that do not overlap."""
    lanes: dict[Hashable, list[list[Operation]]] = {}
    for operation in sorted(operations, key=lambda one: one.begin):
        own = lanes.setdefault(operation.client, [])
        free = (lane for lane in own if (end := lane[-1].end) is not None and end <= operation.begin)
        lane = next(free, None)
        if lane is None:
            own.append([operation])
        else:
            lane.append(operation)
    return [(client, lane) for client, own in lanes.items() for lane in own]


def _cut(text: str) -> str:
    return text if len(text) <= limits.HISTORY_CELL_CHARS else text[: limits.HISTORY_CELL_CHARS - 3] + "..."


def _line(time: str, cells: Sequence[str], widths: Sequence[int], mark: str) -> str:
    columns = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{time:>14}  {columns}".rstrip() + mark


# ---- one operation of a history: client, call, times and outcome. PURE -----------------------------------------------

Call = tuple[Any, ...]
"""Name of an operation and its arguments, as `("write", "x", 3)`."""

Moment = tuple[float, int]
"""Seconds, and the number of the event, which orders events of the same time."""

Status = Literal["ok", "fail", "unknown"]


@attrs.frozen
class Operation:
    """One operation.

    Attributes:
        client: Its client, as a point or a name; one client may have several under way.
        call: Name and arguments.
        begin: Time of its begin.
        status: "ok": it happened, and returned `result`. "fail": it has not happened, and never will. "unknown": it may
            have happened, or may still, at any time after `begin`.
        result: The value returned.
        end: Time at which the outcome was recorded; None while it is under way.
    """

    client: Hashable
    call: Call
    begin: Moment
    status: Status = "unknown"
    result: Any = None
    end: Moment | None = None

    def __str__(self) -> str:
        return f"{client_text(self.client)} {call_text(self.call)} {self.outcome}"

    @property
    def outcome(self) -> str:
        """Return the outcome as text: `-> 3`, `failed`, `unknown`."""
        return f"-> {self.result!r}" if self.status == "ok" else "failed" if self.status == "fail" else "unknown"


def client_text(client: Hashable) -> str:
    return place_name("", cast("Mapping[str, int]", client)) if isinstance(client, Mapping) else str(client)


def call_text(call: Call) -> str:
    """Return a call as text: `write('x', 3)`."""
    return f"{call[0]}({', '.join(map(repr, call[1:]))})"


# ---- linearizability: one order explains all results, and no operation moves past one that ended before it. PURE -----

_END: Final = 0
"""Number of the entry before the first, which is also the one after the last."""


class UndecidedError(RuntimeError):
    """The search visited `limits.LINEARIZATION_STATES_MAX` states without a result."""


class NotLinearizable(AssertionError):
    """No order of the operations explains the results.

    Attributes:
        key: The object, of a model with keys.
        prefix: Shortest prefix of its history that no order explains; operations not yet ended count as unknown.
        culprit: The operation whose result ends the prefix.
        order: Operations that explain the history up to there, in their order.
        state: State of the model after these.
    """

    def __init__(
        self,
        key: Hashable,
        prefix: tuple[Operation, ...],
        culprit: Operation,
        order: tuple[Operation, ...],
        state: Any,
    ) -> None:
        super().__init__(key, prefix, culprit, order, state)
        self.key, self.prefix, self.culprit, self.order, self.state = key, prefix, culprit, order, state

    def __str__(self) -> str:
        of = "" if self.key is None else f" of {self.key!r}"
        taken = ", ".join(map(str, self.order[-limits.HISTORY_ROWS :])) or "(none)"
        return "\n".join(
            [
                f"not linearizable: no order of the operations{of} explains {self.culprit}",
                *table(self.prefix, self.culprit),
                f"an order that explains the operations before it: {taken}; the state is then {self.state!r}",
            ]
        )


def check_linearizable(operations: Iterable[Operation], model: Model) -> None:
    """Check that one order of the operations, within their times, explains all results.

    Args:
        operations: Operations of one history, in any sequence.
        model: Sequential model of the object.

    Raises:
        NotLinearizable: There is no such order. The text shows the shortest prefix of the history that fails.
        UndecidedError: The check did not finish within `limits.LINEARIZATION_STATES_MAX` states.
        TypeError: The model's states have no hash, or its `step` returns something else than a pair or None.

    Cost: linear in the history while few operations overlap; exponential in those that do, and in unknown outcomes.
    """
    parts: dict[Hashable, list[Operation]] = {}
    for operation in operations:
        if operation.status != "fail":
            key = None if model.key is None else model.key(operation.call)
            parts.setdefault(key, []).append(operation)
    failures = [_failure(key, part, model) for key, part in parts.items() if _Search(part, model).order() is None]
    if failures:
        raise min(failures, key=lambda failure: failure.culprit.end or failure.culprit.begin)


def _failure(key: Hashable, operations: Sequence[Operation], model: Model) -> NotLinearizable:
    """Find the shortest prefix that fails: if one does, all longer ones do."""
    ended = sorted((one for one in operations if one.status == "ok"), key=ended_at)
    explained, failing = 0, len(ended)  # operations that have returned
    while failing - explained > 1:
        middle = (explained + failing) // 2
        if _Search(_until(operations, ended_at(ended[middle - 1])), model).order() is None:
            failing = middle
        else:
            explained = middle
    culprit = ended[failing - 1]
    prefix = _until(operations, ended_at(culprit))
    without = [attrs.evolve(one, status="unknown") if one is culprit else one for one in prefix]
    search = _Search(without, model)
    order = tuple(without[number] for number in search.order() or ())
    return NotLinearizable(key, tuple(prefix), culprit, order, search.state)


def ended_at(operation: Operation) -> Moment:
    """Return the end of an operation that is ok."""
    assert operation.end is not None, "an operation that is ok has ended"
    return operation.end


def _until(operations: Iterable[Operation], moment: Moment) -> list[Operation]:
    """Return the history up to a moment: operations that end later are under way."""
    begun = (operation for operation in operations if operation.begin <= moment)
    return [
        one if one.end is None or one.end <= moment else attrs.evolve(one, status="unknown", result=None, end=None)
        for one in begun
    ]


def _is_pair(answer: object) -> bool:
    return isinstance(answer, tuple) and len(cast("Any", answer)) == 2


class _Search:
    """The search for one order.

    Attributes:
        state: State of the model after the operations taken.
    """

    def __init__(self, operations: Sequence[Operation], model: Model) -> None:
        self._operations = operations
        self._step = model.step
        self.state = model.initial
        self._must = [operation.status == "ok" for operation in operations]
        events = [(operation.begin, 0, number) for number, operation in enumerate(operations)]
        events += [(ended_at(one), 1, number) for number, one in enumerate(operations) if self._must[number]]
        events.sort()
        # A ring of entries, in which 0 is beginning and end. Taken operations leave it, and can return to their place.
        size = len(events) + 1
        self._next = [*range(1, size), _END]
        self._before = [size - 1, *range(size - 1)]
        self._is_return = [False, *(kind == 1 for _, kind, _ in events)]
        self._number = [-1, *(number for _, _, number in events)]
        self._entries: list[list[int]] = [[] for _ in operations]
        for entry, (_, _, number) in enumerate(events, 1):
            self._entries[number].append(entry)
        self._twin = self._twins(events)

    def _twins(self, events: Iterable[tuple[Moment, int, int]]) -> dict[int, int]:
        """Return, for each unknown operation, an earlier one with an equal call, which can be taken first."""
        last: list[int] = []
        twins: dict[int, int] = {}
        for _, _, number in events:
            if self._must[number]:
                continue
            call = self._operations[number].call
            for place, other in enumerate(last):
                if self._operations[other].call == call:
                    twins[number], last[place] = other, number
                    break
            else:
                last.append(number)
        return twins

    def order(self) -> list[int] | None:
        """Return numbers of operations in an order that explains all of them, or None.

        Raises:
            UndecidedError: The search visits too many states.
        """
        left = sum(self._must)
        done = 0
        taken: list[tuple[int, Any]] = []
        met: set[tuple[int, Any]] = set()
        entry = self._next[_END]
        while left:
            if entry == _END or self._is_return[entry]:
                if not taken:
                    return None
                number, self.state = taken.pop()
                self._put_back(number)
                done ^= 1 << number
                left += self._must[number]
                entry = self._next[self._entries[number][0]]
                continue
            number = self._number[entry]
            answer = self._take(number, done)
            if answer is None or self._has_met(met, (done | 1 << number, answer[0])):
                entry = self._next[entry]
                continue
            taken.append((number, self.state))
            self.state = answer[0]
            self._take_out(number)
            done |= 1 << number
            left -= self._must[number]
            entry = self._next[_END]
        return [number for number, _ in taken]

    def _take(self, number: int, done: int) -> tuple[Any, Any] | None:
        """Return the model's (state, result) for an operation, or None if it cannot be taken now."""
        operation, twin = self._operations[number], self._twin.get(number)
        if twin is not None and not done >> twin & 1:
            return None
        answer: Any = self._step(self.state, operation.call)
        if answer is None:
            return None
        if not _is_pair(answer):
            raise TypeError(
                f"the step of a model must return (state, result) or None, got {answer!r} for {operation.call!r}"
            )
        state, result = answer
        if self._must[number]:
            return (state, result) if result == operation.result else None
        return None if state == self.state else (state, result)  # an unknown operation without effect explains nothing

    @staticmethod
    def _has_met(met: set[tuple[int, Any]], pair: tuple[int, Any]) -> bool:
        """Return whether this pair was met before, and remember it."""
        before = len(met)
        try:
            met.add(pair)
        except TypeError as error:
            raise TypeError(
                f"the state of a model must be hashable, got {pair[1]!r}: use tuples and frozensets"
            ) from error
        if len(met) > limits.LINEARIZATION_STATES_MAX:
            raise UndecidedError(
                f"the check of a history visits at most {limits.LINEARIZATION_STATES_MAX:,} states "
                "(limits.LINEARIZATION_STATES_MAX), and this one needs more: let fewer operations overlap or be "
                "unknown, or give the model a key"
            )
        return len(met) == before

    def _take_out(self, number: int) -> None:
        for entry in self._entries[number]:
            self._next[self._before[entry]] = self._next[entry]
            self._before[self._next[entry]] = self._before[entry]

    def _put_back(self, number: int) -> None:
        for entry in reversed(self._entries[number]):
            self._next[self._before[entry]] = entry
            self._before[self._next[entry]] = entry


# ---- sequential models, to which histories are compared. PURE --------------------------------------------------------

# state, call  --step-->  next state, result        or None: the call cannot happen in this state

State = Any
"""State of a model; it must be hashable, as numbers, strings, tuples and frozensets are."""

Step = Callable[[State, Call], "tuple[State, Any] | None"]


@attrs.frozen
class Model:
    """A sequential model: a state, and a pure function from state and call to the next state and the result.

    Attributes:
        initial: State before the first operation.
        step: `step(state, call)` returns the next state and the result, or None if the call cannot happen. A call is a
            tuple of the operation's name and its arguments: `match call: case ("add", n): return state + n, state + n`.
        key: Function from a call to the key of its object, or None. Objects of different keys are independent: each
            begins with `initial`, and is checked by itself, which is much faster.

    Example:
        >>> def step(state, call):
        ...     match call:
        ...         case ("add", n):
        ...             return state + n, state + n
        ...         case ("read",):
        ...             return state, state
        >>> Model(0, step).step(3, ("add", 2))
        (5, 5)
    """

    initial: State
    step: Step
    key: Callable[[Call], Hashable] | None = None

    def keyed(self) -> Model:
        """Return the model of many such objects; the first argument of a call is its key: `("write", "x", 3)`."""
        step = self.step
        return Model(self.initial, lambda state, call: step(state, (call[0], *call[2:])), lambda call: call[1])

    @classmethod
    def register(cls, initial: Any = None) -> Model:
        """Return the model of a value: `read()` gives it, `write(value)` None, `cas(old, new)` whether it was `old`."""
        return cls(initial, _register)

    @classmethod
    def counter(cls, initial: float = 0) -> Model:
        """Return the model of a number: `read()` returns it, `add(n)` the new number."""
        return cls(initial, _counter)

    @classmethod
    def set(cls) -> Model:
        """Return the model of a set: `add(value)` and `discard(value)` return whether they changed it.

        `has(value)` returns whether the value is in it. Each value is checked by itself, so calls about the whole set,
        such as its size, need another model.
        """
        return cls(initial=False, step=_one_value, key=lambda call: call[1])

    @classmethod
    def queue(cls) -> Model:
        """Return the model of a FIFO queue: `put(value)` returns None, `get()` the oldest value, once there is one."""
        return cls((), _queue)


def _register(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("read",):
            return state, state
        case ("write", value):
            return value, None
        case ("cas", old, new):
            return (new, True) if state == old else (state, False)
        case _:
            raise _unknown(call, "read(), write(value), cas(old, new)")


def _counter(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("read",):
            return state, state
        case ("add", n):
            return state + n, state + n
        case _:
            raise _unknown(call, "read(), add(n)")


def _one_value(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("add", _):
            return True, not state
        case ("discard", _):
            return False, state
        case ("has", _):
            return state, state
        case _:
            raise _unknown(call, "add(value), discard(value), has(value)")


def _queue(state: Any, call: Call) -> tuple[Any, Any] | None:
    match call:
        case ("put", value):
            return (*state, value), None
        case ("get",):
            return (state[1:], state[0]) if state else None
        case _:
            raise _unknown(call, "put(value), get()")


def _unknown(call: Call, known: str) -> ValueError:
    return ValueError(f"this model has the operations {known}, got {call!r}: write a Model of your own")
