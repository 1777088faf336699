"""Overview of a run as HTML for a notebook: sums, what is wrong, its meshes, the program's curves, events; PURE.

OV-1 A process mesh is one card: a process that runs has the state of the actors on it.
OV-2 Its size has a bound: `mesh_drawing.CELLS_MAX` cells in all, and `limits.LIVE_...` for the rest.
"""

from __future__ import annotations

import html
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Final

from trimesh import limits
from trimesh._wire.observed import ActorRow, EventRow, ProcRow, SampleRow
from trimesh.errors import with_cells
from trimesh.mesh_drawing import CELLS_MAX, mesh_card
from trimesh.observe.curves import Curve, Curves
from trimesh.observe.past import Past
from trimesh.observe.quantities import duration, size
from trimesh.observe.run_snapshot import FINE, RunSnapshot, activity_between, program_line
from trimesh.observe.sums import sum_run
from trimesh.observe.waiting import WaitGraph

_TILE: Final = "border:1px solid rgba(128,128,128,.4);border-radius:4px;padding:2px 10px;min-width:72px"
_ROW: Final = "display:flex;flex-wrap:wrap;gap:6px 8px;margin:6px 0"
_SMALL: Final = "opacity:.75;font-size:11px"
_WIDE, _HIGH = 220, 44
"""Pixels of a curve."""


class Overview:
    """Overview of one run.

    Args:
        first: Name of the mesh that comes first.

    Attributes:
        curves: Curves of the program's metrics.
    """

    def __init__(self, first: str) -> None:
        self._first = first
        self._began_at = 0.0
        self._seen: RunSnapshot | None = None
        self._earlier: RunSnapshot | None = None
        self.curves = Curves()

    def load(self, past: Past) -> None:
        """Take the past of the run, before any snapshot."""
        self.curves.load(past)

    def add(self, seen: RunSnapshot, samples: Sequence[SampleRow] = ()) -> None:
        """Take the next snapshot, and what was logged since the one before it."""
        self._began_at = self._began_at or seen.taken_at
        before, self._seen = self._seen, seen
        if self._earlier is None or before is None or seen.taken_at - before.taken_at >= limits.RATE_SECONDS:
            self._earlier = before
        self.curves.add(samples)
        self.curves.look(seen)

    def html(self, *, has_ended: bool = False) -> str:
        """Return the overview of the last snapshot."""
        seen = self._seen
        if seen is None:
            return ""
        parts = [self._head(seen, has_ended=has_ended), _tiles(seen, self._earlier), *_wrong(seen)]
        parts += [*self._meshes(seen), *self._drawn_curves(), *_events(seen)]
        return f'<div style="font:13px/1.45 system-ui,sans-serif">{"".join(parts)}</div>'

    def _head(self, seen: RunSnapshot, *, has_ended: bool) -> str:
        job = seen.job
        name = f"run {job.pid}" if job is not None else "run"
        since = job.started_at if job is not None and job.started_at else self._began_at
        watched = f"as it was at {_clock(seen.taken_at)}" if has_ended else _clock(seen.taken_at)
        return (
            f"<div><b>{name}</b>, {duration(max(0.0, seen.taken_at - since))} old "
            f'<span style="{_SMALL}">{watched}</span></div>'
        )

    def _meshes(self, seen: RunSnapshot) -> Iterator[str]:
        meshes = defaultdict[str, list[ProcRow]](list)
        for proc in seen.procs:
            if proc.mesh:
                meshes[proc.mesh].append(proc)
        left = CELLS_MAX
        deadlocked = WaitGraph(seen).deadlocked()
        names = sorted(meshes, key=lambda name: (name != self._first, name))
        for number, name in enumerate(names):
            card, cells = _card(name, meshes[name], seen, deadlocked)
            left -= cells
            if left < 0 and number:
                yield f'<div style="{_SMALL}">and {len(names) - number} more meshes</div>'
                return
            yield f'<div style="margin:8px 0">{card}</div>'

    def _drawn_curves(self) -> Iterator[str]:
        drawn = [_drawn(curve) for curve in islice(self.curves.shown(), limits.LIVE_CURVES)]
        if drawn:
            shown = "".join(drawn)
            more = len(self.curves) + self.curves.left_out - len(drawn)
            rest = f'<div style="{_SMALL}">and {more} more metrics</div>' if more > 0 else ""
            yield f'<div style="{_ROW}">{shown}</div>{rest}'


# ---- sums ------------------------------------------------------------------------------------------------------------


def _tiles(seen: RunSnapshot, earlier: RunSnapshot | None) -> str:
    sums = sum_run(seen, earlier, activity_between(seen, earlier))
    tiles = [("processes", f"{len(seen.procs):,}")]
    if sums.ended is not None:
        tiles.append(("calls", f"{_number(sums.ended)}/s"))
    if sums.messages is not None and sums.nbytes is not None and sums.cpu is not None:
        tiles.append(("messages", f"{_number(sums.messages)}/s"))
        tiles.append(("bytes", f"{size(sums.nbytes)}/s"))
        tiles.append(("CPU", f"{sums.cpu:.1f} cores"))
    tiles.append(("memory", size(sums.memory)))
    if sums.gpu_memory:
        tiles.append(("GPU", f"{sums.gpu} %, {size(sums.gpu_memory)}"))
    tiles += [(word, f"{count:,}") for word, count in (("errors", sums.errors), ("deaths", sums.deaths)) if count]
    shown = "".join(
        f'<div style="{_TILE}"><div style="{_SMALL}">{word}</div><div style="font-weight:600">{text}</div></div>'
        for word, text in tiles
    )
    return f'<div style="{_ROW}">{shown}</div>'


# ---- lines -----------------------------------------------------------------------------------------------------------


