"""Snapshot of a run, merged from the reports of its processes: no duplicates, failures first, in a fixed order.

ME-1 A process that has not reported is included by its owner's report.
ME-2 Caller and callee both report a call; its state is the callee's, its parent the caller's.
ME-3 A table with too many rows is cut at its end, where the least urgent rows are, and states how many are missing.

UA-1 Reports of a process and of its owner take precedence; its flight record, which may be older, fills gaps.
UA-2 At most `limits.OBSERVED_RECORDS` records are read for one snapshot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from trimesh import limits
from trimesh._runtime.recording import RunFolder, files_of, is_alive, is_running, read_file, run_folders
from trimesh._wire import flight, observed
from trimesh._wire.exceptions.tracebacks import package_of_line, program_frame
from trimesh._wire.observed import VERSION, CallRow, HostRow, ProcRow
from trimesh.errors import ConnectError, ProtocolError

FINE: Final = ("running", "starting", "exiting")
"""States of a process that is as it should be."""

_STATES: Final = ("dead", "silent", "stopped", "stuck", "held", "exiting", "starting", "running")

_RUNS_SHOWN: Final = 5
"""Runs that an error lists."""

_Row = TypeVar("_Row")


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment, as its processes report it.

    Attributes:
        version: Grows when a field is removed or changes its meaning.
        taken_at: Unix time.
        job: The run itself; None when its controller was not queried.
        by: "loop"; or "thread", when the Trio loop of the controller does not run.
        hosts: Its machines.
        procs: Its processes; those with problems come first.
        actors: Its actors, the longest mailbox first.
        calls: Calls under way, oldest first.
        links: Connections between processes, the one with most bytes waiting first.
        grants: Memory that others may reach, the largest first.
        publications: Published versions of tensors; those whose `publish` waits come first.
        events: Events of members, oldest first.
        failures: The events that are failures, oldest first.
        metrics: Series of metrics, by name and member.
        endpoints: Calls by endpoint of each actor, the most frequent first.
        happened: Number of events of members, by mesh and kind, since the run began.
        retries: Calls that were sent again by `options(retry=)`.
        samples_dropped: Number of samples of metrics that processes dropped because no reader took them in time.
        cut: Number of omitted rows, by table.
    """

    version: int = VERSION
    taken_at: float
    job: observed.JobRow | None = None
    by: str = "loop"
    hosts: tuple[observed.HostRow, ...] = ()
    procs: tuple[observed.ProcRow, ...] = ()
    actors: tuple[observed.ActorRow, ...] = ()
    calls: tuple[observed.CallRow, ...] = ()
    links: tuple[observed.LinkRow, ...] = ()
    grants: tuple[observed.GrantRow, ...] = ()
    publications: tuple[observed.PublicationRow, ...] = ()
    events: tuple[observed.EventRow, ...] = ()
    failures: tuple[observed.EventRow, ...] = ()
    metrics: tuple[observed.MetricRow, ...] = ()
    endpoints: tuple[observed.EndpointRow, ...] = ()
    happened: dict[str, dict[str, int]] = {}
    retries: int = 0
    samples_dropped: int = 0
    cut: dict[str, int] = {}


def merge(
    views: Sequence[observed.ProcView], taken_at: float, *, by: str = "loop", rows_max: int = limits.OBSERVED_ROWS
) -> RunSnapshot:
    """Merge the reports of all processes of a run.

    Args:
        views: Report of each process.
        taken_at: Unix time.
        by: See `RunSnapshot.by`.
        rows_max: Maximum rows of a table.
    """
    cut = dict[str, int]()
    for view in views:
        for table, count in view.cut.items():
            cut[table] = cut.get(table, 0) + count

    def few(table: str, rows: Iterable[_Row]) -> tuple[_Row, ...]:
        found = tuple(rows)
        if len(found) > rows_max:
            cut[table] = cut.get(table, 0) + len(found) - rows_max
        return found[:rows_max]

    events = sorted((event for view in views for event in view.events), key=lambda event: event.at)
    procs = _procs(views, events)
    failures = [event for event in events if event.is_failure]
    job = next((view.job for view in views if view.job is not None), None)
    return RunSnapshot(
        taken_at=taken_at,
        job=job,
        by=by,
        hosts=_hosts(procs, [host for view in views for host in view.hosts], () if job is None else job.insecure),
        procs=few("procs", procs),
        actors=few("actors", sorted((one for view in views for one in view.actors), key=lambda one: -one.queued)),
        calls=few("calls", _calls(views, {proc.id: proc for proc in procs})),
        links=few("links", sorted((one for view in views for one in view.links), key=_busy)),
        grants=few("grants", sorted((one for view in views for one in view.grants), key=lambda one: -one.nbytes)),
        publications=few("publications", sorted((one for view in views for one in view.publications), key=_read)),
        events=tuple(events[-rows_max:]),
        failures=few("failures", failures),
        metrics=few("metrics", sorted((one for view in views for one in view.metrics), key=_named)),
        endpoints=few("endpoints", sorted((one for view in views for one in view.endpoints), key=_frequent)),
        happened=_happened(views),
        retries=sum(view.retries for view in views),
        samples_dropped=sum(view.samples_dropped for view in views),
        cut={**cut, **({"events": len(events) - rows_max} if len(events) > rows_max else {})},
    )


