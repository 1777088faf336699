"""Problems of a run, most urgent first; PURE.

PQ-1 Failures come first, oldest first: later ones may be follow-on failures. Failures whose members were restarted come
     last, and are left out after `limits.PAGE_RESOLVED_SECONDS`.
PQ-2 Members with the same problem share one line. The death of a process is one problem, with its actors in `parts`.
PQ-3 A merely unusual state (memory, a single rank that has not left a call) is marked: `is_sure` is False.
PQ-4 A process that does not run is one problem: that a call has not ended there only follows from it. If all that are
     in a call do not run, as in a collective, they follow from the few that left it, which come before them.
PQ-5 The strip has one line for each and at most a fifth of the window. Details open beside the tab; folded, the number
     of problems stays.
PQ-6 A member that keeps dying is one failure, although each time it was restarted.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from trimesh import limits
from trimesh._wire.observed import HOST_SILENT
from trimesh.cli.text import (
    common,
    kept_text,
    kept_title,
    one_line,
    program_lines,
    silence,
    some,
    unread_text,
    unread_title,
)
from trimesh.observe import (
    CallRow,
    Cause,
    EventRow,
    ProcRow,
    RunSnapshot,
    WaitGraph,
    kept_versions,
    unread_versions,
)
from trimesh.observe.quantities import duration, size
from trimesh.observe.run_snapshot import FINE

_RESTARTED: Final = ("Restarted", "Started")
_LOOP_DEATHS: Final = 3
_LOOP_SECONDS: Final = 600.0
"""A member keeps dying if it died so many times in so many seconds: fewer are what restarts are for."""
_GROWN: Final = 3
_GROWN_BYTES: Final = 64 << 20
_FEW: Final = 4
"""Greatest number of names of a problem. Also: at most one in so many members of a mesh can be the odd ones out."""

_WORDS: Final = {
    "stuck": "computes without a checkpoint: its Trio loop does not run",
    "stopped": "was stopped by a signal, or by a debugger",
    "dead": "has died",
    "held": "is held for a debugger",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a run.

    Attributes:
        kind: "ended", "failure", "deadlock", "dead", "silent", "stopped", "stuck", "waited for", "full", "pinned",
            "alone", "absent", "memory", "unread", "restarted".
        title: Member and problem.
        text: Details.
        names: The members, at most as many as asked for.
        parts: Actors that have died with their processes, at most four.
        count: Number of members.
        at: Source line, if known.
        chain: Chain of causes, or the cycle; each line follows from the next one.
        when: Unix time; 0.0 for now.
        is_sure: False if it is only unusual.
    """

    kind: str
    title: str
    text: str = ""
    names: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    count: int = 1
    at: str = ""
    chain: tuple[str, ...] = ()
    when: float = 0.0
    is_sure: bool = True


def problems(seen: RunSnapshot, cause: Cause | None = None, *, names_max: int = _FEW) -> list[Problem]:
    """Return the problems of a run, most urgent first.

    Args:
        seen: The run.
        cause: Its cause of death, if it has died.
        names_max: Greatest number of members that a problem names.
    """
    failures = list(_failures(seen))
    if cause is not None and cause.name:  # the death that has ended the run is one problem
        failures = [one for one in failures if cause.name not in (*one.names, *one.parts)]
    graph = WaitGraph(seen)
    found = [] if cause is None else [_ended(cause)]
    found += [one for one in failures if one.kind == "failure"]
    found += _deadlocks(graph, seen.taken_at)
    failed = {event.name for event in seen.failures}
    idle = {call.name for call in seen.calls if call.proc in {proc.id for proc in seen.procs if proc.state not in FINE}}
    odd = list(_odd(seen, idle))
    found += [one for one in odd if one.kind == "absent" and one.is_sure]  # the cause of those that do not run
    found += _hosts(seen)
    found += _procs(seen, [proc for proc in seen.procs if proc.state != "dead" or proc.name not in failed])
    found += _full(seen)
    found += _pinned(seen)
    for one in (*_waited_for(graph, seen.taken_at), *odd):
        if not idle.issuperset(one.names) or (one.kind == "absent" and not one.is_sure):  # PQ-4
            found.append(one)
    found += _grown(seen.procs)
    found += _unread(seen)
    found += (one for one in failures if one.kind != "failure")
    return [msgspec.structs.replace(one, names=one.names[:names_max]) for one in found]