def _wrong(seen: RunSnapshot) -> Iterator[str]:
    lines = list[str]()
    graph = WaitGraph(seen)
    for one in graph.culprits():
        if one.cycle:
            calls = [graph.calls[call_id] for call_id in (*one.cycle, one.cycle[0])]
            lines.append(f"wait for each other: {' → '.join(f'{call.name}.{call.endpoint}' for call in calls)}")
    for proc in seen.procs:
        if proc.state not in FINE:
            since = f" for {duration(proc.stalled_seconds)}" * bool(proc.stalled_seconds)
            line = with_cells(program_line(proc.stack))
            text = f"{proc.name} {proc.state}{since}{f': {line}' * bool(line)}"
            cause = proc.last_event.partition(" ")[2]  # without its kind
            lines.append(cause if proc.state == "dead" and proc.name in cause else text)
    yield from _list(lines, '<b style="color:#e0405a">✗</b> ')


def _events(seen: RunSnapshot) -> Iterator[str]:
    told = dict[str, EventRow]()  # a death is several events: of the process and its actors, and why they are restarted
    for event in reversed(seen.events):
        if event.kind != "Started":
            told[event.text or f"{event.name} {event.kind}"] = event
    newest = sorted(told.values(), key=lambda event: -event.at)[: limits.LIVE_LINES]
    yield from _list([f"{_clock(event.at)} {_happened(event)}" for event in newest], "")


def _happened(event: EventRow) -> str:
    if event.name in event.text:
        return event.text
    return f"{event.name} {event.kind.lower()}{f': {event.text}' * bool(event.text)}"


def _list(lines: Sequence[str], sign: str) -> Iterator[str]:
    shown = [f"<div>{sign}{_cut(line)}</div>" for line in lines[: limits.LIVE_LINES]]
    if len(lines) > len(shown):
        shown.append(f'<div style="{_SMALL}">and {len(lines) - len(shown)} more</div>')
    if shown:
        yield f'<div style="margin:6px 0">{"".join(shown)}</div>'


def _cut(line: str) -> str:
    flat = " ".join(line.split())
    return html.escape(flat if len(flat) <= 200 else f"{flat[:199]}…")


# ---- meshes ----------------------------------------------------------------------------------------------------------


def _card(name: str, procs: Sequence[ProcRow], seen: RunSnapshot, deadlocked: Collection[str]) -> tuple[str, int]:
    """Return the drawing of a mesh and the number of its cells."""
    extent = {label: max(proc.point.get(label, 0) for proc in procs) + 1 for label in procs[0].point}
    members = dict[int, ProcRow]()
    for proc in sorted(procs, key=lambda proc: proc.incarnation):
        rank = 0
        for label, count in extent.items():
            rank = rank * count + proc.point.get(label, 0)
        members[rank] = proc
    actors = defaultdict[str, list[ActorRow]](list)
    for actor in seen.actors:
        actors[actor.proc].append(actor)
    oldest = {call.proc: call for call in reversed(seen.calls) if call.state in ("running", "waiting", "sent")}
    states = [""] * math.prod(extent.values())
    titles = [""] * len(states)
    for rank, proc in members.items():
        states[rank] = _state(proc, actors.get(proc.id, ()), deadlocked)
        call = oldest.get(proc.id)
        doing = "" if call is None else f", {call.endpoint} for {duration(call.age)}"
        memory = f", {size(proc.memory_bytes)}" * bool(proc.memory_bytes)
        titles[rank] = f"{proc.name}: {states[rank]}{doing}{memory}"
    return mesh_card(f"{name}{extent or ''}", extent, states, titles), len(states)


def _state(proc: ProcRow, actors: Sequence[ActorRow], deadlocked: Collection[str]) -> str:
    if proc.state != "running":
        return proc.state
    if any(actor.name in deadlocked for actor in actors):
        return "deadlocked"
    serving = [actor for actor in actors if actor.state == "serving"]
    if not serving:
        return "running"
    if any(actor.queued for actor in serving):
        return "calls wait"
    return "busy" if any(actor.running for actor in serving) else "idle"


# ---- curves ----------------------------------------------------------------------------------------------------------


def _drawn(curve: Curve) -> str:
    first, last = curve.x[0], curve.x[-1]
    low, high = min(curve.low), max(curve.high)

    def place(x: int, value: float) -> str:
        right = 1 + (_WIDE - 2) * (x - first) / (last - first) if last > first else _WIDE - 2
        down = 2 + (_HIGH - 4) * (1 - (value - low) / (high - low)) if high > low else _HIGH / 2
        return f"{right:.1f},{down:.1f}"

    line = list(map(place, curve.x, curve.mean))
    band = [*map(place, curve.x, curve.high), *map(place, reversed(curve.x), reversed(curve.low))]
    right, down = line[-1].split(",")
    name = f"{curve.metric}/s" if curve.kind == "counter" else curve.metric
    extent = f"steps {first:,} to {last:,}" if curve.unit == "step" else f"in {duration(last - first)}"
    return (
        f'<div style="{_TILE}"><div style="{_SMALL}">{_cut(name)} <b>{_number(curve.mean[-1])}</b></div>'
        f'<svg width="{_WIDE}" height="{_HIGH}" viewBox="0 0 {_WIDE} {_HIGH}" role="img">'
        f'<polygon points="{" ".join(band)}" fill="#4f8fc4" fill-opacity=".25"/>'
        f'<polyline points="{" ".join(line)}" fill="none" stroke="#4f8fc4" stroke-width="1.5"/>'
        f'<circle cx="{right}" cy="{down}" r="2.5" fill="#4f8fc4"/></svg>'
        f'<div style="{_SMALL}">{_number(low)} to {_number(high)}, {extent}, {_cut(curve.mesh)}</div></div>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