def _busy(link: observed.LinkRow) -> tuple[int, ...]:
    return -link.queued_bytes, -link.waiting, -(link.bytes_sent + link.bytes_received)


def _frequent(row: observed.EndpointRow) -> tuple[object, ...]:
    return -row.calls, row.mesh, row.endpoint, tuple(row.point.values()), row.proc


def _happened(views: Sequence[observed.ProcView]) -> dict[str, dict[str, int]]:
    found = defaultdict[str, Counter[str]](Counter)
    for view in views:
        for mesh, kinds in view.happened.items():
            found[mesh].update(kinds)
    return {mesh: dict(kinds) for mesh, kinds in sorted(found.items())}


def _named(row: observed.MetricRow) -> tuple[object, ...]:
    return row.metric, row.mesh, tuple(row.point.values()), row.incarnation, row.proc


def _read(publication: observed.PublicationRow) -> tuple[bool, int, str, int]:
    return not publication.is_waiting, -len(publication.pinned), publication.proc, publication.number


def _procs(views: Sequence[observed.ProcView], events: Sequence[observed.EventRow]) -> list[observed.ProcRow]:
    last = {event.name: event for event in events}
    own = {view.proc.id: view.proc for view in views}
    found = dict[str, observed.ProcRow]()
    for view in views:
        for child in view.children:
            said = own.get(child.id)
            found[child.id] = _lost(child) if said is None else _joined(child, said)
    for proc_id, proc in own.items():
        found.setdefault(proc_id, proc)
    rows = [
        msgspec.structs.replace(row, last_event=f"{event.kind} {event.text}".strip())
        if (event := last.get(row.name))
        else row
        for row in found.values()
    ]
    return sorted(
        rows, key=lambda row: (_STATES.index(row.state), bool(row.parent), row.mesh, tuple(row.point.values()))
    )


def _lost(child: observed.ProcRow) -> observed.ProcRow:
    """Mark a process as silent that sent no report although its owner reports it as running."""
    return msgspec.structs.replace(child, state="silent") if child.state == "running" else child


def _joined(child: observed.ProcRow, said: observed.ProcRow) -> observed.ProcRow:
    """Merge the row of a process from its owner with its own."""
    is_told = child.state == "running" or (said.state == "stuck" and child.state != "held")
    state = said.state if is_told else child.state
    return msgspec.structs.replace(
        child,
        state=state,
        stack="" if state == "held" else said.stack,  # the stack of a held thread is that of the debugger
        kernel_state=said.kernel_state if state == "silent" else "",
        memory_bytes=said.memory_bytes or child.memory_bytes,
        cpu_seconds=said.cpu_seconds or child.cpu_seconds,
        gpu_percent=said.gpu_percent,
        gpu_memory_bytes=said.gpu_memory_bytes,
        torch=said.torch,
        record=said.record or child.record,
        stalled_seconds=max(child.stalled_seconds, said.stalled_seconds),
    )


def _hosts(
    procs: Sequence[observed.ProcRow], told: Sequence[observed.HostRow], insecure: Collection[str]
) -> tuple[observed.HostRow, ...]:
    """Return the machines: those that were reported, completed by the processes there, and others with processes."""
    found = {row.name: row for row in sorted(told, key=lambda row: bool(row.agent))}
    there = defaultdict[str, list[observed.ProcRow]](list)
    for proc in procs:
        there[proc.host].append(proc)
    rows = [_host(found.get(name, observed.HostRow(name=name)), there[name], insecure) for name in {**found, **there}]
    return tuple(sorted(rows, key=lambda row: (row.state == "running", row.agent != "silent", -row.failed, row.name)))


