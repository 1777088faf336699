r"""Snapshots of this process's tables, as rows of `_wire.observed`, and of a whole run.

Calls pay nothing for it. A snapshot may be taken in a signal handler of the main thread, or in another thread while the
loop is stalled: it takes no lock, awaits nothing, does not call Trio, and has no side effects.

For a whole run, each process queries the processes that it owns, concurrently and for a bounded time.

    owner --Observe--> child (queries its own children) --Observed: a table for each process--> owner
       \--signal, where no answer comes--> child: writes its tables, or at least the stack of its main thread

AS-1 A query ends within its time limit, whatever the processes do.
AS-2 Every owned process is reported: by itself, else from its owner's knowledge, with its stack if there is one.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.metrics import COUNTER, GAUGE, HISTOGRAM
from trimesh._runtime.peers.host import ProcessState
from trimesh._runtime.peers.peer import Parcel
from trimesh._runtime.system.exits import cpu_seconds_of, memory_of, process_state
from trimesh._runtime.values.endpoint_spec import class_of
from trimesh._runtime.watch.report import where
from trimesh._runtime.watch.stacks import Report, read_report, request_report
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeKind, NodeRef
from trimesh.config import current
from trimesh.errors import ProtocolError, place_name
from trimesh.ids import AGENT, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.holds import Pauses
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.meshes.member import Member
    from trimesh._runtime.metrics import MemberMetrics
    from trimesh._runtime.peers.host import ServedHost
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer
    from trimesh._runtime.system.machine import MachineReader
    from trimesh._wire.messages import CallerPlace
    from trimesh.shape.extent import Point


STOPPED: Final = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "": "dead"}
"""State of a process in rows, by its letter in /proc; other letters say nothing about it."""

NOT_OWNED: Final = "the process has ended, or another process of the run than the controller has spawned it"
_KINDS: Final = {
    NodeKind.CALL: "call",
    NodeKind.MESSAGE: "call",
    NodeKind.UNSENT: "room",
    NodeKind.CONSUMER: "consumer",
    NodeKind.SOURCE: "item",
}


def look(proc: Proc) -> observed.ProcView:
    """Return the tables of `proc`: itself, its children and its calls."""
    return _Tables(proc).view()


def look_by_signal(proc: Proc) -> observed.ProcView:
    """Return the tables of `proc` for the small file that a signal handler writes: with few metrics."""
    tables = _Tables(proc)
    return msgspec.structs.replace(tables.view(), metrics=tables.latest_metrics(), endpoints=())


def take_samples(proc: Proc) -> tuple[observed.SampleRow, ...]:
    """Remove and return the samples of `proc` and of the processes below it, as far as it has them."""
    return _Tables(proc).samples() if proc.metrics.ring or proc.inquiries.below else ()


def brief_look(proc: Proc) -> observed.ProcView:
    """Return the oldest calls and any anomalies, for a flight record; reads no other process."""
    return _Tables(proc).brief_view()


def job_of(proc: Proc, record: str = "") -> observed.JobRow:
    """Return the row of a controller's run.

    Args:
        proc: The controller.
        record: Folder of its flight records.
    """
    stopping = tuple(block.name for block in proc.stopping_blocks)
    return observed.JobRow(
        id=proc_name(proc.proc_id),
        pid=proc.pid,
        host=proc.host_name,
        command="" if proc.is_simulated else _command_of(proc.pid),
        started_at=proc.journal.began_at,
        state="stopping" if stopping else "running",
        stopping=stopping,
        record=record,
        insecure=tuple(sorted(proc.plain_hosts)),
    )


def proc_name(proc_id: int) -> str:
    """Return the name of a process incarnation in rows: its id in hexadecimal."""
    return f"{proc_id:x}"


def coordinates(point: Point) -> dict[str, int]:
    """Return a point as a dict from labels to coordinates."""
    return {label: point[label] for label in point}


def metric_rows(proc: Proc) -> tuple[observed.MetricRow, ...]:
    """Return the series of metrics of `proc`."""
    return _Tables(proc).metrics() if any(one.size for one in proc.metrics.all_members()) else ()


class _Tables:
    """Tables of a process at the moment when this is made; see `look`."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._me = proc_name(proc.proc_id)
        self._now = proc.now()
        self._waits = proc.deadlocks.look()
        self._made = [
            (call, peer) for peer in proc.peers() for call in list(peer.calls) if isinstance(call, OutgoingCall)
        ]
        self._unsent = {call.number: call for call, _ in self._made if call.number}

    def view(self) -> observed.ProcView:
        """Return all tables."""
        proc = self._proc
        calls = [*self._incoming(), *self._outgoing(), *self._abandoned()]
        calls.sort(key=lambda one: -one.age)
        shown = calls[: limits.OBSERVED_CALLS]
        return observed.ProcView(
            proc=self._self(),
            children=tuple(_child(self._me, member, proc.holds.pauses) for member in list(proc.members.values())),
            actors=tuple(self._actor(cell) for mesh, cell in list(proc.cells.items()) if mesh != AGENT),
            calls=tuple(shown),
            links=tuple(self._links()),
            grants=tuple(self._grants()),
            publications=tuple(row for tell in proc.bulk.publications for row in tell()),
            events=tuple(proc.journal.after(0)),
            metrics=self.metrics(),
            endpoints=tuple(self._endpoints()),
            happened=proc.journal.counts,
            retries=proc.metrics.retries,
            samples_dropped=proc.metrics.dropped,
            job=job_of(proc, self._record_folder()) if self._is_controller else None,
            cut={"calls": len(calls) - len(shown)} if len(calls) > len(shown) else {},
        )

    def brief_view(self) -> observed.ProcView:
        """Return the part that a flight record keeps: oldest calls, fullest mailboxes, waiting links, late pins."""
        proc = self._proc
        calls = [*self._incoming(), *self._outgoing()]
        calls.sort(key=lambda one: -one.age)
        shown = calls[: limits.RECORD_CALLS]
        actors = [self._actor(cell) for mesh, cell in list(proc.cells.items()) if mesh != AGENT]
        actors.sort(key=lambda one: -one.queued)
        links = [link for link in self._links() if link.queued_bytes or link.waiting]
        return observed.ProcView(
            proc=self._self(),
            actors=tuple(actors[: limits.RECORD_CALLS]),
            calls=tuple(shown),
            links=tuple(links[: limits.RECORD_CALLS]),
            publications=tuple(self._late_publications())[: limits.RECORD_CALLS],
            metrics=self.latest_metrics(),
            job=job_of(proc, self._record_folder()) if self._is_controller else None,
            cut={"calls": len(calls) - len(shown)} if len(calls) > len(shown) else {},
        )

    # ---- this process and its children -----------------------------------------------------------------------

    def _own_place(self) -> tuple[str, str, dict[str, int], int]:
        """Return name, mesh, point and incarnation of this process."""
        proc, family = self._proc, self._proc.family
        own = None if family is None else family.own_mesh
        rank = (
            None
            if own is None
            else next((rank for rank, one in enumerate(own.members) if one.proc_id == proc.proc_id), None)
        )
        if own is None or rank is None:
            return "controller", "", {}, 0
        point = coordinates(own.whole.point(rank))
        return place_name(own.name, point), own.name, point, own.members[rank].incarnation

    def _self(self) -> observed.ProcRow:
        proc, family = self._proc, self._proc.family
        name, mesh, point, incarnation = self._own_place()
        parent = None if family is None else family.parent
        return observed.ProcRow(
            id=self._me,
            parent="" if parent is None else proc_name(parent),
            name=name,
            mesh=mesh,
            point=point,
            incarnation=incarnation,
            pid=proc.pid,
            host=proc.host_name,
            memory_bytes=0 if proc.is_simulated else memory_of(proc.pid),
            cpu_seconds=0.0 if proc.is_simulated else time.process_time(),
            gpu_percent=proc.gpu_use[0],
            gpu_memory_bytes=proc.gpu_use[1],
            torch="" if proc.is_simulated else _torch_version(),
            record="" if proc.recorder is None else str(proc.recorder.path),
        )

    def _record_folder(self) -> str:
        recorder = self._proc.recorder
        return "" if recorder is None else str(recorder.path.parent)

    @property
    def _is_controller(self) -> bool:
        return self._proc.family is None or self._proc.family.root is None

    # ---- actors and memory -----------------------------------------------------------------------------------

    def _actor(self, cell: Cell) -> observed.ActorRow:
        spec, point = cell.spec, coordinates(cell.spec.point)
        state = "ended" if cell.ended.is_set() else "serving" if cell.mailbox.is_open else "starting"
        return observed.ActorRow(
            proc=self._me,
            name=place_name(spec.name, point),
            mesh=spec.name,
            point=point,
            cls=class_of(spec.cls).__qualname__,
            incarnation=spec.incarnation,
            state=state,
            queued=sum(1 for _ in cell.mailbox.queued()),
            running=sum(1 for _ in cell.mailbox.running()),
        )

    def _grants(self) -> Iterator[observed.GrantRow]:
        for one in self._proc.bulk.registrations():
            yield observed.GrantRow(proc=self._me, kind="buffer", nbytes=one.span.nbytes)

    def _late_publications(self) -> Iterator[observed.PublicationRow]:
        """Yield publications of which a pin delays the publisher, or of which versions are overwritten unread."""
        for tell in self._proc.bulk.publications:
            for row in tell():
                if row.unread > row.slots or any(pin.seconds for pin in row.pins):
                    yield row

    def _links(self) -> Iterator[observed.LinkRow]:
        for peer in self._proc.peers():
            if peer.link is None or peer.proc_id == self._proc.proc_id:
                continue
            counted = peer.link.statistics()
            yield observed.LinkRow(
                proc=self._me,
                peer=proc_name(peer.proc_id),
                messages_sent=counted.messages_sent,
                messages_received=counted.messages_received,
                bytes_sent=counted.bytes_sent,
                bytes_received=counted.bytes_received,
                queued_bytes=counted.queued_bytes,
                dropped_frames=counted.dropped_frames,
                waiting=peer.waiting,
            )

    # ---- metrics ---------------------------------------------------------------------------------------------

    def metrics(self) -> tuple[observed.MetricRow, ...]:
        metrics = self._proc.metrics
        me = self._self_name() if metrics.own.size else None
        return tuple(row for member in metrics.all_members() for row in _series(member, self._me, me))

    def _endpoints(self) -> Iterator[observed.EndpointRow]:
        if self._proc.recorder is None:
            return
        for name, tally, counts in self._proc.recorder.endpoints():
            _, calls, nbytes, errors, cancelled = tally
            yield observed.EndpointRow(
                proc=self._me,
                name=place_name(name.mesh, name.point),
                mesh=name.mesh,
                point=name.point,
                endpoint=name.endpoint,
                calls=calls,
                errors=errors,
                cancelled=cancelled,
                bytes_received=nbytes,
                counts=tuple(counts),
            )

    def latest_metrics(self) -> tuple[observed.MetricRow, ...]:
        """Return the newest series, without buckets, which would fill a flight record."""
        rows = [msgspec.structs.replace(one, bounds=(), counts=()) for one in self.metrics()]
        return tuple(sorted(rows, key=lambda one: -one.at)[: limits.RECORD_METRICS])

    def samples(self) -> tuple[observed.SampleRow, ...]:
        """Remove and return the samples of this process, after those of processes below it."""
        below, found = self._proc.inquiries.below, list[observed.SampleRow]()
        while below:
            found.append(below.popleft())
        own = self._self_name()
        for _, at, step, member, values in self._proc.metrics.take():
            place = _place(member, own)
            row = observed.SampleRow(
                at=at, proc=self._me, step=step, values={name: _real(value) for name, value in values.items()}, **place
            )
            found.append(row)
        return tuple(found[-limits.METRIC_SAMPLES_COLLECTED :])

    def _self_name(self) -> dict[str, Any]:
        name, mesh, point, incarnation = self._own_place()
        return {"name": name, "mesh": mesh, "point": point, "incarnation": incarnation}

    # ---- incoming calls --------------------------------------------------------------------------------------

    def _incoming(self) -> Iterator[observed.CallRow]:
        for mesh, cell in list(self._proc.cells.items()):
            is_agent = mesh == AGENT
            for group in list(cell.mailbox.groups()):
                for call, task in list(group.running.items()):
                    if not is_agent:
                        yield self._running(cell, call, task)
                holders = tuple(
                    observed.WaitRow(kind="slot", call=self._name(self._waits.ref_of(one)))
                    for one in list(group.running)
                )
                for call in [] if is_agent else list(group.queue):
                    yield self._row(cell, call, "queued", holders)
            if not cell.mailbox.is_open and not is_agent:
                until = (observed.WaitRow(kind="slot", text="start of its actor"),)
                for call in list(cell.mailbox.queued()):
                    yield self._row(cell, call, "queued", until)

    def _running(self, cell: Cell, call: IncomingCall, task: trio.lowlevel.Task) -> observed.CallRow:
        waits = tuple(wait for edge in self._waits.edges_of(call) for wait in self._wait(edge))
        state = "waiting" if waits else "running"
        if call.cancelled_by is not None or call.deadline <= self._now:
            state = "cancelling"
        return self._row(cell, call, state, waits, task)

    def _row(
        self,
        cell: Cell,
        call: IncomingCall,
        state: str,
        waits: tuple[observed.WaitRow, ...] = (),
        task: trio.lowlevel.Task | None = None,
    ) -> observed.CallRow:
        at, stack = ("", list[str]()) if task is None else where(task, call.thread)
        spec, point = cell.spec, coordinates(cell.spec.point)
        return observed.CallRow(
            id=self._name(self._waits.ref_of(call)),
            proc=self._me,
            name=place_name(spec.name, point),
            mesh=spec.name,
            point=point,
            endpoint=call.spec.name,
            caller=self._name_of(call.caller, call.peer.proc_id),
            caller_proc=proc_name(call.peer.proc_id),
            state=state,
            age=self._now - call.received_at,
            left=self._left(call.deadline),
            waits=waits,
            at=at,
            stack=tuple(stack),
        )

    def _name_of(self, place: CallerPlace | None, proc_id: int) -> str:
        """Return the name of a call's caller: the actor and endpoint that it sent along, else its process."""
        if place is None:
            family = self._proc.family
            is_root = proc_id == (self._proc.proc_id if family is None or family.root is None else family.root)
            return "controller" if is_root else f"process {proc_name(proc_id)}"
        point, rest = list[tuple[str, int]](), place.rank
        for label, size in zip(reversed(place.labels), reversed(place.sizes), strict=False):
            point.append((label, rest % max(size, 1)))
            rest //= max(size, 1)
        name = place_name(place.mesh, dict(reversed(point)))
        return f"{name}.{place.endpoint}" if place.endpoint else name

    def _left(self, deadline: float) -> float | None:
        return None if deadline == math.inf else deadline - self._now

    # ---- waits -----------------------------------------------------------------------------------------------

    def _wait(self, edge: NodeRef) -> Iterator[observed.WaitRow]:
        if edge.kind is NodeKind.NEXT:
            for one in self._waits.any_of(edge):
                yield from self._wait(one)
            return
        text = ""
        if edge.kind is NodeKind.CONSUMER:
            text = "consumer of its items"
        elif edge.kind is NodeKind.UNSENT:
            text = "room in a mailbox"
        yield observed.WaitRow(kind=_KINDS.get(edge.kind, "call"), call=self._name(edge), text=text)

    def _name(self, ref: NodeRef) -> str:
        """Return the id of the call that a node stands for; empty if it is not a call."""
        match ref.kind:
            case NodeKind.CALL | NodeKind.SOURCE:
                return _call_id(ref.a, ref.b, ref.proc)
            case NodeKind.MESSAGE:
                return f"message.{ref.a}@{proc_name(ref.proc)}"
            case NodeKind.UNSENT:
                outgoing = self._unsent.get(ref.a)
                return "" if outgoing is None else self._outgoing_id(outgoing, ref.b)
            case _:
                return ""

    # ---- outgoing calls --------------------------------------------------------------------------------------

    def _outgoing_id(self, call: OutgoingCall, proc_id: int) -> str:
        if call.is_broadcast:
            return f"message.{self._me}.{call.number}@{proc_name(proc_id)}"
        return _call_id(self._proc.proc_id, call.call_id, proc_id)

    def _outgoing(self) -> Iterator[observed.CallRow]:
        for call, peer in self._made:
            if call.mesh == AGENT:
                continue
            above = self._waits.call_of(call.part_of)
            is_unsent = call.is_unsent_to(peer)
            origin = call.request.origin(call.index_of(peer))
            point = {} if origin.point is None else coordinates(origin.point)
            name = place_name(call.request.mesh, point)
            age = self._now - call.started_at
            yield observed.CallRow(
                id=self._outgoing_id(call, peer.proc_id),
                proc=proc_name(peer.proc_id),
                name=name,
                mesh=call.request.mesh,
                point=point,
                endpoint=call.request.endpoint,
                caller=self._name_of(call.request.caller, self._proc.proc_id),
                caller_proc=self._me,
                part_of="" if above is None else self._name(self._waits.ref_of(above)),
                called=len(call.targets),
                state="cancelling" if call.is_given_up else "sending" if is_unsent else "sent",
                age=age,
                left=None if call.budget is None else call.budget - age,
                waits=(observed.WaitRow(kind="room", text=f"room in the mailbox of {name}"),) if is_unsent else (),
            )

    def _abandoned(self) -> Iterator[observed.CallRow]:
        for peer in self._proc.peers():
            for call in peer.abandoned:
                origin = call.where()
                point = {} if origin.point is None else coordinates(origin.point)
                mesh, _, endpoint = call.what.rpartition(".")
                yield observed.CallRow(
                    id=_call_id(self._proc.proc_id, call.call_id, peer.proc_id),
                    proc=proc_name(peer.proc_id),
                    name=place_name(mesh, point),
                    mesh=mesh,
                    point=point,
                    endpoint=endpoint,
                    caller_proc=self._me,
                    state="abandoned",
                    age=self._now - call.started_at,
                )


