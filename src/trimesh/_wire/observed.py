"""Rows of process reports: one table for each kind of thing, the same for all readers.

Each row is a map with names, so that readers need not use this library, and added fields do not break them. `VERSION`
grows when a field is removed or changes its meaning.

Times are ages in seconds when the row was made; processes share no clock. `at` is a Unix time.
"""

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from trimesh import limits
from trimesh._wire.memory import Buffer
from trimesh.errors import ProtocolError, ShapeError
from trimesh.shape.extent import Extent, Point

# Annotations are not strings here: msgspec would compile each of them in every new process.


VERSION: Final = 1


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the rows."""


class JobRow(_Row, frozen=True):
    """One run: a controller and all that it owns.

    Attributes:
        id: `ProcId` of the controller.
        pid: Pid of the controller.
        host: Host of the controller.
        command: Its command line.
        started_at: Unix time at which its outermost block was entered.
        state: "running", or "stopping" while a block is being left.
        stopping: Names of the blocks that are being left.
        record: Folder of its flight records; empty without them.
        insecure: Names of its hosts whose sessions have no TLS.
    """

    id: str
    pid: int
    host: str
    command: str = ""
    started_at: float = 0.0
    state: str = "running"
    stopping: tuple[str, ...] = ()
    record: str = ""
    insecure: tuple[str, ...] = ()


HOST_SILENT: Final = "-"
"""Kernel state of a process whose host does not answer either."""


class DiskRow(_Row, frozen=True):
    """One file system of a machine.

    Attributes:
        path: A folder on it that the run uses.
        nbytes: Its size.
        free_bytes: Bytes that this user can still write.
    """

    path: str
    nbytes: int
    free_bytes: int


class GPURow(_Row, frozen=True):
    """One GPU of a machine, or one slice of it.

    Attributes:
        index: Its number on the machine; slices have that of their GPU.
        name: Model.
        percent: Its use by all processes; -1 if unknown, as of a slice.
        memory_bytes, used_bytes: Its memory, and the part in use by all processes.
        celsius: Temperature; -1 if unknown.
    """

    index: int
    name: str = ""
    percent: int = -1
    memory_bytes: int = 0
    used_bytes: int = 0
    celsius: int = -1


class HostRow(_Row, frozen=True):
    """One machine of a run. Figures are those of the machine, with all its programs; 0 if unknown.

    Attributes:
        name: Its name.
        procs: Number of processes of the run there.
        failed: Number of them whose state is neither "running" nor "starting".
        is_insecure: Whether the session with it has no TLS.
        state: "running"; "silent" if neither its agent nor a process there answers; "lost".
        agent: State of the agent there: "running", "silent" while it does not answer, or "lost"; empty on the machine
            of the controller, which has none.
        said: Why it was lost.
        pid: Pid of the agent, or of the controller.
        at: Unix time there of the figures; 0.0 without figures.
        cpus: Number of its processors.
        cpu_seconds: Time that its processors have worked since it was started.
        memory_bytes, memory_free_bytes: Its memory, and the part that programs can still get.
        received_bytes, sent_bytes: Counters of its network interfaces.
        disks: File systems of the temporary folder, shared memory, sockets and records, and the working folder.
        gpus: Its GPUs.
        trimesh, python, kernel: Versions there.
        torch: Versions of torch that processes of the run have loaded there.
    """

    name: str
    procs: int = 0
    failed: int = 0
    is_insecure: bool = False
    state: str = "running"
    agent: str = ""
    said: str = ""
    pid: int = 0
    at: float = 0.0
    cpus: int = 0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    disks: tuple[DiskRow, ...] = ()
    gpus: tuple[GPURow, ...] = ()
    trimesh: str = ""
    python: str = ""
    kernel: str = ""
    torch: tuple[str, ...] = ()


class ProcRow(_Row, frozen=True):
    """One process.

    Attributes:
        id: Of this incarnation.
        parent: The process that owns it; empty for the controller.
        name: `mesh[label=0]`, or "controller".
        mesh, point: The mesh of processes, its coordinates there.
        incarnation: 0 for the first at its point.
        pid, host: Where it is.
        state: "running"; "stuck" when its Trio loop does not run, but Python code does; "silent" when its main thread
            runs no Python code: C code holds the GIL, or it waits in the operating system; "stopped" by a signal or a
            debugger; "held" by a debugger of ours; "starting"; "exiting" once its exit was requested; "dead".
        stalled_seconds: Seconds for which its Trio loop has not run; 0.0 while it runs.
        memory_bytes: Resident memory; 0 if unknown.
        cpu_seconds: Processor time of all its threads since its start; 0.0 if unknown.
        gpu_percent: Use of the busiest GPU on which it has memory, by all processes; 0 without one.
        gpu_memory_bytes: Its memory on all GPUs.
        torch: Version of torch, if it has loaded it.
        stack: Stack of the main thread, innermost call first, of a process that does not run.
        kernel_state: The kernel's letter for the main thread of a silent process: "R" while C code computes, "S" while
            it waits in the operating system, "D" while it waits there for a disk or another device, "-" if its host
            does not answer either (`HOST_SILENT`); empty if unknown.
        last_event: Its last event; empty for none.
        record: File of its flight record; empty without one.
        stack_fd: Descriptor that a process of this host writes its stack to; see `trimesh._runtime.watch.stacks`.
    """

    id: str
    parent: str = ""
    name: str = "controller"
    mesh: str = ""
    point: dict[str, int] = {}
    incarnation: int = 0
    pid: int = 0
    host: str = ""
    state: str = "running"
    stalled_seconds: float = 0.0
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    gpu_percent: int = 0
    gpu_memory_bytes: int = 0
    torch: str = ""
    stack: str = ""
    kernel_state: str = ""
    last_event: str = ""
    record: str = ""
    stack_fd: int = -1


class ActorRow(_Row, frozen=True):
    """One actor.

    Attributes:
        proc: Its process.
        name, mesh, point: As in `ProcRow`.
        cls: Name of its class.
        incarnation: 0 for the first at its point.
        state: "starting", "serving", "ended".
        queued: Calls that wait in its mailbox.
        running: Calls that run.
    """

    proc: str
    name: str
    mesh: str
    point: dict[str, int] = {}
    cls: str = ""
    incarnation: int = 0
    state: str = "serving"
    queued: int = 0
    running: int = 0


class WaitRow(_Row, frozen=True):
    """One wait of a call or a message.

    Attributes:
        kind: "call", "slot" (held by another call), "room" (in a mailbox), "consumer" or "item" (of a stream).
        call: Id of the call that it waits for; empty if it does not wait for a call.
        text: Description.
    """

    kind: str
    call: str = ""
    text: str = ""


class CallRow(_Row, frozen=True):
    """One call to one member.

    Attributes:
        id: The same in the reports of caller and callee.
        proc: The process of the callee.
        name: `mesh[label=0]` of the callee.
        mesh, point: The same in parts.
        endpoint: Name of the endpoint.
        caller: The caller: `mesh[label=0].endpoint`, or "controller".
        caller_proc: The calling process.
        part_of: Id of the call that the caller's task is part of; empty for a program's own task.
        called: Number of members in the same call, this one included; 0 if unknown.
        state: "sending" (waits for room in the mailbox), "sent" (no report from the callee), "queued", "running",
            "waiting" (runs, and waits for other calls), "cancelling", "abandoned" (no task waits for it; may still
            run).
        age: Seconds since it was made, as far as known.
        left: Seconds left of its deadline; None for no deadline.
        waits: Its waits.
        at: Source line that it runs or waits at; empty if unknown.
        stack: Frames that lead there, innermost first.
    """

    id: str
    proc: str
    name: str
    mesh: str
    endpoint: str
    point: dict[str, int] = {}
    caller: str = ""
    caller_proc: str = ""
    part_of: str = ""
    called: int = 0
    state: str = "sent"
    age: float = 0.0
    left: float | None = None
    waits: tuple[WaitRow, ...] = ()
    at: str = ""
    stack: tuple[str, ...] = ()


class LinkRow(_Row, frozen=True):
    """One link, as the process at one end of it counts.

    Attributes:
        proc, peer: Its ends.
        messages_sent, messages_received: Whole messages.
        bytes_sent, bytes_received: Heads and bodies.
        queued_bytes: Waiting here because the peer is slow.
        dropped_frames: Frames of another incarnation, and duplicates.
        waiting: Messages that wait here for room in mailboxes of the peer.
    """

    proc: str
    peer: str
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    queued_bytes: int = 0
    dropped_frames: int = 0
    waiting: int = 0


class GrantRow(_Row, frozen=True):
    """Memory of one process that others may access.

    Attributes:
        proc: The owning process.
        kind: "buffer", or "publication".
        name: Name of a publication; else empty.
        nbytes: Its size.
    """

    proc: str
    kind: str
    name: str = ""
    nbytes: int = 0


class PinRow(_Row, frozen=True):
    """A version of a publication that one process has pinned.

    Attributes:
        proc: The process.
        version: The pinned version.
        seconds: Seconds since a `publish` first found that version pinned in a slot that it wanted to write; 0.0 if
            none has.
    """

    proc: str
    version: int
    seconds: float = 0.0


class PublicationRow(_Row, frozen=True):
    """Versions of tensors that one process publishes; see `trimesh.rdma.Published`.

    Attributes:
        proc: The publishing process.
        number: Number of the publication there.
        member: The actor that created it: `mesh[label=0]`; empty outside of actors.
        latest: Its latest version; 0 before the first.
        slots: Number of versions that have memory at one time.
        pinned: Versions that readers have pinned, oldest first: their memory is not written to.
        nbytes: Memory of its slots.
        readers: The processes that read it, as far as the publisher knows them.
        is_waiting: Whether a `publish` waits because readers have pinned all versions but the latest.
        pins: The pins, by process.
        unread: Number of versions published since a reader unpinned one, or the last reader ended; 0 while one is
            pinned.
        unread_seconds: Seconds since the first of them was published.
    """

    proc: str
    number: int
    member: str = ""
    latest: int = 0
    slots: int = 0
    pinned: tuple[int, ...] = ()
    nbytes: int = 0
    readers: tuple[str, ...] = ()
    is_waiting: bool = False
    pins: tuple[PinRow, ...] = ()
    unread: int = 0
    unread_seconds: float = 0.0


class EventRow(_Row, frozen=True):
    """Something that happened to a member; see `trimesh.events`.

    Attributes:
        number: Counts the events of a run, from 1.
        at: Unix time.
        kind: "Started", "Died", ...: the name of the record.
        name: `mesh[label=0]`.
        mesh, point, incarnation: The same in parts.
        text: Description.
        is_failure: Whether it is a failure.
        causes: The causes of the error in `text`: members of a group, causes of causes; each after its effect.
    """

    number: int
    at: float
    kind: str
    name: str
    mesh: str = ""
    point: dict[str, int] = {}
    incarnation: int = 0
    text: str = ""
    is_failure: bool = False
    causes: tuple[str, ...] = ()


class OutputRow(_Row, frozen=True):
    """A line that a process has written.

    Attributes:
        number: Counts the lines of a run, from 1.
        at: Unix time at which the controller received it.
        name: Name of the process: `mesh[label=0]`.
        stream: 1 for standard output, 2 for standard error.
        text: The line.
        dropped: Number of lines that this row replaces, because they came faster than they could be shown.
    """

    number: int
    at: float
    name: str
    stream: int = 1
    text: str = ""
    dropped: int = 0


class MetricRow(_Row, frozen=True):
    """One series of metrics: a name, as one actor or process has it.

    Attributes:
        proc: The process.
        name: The actor, or the process for code outside of actors: `mesh[label=0]`.
        mesh, point, incarnation: The same in parts.
        metric: Name of the metric.
        kind: "value" (the newest that was logged), "counter", "gauge" or "histogram".
        value: The value, the total of a counter, the sum of a histogram.
        at: Unix time of a value or gauge.
        step: Step of a value; None without one.
        bounds: Upper bounds of the buckets of a histogram.
        counts: Values in each bucket, and above the last bound.
    """

    proc: str
    name: str
    metric: str
    mesh: str = ""
    point: dict[str, int] = {}
    incarnation: int = 0
    kind: str = "value"
    value: float = 0.0
    at: float = 0.0
    step: int | None = None
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


class SampleRow(_Row, frozen=True, omit_defaults=True):
    """The values of one call of `trimesh.log`.

    Attributes:
        at: Unix time.
        proc: The process.
        name, mesh, point, incarnation: As in `MetricRow`.
        step: Their step; None without one.
        values: The values by name.
    """

    at: float
    proc: str
    name: str
    values: dict[str, float]
    mesh: str = ""
    point: dict[str, int] = {}
    incarnation: int = 0
    step: int | None = None


class EndpointRow(_Row, frozen=True, omit_defaults=True):
    """Calls of one endpoint of one actor since it was spawned, as its flight record counts them.

    Attributes:
        proc: The process.
        name, mesh, point: The actor, as in `MetricRow`.
        endpoint: The endpoint.
        calls: Calls that a slot has taken.
        errors: Those that raised.
        cancelled: Those that were cancelled.
        bytes_received: Bytes of their arguments.
        counts: Calls by duration, up to each of `limits.LATENCY_BOUNDS` and above; without those of a second in which
            more than `limits.RECORD_ROWS` ended.
    """

    proc: str
    name: str
    endpoint: str
    mesh: str = ""
    point: dict[str, int] = {}
    calls: int = 0
    errors: int = 0
    cancelled: int = 0
    bytes_received: int = 0
    counts: tuple[int, ...] = ()


class HoldRow(_Row, frozen=True):
    """A thread that waits for a debugger, or has one.

    Attributes:
        id: Id of the hold.
        proc: Its process.
        proc_name: `mesh[label=0]` of the process.
        name: `mesh[label=0].endpoint` of the running endpoint; else the name of the process.
        kind: "breakpoint", or "post-mortem" of an error that has left an endpoint.
        at: Source line.
        text: The error.
        pid, host: Pid and host of the process.
        seconds: Seconds after which it continues if no terminal attaches.
        age: Seconds since it was held.
        is_attached: True if a terminal is attached.
    """

    id: str
    proc: str
    proc_name: str
    name: str
    kind: str = "breakpoint"
    at: str = ""
    text: str = ""
    pid: int = 0
    host: str = ""
    seconds: float = 0.0
    age: float = 0.0
    is_attached: bool = False


class ProcView(_Row, frozen=True):
    """Report of one process: itself, its children as it sees them, and its work for others.

    Attributes:
        children: The processes that it owns.
        actors, calls, links, grants, publications, events, metrics: Rows of this process; calls include the calls that
            it made.
        samples: Samples that were removed from this process and those below it, for a reader that asked for them.
        endpoints: Calls of its actors, by endpoint; none without a flight record.
        happened: Number of events of its members, by mesh and kind.
        retries: Calls that it has sent again.
        samples_dropped: Number of samples that this process dropped, as no reader took them in time.
        cut: Number of rows left out, by table.
        job, hosts: The run and its machines; only in the report of a controller.
    """

    proc: ProcRow
    version: int = VERSION
    children: tuple[ProcRow, ...] = ()
    actors: tuple[ActorRow, ...] = ()
    calls: tuple[CallRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
    grants: tuple[GrantRow, ...] = ()
    publications: tuple[PublicationRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    metrics: tuple[MetricRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    endpoints: tuple[EndpointRow, ...] = ()
    happened: dict[str, dict[str, int]] = {}
    retries: int = 0
    samples_dropped: int = 0
    cut: dict[str, int] = {}
    job: JobRow | None = None
    hosts: tuple[HostRow, ...] = ()


_T = TypeVar("_T")

encode = msgspec.msgpack.Encoder().encode


def decode_view(data: Buffer) -> ProcView:
    """Decode the report of one process.

    Raises:
        ProtocolError: `data` is not a report.
    """
    return _decoded(data, ProcView)


def decode_views(data: Buffer) -> tuple[ProcView, ...]:
    """Decode the reports of several processes.

    Raises:
        ProtocolError: `data` is not such a list.
    """
    return _decoded(data, tuple[ProcView, ...])


def decode_actors(data: Buffer) -> tuple[ActorRow, ...]:
    """Decode rows of actors.

    Raises:
        ProtocolError: `data` is not such rows.
    """
    return _decoded(data, tuple[ActorRow, ...])


def decode_host(data: Buffer) -> HostRow:
    """Decode the figures of a machine.

    Raises:
        ProtocolError: `data` is not such a row.
    """
    return _decoded(data, HostRow)


def _decoded(data: Buffer, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the report of a process must be a valid table: {error}") from error


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request at a control socket.

    Attributes:
        kind: "views": reports of all processes; "events": events after number `after`; "output": lines after line
            `after`; "samples": samples of metrics after number `after`; "kill": end process `target`; "cancel": cancel
            call `target`; "stop": interrupt, as Ctrl-C does; "holds": threads that wait for a debugger; "attach":
            become the terminal of hold `target`: from then on only "line", "detach" and "leave" may follow, and
            answers arrive unrequested.
        seconds: Time for processes to answer; 0.0 for the default bound.
        after: Number of an event or line.
        target: Id of a process, call or hold.
        text: A line for a debugger.
    """

    kind: str
    seconds: float = 0.0
    after: int = 0
    target: str = ""
    text: str = ""


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of a control socket.

    Attributes:
        error: Why the request failed; empty if it succeeded.
        by: "loop"; or "thread", when the Trio loop of the controller does not run.
        views, events, output, holds, samples: The requested rows.
        number: Number of the newest sample.
        said: Kind of a debugger's message to its terminal: "output", "prompt" or "ended"; empty for an answer.
    """

    error: str = ""
    by: str = "loop"
    views: tuple[ProcView, ...] = ()
    events: tuple[EventRow, ...] = ()
    output: tuple[OutputRow, ...] = ()
    holds: tuple[HoldRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    number: int = 0
    said: str = ""
    text: str = ""


def decode_hold(text: str) -> HoldRow:
    """Decode the row of a held thread from JSON.

    Raises:
        ProtocolError: `text` is not such a row.
    """
    try:
        return msgspec.json.decode(text, type=HoldRow)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the report of a held thread must be a valid row: {error}") from error


def decode_request(data: Buffer) -> ControlRequest:
    """Decode the request of a client.

    Raises:
        ProtocolError: `data` is not a request.
    """
    return _decoded(data, ControlRequest)


def decode_answer(data: Buffer) -> ControlAnswer:
    """Decode the answer of a control socket.

    Raises:
        ProtocolError: `data` is not an answer.
    """
    return _decoded(data, ControlAnswer)


# ---- wait graph: nodes and edges that processes report to a deadlock search ------------------------------------------

# A *node* is something that may be unable to end. Its name contains the process that can look it up, and is never
# reused, so two equal reports of a node mean that it has not changed.

# Annotations are not strings here: msgspec would compile each of them in every new process.


class NodeKind(enum.IntEnum):
    """Kind of a node of the wait graph; it determines the meaning of the fields of its name."""

    CALL = 0
    """A call that `proc` has received: made by process `a`, which has numbered it `b`. Queued, it waits for one of the
    calls that hold the slots; running, for all that its own tasks wait for."""
    MESSAGE = 1
    """A broadcast that runs in `proc`, numbered `a` there."""
    CALLER = 2
    """The other end of a call: the task of `proc` that waits for its call `a` to process `b`."""
    UNSENT = 3
    """A message of `proc` to process `b`, numbered `a` here, that waits for room in a mailbox."""
    ROOM = 4
    """The mailbox of actor `a` of `proc`, full for process `b`, which knows that `c` messages were taken out of it."""
    CONSUMER = 5
    """The consumer of the items that process `b` streams for call `a` of `proc`; it has acknowledged `c` items."""
    NEXT = 6
    """The wait of a task of `proc`, numbered `a` there, for the next result of a stream or a map."""
    SOURCE = 7
    """The items that `proc` sends for call `b` of process `a`, where `c` have arrived."""


class NodeRef(NamedTuple):
    """The name of a node."""

    kind: NodeKind
    proc: int
    a: int = 0
    b: int = 0
    c: int = 0


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the records."""


