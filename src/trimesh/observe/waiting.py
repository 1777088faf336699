"""Who waits for whom in a snapshot, and whom all wait for in the end.

WG-1 A call that waits for others is no culprit, unless it waits for itself.
WG-2 What is waited for by most comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from trimesh._wire import observed
from trimesh.observe.merging import RunSnapshot


class Culprit(msgspec.Struct, frozen=True):
    """A call that others wait for and that itself waits for no call; or one that waits for itself.

    Attributes:
        call: It.
        waiters: How many calls wait for it, directly or not.
        cycle: The ids of the calls of a circle, from this one on; empty when it is in none.
    """

    call: observed.CallRow
    waiters: int
    cycle: tuple[str, ...] = ()


class WaitGraph:
    """Who waits for whom in a snapshot.

    Attributes:
        calls: By id.
        waits_for: Ids of the calls that a call waits for.
    """

    def __init__(self, snapshot: RunSnapshot) -> None:
        self.calls = {call.id: call for call in snapshot.calls}
        self.waits_for: dict[str, tuple[str, ...]] = {
            call.id: tuple(dict.fromkeys(wait.call for wait in call.waits if wait.call in self.calls))
            for call in snapshot.calls
        }
        holders = dict[str, list[str]]()
        for call in snapshot.calls:
            if call.state in ("running", "waiting"):
                holders.setdefault(call.name, []).append(call.id)
        for call in snapshot.calls:  # room in a mailbox is made by the calls that its actor runs
            if call.state == "sending":
                self.waits_for[call.id] = tuple(holders.get(call.name, ()))
        self.waits_for = {call_id: others for call_id, others in self.waits_for.items() if others}

    def roots(self) -> Sequence[observed.CallRow]:
        """Return the calls that no call waits for, oldest first."""
        awaited = {other for others in self.waits_for.values() for other in others}
        return [call for call in self.calls.values() if call.id not in awaited]

    def culprits(self) -> Sequence[Culprit]:
        """Return what everything waits for: first what most wait for, then what is oldest."""
        waited_by = dict[str, list[str]]()
        for call_id, others in self.waits_for.items():
            for other in others:
                waited_by.setdefault(other, []).append(call_id)
        found = list[Culprit]()
        in_cycle = set[str]()
        for call_id, call in self.calls.items():
            cycle = self._cycle(call_id) if call_id in self.waits_for and call_id not in in_cycle else ()
            if cycle:
                in_cycle.update(cycle)
                found.append(Culprit(call, len(_reached(call_id, waited_by)), cycle))
            elif call_id not in self.waits_for:
                found.append(Culprit(call, len(_reached(call_id, waited_by))))
        return sorted(found, key=lambda one: (not one.cycle, -one.waiters, -one.call.age))

    def _cycle(self, start: str) -> tuple[str, ...]:
        """Return the ids of a circle through a call, from it on; empty if there is none."""
        before = dict[str, str]()
        todo = list(self.waits_for.get(start, ()))
        before.update(dict.fromkeys(todo, start))
        while todo:
            call_id = todo.pop()
            if call_id == start:
                break
            for other in self.waits_for.get(call_id, ()):
                if other not in before:
                    before[other] = call_id
                    todo.append(other)
        if start not in before:
            return ()
        way, at = [start], before[start]
        while at != start:
            way.append(at)
            at = before[at]
        return (start, *reversed(way[1:]))

    def tree(self) -> Iterator[tuple[int, observed.CallRow, bool]]:
        """Yield depth, call, and whether it was shown before, of all that take part: who waits, then what for."""
        shown = set[str]()
        roots = [call for call in self.roots() if call.id in self.waits_for]
        for root in [*roots, *(call for call in self.calls.values() if call.id in self.waits_for)]:
            if root.id not in shown:
                yield from self._branch(root, shown)

    def _branch(self, root: observed.CallRow, shown: set[str]) -> Iterator[tuple[int, observed.CallRow, bool]]:
        todo = [(0, root.id)]
        while todo:
            depth, call_id = todo.pop()
            yield depth, self.calls[call_id], call_id in shown
            if call_id not in shown:
                shown.add(call_id)
                todo += [(depth + 1, other) for other in reversed(self.waits_for.get(call_id, ()))]


def _reached(start: str, edges: Mapping[str, Sequence[str]]) -> set[str]:
    seen, todo = set[str](), list(edges.get(start, ()))
    while todo:
        call_id = todo.pop()
        if call_id not in seen:
            seen.add(call_id)
            todo += edges.get(call_id, ())
    return seen