def _host(row: observed.HostRow, procs: Sequence[observed.ProcRow], insecure: Collection[str]) -> observed.HostRow:
    silent = sum(proc.kernel_state == observed.HOST_SILENT for proc in procs)
    is_silent = row.agent == "silent" if not procs else silent == len(procs)
    return msgspec.structs.replace(
        row,
        procs=len(procs),
        failed=sum(proc.state not in FINE for proc in procs),
        is_insecure=row.name in insecure,
        state="lost" if row.agent == "lost" else "silent" if is_silent else "running",
        torch=tuple(sorted({proc.torch for proc in procs if proc.torch})),
    )


def _calls(views: Sequence[observed.ProcView], procs: dict[str, observed.ProcRow]) -> Sequence[observed.CallRow]:
    made = dict[str, observed.CallRow]()
    come = dict[str, observed.CallRow]()
    for view in views:
        for call in view.calls:
            (come if call.proc == view.proc.id and call.state not in ("sent", "sending") else made)[call.id] = call
    rows = list[observed.CallRow]()
    for call_id in {**made, **come}:
        here, there = made.get(call_id), come.get(call_id)
        if there is None or here is None:
            rows.append(_explained(there or made[call_id], procs))
            continue
        state = here.state if here.state in ("cancelling", "abandoned") else there.state
        left = there.left if here.left is None else here.left
        age = max(here.age, there.age)
        both = msgspec.structs.replace(
            there, state=state, part_of=here.part_of, called=here.called, caller=here.caller, age=age, left=left
        )
        rows.append(_explained(both, procs))
    return sorted(rows, key=lambda row: -row.age)


def _explained(call: observed.CallRow, procs: dict[str, observed.ProcRow]) -> observed.CallRow:
    """Give a call without a known line the line at which the main thread of its stuck process is."""
    proc = procs.get(call.proc)
    if call.at or proc is None or proc.state in FINE or call.state in ("sending", "queued"):
        return call
    return msgspec.structs.replace(call, at=_first_line(proc.stack) or f"its process is {proc.state}")


def _first_line(stack: str) -> str:
    return program_line(stack) or next((line.strip() for line in stack.splitlines() if "File " in line), "")


def program_line(stack: str) -> str:
    """Return the innermost line of a stack in the program's own code, or else in a package that it called."""
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return program_frame(lines, package_of_line) or ""


# ---- silent processes, completed from their flight records: actors, memory, path of the record -----------------------

_ALIVE = ("running", "stopped", "held", "exiting")


def unanswered(views: Sequence[observed.ProcView]) -> dict[str, observed.ProcRow]:
    """Return the processes that sent no report and keep a flight record, by id, as their owners report them.

    Args:
        views: Reports of all processes of a run.
    """
    answered = {view.proc.id for view in views if view.proc.pid}  # no pid: the owner's, with a stack only
    children = {child.id: child for view in views for child in view.children}
    found = [child for child in children.values() if child.record and child.state in _ALIVE]
    return {child.id: child for child in found if child.id not in answered}


def with_records(views: Sequence[observed.ProcView]) -> list[observed.ProcView]:
    """Return the views, completed from the flight records of silent processes.

    Blocking: some milliseconds for each silent process.
    """
    found = list(views)
    places = {view.proc.id: index for index, view in enumerate(found)}
    for proc_id, child in list(unanswered(views).items())[: limits.OBSERVED_RECORDS]:
        try:
            record = read_record(child.record)
        except ValueError:  # the record is on another host, or gone
            continue
        seen = record.last_view()
        at = places.get(proc_id)
        said = observed.ProcView(proc=msgspec.structs.replace(child, state="silent")) if at is None else found[at]
        memory = said.proc.memory_bytes or (0 if seen is None else seen.proc.memory_bytes)
        proc = msgspec.structs.replace(said.proc, memory_bytes=memory, record=child.record)
        whole = msgspec.structs.replace(said, proc=proc, actors=record.actors())
        if at is None:
            found.append(whole)
        else:
            found[at] = whole
    return found


# ---- stacks of a snapshot, of stuck main threads and of calls; equal ones are merged ---------------------------------


class SharedStack(msgspec.Struct, frozen=True):
    """One stack and the members that have it.

    Attributes:
        what: "main thread", or the endpoint that runs.
        lines: Innermost first.
        members: Names of the members, in order.
    """

    what: str
    lines: tuple[str, ...]
    members: tuple[str, ...]