def _place(member: MemberMetrics, own: dict[str, Any]) -> dict[str, Any]:
    """Return the coordinates of a member's series as fields of a row."""
    if not member.mesh:
        return own
    name = place_name(member.mesh, member.point)
    return {"name": name, "mesh": member.mesh, "point": member.point, "incarnation": member.incarnation}


def _series(member: MemberMetrics, proc: str, own: dict[str, Any] | None) -> Iterator[observed.MetricRow]:
    if not member.size:
        return
    place: dict[str, Any] = {"proc": proc, **_place(member, own or {})}
    for name, (_, at, step, _, values) in list(member.latest.items()):
        yield observed.MetricRow(metric=name, value=_real(values[name]), at=at, step=step, **place)
    for name, total in list(member.totals.items()):
        yield observed.MetricRow(metric=name, kind=COUNTER, value=_real(total), **place)
    for name, (at, level) in list(member.levels.items()):
        yield observed.MetricRow(metric=name, kind=GAUGE, value=_real(level), at=at, **place)
    for name, spread in list(member.spreads.items()):
        yield observed.MetricRow(
            metric=name,
            kind=HISTOGRAM,
            value=_real(spread.total),
            bounds=spread.bounds,
            counts=tuple(spread.counts),
            **place,
        )


def _real(value: float) -> float:
    """Return a number as it can be sent: an integer may have more than 64 bits."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _call_id(caller: int, number: int, callee: int) -> str:
    return f"{proc_name(caller)}.{number}@{proc_name(callee)}"


def _child(parent: str, member: Member, pauses: Pauses) -> observed.ProcRow:
    mesh, point = member.mesh, coordinates(member.point)
    if member.gone.is_set():
        state = "dead"
    elif member.child is None:
        state = "starting"
    else:
        state = "running" if member.stack_fd < 0 else STOPPED.get(process_state(member.pid), "running")
        state = "exiting" if state == "running" and member.is_expected else state
        state = "held" if state == "running" and pauses.is_held(member.peer) else state
    return observed.ProcRow(
        id=proc_name(member.peer.proc_id),
        parent=parent,
        name=place_name(mesh, point),
        mesh=mesh,
        point=point,
        incarnation=member.incarnation,
        pid=member.pid,
        host=member.host_name,
        state=state,
        stalled_seconds=member.stall.seconds,
        record=member.record,
        stack_fd=member.stack_fd,
    )


def _torch_version() -> str:
    torch = sys.modules.get("torch")
    return str(getattr(torch, "__version__", ""))


def _command_of(pid: int) -> str:
    with suppress(OSError):
        parts = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(filter(None, parts)).decode(errors="replace")[: limits.OBSERVED_TEXT_CHARS]
    return ""


# ---- snapshot of a whole run: each process queries those that it owns, all at once and for a bounded time ------------

_POLL_SECONDS: Final = 0.005
_SHARE: Final = 0.8
"""Share of a child's time limit that it gives to the processes below it; the rest is for the way back."""


