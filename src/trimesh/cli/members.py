"""Parser for members named on the command line, such as `procs[gpus=2]`, and errors of arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import attrs

from trimesh.cli.text import one_line
from trimesh.observe import ActorRow, ProcRow, RunSnapshot

ABSENT: Final = 1
MALFORMED: Final = 2

_NAME: Final = re.compile(r"(?P<mesh>[^\[\]{}=]+?)\s*(?:\[(?P<inside>[^\[\]]+)\])?")
_COORDINATE: Final = re.compile(r"\s*([^\W\d]\w*)\s*=\s*([0-9]+)\s*")
_SHOWN_OF_ONE: Final = 8
_SHOWN_OF_EACH: Final = 3


class ArgumentRefused(Exception):
    """An argument of a command that cannot be used.

    Attributes:
        code: Exit code: `ABSENT` if what it names does not exist, `MALFORMED` if it is wrong usage.
    """

    def __init__(self, text: str, code: int = MALFORMED) -> None:
        super().__init__(text)
        self.code = code


def nearest(text: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the name that is most like a text; empty if none is like it."""
    found = get_close_matches(text, list(names), n=1)
    return f"; did you mean {one_line(found[0])}?" if found else ""


def run_of(run: str, pid: int | None) -> tuple[str, int | None]:
    """Return the folder and the pid of a run that is named by its folder, or by its number, which is its pid."""
    is_number = run.isascii() and run.isdecimal() and not Path(run).exists()
    return ("", int(run)) if is_number else (run, pid)


def seconds_of(option: str, value: float) -> float:
    """Return a number of seconds that an option has.

    Raises:
        ArgumentRefused: It is negative, or not a finite number.
    """
    if not 0 <= value < math.inf:
        raise ArgumentRefused(f"{option} must be a finite number of seconds >= 0, got {value}")
    return value


@attrs.frozen
class NamedMember:
    """A member, and an endpoint if the argument has one.

    Attributes:
        name: Name of the member, as `ps` shows it.
        endpoint: Name of the endpoint; empty without one.
    """

    name: str
    endpoint: str = ""


def parse(text: str) -> tuple[str, dict[str, int]] | None:
    """Return the mesh and the coordinates in a member's name; None for a text that is no such name.

    Example:
        >>> parse("procs[hosts=1,gpus=2]")
        ('procs', {'hosts': 1, 'gpus': 2})
        >>> parse("procs"), parse("procs[2]")
        (('procs', {}), None)
    """
    found = _NAME.fullmatch(text.strip())
    if found is None:
        return None
    point = parse_coordinates(found["inside"]) if found["inside"] else {}
    return None if point is None else (found["mesh"], point)


def parse_coordinates(text: str) -> dict[str, int] | None:
    """Return coordinates from `hosts=1,gpus=2`; None for another text, and for a label that comes twice."""
    parts = [_COORDINATE.fullmatch(part) for part in text.split(",")]
    point = {part[1]: int(part[2]) for part in parts if part is not None}
    return point if len(point) == len(parts) else None


def choose(text: str, rows: Sequence[ProcRow | ActorRow], *, endpoints: bool = False) -> NamedMember:
    """Return the process or actor that an argument names.

    Args:
        text: The argument.
        rows: The processes and actors that exist.
        endpoints: Accept `procs[gpus=2].step`, too.

    Raises:
        ArgumentRefused: The argument names none of them.
    """
    found = _find(text, rows)
    head, dot, endpoint = text.rpartition(".")
    if found is None and endpoints and dot and endpoint.isidentifier():
        found = _find(head, rows)
        if found is not None:
            return NamedMember(found, endpoint)
    if found is not None:
        return NamedMember(found)
    parsed = parse(text)
    if parsed is None:
        rule = "a member must be named by its mesh and coordinates, such as procs[gpus=2]"
        raise ArgumentRefused(
            f"{rule}, got {one_line(repr(text))}{nearest(text, {row.name for row in rows})}\n{existing(rows)}"
        )
    meant = _nearest_member(text, rows, endpoints=endpoints)
    raise ArgumentRefused(f"no process or actor is named {one_line(text)}{meant}\n{existing(rows, parsed[0])}", ABSENT)


