"""Calls and stacks as text: what is under way, who waits for whom, what runs where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from trimesh import limits
from trimesh.cli.text import call_line, clean, duration, more, one_line
from trimesh.observe import CallRow, RunSnapshot, SharedStack, WaitGraph

_SHOWN: Final = 50


def is_stuck(call: CallRow, snapshot: RunSnapshot) -> bool:
    """Return whether a call waits, or its process does not run, for longer than a process may stall."""
    states = {proc.id: proc.state for proc in snapshot.procs}
    is_still = call.state in ("queued", "waiting", "sending", "abandoned", "cancelling")
    return call.age >= limits.STALL_SECONDS and (is_still or states.get(call.proc) not in ("running", None))


def call_lines(calls: Sequence[CallRow], *, shows_all: bool) -> Iterator[str]:
    """Yield a line on each call, oldest first; those that differ in their member only are one."""
    rows = [group for one in call_groups(calls) for group in ([[call] for call in one] if shows_all else [one])]
    for count, group in enumerate(rows):
        if count == _SHOWN and not shows_all:
            yield more(len(rows) - count, "kinds of calls")
            return
        yield f"{call_line(group[0])}{f'  and {len(group) - 1} like it' * (len(group) > 1)}  {clean(group[0].id)}"


def call_groups(calls: Sequence[CallRow]) -> Sequence[Sequence[CallRow]]:
    """Return calls that differ in their member only together, in the order of the first of each."""
    groups = dict[tuple[str, ...], list[CallRow]]()
    for call in calls:
        groups.setdefault((call.mesh, call.endpoint, call.state, call.caller, call.at), []).append(call)
    return list(groups.values())


def wait_lines(snapshot: RunSnapshot) -> Iterator[str]:
    """Yield who waits for whom as a tree, and then what all wait for in the end."""
    graph = WaitGraph(snapshot)
    for depth, call, is_known in graph.tree():
        head = "" if not depth else f"{'   ' * (depth - 1)}└─ waits for "
        yield f"{head}{call_line(call)}{'  (see above)' * is_known}"
    states = {proc.id: proc.state for proc in snapshot.procs}
    for one in graph.culprits()[:_SHOWN]:
        call = one.call
        if one.cycle:
            way = " -> ".join(f"{graph.calls[call_id].name}.{graph.calls[call_id].endpoint}" for call_id in one.cycle)
            yield f"these wait for each other: {clean(way)} -> {clean(call.name)}.{clean(call.endpoint)}"
            continue
        where = f", {one_line(call.at)}" if call.at else ""
        state = states.get(call.proc, "running")
        is_said = state == "running" or "its process is" in call.at  # where it is not known where the call runs
        process = "" if is_said else f", its process is {state}"
        yield (
            f"{clean(call.name)}.{clean(call.endpoint)} waits for no call: {call.state} for {duration(call.age)}"
            f"{process}{where}; {one.waiters} calls wait for it"
        )


def stack_lines(stacks: Sequence[SharedStack]) -> Iterator[str]:
    """Yield stacks with those who have them; equal ones once."""
    for stack in stacks:
        few = ", ".join(clean(name) for name in stack.members[:4])
        rest = f" and {len(stack.members) - 4} more" * (len(stack.members) > 4)
        yield f"{clean(stack.what)} x{len(stack.members)}: {few}{rest}"
        for line in stack.lines:
            yield f"    {one_line(line)}"
