"""Checks of a history that are weaker and cheaper than linearizability: effects that happen once, reads in order. PURE.

Each takes time linear in the history, or n log n, whatever overlaps. Operations that began and have not ended may have
happened or not, as in `check_linearizable`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from trimesh.testing.histories import Operation, ended_at, table


class Inconsistent(AssertionError):
    """The operations of a history and their results do not fit together.

    Attributes:
        rule: The rule that is broken, and by what.
        operations: The operations that show it, in the order in which they began.
    """

    def __init__(self, rule: str, operations: Sequence[Operation]) -> None:
        super().__init__(rule, tuple(operations))
        self.rule = rule
        self.operations = tuple(operations)

    def __str__(self) -> str:
        return "\n".join([self.rule, *table(self.operations)])


def check_once(operations: Iterable[Operation], name: str, effects: Iterable[Hashable]) -> None:
    """Check that each operation had its effect exactly once.

    One that returned has one effect, one that failed none, one whose outcome is unknown at most one, and no effect is
    without an operation. So nothing acknowledged is lost, and no retry acts twice.

    Args:
        operations: Operations of one history. The first argument of each is its key, and each has its own.
        name: Name of the operations with an effect.
        effects: Key of each effect that the system shows at the end, as often as it shows it.

    Raises:
        Inconsistent: An effect is missing, happened twice, or belongs to no operation that could have had it.
        ValueError: Two operations have one key.
    """
    found = Counter(effects)
    own: dict[Hashable, Operation] = {}
    for one in operations:
        if one.call[0] != name:
            continue
        key = one.call[1]
        if key in own:
            raise ValueError(f"each {name} needs a first argument of its own, got {key!r} twice: add a number to it")
        own[key] = one
    for key, one in own.items():
        count = found.pop(key, 0)
        if count > 1:
            raise Inconsistent(f"each {name} must have its effect once, {name}({key!r}) had it {count} times", [one])
        if one.status == "ok" and not count:
            raise Inconsistent(f"each {name} that returned must have its effect, {name}({key!r}) had none", [one])
        if one.status == "fail" and count:
            raise Inconsistent(f"a {name} that failed must have no effect, {name}({key!r}) had it", [one])
    if found:
        raise Inconsistent(f"each effect must be of a {name} of the history, got {sorted(found, key=repr)}", [])


def check_monotonic(
    operations: Iterable[Operation], name: str, version: Callable[[Any], Any] = lambda result: result
) -> None:
    """Check that no client reads an older version than it has read before.

    Args:
        operations: Operations of one history.
        name: Name of the reads.
        version: Gives the version of a result; versions are compared by `<`. By default the result is one.

    Raises:
        Inconsistent: A read returned an older version than one of the same client that had ended before it began.
    """
    for reads in _by_client(operations, name).values():
        newest: Operation | None = None
        ended = sorted(reads, key=ended_at)
        taken = 0
        for one in sorted(reads, key=lambda one: one.begin):
            while ended_at(other := ended[taken]) <= one.begin:  # at the latest its own end is later
                if newest is None or version(newest.result) < version(other.result):
                    newest = other
                taken += 1
            if newest is not None and version(one.result) < version(newest.result):
                raise Inconsistent("a client must not read an older version than before", [newest, one])


def check_fresh(
    operations: Iterable[Operation],
    read: str,
    write: str,
    *,
    initial: Any = None,
    seconds: float = 0.0,
    version: Callable[[Any], Any] = lambda result: result,
) -> None:
    """Check that each read returns the newest version that was written, or one that is little older.

    Args:
        operations: Operations of one history. The first argument of a write is its version, compared by `<`.
        read: Name of the reads.
        write: Name of the writes.
        initial: Version before the first write.
        seconds: How long after its end a write may still be missed.
        version: Gives the version of the result of a read. By default the result is one.

    Raises:
        Inconsistent: A read missed a write that had ended `seconds` before it began, or returned a version that no
            write had begun to write, or whose write had failed.
    """
    both = list(operations)
    writes = [one for one in both if one.call[0] == write and one.status != "fail"]
    begun = {one.call[1]: one for one in sorted(writes, key=lambda one: one.begin, reverse=True)}
    ended = sorted((one for one in writes if one.status == "ok"), key=ended_at)
    times = [ended_at(one)[0] + seconds for one in ended]
    events = [ended_at(one)[1] for one in ended]
    newest = list(accumulate(ended, _newer))
    for one in both:
        if one.call[0] != read or one.status != "ok":
            continue
        got = version(one.result)
        source = begun.get(got)
        if source is None and got != initial:
            raise Inconsistent(f"a {read} must return a version that was written, got {got!r}", [one])
        if source is not None and source.begin > ended_at(one):
            raise Inconsistent(f"a {read} must return a version that was written before, got {got!r}", [one, source])
        before = bisect_left(times, one.begin[0]) if seconds else bisect_left(events, one.begin[1])
        if before and (source is None or got < newest[before - 1].call[1]):
            late = f" {seconds:g} s" if seconds else ""
            raise Inconsistent(
                f"a {read} must return what was written{late} before it began, or newer", [newest[before - 1], one]
            )


def _newer(one: Operation, other: Operation) -> Operation:
    return other if one.call[1] < other.call[1] else one


def _by_client(operations: Iterable[Operation], name: str) -> dict[Hashable, list[Operation]]:
    """Return the operations that returned, by client."""
    found: dict[Hashable, list[Operation]] = {}
    for one in operations:
        if one.call[0] == name and one.status == "ok":
            found.setdefault(one.client, []).append(one)
    return found