class Inquiry:
    """One query in progress.

    Attributes:
        views: Received views, by child.
        awaited: Children that have not answered.
        news: Set when no child is awaited any more.
    """

    def __init__(self, awaited: set[ProcId]) -> None:
        self.views: dict[ProcId, tuple[observed.ProcView, ...]] = {}
        self.awaited = awaited
        self.news = trio.Event()

    def drop(self, proc_id: ProcId) -> None:
        """Stop waiting for a child."""
        self.awaited.discard(proc_id)
        if not self.awaited:
            self.news.set()


class Inquiries:
    """Queries of one process to its children, and its answers to its owner.

    Attributes:
        below: Samples of metrics from processes below this one, which no reader has taken.
        last: Last totals of such processes that have ended.
    """

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self.below: deque[observed.SampleRow] = deque(maxlen=limits.METRIC_SAMPLES_COLLECTED)
        self.last: deque[observed.ProcView] = deque(maxlen=limits.METRIC_ENDED)
        self._numbers = itertools.count(1)
        self._open: dict[int, Inquiry] = {}
        self._is_taking = False
        self._late = set[ProcId]()  # have not answered a query for samples
        self._machine: MachineReader | None = None
        proc.routes[messages.Observe] = self._take_question
        proc.routes[messages.Observed] = self._take_answer
        proc.routes[messages.Interrupt] = self._take_interrupt
        proc.on_gone.append(self._gone)

    async def ask(self, seconds: float = limits.OBSERVE_SECONDS, *, takes: bool = False) -> Sequence[observed.ProcView]:
        """Return views of this process, which comes first, and all processes below it.

        Args:
            seconds: Time limit for the answers.
            takes: Whether to collect samples of metrics; `take_samples` returns them, also those of late answers.
                Then a process that has not answered the last such query, or does not answer this one, is left out.
        """
        if takes or self._proc.is_simulated or self._proc.family is None or self._proc.family.root is not None:
            return await self._ask_procs(seconds, takes=takes)
        hosts = list[observed.HostRow]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_hosts, hosts, min(seconds / 4, limits.OBSERVE_STATE_SECONDS))
            views = await self._ask_procs(seconds, takes=False)
        return [msgspec.structs.replace(views[0], hosts=tuple(hosts)), *views[1:]]

    async def _ask_hosts(self, rows: list[observed.HostRow], seconds: float) -> None:
        """Add the row of this machine, and those of the machines that agents serve."""
        from trimesh._runtime.system.machine import MachineReader  # noqa: PLC0415 - few runs are looked at

        assert self._proc.family is not None
        self._machine = self._machine or MachineReader(current().nvml)

        async def ask(host: ServedHost) -> None:
            row = None
            with trio.move_on_after(seconds):
                row = await host.machine()
            agent = "silent" if row is None else "running"
            rows.append(msgspec.structs.replace(row or observed.HostRow(name=""), name=host.name, agent=agent))

        lost = self._proc.family.lost_hosts
        rows += [observed.HostRow(name=name, agent="lost", said=text) for name, text in lost.items()]
        async with trio.open_nursery() as nursery:
            for host in self._proc.family.remotes:
                if host.name not in lost:
                    nursery.start_soon(ask, host)
            rows.append(msgspec.structs.replace(await self._machine.read(), name=self._proc.host_name))

    async def _ask_procs(self, seconds: float, *, takes: bool) -> list[observed.ProcView]:
        proc = self._proc
        members = [member for member in proc.members.values() if not member.gone.is_set() and member.child is not None]
        by_signal = [member for member in members if member.stall.seconds and member.stack_fd >= 0]
        by_message = [member for member in members if member not in by_signal and member.peer.link is not None]
        if takes:
            by_signal, by_message = [], [one for one in by_message if one.peer.proc_id not in self._late]
        self._is_taking = self._is_taking or takes
        number, question = next(self._numbers), Inquiry({member.peer.proc_id for member in by_message})
        self._open[number] = question
        patience = min(seconds / 2, limits.OBSERVE_LOOP_SECONDS + seconds / 4)
        try:
            head = messages.encode(messages.Observe(number, patience * _SHARE, takes))
            for member in by_message:
                member.peer.send(Parcel(head))
            asked = AskedBySignal(by_signal)
            if question.awaited:
                with trio.move_on_after(patience):
                    await question.news.wait()
        finally:
            del self._open[number]
        below = [view for views in question.views.values() for view in views]
        if takes:
            self._late |= question.awaited
            return [look(proc), *below, *self.take_last()]
        silent = [member for member in by_message if member.peer.proc_id not in question.views]
        asked.add([member for member in silent if member.stack_fd >= 0 and not member.gone.is_set()])
        far = [member for member in silent if member.stack_fd < 0 and not member.gone.is_set()]
        ends_at = time.monotonic() + seconds / 2
        states = await _states_of(far, min(seconds / 4, limits.OBSERVE_STATE_SECONDS))
        while not asked.is_answered and time.monotonic() < ends_at:  # noqa: ASYNC110 - another process answers, by a file
            await trio.sleep(_POLL_SECONDS)
        return [look(proc), *below, *asked.views(), *states]

    # ---- messages --------------------------------------------------------------------------------------------

    def _take_question(self, peer: Peer, message: messages.Observe, _: list[memoryview]) -> None:
        seconds = min(max(message.seconds, 0.0), limits.OBSERVE_SECONDS)
        self._proc.serve(self._answer, peer, message.number, seconds, message.takes)

    @trio.lowlevel.enable_ki_protection
    async def _answer(self, peer: Peer, number: int, seconds: float, takes: bool) -> None:  # noqa: FBT001 - of a message
        views = list(await self.ask(seconds, takes=takes))
        if takes and (samples := take_samples(self._proc)):
            views[0] = msgspec.structs.replace(views[0], samples=samples)
        peer.send(Parcel(messages.encode(messages.Observed(number)), [observed.encode(views)]))

    def take_last(self) -> list[observed.ProcView]:
        """Remove and return the last totals of processes that have ended."""
        found = list(self.last)
        self.last.clear()
        return found

    def send_rest(self, owner: Peer) -> None:
        """Send the samples that are left, and the totals, to the owner, before this process ends."""
        samples, rows = take_samples(self._proc), metric_rows(self._proc)
        if samples or rows or self.last:
            proc = observed.ProcRow(id=proc_name(self._proc.proc_id))
            view = observed.ProcView(proc=proc, samples=samples, metrics=rows)
            views = [view, *self.take_last()]
            owner.send(Parcel(messages.encode(messages.Observed(0)), [observed.encode(views)]))

    def _take_answer(self, peer: Peer, message: messages.Observed, bodies: list[memoryview]) -> None:
        if len(bodies) != 1:
            raise ProtocolError(f"Observed must have one body, the views; got {len(bodies)} bodies")
        question = self._open.get(message.number)
        is_awaited = question is not None and peer.proc_id in question.awaited
        if not is_awaited and not (message.number == 0 or self._is_taking):
            return
        views = observed.decode_views(bodies[0])
        for view in views:
            self.below.extend(view.samples)
            if message.number == 0 and view.metrics:
                self.last.append(msgspec.structs.replace(view, samples=()))
        self._late.discard(peer.proc_id)
        if question is not None and is_awaited:
            question.views[peer.proc_id] = tuple(
                msgspec.structs.replace(view, samples=()) if view.samples else view for view in views
            )
            question.drop(peer.proc_id)

    def interrupt(self, proc_id: int, caller: int, number: int, reason: str) -> str:
        """Cancel a call that this process, or one that it owns, runs; return why that failed, or an empty text."""
        if proc_id == self._proc.proc_id:
            return "" if self._cancel(caller, number, reason) else "the call has ended"
        member = self._proc.members.get(ProcId(proc_id))
        if member is None or member.gone.is_set():
            return NOT_OWNED
        member.peer.send(Parcel(messages.encode(messages.Interrupt(caller, number, reason))))
        return ""

    def _take_interrupt(self, peer: Peer, message: messages.Interrupt, _: list[memoryview]) -> None:
        del peer
        self._cancel(message.caller, message.call, message.reason)

    def _cancel(self, caller: int, number: int, reason: str) -> bool:
        peer = self._proc.find_peer(caller)
        call = None if peer is None else peer.inbound.get(number)
        cell = None if call is None else self._proc.cells.get(call.mesh)
        if call is None or cell is None or call.mesh == AGENT:
            return False
        cell.cancel(call, "other", reason)
        return True

    def _gone(self, peer: Peer) -> None:
        self._late.discard(peer.proc_id)
        for question in self._open.values():
            question.drop(peer.proc_id)


