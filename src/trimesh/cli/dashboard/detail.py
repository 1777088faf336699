"""Details of one member, for the page; PURE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from trimesh import limits
from trimesh.cli.dashboard.board import SeenRun
from trimesh.cli.text import clean
from trimesh.observe import ActorRow, CallRow, EventRow, LinkRow, ProcActivity, calls_of

_MOST = 50


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """One process and its actors.

    Attributes:
        activity: The process and its activity.
        actors: Actors in it.
        calls: Calls to it, oldest first, with their stacks.
        made: Calls that it has made.
        events: Events of it and its actors, newest first.
        links: Its ends of its connections.
        is_ours: Whether the controller owns it, so that it can be killed.
    """

    activity: ProcActivity
    actors: tuple[ActorRow, ...] = ()
    calls: tuple[CallRow, ...] = ()
    made: tuple[CallRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
    is_ours: bool = False


def detail(seen: SeenRun, name: str) -> Detail | None:
    """Return the details of a member, or None if there is no such member.

    Args:
        seen: The run.
        name: A cell of the page, `KIND:MESH:CELL`, or the name of a process or actor, as the page shows it.
    """
    proc_id = _proc_id(seen, name)
    found = next((one for one in seen.activities if one.proc.id == proc_id), None)
    if found is None:
        return None
    run = seen.snapshot
    actors = tuple(actor for actor in run.actors if actor.proc == proc_id)
    names = {found.proc.name, *(actor.name for actor in actors)}
    events = [event for event in reversed(run.events) if event.name in names]
    root = next((proc.id for proc in run.procs if not proc.parent), "")
    return Detail(
        activity=found,
        actors=actors[:_MOST],
        calls=tuple(calls_of(run, found.proc.id)[:_MOST]),
        made=tuple(call for call in run.calls if call.caller_proc == proc_id and call.proc != proc_id)[:_MOST],
        events=tuple(events[:_MOST]),
        links=tuple(link for link in run.links if link.proc == proc_id)[:_MOST],
        is_ours=found.proc.parent == root and found.proc.state != "dead",
    )


def _proc_id(seen: SeenRun, name: str) -> str:
    kind, _, rest = name.partition(":")
    mesh, _, cell = rest.rpartition(":")
    if (
        kind in ("procs", "actors")
        and cell.isascii()
        and cell.isdigit()
        and len(cell) <= len(str(limits.PAGE_CELLS_MAX))
    ):
        for one in seen.placed:
            if one.grid.kind == kind and clean(one.grid.name) == mesh and int(cell) < len(one.procs):
                return one.procs[int(cell)]
    for proc in seen.snapshot.procs:
        if clean(proc.name) == name:
            return proc.id
    return next((actor.proc for actor in seen.snapshot.actors if clean(actor.name) == name), "")


# ---- rows as JSON without invisible characters -----------------------------------------------------------------------

_NUMBERS: Final = {int, float}
_encode = msgspec.json.Encoder().encode


def page_json(value: object) -> bytes:
    """Return a value as JSON, with every invisible character in its texts and names written as an escape (DX-3)."""
    return _encode(_cleaned(msgspec.to_builtins(value)))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else clean(value)
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {_cleaned(key): _cleaned(one) for key, one in pairs}
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return items if set(map(type, items)) <= _NUMBERS else [_cleaned(one) for one in items]
    return value
