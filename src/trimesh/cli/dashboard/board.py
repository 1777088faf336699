"""What the page shows of a run at one moment, made of two snapshots; PURE."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from trimesh import limits
from trimesh.cli.calling import call_groups
from trimesh.cli.dashboard.grids import Grid, Placed, grids
from trimesh.cli.dashboard.problems import Problem, problems
from trimesh.cli.dashboard.waits import WaitPicture, wait_picture
from trimesh.observe import (
    CallRow,
    Cause,
    EventRow,
    GrantRow,
    HostRow,
    JobRow,
    LinkRow,
    ProcActivity,
    PublicationRow,
    RunSnapshot,
    activity_between,
)

_LARGEST: Final = 40


class CallGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that differ in their member only.

    Attributes:
        first: The oldest of them, without its stack.
        count: How many.
        left: Seconds to the first deadline of them; None for none.
    """

    first: CallRow
    count: int
    left: float | None = None


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a connection.

    Attributes:
        proc, peer: Names of its ends.
        link: What was counted.
        nbytes: Bytes a second, both ways.
    """

    proc: str
    peer: str
    link: LinkRow
    nbytes: float = 0.0


class BoardSums(msgspec.Struct, frozen=True, kw_only=True):
    """BoardSums over a run at one moment: a point of the charts.

    Attributes:
        at: Unix time.
        messages, nbytes: A second, over all links.
        calls, queued: Under way, and waiting in mailboxes.
        memory: Resident bytes of all processes.
        failed: Processes that do not run as they should.
        half, most: Latency in seconds of half of the calls, and of 99 of 100, of the busiest processes; None if no call
            has ended.
    """

    at: float
    messages: float = 0.0
    nbytes: float = 0.0
    calls: int = 0
    queued: int = 0
    memory: int = 0
    failed: int = 0
    half: float | None = None
    most: float | None = None


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows of a run at one moment.

    Attributes:
        version: Grows when a field is taken away or gets another meaning.
        number: Counts boards.
        at: Unix time of the snapshot.
        state: "live"; "silent" while the run does not answer, "ended" when it has: then the rest is what was seen last.
        said: Why the state is not "live".
        by: As `RunSnapshot.by`.
        job: The run.
        procs: Processes by state.
        sums: BoardSums over all.
        problems: What is wrong, what needs a look first.
        meshes: Those with failures first.
        calls: Under way, oldest first.
        waits: Who waits for whom.
        links, grants, publications, hosts, events, cut: As those of `RunSnapshot`; events newest first.
        host_count: How many hosts there are.
        largest: Processes with most memory: name and bytes.
        left_out: What of these tables is not shown, by table.
    """

    version: int = 1
    number: int = 0
    at: float
    state: str = "live"
    said: str = ""
    by: str = "loop"
    job: JobRow | None = None
    procs: dict[str, int] = {}
    sums: BoardSums
    problems: tuple[Problem, ...] = ()
    meshes: tuple[Grid, ...] = ()
    calls: tuple[CallGroup, ...] = ()
    waits: WaitPicture = WaitPicture()
    links: tuple[LinkUse, ...] = ()
    grants: tuple[GrantRow, ...] = ()
    publications: tuple[PublicationRow, ...] = ()
    hosts: tuple[HostRow, ...] = ()
    host_count: int = 0
    largest: tuple[tuple[str, int], ...] = ()
    events: tuple[EventRow, ...] = ()
    left_out: dict[str, int] = {}


class SeenRun(msgspec.Struct, frozen=True):
    """A board, and what it was made of.

    Attributes:
        board: It.
        snapshot: The run.
        placed: Its meshes, with who is in their cells.
        activities: What each process did.
    """

    board: Board
    snapshot: RunSnapshot
    placed: tuple[Placed, ...]
    activities: tuple[ProcActivity, ...]


def see(later: RunSnapshot, earlier: RunSnapshot | None = None, *, number: int = 0) -> SeenRun:
    """Return what the page shows of a run.

    Args:
        later: The run now.
        earlier: As it was a look before; without it nothing is known of rates.
        number: Of the board.
    """
    activities = activity_between(later, earlier)
    placed, meshes_cut = grids(activities, later.actors, later.calls)
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
        "hosts": max(0, len(later.hosts) - most),
        "events": max(0, len(later.events) - most),
        **{f"{table} of the run": count for table, count in later.cut.items()},
    }
    board = Board(
        number=number,
        at=later.taken_at,
        by=later.by,
        job=later.job,
        procs=dict(Counter(proc.state for proc in later.procs)),
        sums=_sums(later, activities),
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
        hosts=tuple(sorted(later.hosts, key=lambda host: -host.failed)[:most]),
        largest=tuple(_largest(later)),
        events=tuple(reversed(later.events[-most:])),
        left_out={table: count for table, count in left_out.items() if count},
    )
    return SeenRun(board, later, tuple(placed), tuple(activities))


def with_end(seen: SeenRun, state: str, said: str, cause: Cause | None = None, *, number: int) -> SeenRun:
    """Return what was seen last of a run that does not answer any more."""
    wrong = seen.board.problems if cause is None else tuple(problems(seen.snapshot, cause))
    board = msgspec.structs.replace(
        seen.board, number=number, state=state, said=said, problems=wrong[: limits.PAGE_PROBLEMS_MAX]
    )
    return msgspec.structs.replace(seen, board=board)


def _sums(seen: RunSnapshot, activities: Sequence[ProcActivity]) -> BoardSums:
    return BoardSums(
        at=seen.taken_at,
        messages=sum(one.sent for one in activities),
        nbytes=sum(one.nbytes for one in activities) / 2,  # what one end has sent, the other has received
        calls=len(seen.calls) + seen.cut.get("calls", 0),
        queued=sum(actor.queued for actor in seen.actors),
        memory=sum(proc.memory_bytes for proc in seen.procs),
        failed=sum(proc.state in ("dead", "stuck", "silent", "stopped") for proc in seen.procs),
    )


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


def _largest(seen: RunSnapshot) -> list[tuple[str, int]]:
    found = sorted(seen.procs, key=lambda proc: -proc.memory_bytes)[: _LARGEST // 2]
    return [(proc.name, proc.memory_bytes) for proc in found if proc.memory_bytes]