def _ended(cause: Cause) -> Problem:
    stack = tuple(program_lines(cause.stack, 8))
    doing = f"in {cause.call}" * bool(cause.call)
    names = (cause.name,) if cause.name else ()
    return Problem(
        kind="ended", title=cause.text, text=doing, names=names, at=cause.at or (stack or ("",))[0], chain=stack
    )


def _failures(seen: RunSnapshot) -> Iterator[Problem]:
    last = dict[str, EventRow]()
    for event in seen.events:
        if event.is_failure or event.kind in _RESTARTED:
            last[event.name] = event
    procs = {proc.name for proc in seen.procs}
    deaths = {event.text for event in seen.failures if event.name in procs}
    loops = _loops(seen)
    yield from _loop_problems(loops, procs)
    groups = dict[tuple[str, str, str], list[EventRow]]()
    for event in seen.failures:
        if event.name in loops:
            continue
        mesh = "" if event.text in deaths else event.mesh  # an actor reports the error of its process
        groups.setdefault((event.kind, mesh, event.text), []).append(event)
    for (kind, _, text), events in groups.items():
        every = tuple(dict.fromkeys(event.name for event in events))
        names = tuple(name for name in every if name in procs) or every
        ends = [last[name] for name in every if name in last]
        restarted = bool(ends) and all(event.kind in _RESTARTED for event in ends)
        if restarted and max(event.at for event in ends) < seen.taken_at - limits.PAGE_RESOLVED_SECONDS:
            continue
        yield Problem(
            kind="restarted" if restarted else "failure",
            title=f"{some(names)} {kind.lower()}{' and was restarted' * restarted}",
            text=text,
            names=names,
            parts=tuple(name for name in every if name not in names)[:_FEW],
            count=len(names),
            chain=events[0].causes,
            when=events[0].at,
            is_sure=not restarted,
        )


def _loops(seen: RunSnapshot) -> dict[str, list[EventRow]]:
    """Return the deaths of the last minutes of each member that keeps dying (PQ-6)."""
    found = defaultdict[str, list[EventRow]](list)
    for event in seen.failures:
        if event.kind == "Died" and event.at > seen.taken_at - _LOOP_SECONDS:
            found[event.name].append(event)
    return {name: deaths for name, deaths in found.items() if len(deaths) >= _LOOP_DEATHS}


def _loop_problems(loops: dict[str, list[EventRow]], procs: set[str]) -> Iterator[Problem]:
    """Yield a failure for each process that keeps dying, with its actors in `parts`, and for each other actor."""
    for name in sorted(loops, key=lambda name: (name not in procs, name)):
        deaths = loops[name]
        texts = {event.text for event in deaths}
        homes = {other for other in procs & loops.keys() if texts & {event.text for event in loops[other]}}
        if name in procs or not homes:
            parts = [other for other in loops if other not in procs and texts & {one.text for one in loops[other]}]
            yield Problem(
                kind="failure",
                title=f"{name} died {len(deaths)} times in {duration(deaths[-1].at - deaths[0].at)}",
                text=f"last: {deaths[-1].text}",
                names=(name,),
                parts=tuple(parts[:_FEW]) if name in procs else (),
                chain=deaths[-1].causes,
                when=deaths[-1].at,
            )


def _deadlocks(graph: WaitGraph, now: float) -> Iterator[Problem]:
    for one in graph.culprits():
        if one.cycle:
            calls = [graph.calls[call_id] for call_id in one.cycle]
            lines = [f"{_called(call)} waits{f' at {call.at}' * bool(call.at)}" for call in [*calls, calls[0]]]
            left = [call.left for call in calls if call.left is not None]
            until = f"; the first deadline ends it in {duration(max(0.0, min(left)))}" if left else ""
            yield Problem(
                kind="deadlock",
                title=f"{len(calls)} calls wait for each other: " + " → ".join(_called(call) for call in calls[:_FEW]),
                text=f"{one.waiters} calls wait for them{until}",
                names=tuple(dict.fromkeys(call.name for call in calls)),
                count=len(calls),
                chain=tuple(lines),
                when=now - min(call.age for call in calls),
            )


