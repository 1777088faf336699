"""Processes that do not answer, completed from their flight records: actors, memory, where the record is.

UA-1 What a process says itself, and what its owner knows of it, counts; its record, which may be older, fills in.
UA-2 At most `limits.OBSERVED_RECORDS` records are read for one snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trimesh import limits
from trimesh._wire import flight, observed
from trimesh.observe.flights import read_record
from trimesh.shape.point import place_name

_ALIVE = ("running", "stopped", "held", "exiting")


def unanswered(views: Sequence[observed.ProcView]) -> dict[str, observed.ProcRow]:
    """Return the processes that have not told their tables and keep a flight record, by id, as their owners know them.

    Args:
        views: What all processes of a run have said.
    """
    answered = {view.proc.id for view in views if view.proc.pid}  # an owner gives no more than the stack
    children = {child.id: child for view in views for child in view.children}
    found = [child for child in children.values() if child.record and child.state in _ALIVE]
    return {child.id: child for child in found if child.id not in answered}


def with_records(views: Sequence[observed.ProcView]) -> list[observed.ProcView]:
    """Return the views with what the flight records of silent processes add.

    Blocking: some milliseconds for each process that has not answered.
    """
    found = list(views)
    places = {view.proc.id: index for index, view in enumerate(found)}
    for proc_id, child in list(unanswered(views).items())[: limits.OBSERVED_RECORDS]:
        try:
            record = read_record(child.record)
        except ValueError:  # it is on another host, or gone
            continue
        seen = next((one.view for one in reversed(record.records) if isinstance(one, flight.SeenView)), None)
        at = places.get(proc_id)
        said = observed.ProcView(proc=msgspec.structs.replace(child, state="silent")) if at is None else found[at]
        memory = said.proc.memory_bytes or (0 if seen is None else seen.proc.memory_bytes)
        proc = msgspec.structs.replace(said.proc, memory_bytes=memory, record=child.record)
        whole = msgspec.structs.replace(said, proc=proc, actors=_actors(proc_id, record, seen))
        if at is None:
            found.append(whole)
        else:
            found[at] = whole
    return found


def _actors(proc_id: str, record: flight.Flight, seen: observed.ProcView | None) -> tuple[observed.ActorRow, ...]:
    """Return the actors that were there at the last look, and those called since: calls are written at once."""
    rows = {} if seen is None else {actor.name: msgspec.structs.replace(actor, running=0) for actor in seen.actors}
    for call in record.calls:
        if call.name is None or not call.name.mesh:
            continue
        name = place_name(call.name.mesh, call.name.point)
        row = rows.get(name) or observed.ActorRow(
            proc=proc_id, name=name, mesh=call.name.mesh, point=call.name.point, state="serving"
        )
        rows[name] = msgspec.structs.replace(row, running=row.running + (call.outcome == flight.RUNNING))
    return tuple(rows.values())