def _nearest_member(text: str, rows: Sequence[ProcRow | ActorRow], *, endpoints: bool) -> str:
    """Return "; did you mean ...?" with the member whose mesh and coordinates are nearest; empty if none is near."""
    meshes = {row.mesh or row.name for row in rows}
    parsed, end = parse(text), ""
    if endpoints and (parsed is None or parsed[0] not in meshes) and "." in text:
        head, _, endpoint = text.rpartition(".")
        parsed, end = parse(head), f".{endpoint}"
    if parsed is None:
        return ""
    found = get_close_matches(parsed[0], meshes, n=1)
    if not found:
        return ""
    members = [row for row in rows if (row.mesh or row.name) == found[0]]
    best = min(members, key=lambda row: _distance(parsed[1], row.point))
    return f"; did you mean {one_line(best.name + end)}?"


def _distance(wanted: dict[str, int], point: dict[str, int]) -> tuple[int, int]:
    """Return how far a point is from the wanted one: labels that match none of its own, then steps along the others."""
    missing, steps = len(point), 0
    for label, index in wanted.items():
        found = get_close_matches(label, point, n=1, cutoff=0.5)
        missing -= bool(found)
        steps += abs(index - point[found[0]]) if found else 0
    return missing, steps


def choose_processes(at: str, snapshot: RunSnapshot, named: Iterable[str]) -> str:
    """Return the name of the process of a member; for coordinates, return them unchanged if a process has them.

    Args:
        at: A member, or coordinates: `gpus=2`.
        snapshot: The run.
        named: Further names of processes, which may have ended.

    Raises:
        ArgumentRefused: No process has that name, or these coordinates.
    """
    point = parse_coordinates(at)
    if point is not None:
        if not any(has_coordinates(name, point) for name in {*named, *(proc.name for proc in snapshot.procs)}):
            best = min(snapshot.procs, key=lambda proc: (not proc.point, *_distance(point, proc.point)), default=None)
            meant = "" if best is None or not best.point else f"; did you mean {one_line(best.name)}?"
            raise ArgumentRefused(
                f"no process has the coordinates {one_line(at)}{meant}\n{existing(snapshot.procs)}", ABSENT
            )
        return at
    if at in named:
        return at
    chosen = choose(at, [*snapshot.procs, *snapshot.actors], endpoints=True)
    names = {proc.id: proc.name for proc in snapshot.procs}
    homes = [names.get(actor.proc, "") for actor in snapshot.actors if actor.name == chosen.name]
    return chosen.name if chosen.name in names.values() or not homes else homes[0]


def has_coordinates(name: str, point: dict[str, int]) -> bool:
    """Return whether the name of a member contains all coordinates of `point`."""
    parsed = parse(name)
    return parsed is not None and point.items() <= parsed[1].items()


def existing(rows: Sequence[ProcRow | ActorRow], mesh: str = "") -> str:
    """Return a line that lists members: those of `mesh`, or some of each mesh if there is no such mesh."""
    groups = dict[str, dict[str, None]]()  # a dict is an ordered set of names
    for row in rows:
        groups.setdefault(row.mesh or row.name, {})[row.name] = None
    if mesh in groups:
        return one_line(f"{mesh} has {_listed([*groups[mesh]], _SHOWN_OF_ONE)}{_MORE}", 400)
    return one_line(f"there are {', '.join(_listed([*one], _SHOWN_OF_EACH) for one in groups.values())}{_MORE}", 400)


_MORE: Final = "; trimesh ps --all shows them"


def _find(text: str, rows: Sequence[ProcRow | ActorRow]) -> str | None:
    parsed = parse(text)
    named = [row.name for row in rows if row.name == text]
    named += [row.name for row in rows if parsed is not None and (row.mesh or row.name, row.point) == parsed]
    return named[0] if named else None


def _listed(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + f" and {len(names) - count} more" * (len(names) > count)