def shared_stacks(snapshot: RunSnapshot, name: str = "") -> Sequence[SharedStack]:
    """Return the stacks of a run, those of the fewest members first: a lone member differs from the rest.

    Args:
        snapshot: Snapshot of the run.
        name: Name of one process or actor; empty for all.
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


# ---- activity of each process of a run between two snapshots ---------------------------------------------------------


class ProcActivity(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of one process between two snapshots.

    Attributes:
        proc: The process, as in the later snapshot.
        received, sent: Messages a second between the snapshots, over all its links.
        nbytes: Bytes a second, both ways.
        queued, running: Calls that wait in mailboxes of its actors, and that run there.
        oldest: Age of the oldest call to it that is under way, in seconds; 0.0 without one.
        cpu: Processor seconds a second between the snapshots; None if unknown, as of a process that does not answer.
        actors: Names of its actors.
    """

    proc: ProcRow
    received: float = 0.0
    sent: float = 0.0
    nbytes: float = 0.0
    queued: int = 0
    running: int = 0
    oldest: float = 0.0
    cpu: float | None = None
    actors: tuple[str, ...] = ()


def activity_between(later: RunSnapshot, earlier: RunSnapshot | None = None) -> list[ProcActivity]:
    """Return the activity of each process between two snapshots, in the order of the later one.

    Args:
        later: The newer snapshot.
        earlier: The older one; without it all rates are 0.
    """
    now, before = _counted(later), Counter[tuple[str, str]]() if earlier is None else _counted(earlier)
    seconds = 0.0 if earlier is None else later.taken_at - earlier.taken_at
    queued, running, oldest = Counter[str](), Counter[str](), defaultdict[str, float](float)
    actors = defaultdict[str, list[str]](list)
    used = {proc.id: proc.cpu_seconds for proc in (() if earlier is None else earlier.procs)}
    for actor in later.actors:
        actors[actor.proc].append(actor.name)
        queued[actor.proc] += actor.queued
        running[actor.proc] += actor.running
    for call in later.calls:
        oldest[call.proc] = max(oldest[call.proc], call.age)

    def rate(proc: str, what: str) -> float:
        """Return a rate, at least 0: the counts of a closed link are missing in the later snapshot."""
        return max(0, now[proc, what] - before[proc, what]) / seconds if seconds > 0 else 0.0

    def cpu(proc: ProcRow) -> float | None:
        before = used.get(proc.id, 0.0)
        return max(0.0, proc.cpu_seconds - before) / seconds if before and proc.cpu_seconds and seconds > 0 else None

    return [
        ProcActivity(
            proc=proc,
            received=rate(proc.id, "received"),
            sent=rate(proc.id, "sent"),
            nbytes=rate(proc.id, "bytes"),
            queued=queued[proc.id],
            running=running[proc.id],
            oldest=oldest[proc.id],
            cpu=cpu(proc),
            actors=tuple(sorted(actors[proc.id])),
        )
        for proc in later.procs
    ]


