"""Board: the page's view of a run at one moment, computed from two snapshots; PURE.

GD-1 A process is a letter by its state. An actor has the letter of its process, unless the process is well; then the
     letter shows the actor's activity. One whose calls wait for each other is marked, if its process is well.
GD-2 A mesh with too few of the points of its extent is drawn as a row of its members.
GD-3 An actor mesh is drawn on the card of the process mesh that has most of its members.
GD-4 A process that does not answer keeps the memory and the actors that were last seen, a host its figures.
GD-5 The last two dimensions of a mesh are its rows and columns; the others are grids side by side. Rows that do not fit
     go on below, at a multiple of 8.

OP-1 The page begins with sums over the run, its first curves, all meshes and the newest events.

WB-1 Calls to members of one mesh that have the same endpoint, state, caller and line are one box, unless they wait for
     themselves: those are a box each.
WB-2 A box is placed to the right of all that wait for it. An arrow that would lead back belongs to a cycle.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from trimesh import limits
from trimesh.cli.dashboard.problems import Problem, problems
from trimesh.cli.text import call_groups
from trimesh.observe import (
    ActorRow,
    CallRow,
    Cause,
    EventRow,
    GrantRow,
    HostRow,
    JobRow,
    LinkRow,
    ProcActivity,
    ProcRow,
    PublicationRow,
    RunSnapshot,
    WaitGraph,
    activity_between,
)
from trimesh.observe.run_snapshot import FINE, HostActivity, hosts_between
from trimesh.observe.sums import RunSums, sum_run

PROC_LETTERS: Final = {
    "running": "r",
    "starting": "s",
    "exiting": "e",
    "stuck": "S",
    "silent": "L",
    "stopped": "T",
    "dead": "D",
}
"""Letters of process states; capitals are problems."""

IDLE, BUSY, WAITED_FOR, ENDED, MISSING = "i", "b", "q", "x", "."
DEADLOCKED: Final = "W"

_SPARSE: Final = 4
_MIB: Final = 1 << 20

_Row = TypeVar("_Row", ProcRow, ActorRow)
_Number = TypeVar("_Number", int, float)


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh.

    Attributes:
        name: Name of the mesh.
        kind: "procs" or "actors".
        on: Name of the process mesh of an actor mesh.
        cls: Class of the actors.
        labels, sizes: Its extent, as far as its members show it.
        letters: One letter per cell, in order; "." for a cell without a member.
        depth: Calls in mailboxes, by cell; empty if all are 0, as the next six.
        memory: Memory in MiB, by cell.
        cpu: Processor use in percent of one core, by cell.
        gpu: Use of its busiest GPU in percent, by cell.
        rate: Messages per second, by cell.
        age: Age of the oldest call under way in seconds, by cell.
        oldest: Endpoint of that call, by cell, of a mesh of at most `limits.PAGE_PANELS_MAX` cells.
        counts: Number of cells by letter.
    """

    name: str
    kind: str
    on: str = ""
    cls: str = ""
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    letters: str = ""
    depth: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    cpu: tuple[int, ...] = ()
    gpu: tuple[int, ...] = ()
    rate: tuple[int, ...] = ()
    age: tuple[float, ...] = ()
    oldest: tuple[str, ...] = ()
    counts: dict[str, int] = {}


class Placed(msgspec.Struct, frozen=True):
    """A mesh as drawn, and the members in its cells.

    Attributes:
        grid: The mesh as drawn.
        procs: Id of the process of each cell; "" for none.
        names: Name of the member of each cell; "" for none.
    """

    grid: Grid
    procs: tuple[str, ...]
    names: tuple[str, ...]


def grids(
    activities: Sequence[ProcActivity],
    actors: Sequence[ActorRow],
    calls: Sequence[CallRow],
    deadlocked: Collection[str] = (),
) -> tuple[list[Placed], int]:
    """Return the meshes of a run, those with failures first, and the number of omitted ones.

    Args:
        activities, actors, calls: Rows of the run.
        deadlocked: Names of actors whose calls wait for each other.
    """
    doing = {one.proc.id: one for one in activities}
    proc_meshes, actor_meshes = defaultdict[str, list[ProcRow]](list), defaultdict[str, list[ActorRow]](list)
    for one in activities:
        proc_meshes[one.proc.mesh or one.proc.name].append(one.proc)
    for actor in actors:
        actor_meshes[actor.mesh].append(actor)
    oldest = dict[str, CallRow]()
    for call in calls:
        for key in (call.name, call.proc):
            if key not in oldest or oldest[key].age < call.age:
                oldest[key] = call
    found = [_proc_grid(name, rows, doing, oldest, deadlocked) for name, rows in proc_meshes.items()]
    found += [_actor_grid(name, rows, doing, oldest, deadlocked) for name, rows in actor_meshes.items()]
    found.sort(key=lambda one: (_failed(one.grid) == 0, one.grid.kind != "procs", -len(one.names), one.grid.name))
    return found[: limits.PAGE_MESHES_MAX], max(0, len(found) - limits.PAGE_MESHES_MAX)