def _called(call: CallRow) -> str:
    return f"{call.name}.{call.endpoint}"


def _hosts(seen: RunSnapshot) -> Iterator[Problem]:
    """Yield the hosts of which neither the agent nor a process answers, with their processes."""
    for host in seen.hosts:
        names = tuple(proc.name for proc in seen.procs if proc.host == host.name and proc.kernel_state == HOST_SILENT)
        if names:
            what = "process" if len(names) == 1 else "processes"
            yield Problem(
                kind="silent",
                title=f"host {host.name} silent, with {len(names)} {what}: {some(names)}",
                text="its agent is stopped, or cannot be reached",
                names=names,
                count=len(names),
            )


def _procs(seen: RunSnapshot, procs: Sequence[ProcRow]) -> Iterator[Problem]:
    groups = dict[tuple[str, str, str], list[ProcRow]]()
    for proc in procs:
        if proc.state not in FINE and proc.kernel_state != HOST_SILENT:
            line = next(iter(program_lines(proc.stack, 1)), "")
            groups.setdefault((proc.state, proc.mesh, line), []).append(proc)
    for (state, _, line), members in groups.items():
        longest = max(proc.stalled_seconds for proc in members)
        names = tuple(proc.name for proc in members)
        last = members[0].last_event if state == "dead" else ""
        words = silence(members[0]) if state == "silent" else _WORDS.get(state, "")
        if state in ("silent", "stuck"):
            words = _with_call(words, seen, members[0])
        yield Problem(
            kind=state,
            title=f"{some(names)} {state}{f' for {duration(longest)}' * bool(longest)}",
            text=last or words,
            names=names,
            count=len(names),
            at=line,
            chain=tuple(program_lines(members[0].stack, 8))[1:],
            when=seen.taken_at - longest if longest else 0.0,
        )


def _with_call(words: str, seen: RunSnapshot, proc: ProcRow) -> str:
    """Prefix a text with the oldest call that a process has begun, or may have, its caller and its age."""
    calls = [call for call in seen.calls if call.proc == proc.id and call.state in ("running", "sent")]
    if not calls:
        return words
    call = max(calls, key=lambda one: one.age)
    by = f" by {call.caller}" * bool(call.caller)
    return f"in {_called(call)}, called{by} {duration(call.age)} ago: {words}"


def _waited_for(graph: WaitGraph, now: float) -> Iterator[Problem]:
    """Yield the calls older than `limits.STALL_SECONDS` that others wait for."""
    for one in graph.culprits():
        if not one.cycle and one.waiters and one.call.age >= limits.STALL_SECONDS and one.call.state != "sending":
            call = one.call
            waiters = "1 call waits" if one.waiters == 1 else f"{one.waiters} calls wait"
            yield Problem(
                kind="waited for",
                title=f"{waiters} for {_called(call)}, {call.state} for {duration(call.age)}",
                text=f"called by {call.caller}" * bool(call.caller),
                names=(call.name,),
                at=call.at,
                chain=call.stack[1:],
                when=now - call.age,
            )


def _full(seen: RunSnapshot) -> Iterator[Problem]:
    """Yield the full mailboxes that messages wait for."""
    sending = defaultdict[str, list[CallRow]](list)
    for call in seen.calls:
        if call.state == "sending":
            sending[call.name].append(call)
    for name, calls in sending.items():
        holders = [call for call in seen.calls if call.name == name and call.state in ("running", "waiting")]
        held = f"{_called(holders[0])} holds it, for {duration(holders[0].age)}" if holders else ""
        yield Problem(
            kind="full",
            title=f"the mailbox of {name} is full: {len(calls)} messages wait for room",
            text=held,
            names=(name,),
            count=len(calls),
            at=holders[0].at if holders else "",
            chain=holders[0].stack[1:] if holders else (),
        )


