"""Wait graph of a snapshot and its root causes.

WG-1 A call that waits for others is not a culprit, unless it waits for itself.
WG-2 The culprit that most calls wait for comes first.

UV-1 A pin counts only after it has blocked a `publish` for as long as a process may stall: until then the reader reads,
     and memory that no `publish` needs does not matter.
UV-2 If each rank of a mesh publishes, readers may read one for all: publications are unread only if all of them are.
UV-3 Publications of one mesh that the same readers pin are reported together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from trimesh import limits
from trimesh._wire import observed
from trimesh.observe.run_snapshot import RunSnapshot


class Culprit(msgspec.Struct, frozen=True):
    """A root cause of waits: a call that waits for no other call, or one that waits for itself.

    Attributes:
        call: The call.
        waiters: Number of calls that wait for it, directly or not.
        cycle: Ids of the calls of its cycle, from this one on; empty if it is in none.
    """

    call: observed.CallRow
    waiters: int
    cycle: tuple[str, ...] = ()


class WaitGraph:
    """The calls of a snapshot and the calls that each waits for.

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
        for call in snapshot.calls:  # a full mailbox gets room when a running call of its actor ends
            if call.state == "sending":
                self.waits_for[call.id] = tuple(holders.get(call.name, ()))
        self.waits_for = {call_id: others for call_id, others in self.waits_for.items() if others}

    def roots(self) -> Sequence[observed.CallRow]:
        """Return the calls that no call waits for, oldest first."""
        awaited = {other for others in self.waits_for.values() for other in others}
        return [call for call in self.calls.values() if call.id not in awaited]

    def deadlocked(self) -> set[str]:
        """Return the names of members whose calls wait for each other."""
        return {self.calls[call_id].name for one in self.culprits() for call_id in one.cycle}

    def culprits(self) -> Sequence[Culprit]:
        """Return the root causes of waiting: those with most waiters first, then the oldest."""
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
        """Return the ids of a cycle through a call, from it on; empty if there is none."""
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


def _reached(start: str, edges: Mapping[str, Sequence[str]]) -> set[str]:
    seen, todo = set[str](), list(edges.get(start, ()))
    while todo:
        call_id = todo.pop()
        if call_id not in seen:
            seen.add(call_id)
            todo += edges.get(call_id, ())
    return seen


# ---- publications with problems: versions that readers keep, versions without readers --------------------------------

_Group = tuple[str, str, int]


class KeptVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions whose memory cannot be reused because readers keep them pinned.

    Attributes:
        holders: Names of the processes that pin them.
        publishers: Names of the actors, or else processes, that published them.
        versions: Their numbers.
        latest: The latest version.
        kept, slots: Slots of one publisher that they take, and that it has.
        seconds: Time since the first of them blocked a `publish`.
        is_waiting: Whether a `publish` waits for them.
        call: The oldest running call in a process that pins them; None if there is none.
    """

    holders: tuple[str, ...]
    publishers: tuple[str, ...]
    versions: tuple[int, ...]
    latest: int
    kept: int
    slots: int
    seconds: float
    is_waiting: bool
    call: observed.CallRow | None = None


class UnreadVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that were published and overwritten without any process reading them.

    Attributes:
        publishers: Names of the actors, or else processes, that published them.
        count: Number of them, since a reader last released a version.
        seconds: Time since the first of them was published.
        latest: The latest version.
        readers: Names of live processes that read earlier versions.
        nbytes: Memory of the publications.
    """

    publishers: tuple[str, ...]
    count: int
    seconds: float
    latest: int
    readers: tuple[str, ...] = ()
    nbytes: int = 0


def kept_versions(seen: RunSnapshot) -> list[KeptVersions]:
    """Return the versions that block a `publish`; those for which one waits come first (UV-1)."""
    procs = {proc.id: proc for proc in seen.procs}
    groups = defaultdict[tuple[_Group, tuple[str, ...]], list[observed.PublicationRow]](list)
    for row in seen.publications:
        pinned_by = dict.fromkeys(pin.proc for pin in _in_the_way(row))
        if pinned_by:
            groups[_group(row, procs), tuple(pinned_by)].append(row)
    found = list[KeptVersions]()
    for (_, holders), rows in groups.items():
        pins = [pin for row in rows for pin in _in_the_way(row)]
        ran = [call for call in seen.calls if call.proc in holders and call.state in ("running", "waiting", "sent")]
        found.append(
            KeptVersions(
                holders=tuple(_name(proc_id, procs) for proc_id in holders),
                publishers=tuple(row.member or _name(row.proc, procs) for row in rows),
                versions=tuple(sorted({pin.version for pin in pins})),
                latest=max(row.latest for row in rows),
                kept=max(len({pin.version for pin in row.pins} - {row.latest}) for row in rows),
                slots=max(row.slots for row in rows),
                seconds=max(pin.seconds for pin in pins),
                is_waiting=any(row.is_waiting for row in rows),
                call=max(ran, key=lambda call: call.age, default=None),
            )
        )
    return sorted(found, key=lambda one: (not one.is_waiting, -one.seconds))


def unread_versions(seen: RunSnapshot) -> list[UnreadVersions]:
    """Return publications whose versions have been unread for long, those of one mesh as one (UV-2)."""
    procs = {proc.id: proc for proc in seen.procs}
    groups = defaultdict[_Group, list[observed.PublicationRow]](list)
    for row in seen.publications:
        groups[_group(row, procs)].append(row)
    return [
        UnreadVersions(
            publishers=tuple(row.member or _name(row.proc, procs) for row in rows),
            count=min(row.unread for row in rows),
            seconds=min(row.unread_seconds for row in rows),
            latest=max(row.latest for row in rows),
            readers=tuple(_name(reader, procs) for reader in dict.fromkeys(one for row in rows for one in row.readers)),
            nbytes=sum(row.nbytes for row in rows),
        )
        for rows in groups.values()
        if all(row.unread > row.slots and row.unread_seconds >= limits.UNREAD_SECONDS for row in rows)
    ]


def _in_the_way(row: observed.PublicationRow) -> Sequence[observed.PinRow]:
    return [
        pin for pin in row.pins if pin.seconds and pin.seconds >= limits.STALL_SECONDS and pin.version != row.latest
    ]


def _group(row: observed.PublicationRow, procs: dict[str, observed.ProcRow]) -> _Group:
    proc = procs.get(row.proc)
    return "" if proc is None else proc.mesh, row.member.partition("[")[0], row.number


def _name(proc_id: str, procs: dict[str, observed.ProcRow]) -> str:
    """Return the name of a process, or its id: a reader may be of another program."""
    proc = procs.get(proc_id)
    return f"process {proc_id}" if proc is None else proc.name