def _failed(grid: Grid) -> int:
    return sum(count for letter, count in grid.counts.items() if letter.isupper())


def _proc_grid(
    name: str,
    rows: Sequence[ProcRow],
    doing: Mapping[str, ProcActivity],
    oldest: Mapping[str, CallRow],
    deadlocked: Collection[str],
) -> Placed:
    labels, sizes, cells = _arranged(rows)
    found = [None if row is None else doing[row.id] for row in cells]
    letters = "".join(MISSING if one is None else _proc_letter(one, deadlocked) for one in found)
    grid = Grid(
        name=name,
        kind="procs",
        labels=labels,
        sizes=sizes,
        letters=letters,
        depth=_numbers([0 if one is None else one.queued for one in found]),
        memory=_numbers([0 if one is None else one.proc.memory_bytes // _MIB for one in found]),
        cpu=_numbers([0 if one is None else round(100 * (one.cpu or 0.0)) for one in found]),
        gpu=_numbers([0 if one is None else one.proc.gpu_percent for one in found]),
        rate=_numbers([0 if one is None else round(one.received + one.sent) for one in found]),
        age=_numbers([0.0 if one is None else round(one.oldest, 1) for one in found]),
        oldest=_endpoints(oldest, ["" if one is None else one.proc.id for one in found]),
        counts=dict(Counter(letters)),
    )
    return _placed(
        grid, ["" if row is None else row.id for row in cells], ["" if row is None else row.name for row in cells]
    )


def _actor_grid(
    name: str,
    rows: Sequence[ActorRow],
    doing: Mapping[str, ProcActivity],
    oldest: Mapping[str, CallRow],
    deadlocked: Collection[str],
) -> Placed:
    labels, sizes, cells = _arranged(rows)
    letters = "".join(MISSING if row is None else _actor_letter(row, doing.get(row.proc), deadlocked) for row in cells)
    homes = Counter(doing[row.proc].proc.mesh or doing[row.proc].proc.name for row in rows if row.proc in doing)
    calls = [None if row is None else oldest.get(row.name) for row in cells]
    grid = Grid(
        name=name,
        kind="actors",
        on=homes.most_common(1)[0][0] if homes else "",
        cls=rows[0].cls,
        labels=labels,
        sizes=sizes,
        letters=letters,
        depth=_numbers([0 if row is None else row.queued for row in cells]),
        age=_numbers([0.0 if call is None else round(call.age, 1) for call in calls]),
        oldest=_endpoints(oldest, ["" if row is None else row.name for row in cells]),
        counts=dict(Counter(letters)),
    )
    return _placed(
        grid, ["" if row is None else row.proc for row in cells], ["" if row is None else row.name for row in cells]
    )


def _endpoints(oldest: Mapping[str, CallRow], keys: Sequence[str]) -> tuple[str, ...]:
    if len(keys) > limits.PAGE_PANELS_MAX or not any(key in oldest for key in keys):
        return ()
    return tuple(oldest[key].endpoint if key in oldest else "" for key in keys)


def _proc_letter(doing: ProcActivity, deadlocked: Collection[str]) -> str:
    if doing.proc.state in FINE and any(name in deadlocked for name in doing.actors):
        return DEADLOCKED
    return PROC_LETTERS.get(doing.proc.state, "r")


def _actor_letter(actor: ActorRow, doing: ProcActivity | None, deadlocked: Collection[str]) -> str:
    if doing is not None and doing.proc.state not in FINE:
        return PROC_LETTERS.get(doing.proc.state, "r")
    if actor.name in deadlocked:
        return DEADLOCKED
    if actor.state != "serving":
        return "s" if actor.state == "starting" else ENDED
    return WAITED_FOR if actor.queued else BUSY if actor.running else IDLE


def _numbers(values: list[_Number]) -> tuple[_Number, ...]:
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


# ---- wait graph as boxes and arrows ----------------------------------------------------------------------------------


class WaitBox(msgspec.Struct, frozen=True, kw_only=True):
    """One call, or several that differ only in their member.

    Attributes:
        name: Name of the first member.
        call: Id of the first call.
        endpoint, state, at: Endpoint, state and source line, equal for all calls.
        count: Number of calls.
        age: Age of the oldest call in seconds.
        left: Seconds to the first deadline; None without one.
        column: Column of the drawing; 0 if no call waits for it.
        waiters: Number of calls that wait for it, directly or not.
        is_culprit: Whether it waits for no call, while others wait for it.
        in_circle: Whether it is part of a cycle.
    """

    name: str
    call: str
    endpoint: str
    state: str
    at: str = ""
    count: int = 1
    age: float = 0.0
    left: float | None = None
    column: int = 0
    waiters: int = 0
    is_culprit: bool = False
    in_circle: bool = False


class WaitPicture(msgspec.Struct, frozen=True, kw_only=True):
    """Drawing of the wait graph.

    Attributes:
        boxes: Calls that wait or are waited for.
        arrows: Source box, target box, and number of waiting calls.
        left_out: Boxes beyond `limits.PAGE_NODES_MAX`.
    """

    boxes: tuple[WaitBox, ...] = ()
    arrows: tuple[tuple[int, int, int], ...] = ()
    left_out: int = 0


def wait_picture(seen: RunSnapshot) -> WaitPicture:
    graph = WaitGraph(seen)
    culprits = graph.culprits()
    in_circle = {call_id for one in culprits for call_id in one.cycle}
    waiters = {one.call.id: one.waiters for one in culprits}
    taking_part = set(graph.waits_for) | {other for others in graph.waits_for.values() for other in others}
    groups = dict[tuple[str, ...], list[CallRow]]()
    for call_id in [one for one in graph.calls if one in taking_part]:
        call = graph.calls[call_id]
        alone = call_id if call_id in in_circle else ""
        groups.setdefault((call.mesh, call.endpoint, call.state, call.caller, call.at, alone), []).append(call)
    ranked = sorted(groups.values(), key=lambda calls: -max(waiters.get(call.id, 0) for call in calls))
    ordered = sorted(ranked, key=lambda calls: calls[0].id not in in_circle)
    shown = ordered[: limits.PAGE_NODES_MAX]
    place = {call.id: number for number, calls in enumerate(shown) for call in calls}
    arrows = Counter(
        (place[call_id], place[other])
        for call_id, others in graph.waits_for.items()
        for other in others
        if call_id in place and other in place
    )
    columns = _columns(len(shown), arrows)
    boxes = [_box(calls, columns[number], in_circle, waiters) for number, calls in enumerate(shown)]
    return WaitPicture(
        boxes=tuple(boxes),
        arrows=tuple((start, end, count) for (start, end), count in arrows.items()),
        left_out=len(ordered) - len(shown),
    )


def _box(calls: list[CallRow], column: int, in_circle: set[str], waiters: dict[str, int]) -> WaitBox:
    first = calls[0]
    left = [call.left for call in calls if call.left is not None]
    most = max(waiters.get(call.id, 0) for call in calls)
    return WaitBox(
        name=first.name,
        call=first.id,
        endpoint=first.endpoint,
        state=first.state,
        at=first.at,
        count=len(calls),
        age=max(call.age for call in calls),
        left=min(left) if left else None,
        column=column,
        waiters=most,
        is_culprit=most > 0 and first.id not in in_circle,
        in_circle=first.id in in_circle,
    )


def _columns(count: int, arrows: Counter[tuple[int, int]]) -> list[int]:
    """Return the column of each box, right of all that wait for it; each box is visited once (WB-2)."""
    after = [list[int]() for _ in range(count)]
    awaited = [0] * count
    for start, end in arrows:
        if start != end:
            after[start].append(end)
            awaited[end] += 1
    columns = [0] * count
    todo = [box for box in range(count) if not awaited[box]]
    done = set[int]()
    while len(done) < count:
        if not todo:  # only cycles are left: break one at its first box
            todo = [next(box for box in range(count) if box not in done)]
        box = todo.pop()
        if box in done:
            continue
        done.add(box)
        for other in after[box]:
            if other not in done:
                columns[other] = max(columns[other], columns[box] + 1)
                awaited[other] -= 1
                if awaited[other] <= 0:
                    todo.append(other)
    return columns


# ---- board -----------------------------------------------------------------------------------------------------------

_LARGEST: Final = 40


class CallGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that differ only in their member.

    Attributes:
        first: The oldest of them, without its stack.
        count: Number of calls.
        left: Seconds to the first deadline; None without one.
    """

    first: CallRow
    count: int
    left: float | None = None


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a connection.

    Attributes:
        proc, peer: Names of its ends.
        link: Counters of the connection.
        nbytes: Bytes per second, both directions together.
    """

    proc: str
    peer: str
    link: LinkRow
    nbytes: float = 0.0


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """The page's view of a run at one moment.

    Attributes:
        version: Grows when a field is removed or changes its meaning.
        number: Number of the board, increasing.
        at: Unix time of the snapshot.
        state: "live"; "silent" while the run does not answer, "ended" after its end: then the rest is the last state.
        said: Why the state is not "live".
        by: As `RunSnapshot.by`.
        job: The run.
        procs: Number of processes by state.
        sums: Sums over the run.
        problems: Problems, most urgent first.
        meshes: Meshes, those with failures first.
        calls: Calls under way, oldest first.
        waits: The wait graph.
        links, grants, publications, events: As those of `RunSnapshot`; events newest first.
        host_count: Number of hosts.
        curves: Number of curves of the program's metrics.
        left_out: Number of rows not shown, by table.
    """

    version: int = 1
    number: int = 0
    at: float
    state: str = "live"
    said: str = ""
    by: str = "loop"
    job: JobRow | None = None
    procs: dict[str, int] = {}
    sums: RunSums
    problems: tuple[Problem, ...] = ()
    meshes: tuple[Grid, ...] = ()
    calls: tuple[CallGroup, ...] = ()
    waits: WaitPicture = WaitPicture()
    links: tuple[LinkUse, ...] = ()
    grants: tuple[GrantRow, ...] = ()
    publications: tuple[PublicationRow, ...] = ()
    host_count: int = 0
    events: tuple[EventRow, ...] = ()
    curves: int = 0
    left_out: dict[str, int] = {}


class SeenRun(msgspec.Struct, frozen=True):
    """A board and its sources.

    Attributes:
        board: The board.
        snapshot: Snapshot of the run.
        placed: Its meshes, with the members in their cells.
        activities: Activity of each process.
        hosts: Activity of each machine.
    """

    board: Board
    snapshot: RunSnapshot
    placed: tuple[Placed, ...]
    activities: tuple[ProcActivity, ...]
    hosts: tuple[HostActivity, ...] = ()


def see(
    later: RunSnapshot,
    earlier: RunSnapshot | None = None,
    *,
    number: int = 0,
    cores: Mapping[str, float] | None = None,
) -> SeenRun:
    """Compute the board of a run.

    Args:
        later: Snapshot of the run now.
        earlier: The previous snapshot, for rates; without it all rates are 0.
        number: Number of the board.
        cores: Cores that each process uses, by id, if there is no previous snapshot to count from.
    """
    later = _with_last_known(later, earlier)
    activities = activity_between(later, earlier)
    if cores and earlier is None:
        activities = [msgspec.structs.replace(one, cpu=cores.get(one.proc.id)) for one in activities]
    placed, meshes_cut = grids(activities, later.actors, later.calls, WaitGraph(later).deadlocked())
    wrong = problems(later)
    groups = call_groups(later.calls)
    names = {proc.id: proc.name for proc in later.procs}
    most = limits.PAGE_ROWS_MAX
    left_out = {
        "meshes": meshes_cut,
        "problems": max(0, len(wrong) - limits.PAGE_PROBLEMS_MAX),
        "calls": max(0, len(groups) - most),
        "links": max(0, len(later.links) - _LARGEST),
        "grants": max(0, len(later.grants) - _LARGEST),
        "publications": max(0, len(later.publications) - _LARGEST),
        "events": max(0, len(later.events) - most),
        **{f"{table} of the run": count for table, count in later.cut.items()},
    }
    board = Board(
        number=number,
        at=later.taken_at,
        by=later.by,
        job=later.job,
        procs=dict(Counter(proc.state for proc in later.procs)),
        sums=sum_run(later, earlier, activities),
        problems=tuple(wrong[: limits.PAGE_PROBLEMS_MAX]),
        meshes=tuple(one.grid for one in placed),
        calls=tuple(_group(calls) for calls in groups[:most]),
        waits=wait_picture(later),
        links=tuple(_links(later, earlier, names)),
        grants=tuple(
            msgspec.structs.replace(grant, proc=names.get(grant.proc, grant.proc)) for grant in later.grants[:_LARGEST]
        ),
        publications=tuple(_publication(one, names) for one in later.publications[:_LARGEST]),
        host_count=len(later.hosts),
        events=tuple(reversed(later.events[-most:])),
        left_out={table: count for table, count in left_out.items() if count},
    )
    return SeenRun(board, later, tuple(placed), tuple(activities), tuple(hosts_between(later, earlier)))


def _with_last_known(later: RunSnapshot, earlier: RunSnapshot | None) -> RunSnapshot:
    """Complete the rows of hosts and processes that do not answer by what was last seen of them (GD-4)."""
    if earlier is None:
        return later
    known = {host.name: host for host in earlier.hosts if host.at}
    hosts = tuple(_host_as_known(host, known.get(host.name)) for host in later.hosts)
    later = msgspec.structs.replace(later, hosts=hosts)
    mute = {proc.id for proc in later.procs if proc.state in ("silent", "stopped")}
    if not mute:
        return later
    before = {proc.id: proc for proc in earlier.procs if proc.id in mute}
    reported = {actor.proc for actor in later.actors}
    procs = tuple(
        msgspec.structs.replace(
            proc,
            memory_bytes=proc.memory_bytes or before[proc.id].memory_bytes,
            cpu_seconds=proc.cpu_seconds or before[proc.id].cpu_seconds,
        )
        if proc.id in before
        else proc
        for proc in later.procs
    )
    actors = tuple(actor for actor in earlier.actors if actor.proc in mute - reported)
    return msgspec.structs.replace(later, procs=procs, actors=later.actors + actors)


def _host_as_known(host: HostRow, before: HostRow | None) -> HostRow:
    if before is None or host.agent in ("", "running") or host.at:
        return host
    return msgspec.structs.replace(
        before,
        procs=host.procs,
        failed=host.failed,
        state=host.state,
        agent=host.agent,
        said=host.said,
        torch=host.torch or before.torch,
    )


def with_end(seen: SeenRun, state: str, said: str, cause: Cause | None = None, *, number: int) -> SeenRun:
    """Return the last state of a run that no longer answers."""
    wrong = seen.board.problems if cause is None else tuple(problems(seen.snapshot, cause))
    board = msgspec.structs.replace(
        seen.board, number=number, state=state, said=said, problems=wrong[: limits.PAGE_PROBLEMS_MAX]
    )
    return msgspec.structs.replace(seen, board=board)


def _group(calls: Sequence[CallRow]) -> CallGroup:
    left = [call.left for call in calls if call.left is not None]
    return CallGroup(
        first=msgspec.structs.replace(calls[0], stack=()), count=len(calls), left=min(left) if left else None
    )


def _links(later: RunSnapshot, earlier: RunSnapshot | None, names: dict[str, str]) -> list[LinkUse]:
    before = defaultdict[tuple[str, str], int](int)
    seconds = 0.0 if earlier is None else later.taken_at - earlier.taken_at
    for link in () if earlier is None else earlier.links:
        before[link.proc, link.peer] = link.bytes_sent + link.bytes_received

    def use(link: LinkRow) -> LinkUse:
        count = link.bytes_sent + link.bytes_received - before[link.proc, link.peer]
        return LinkUse(
            proc=names.get(link.proc, link.proc),
            peer=names.get(link.peer, link.peer),
            link=link,
            nbytes=max(0, count) / seconds if seconds > 0 else 0.0,
        )

    return [use(link) for link in later.links[:_LARGEST]]


def _publication(row: PublicationRow, names: dict[str, str]) -> PublicationRow:
    """Return a row with names of processes in place of their ids."""
    pins = tuple(msgspec.structs.replace(pin, proc=names.get(pin.proc, pin.proc)) for pin in row.pins)
    readers = tuple(names.get(reader, reader) for reader in row.readers)
    return msgspec.structs.replace(row, proc=names.get(row.proc, row.proc), pins=pins, readers=readers)