class Place(_Record, frozen=True):
    """An endpoint of an actor, for error texts.

    Attributes:
        mesh: Name of the actor mesh.
        actor: Name of the class.
        labels, sizes: The extent of the mesh as spawned.
        key: Number of the mesh that the member belongs to.
    """

    mesh: str
    actor: str
    endpoint: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: int
    key: int | None

    def point(self) -> Point:
        """Return the coordinates.

        Raises:
            ProtocolError: They are invalid.
        """
        try:
            extent = Extent(dict(zip(self.labels, self.sizes, strict=True)))
            return Point(self.rank, extent, self.key, None if self.key is None else self.rank)
        except (ShapeError, TypeError, ValueError) as error:
            raise ProtocolError(f"a point must lie in its extent: {error}") from error


class NodeReport(_Record, frozen=True):
    """One node that waits; a node that does not is not reported.

    Attributes:
        needs_all: True if it waits for all of its nodes to end, False if for any.
        waits_for: The nodes that it waits for; for a caller, the node that it is part of. Only a caller may have none.
        can_break: True if an error can end it without side effects: it has not started.
        place: The endpoint, or None if it is not one.
    """

    ref: NodeRef
    needs_all: bool
    waits_for: tuple[NodeRef, ...]
    can_break: bool = False
    place: Place | None = None


_DECODER: Final = msgspec.msgpack.Decoder(tuple[NodeReport, ...])


def decode_reports(data: Buffer) -> Sequence[NodeReport]:
    """Decode the reports of one process.

    Raises:
        ProtocolError: `data` is invalid, or holds more than `limits.DEADLOCK_NODES_MAX` reports.
    """
    try:
        reports = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"reports of waits must be valid records: {error}") from error
    if len(reports) > limits.DEADLOCK_NODES_MAX:
        raise ProtocolError(f"at most {limits.DEADLOCK_NODES_MAX} nodes may be reported, got {len(reports)}")
    return reports
