"""Stacks of a snapshot: of main threads that do not run their loop, and of calls; equal ones are one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trimesh.observe.merging import RunSnapshot


class SharedStack(msgspec.Struct, frozen=True):
    """One stack, and who has it.

    Attributes:
        what: "main thread", or the endpoint that runs.
        lines: Innermost first.
        members: Names of the members, in order.
    """

    what: str
    lines: tuple[str, ...]
    members: tuple[str, ...]


def shared_stacks(snapshot: RunSnapshot, name: str = "") -> Sequence[SharedStack]:
    """Return the stacks of a run, those that the fewest members have first: who is alone differs from the rest.

    Args:
        snapshot: The run.
        name: Of one process or actor; empty for all.
    """
    names = {proc.id: proc.name for proc in snapshot.procs}
    found = dict[tuple[str, tuple[str, ...]], list[str]]()
    for proc in snapshot.procs:
        if proc.stack and name in ("", proc.name):
            lines = tuple(line.strip() for line in proc.stack.splitlines()[1:])
            found.setdefault(("main thread", lines), []).append(proc.name)
    for call in snapshot.calls:
        if call.stack and name in ("", call.name, names.get(call.proc)):
            found.setdefault((f"{call.mesh}.{call.endpoint}", call.stack), []).append(call.name)
    rows = [SharedStack(what, lines, tuple(members)) for (what, lines), members in found.items()]
    return sorted(rows, key=lambda row: (row.what != "main thread", len(row.members)))