def _pinned(seen: RunSnapshot) -> Iterator[Problem]:
    """Yield the readers whose pinned versions block a `publish`."""
    for one in kept_versions(seen):
        yield Problem(
            kind="pinned",
            title=kept_title(one),
            text=kept_text(one),
            names=one.holders,
            count=len(one.holders),
            at="" if one.call is None else one.call.at,
            chain=() if one.call is None else one.call.stack[1:],
            when=seen.taken_at - one.seconds,
            is_sure=one.is_waiting,
        )


def _unread(seen: RunSnapshot) -> Iterator[Problem]:
    """Yield the publishers whose versions no process has read for long."""
    for one in unread_versions(seen):
        yield Problem(
            kind="unread",
            title=unread_title(one),
            text=unread_text(one),
            names=one.publishers,
            count=len(one.publishers),
            when=seen.taken_at - one.seconds,
            is_sure=False,
        )


def _odd(seen: RunSnapshot, idle: set[str]) -> Iterator[Problem]:
    """Yield, for long calls to many members, the few members that are still in it, or the few that are not.

    Args:
        seen: The run.
        idle: Members whose processes do not run: if all that are in a call are, they wait for those that are not in it.
    """
    members = defaultdict[str, set[str]](set)
    for actor in seen.actors:
        members[actor.mesh].add(actor.name)
    groups = defaultdict[str, list[CallRow]](list)
    for call in seen.calls:
        if call.age >= limits.STALL_SECONDS and call.state in ("running", "waiting", "sent"):
            groups[call.id.rpartition("@")[0]].append(call)
    for calls in groups.values():
        oldest = max(calls, key=lambda call: call.age)
        names = tuple(dict.fromkeys(call.name for call in calls))
        others = max(call.called for call in calls) - len(names)  # members that were called, and are no longer in it
        few = max(1, (others + len(names)) // _FEW)
        text, what = f"for {duration(oldest.age)}", f"{oldest.mesh}.{oldest.endpoint}"
        if others == 1 and len(names) == 1:
            continue  # of two members, either may be the odd one
        if 0 < others <= few:
            left = sorted(members[oldest.mesh] - set(names))
            left = left if len(left) == others else []  # the members of a slice are not known
            who = some(left) if left else f"{others} of {others + len(names)} members"
            title = f"{who} is not in {what}, in which {len(names)} others are"
            names, when = tuple(left), seen.taken_at - oldest.age
            is_sure = idle.issuperset(call.name for call in calls)
            yield Problem(kind="absent", title=title, text=text, names=names, when=when, is_sure=is_sure)
        elif others > 1 and len(names) <= few:
            title = f"{what} has ended on {others} of {others + len(names)} members, but not on {some(names)}"
            yield Problem(
                kind="alone",
                title=title,
                text=text,
                names=names,
                at=oldest.at,
                chain=oldest.stack[1:],
                when=seen.taken_at - oldest.age,
                is_sure=False,
            )


def _grown(procs: Sequence[ProcRow]) -> Iterator[Problem]:
    meshes = defaultdict[str, list[ProcRow]](list)
    for proc in procs:
        if proc.mesh and proc.memory_bytes:
            meshes[proc.mesh].append(proc)
    for mesh, rows in meshes.items():
        usual = statistics.median_low(proc.memory_bytes for proc in rows)
        large = [proc for proc in rows if proc.memory_bytes > max(_GROWN * usual, usual + _GROWN_BYTES)]
        if len(rows) > 2 and large:
            worst = max(large, key=lambda proc: proc.memory_bytes)
            names = tuple(proc.name for proc in large)
            title = f"{some(names)} has {size(worst.memory_bytes)} of memory, where others of {mesh} have {size(usual)}"
            yield Problem(kind="memory", title=title, names=names, count=len(names), is_sure=False)


def summary(seen: RunSnapshot) -> str:
    """Return one line on the processes of a run."""
    return f"{len(seen.procs)} processes: {one_line(common([proc.state for proc in seen.procs]))}"