async def _states_of(members: Sequence[Member], seconds: float) -> Sequence[observed.ProcView]:
    """Return views of processes on other hosts that do not answer, by the kernel states that the hosts report."""
    found: dict[Member, ProcessState | None] = {}

    @trio.lowlevel.enable_ki_protection
    async def ask(member: Member) -> None:
        if member.child is not None:
            found[member] = await member.child.kernel_state(member.record)

    if members:
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for member in members:
                    nursery.start_soon(ask, member)
    return [_view_by_state(member, found.get(member)) for member in members]


def _view_by_state(member: Member, known: ProcessState | None) -> observed.ProcView:
    known = ProcessState(observed.HOST_SILENT) if known is None else known
    state = STOPPED.get(known.letter, "silent")
    return observed.ProcView(
        proc=observed.ProcRow(
            id=proc_name(member.peer.proc_id),
            state=state,
            stalled_seconds=member.stall.seconds,
            kernel_state=known.letter if state == "silent" else "",
            memory_bytes=known.memory_bytes,
            cpu_seconds=known.cpu_seconds,
        ),
        actors=known.actors,
    )


class AskedBySignal:
    """Child processes that are queried by a signal, and answer in a file; see `watch/stacks.py`."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._asked_at: dict[Member, float] = {}
        self._reports: dict[Member, Report] = {}
        self.add(members)

    def add(self, members: Sequence[Member]) -> None:
        for member in members:
            self._asked_at[member] = request_report(member.pid)

    @property
    def is_answered(self) -> bool:
        """Read the files that are not complete yet; return whether all processes have written their tables."""
        for member, asked_at in self._asked_at.items():
            found = self._reports.get(member)
            if found is None or found.tables is None:
                self._reports[member] = read_report(member.pid, member.stack_fd, asked_at)
        return all(report.tables is not None for report in self._reports.values())

    def views(self) -> list[observed.ProcView]:
        """Return a view of each process: its own tables, or the controller's knowledge of it."""
        return [_view_of(member, report) for member, report in self._reports.items()]


def _view_of(member: Member, report: Report) -> observed.ProcView:
    view: observed.ProcView | None = None
    if report.tables is not None:
        try:
            view = observed.decode_view(report.tables)
        except ProtocolError:  # the file was being written, or holds something else
            view = None
    state = "silent" if report.tasks is None else "running" if report.is_in_loop else "stuck"
    stack = "" if report.is_in_loop else report.stack
    seconds = member.stall.seconds
    if view is None:
        proc = observed.ProcRow(
            id=proc_name(member.peer.proc_id),
            state=state,
            stack=stack,
            stalled_seconds=seconds,
            kernel_state=process_state(member.pid) if state == "silent" else "",
            memory_bytes=memory_of(member.pid),
            cpu_seconds=cpu_seconds_of(member.pid),
        )
        return observed.ProcView(proc=proc)
    proc = msgspec.structs.replace(view.proc, state=state, stack=stack, stalled_seconds=seconds)
    return msgspec.structs.replace(view, proc=proc)