class HostActivity(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of one machine between two snapshots; None if unknown.

    Attributes:
        host: The machine, as in the later snapshot.
        cpu: Processors at work.
        received, sent: Bytes a second of its network.
    """

    host: HostRow
    cpu: float | None = None
    received: float | None = None
    sent: float | None = None


def hosts_between(later: RunSnapshot, earlier: RunSnapshot | None = None) -> list[HostActivity]:
    """Return the activity of each machine between two snapshots, in the order of the later one."""
    before = {} if earlier is None else {row.name: row for row in earlier.hosts if row.at}
    return [_host_activity(row, before.get(row.name)) for row in later.hosts]


def _host_activity(row: HostRow, before: HostRow | None) -> HostActivity:
    if before is None or row.at <= before.at:
        return HostActivity(host=row)
    seconds = row.at - before.at
    return HostActivity(
        host=row,
        cpu=max(0.0, row.cpu_seconds - before.cpu_seconds) / seconds,
        received=max(0, row.received_bytes - before.received_bytes) / seconds,
        sent=max(0, row.sent_bytes - before.sent_bytes) / seconds,
    )


def calls_of(seen: RunSnapshot, proc: str) -> list[CallRow]:
    """Return the calls to a process that are under way, oldest first."""
    return [call for call in seen.calls if call.proc == proc]


def _counted(seen: RunSnapshot) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for link in seen.links:
        found[link.proc, "received"] += link.messages_received
        found[link.proc, "sent"] += link.messages_sent
        found[link.proc, "bytes"] += link.bytes_received + link.bytes_sent
    return found


# ---- the flight records of a run, read from its folder ---------------------------------------------------------------


class RunRecords(msgspec.Struct, frozen=True):
    """Flight records of one run.

    Attributes:
        folder: Their folder.
        flights: Contents of each, by `ProcRow.id`.
        unreadable: Files that are no flight records, and why.
        is_running: Whether the run is alive.
    """

    folder: Path
    flights: dict[str, flight.Flight]
    unreadable: dict[str, str]
    is_running: bool

    @property
    def root(self) -> flight.Flight | None:
        """Return the controller's record, or None if it cannot be read; it may be on another host."""
        return next((one for one in self.flights.values() if one.head.job is not None), None)


def recorded_runs() -> list[RunFolder]:
    """Return the folders of flight records of this user on this machine, the newest first.

    Raises:
        ConnectError: Their folder belongs to another user, or others may enter it.
    """
    try:
        return run_folders()
    except OSError as error:
        raise ConnectError(f"flight records of this user cannot be listed: {error}") from error


def read_records(folder: Path) -> RunRecords:
    """Read the flight records in the folder of a run.

    Raises:
        ConnectError: The folder cannot be read, or has no flight record.
    """
    flights = dict[str, flight.Flight]()
    unreadable = dict[str, str]()
    try:
        files = files_of(folder)
    except OSError as error:
        raise ConnectError(
            f"flight records of {folder} cannot be read: {error.strerror}{_known_runs(folder)}"
        ) from error
    lives = False
    for path in files[: limits.RECORD_FILES_MAX]:
        try:
            flights[path.name] = found = flight.read_flight(read_file(path))
        except (OSError, ProtocolError) as error:
            unreadable[path.name] = str(error)
        else:
            lives = lives or (not found.ended_at and is_running(found.head))
    if not flights:
        bad = f": {len(unreadable)} file{'s' * (len(unreadable) > 1)} cannot be read as one" * bool(unreadable)
        raise ConnectError(f"there is no flight record in {folder}{bad}{_known_runs(folder)}")
    return RunRecords(folder, flights, unreadable, lives)


def _known_runs(wanted: Path | int) -> str:
    """Return the end of an error on a run that was not found: the one that is meant, or the newest ones."""
    try:
        known = recorded_runs()
    except ConnectError:
        return ""
    names = {str(one.path) if isinstance(wanted, Path) else str(one.pid): one for one in known}
    meant = get_close_matches(str(wanted), names, n=1, cutoff=0.8 if isinstance(wanted, Path) else 0.6)
    if meant:
        return f"; did you mean {meant[0]}?"
    newest = ", ".join(str(one.pid) for one in known[:_RUNS_SHOWN])
    return f"; the newest runs that have records: {newest}" if known else "; no run has left records on this machine"


def read_record(path: str | Path) -> flight.Flight:
    """Read the flight record of one process, dead or alive: the file is `ProcRow.record`.

    Raises:
        ValueError: The file is on another host, is no flight record, or cannot be read.
    """
    if not path:
        raise ValueError("this process keeps no flight record")
    try:
        return flight.read_flight(read_file(Path(path)))
    except FileNotFoundError:
        raise ValueError("its flight record is not on this machine") from None
    except (OSError, ProtocolError) as error:
        raise ValueError(f"its flight record cannot be read: {error}") from error


def is_alive_run(folder: RunFolder) -> bool:
    try:
        return is_alive(folder)
    except OSError:  # removed meanwhile
        return True


def find_records(where: str = "", pid: int | None = None) -> RunRecords:
    """Return the flight records of the newest dead run, or of a given one.

    Args:
        where: The folder of a run; empty for a run of this user on this machine.
        pid: Process id of its controller; then the run may be alive.

    Raises:
        ConnectError: There is none.
    """
    if where:
        return read_records(Path(where))
    for folder in recorded_runs():
        if pid not in (None, folder.pid) or (pid is None and is_alive_run(folder)):
            continue
        return read_records(folder.path)
    if pid is None:
        raise ConnectError(
            "no failed run has left flight records on this machine; a run that ends well removes its own"
        )
    text = f"no run of process {pid} has left flight records on this machine; a run that ends well removes its own"
    raise ConnectError(f"{text}{_known_runs(pid)}")
