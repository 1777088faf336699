"""Whether a history is linearizable: one order explains all results, and no operation moves past one before it. PURE.

Each object (`Model.key`) is checked by itself: if each is linearizable, the whole is. The search is that of Wing and
Gong, with the memory of Lowe: it takes operations, in any order that their times allow, as long as the model answers
what came back, and goes back when it cannot go on. A pair (operations taken, state) that it has met once is not taken
again. An operation that has failed is left out; one whose outcome is unknown may be taken at any time after it began,
with any result, or never.

    event    0      1       2        3        4
    a        add(1) ......... -> 1                     the first return bounds what may be taken next: whoever began
    b               read() .................. -> 0     after it comes after it
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, cast

import attrs

from trimesh import limits
from trimesh.testing.histories.history_table import table
from trimesh.testing.histories.model import Model
from trimesh.testing.histories.operation import Moment, Operation

_END: Final = 0
"""Number of the entry before the first, which is also the one after the last."""


class UndecidedError(RuntimeError):
    """The search has looked at `limits.LINEARIZATION_STATES_MAX` states, and does not know yet."""


class NotLinearizable(AssertionError):
    """No order of the operations explains what came back.

    Attributes:
        key: The object that it is about, of a model with keys.
        prefix: The shortest beginning of its history that no order explains; what had not ended then counts as unknown.
        culprit: The operation of which the result ends it.
        order: Operations that explain the history up to there, in their order.
        state: Of the model after these.
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
        taken = ", ".join(map(str, self.order[-limits.HISTORY_ROWS :])) or "of none"
        return "\n".join(
            [
                f"not linearizable: no order of the operations{of} explains {self.culprit}",
                *table(self.prefix, self.culprit),
                f"the operations before it are explained by the order {taken}; the state is then {self.state!r}",
            ]
        )


def check_linearizable(operations: Iterable[Operation], model: Model) -> None:
    """Check that one order of the operations, within their times, explains what came back of each.

    Args:
        operations: Of one history, in any sequence.
        model: What the object does when one operation happens after the other.

    Raises:
        NotLinearizable: There is no such order. The text shows the shortest beginning of the history that fails.
        UndecidedError: That cannot be said within `limits.LINEARIZATION_STATES_MAX` states.
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
    """Find the shortest beginning that fails: if one does, all longer ones do."""
    ended = sorted((one for one in operations if one.status == "ok"), key=_end)
    explained, failing = 0, len(ended)  # operations that have returned
    while failing - explained > 1:
        middle = (explained + failing) // 2
        if _Search(_until(operations, _end(ended[middle - 1])), model).order() is None:
            failing = middle
        else:
            explained = middle
    culprit = ended[failing - 1]
    prefix = _until(operations, _end(culprit))
    without = [attrs.evolve(one, status="unknown") if one is culprit else one for one in prefix]
    search = _Search(without, model)
    order = tuple(without[number] for number in search.order() or ())
    return NotLinearizable(key, tuple(prefix), culprit, order, search.state)


def _end(operation: Operation) -> Moment:
    assert operation.end is not None, "an operation that is ok has ended"
    return operation.end


def _until(operations: Iterable[Operation], moment: Moment) -> list[Operation]:
    """Return the history up to a moment: what ends later is under way."""
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
        state: Of the model after what is taken.
    """

    def __init__(self, operations: Sequence[Operation], model: Model) -> None:
        self._operations = operations
        self._step = model.step
        self.state = model.initial
        self._must = [operation.status == "ok" for operation in operations]
        events = [(operation.begin, 0, number) for number, operation in enumerate(operations)]
        events += [(_end(one), 1, number) for number, one in enumerate(operations) if self._must[number]]
        events.sort()
        # A ring of entries, 0 is its beginning and its end: what is taken leaves it, and can come back to its place.
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
        """Return, for an unknown operation, an earlier one that asks the same: it may as well be taken first."""
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
            UndecidedError: It takes too many states.
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
        """Return what the model makes of an operation now, or None if that is not what came back."""
        operation, twin = self._operations[number], self._twin.get(number)
        if twin is not None and not done >> twin & 1:
            return None
        answer: Any = self._step(self.state, operation.call)
        if answer is None:
            return None
        if not _is_pair(answer):
            raise TypeError(f"the step of a model returns (state, result) or None; for {operation.call!r}: {answer!r}")
        state, result = answer
        if self._must[number]:
            return (state, result) if result == operation.result else None
        return None if state == self.state else (state, result)  # unknown, and changes nothing: it explains nothing

    @staticmethod
    def _has_met(met: set[tuple[int, Any]], pair: tuple[int, Any]) -> bool:
        """Return whether this was met before, and remember it."""
        before = len(met)
        try:
            met.add(pair)
        except TypeError as error:
            raise TypeError(
                f"the state of a model needs a hash, as tuples and frozensets have; got {pair[1]!r}"
            ) from error
        if len(met) > limits.LINEARIZATION_STATES_MAX:
            raise UndecidedError(
                f"a history is looked at in at most {limits.LINEARIZATION_STATES_MAX:,} states "
                "(limits.LINEARIZATION_STATES_MAX): let fewer operations overlap or be unknown, or give the model a key"
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
