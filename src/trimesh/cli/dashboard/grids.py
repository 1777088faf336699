"""Meshes as the page draws them: one letter a rank, in the order of the extent; PURE.

GD-1 A process is a letter by its state. An actor is that of its process, unless that is well; then it says what the
     actor does.
GD-2 A mesh whose points leave too much out to be drawn as its extent is a row of its members.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from trimesh import limits
from trimesh.cli.text import FINE
from trimesh.observe import ActorRow, CallRow, ProcActivity, ProcRow

PROC_LETTERS: Final = {
    "running": "r",
    "starting": "s",
    "exiting": "e",
    "stuck": "S",
    "silent": "L",
    "stopped": "T",
    "dead": "D",
}
"""Capitals need a look."""

IDLE, BUSY, WAITED_FOR, ENDED, MISSING = "i", "b", "q", "x", "."

_SPARSE: Final = 4
_MIB: Final = 1 << 20

_Row = TypeVar("_Row", ProcRow, ActorRow)


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh.

    Attributes:
        name: Of the mesh.
        kind: "procs" or "actors".
        cls: Of the actors.
        labels, sizes: Its extent, as far as its members show it.
        letters: One a cell, in order; "." where there is no member.
        depth: Calls in mailboxes, by cell; empty if all are 0, here and below.
        memory: MiB, by cell.
        rate: Messages a second, by cell.
        age: Seconds of the oldest call under way, by cell.
        counts: Cells by letter.
    """

    name: str
    kind: str
    cls: str = ""
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    letters: str = ""
    depth: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    rate: tuple[int, ...] = ()
    age: tuple[int, ...] = ()
    counts: dict[str, int] = {}


class Placed(msgspec.Struct, frozen=True):
    """A mesh as drawn, and who is in its cells.

    Attributes:
        grid: As drawn.
        procs: Id of the process of each cell; "" for none.
        names: Of the member of each cell.
    """

    grid: Grid
    procs: tuple[str, ...]
    names: tuple[str, ...]


def grids(
    activities: Sequence[ProcActivity], actors: Sequence[ActorRow], calls: Sequence[CallRow]
) -> tuple[list[Placed], int]:
    """Return the meshes of a run, those with failures first, and how many more there are."""
    doing = {one.proc.id: one for one in activities}
    proc_meshes, actor_meshes = defaultdict[str, list[ProcRow]](list), defaultdict[str, list[ActorRow]](list)
    for one in activities:
        proc_meshes[one.proc.mesh or one.proc.name].append(one.proc)
    for actor in actors:
        actor_meshes[actor.mesh].append(actor)
    ages = defaultdict[str, float](float)
    for call in calls:
        ages[call.name] = max(ages[call.name], call.age)
    found = [_proc_grid(name, rows, doing) for name, rows in proc_meshes.items()]
    found += [_actor_grid(name, rows, doing, ages) for name, rows in actor_meshes.items()]
    found.sort(key=lambda one: (_failed(one.grid) == 0, one.grid.kind != "procs", -len(one.names), one.grid.name))
    return found[: limits.PAGE_MESHES_MAX], max(0, len(found) - limits.PAGE_MESHES_MAX)


def _failed(grid: Grid) -> int:
    return sum(count for letter, count in grid.counts.items() if letter.isupper())


def _proc_grid(name: str, rows: Sequence[ProcRow], doing: dict[str, ProcActivity]) -> Placed:
    labels, sizes, cells = _arranged(rows)
    found = [None if row is None else doing[row.id] for row in cells]
    letters = "".join(MISSING if one is None else PROC_LETTERS.get(one.proc.state, "r") for one in found)
    grid = Grid(
        name=name,
        kind="procs",
        labels=labels,
        sizes=sizes,
        letters=letters,
        depth=_numbers([0 if one is None else one.queued for one in found]),
        memory=_numbers([0 if one is None else one.proc.memory_bytes // _MIB for one in found]),
        rate=_numbers([0 if one is None else round(one.received + one.sent) for one in found]),
        age=_numbers([0 if one is None else int(one.oldest) for one in found]),
        counts=dict(Counter(letters)),
    )
    return _placed(
        grid, ["" if row is None else row.id for row in cells], ["" if row is None else row.name for row in cells]
    )


def _actor_grid(name: str, rows: Sequence[ActorRow], doing: dict[str, ProcActivity], ages: dict[str, float]) -> Placed:
    labels, sizes, cells = _arranged(rows)
    letters = "".join(MISSING if row is None else _actor_letter(row, doing.get(row.proc)) for row in cells)
    grid = Grid(
        name=name,
        kind="actors",
        cls=rows[0].cls,
        labels=labels,
        sizes=sizes,
        letters=letters,
        depth=_numbers([0 if row is None else row.queued for row in cells]),
        age=_numbers([0 if row is None else int(ages.get(row.name, 0.0)) for row in cells]),
        counts=dict(Counter(letters)),
    )
    return _placed(
        grid, ["" if row is None else row.proc for row in cells], ["" if row is None else row.name for row in cells]
    )


def _actor_letter(actor: ActorRow, doing: ProcActivity | None) -> str:
    if doing is not None and doing.proc.state not in FINE:
        return PROC_LETTERS.get(doing.proc.state, "r")
    if actor.state != "serving":
        return "s" if actor.state == "starting" else ENDED
    return WAITED_FOR if actor.queued else BUSY if actor.running else IDLE


def _numbers(values: list[int]) -> tuple[int, ...]:
    return tuple(values) if any(values) else ()


def _placed(grid: Grid, procs: Sequence[str], names: Sequence[str]) -> Placed:
    return Placed(grid, tuple(procs), tuple(names))


def _arranged(rows: Sequence[_Row]) -> tuple[tuple[str, ...], tuple[int, ...], list[_Row | None]]:
    """Return labels, sizes and the newest member of each cell."""
    newest = dict[tuple[tuple[str, int], ...], _Row]()
    for row in rows:
        key = tuple(row.point.items())
        if key not in newest or newest[key].incarnation <= row.incarnation:
            newest[key] = row
    labels = tuple(rows[0].point)
    is_regular = all(tuple(row.point) == labels and min(row.point.values(), default=0) >= 0 for row in newest.values())
    sizes = tuple(max(row.point[label] for row in newest.values()) + 1 for label in labels) if is_regular else ()
    count = math.prod(sizes)
    if not is_regular or count > limits.PAGE_CELLS_MAX or count > _SPARSE * len(newest) + 64:  # GD-2
        members = list[_Row | None](newest.values())[: limits.PAGE_CELLS_MAX]
        return ("member",), (len(members),), members
    cells = list[_Row | None]([None]) * count
    for row in newest.values():
        at = 0
        for label, size in zip(labels, sizes, strict=True):
            at = at * size + row.point[label]
        cells[at] = row
    return labels, sizes, cells
