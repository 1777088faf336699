r"""Diagnoses of dead processes and lost hosts, and watch of abandoned calls.

DT-1 the last `limits.DEATHS` deaths keep their whole diagnosis. Of the last `limits.GONE_PEERS`, it is known only that
     the process is gone.

Abandoned calls:

    cancelled --caller stops waiting (C2)--> abandoned --terminal frame, or death of the process--> forgotten
                                                  \--limits.CANCEL_ACK_SECONDS after the cancel--> silent: reported once

An abandoned call is one whose caller no longer waits for the acknowledgement of its cancel. The callee may still run,
hold its slot and have side effects; its reply is dropped. Until its end is known, the call counts as load of its member
and `trimesh.dump` shows it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.records import LostHost
from trimesh._runtime.values.codec import describe
from trimesh.errors import (
    HostLost,
    MembershipChanged,
    MeshStopped,
    Origin,
    ProcDied,
    place_name,
    set_origin,
)
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent, Point

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Outbox, Peer


class ProcDeath(msgspec.Struct, frozen=True):
    """Diagnosis of the death of one process, shared by all errors of it; calling it returns a new error.

    Attributes:
        text: Text of the errors.
        kind: Class of the errors.
        exit: Exit report: process, exit status, last output, time; None if none arrived.
        reason: See `ProcDied.reason`; "" if the exit report has the exit status.
        by: "grace" when it was killed because it exceeded its grace, "kill" when the user killed it.
        record: File of its flight record, or "".
        loss: Loss of its host, if that was the cause; the errors are then its `HostLost`.
        cause: `__cause__` of the errors, if the runtime of this very process ended by an exception.
    """

    text: str
    kind: type[Exception] = ProcDied
    exit: ExitReport | None = None
    reason: str = ""
    by: str | None = None
    record: str = ""
    loss: HostLoss | None = None
    cause: BaseException | None = None

    def __call__(self, *, maybe_executed: bool = True) -> Exception:
        """Return a new error for one call; `maybe_executed` is false if the call cannot have run."""
        if self.loss is not None:
            return self.loss()
        if self.kind is ProcDied:
            report = self.exit or ExitReport.unknown(_NO_PROC)
            return report.error(
                self.text, maybe_executed=maybe_executed, by=self.by, record=self.record, reason=self.reason
            )
        error = self.kind(self.text)
        if isinstance(error, MembershipChanged):
            error.maybe_executed = maybe_executed
        if self.cause is not None:
            error.__cause__ = self.cause
        return error


_NO_PROC: Final = ProcId(0)


def stopped(message: str) -> ProcDeath:
    """Return the death record of a process that stopped normally."""
    return ProcDeath(message, MeshStopped)


def left(message: str) -> ProcDeath:
    """Return the death record of a process that was removed from its mesh."""
    return ProcDeath(message, MembershipChanged)


def diagnosed(
    label: str,
    report: ExitReport | None,
    *,
    silent: str = "",
    by: str | None = None,
    note: str = "",
    record: str = "",
) -> ProcDeath:
    """Return the death record for an exit report.

    Args:
        label: Name of the process in messages.
        report: Its exit report; None if none arrived.
        silent: Name of the bound in `limits` that the process exceeded by not answering, or "".
        by: See `ProcDeath.by`.
        note: Text to add.
        record: File of its flight record, or "".
    """
    if report is not None and report.lost_host is not None:
        loss = HostLoss.of(report.lost_host)
        return ProcDeath(loss.text, HostLost, report, loss=loss)
    silence = f"stopped for longer than limits.{silent} ({getattr(limits, silent):g} s)" if silent else ""
    if report is None or not report.is_known:
        text = f"{label} {silence or 'was lost'}; no exit report arrived{note}"
        return ProcDeath(text, reason="stopped" if silent else "lost", by=by, record=record)
    verb = "was killed by" if report.signal is not None else "ended with"
    how = f"{silence}, then ended" if silent else f"{verb} {report.describe()}"
    text = f"{label} {how} (pid {report.pid}){note}"
    from trimesh._wire.exceptions.tracebacks import last_words  # noqa: PLC0415 - only deaths need it

    if words := last_words(report.stderr_tail):
        text += f"; last output: {words}"
    return ProcDeath(text, exit=report, reason="stopped" if silent else "", by=by, record=record)


class Deaths:
    """Death records that one process keeps, up to the bounds of DT-1."""

    def __init__(self) -> None:
        self._of: dict[ProcId, ProcDeath] = {}
        self._diagnosed: deque[ProcId] = deque()

    def __len__(self) -> int:
        return len(self._of)

    def add(self, proc_id: ProcId, death: ProcDeath) -> None:
        """Record a death; drop the oldest diagnosis, and the oldest record, beyond the bounds of DT-1."""
        self._of[proc_id] = death
        self._diagnosed.append(proc_id)
        if len(self._diagnosed) > limits.DEATHS:
            self._of[self._diagnosed.popleft()] = _ENDED_LONG_AGO
        if len(self._of) > limits.GONE_PEERS:
            del self._of[next(iter(self._of))]

    def of(self, proc_id: ProcId) -> ProcDeath | None:
        """Return the death record of a process; None if it is alive or its record was dropped."""
        return self._of.get(proc_id)


_ENDED_LONG_AGO: Final = ProcDeath(
    f"the process died; its diagnosis was dropped after limits.DEATHS ({limits.DEATHS}) later deaths", reason="lost"
)


# ---- lost hosts ------------------------------------------------------------------------------------------------------

# A lost host is one failure, and the cause of death of each process that ran there.


class HostLoss(msgspec.Struct, frozen=True):
    """Loss of one host; calling it returns a new `HostLost`, for a call to one of its processes or for a block.

    Attributes:
        reason: See `HostLost.reason`.
        text: The reason as a sentence.
        point: Coordinates of the host in its job; None if unknown.
        job: Name of the mesh of hosts.
    """

    host: str
    reason: str
    text: str
    point: Point | None = None
    job: str = "hosts"

    @classmethod
    def of(cls, lost: LostHost) -> HostLoss:
        """Rebuild the loss that another process reported."""
        point = Extent(hosts=lost.hosts).point(lost.rank) if lost.rank < lost.hosts else None
        return cls(lost.host, lost.reason, lost.text, point)

    @property
    def record(self) -> LostHost:
        """The loss as sent to other processes."""
        hosts, rank = (0, 0) if self.point is None else (self.point.extent.nelements, self.point.rank)
        return LostHost(self.host, self.reason, self.text, hosts, rank)

    def __call__(self, *, maybe_executed: bool = True) -> Exception:
        """Return a new error for one call or block."""
        place = "" if self.point is None else f" {place_name(self.job, self.point)}"
        error = HostLost(
            f"the host {self.host}{place} was lost with all its processes: {self.text}",
            host=self.host,
            point=self.point,
            reason=self.reason,
        )
        set_origin(error, Origin(self.point, self.job, host=self.host))
        return error


class ReportedLosses:
    """Host losses already reported to a block: each is one failure, however many processes ran there."""

    def __init__(self) -> None:
        self._reported = set[tuple[str, Point | None]]()

    def is_repeated(self, error: Exception) -> bool:
        """Return whether `error` is a host loss that was reported before; mark it as reported if not."""
        if not isinstance(error, HostLost):
            return False
        lost = (error.host, error.point)
        is_repeated = lost in self._reported
        self._reported.add(lost)
        return is_repeated


# ---- abandoned calls -------------------------------------------------------------------------------------------------

_log = logging.getLogger("trimesh")


class AbandonedCall(msgspec.Struct, eq=False):
    """Cancelled call to one member, for whose end no task waits any more.

    Attributes:
        call_id: Id of the call on its link.
        box: Outbox that sent it; the call counts as its load.
        what: `mesh.endpoint`, for messages.
        where: Returns the coordinates of the member.
        started_at: When it was sent (Trio time).
        cancelled_at: When its cancel was sent (Trio time).
        on_silent: Called once when the call counts as silent; notifies the owner of the member.
        is_reported: Whether its silence has been reported.
    """

    call_id: int
    box: Outbox
    what: str
    where: Callable[[], Origin]
    started_at: float
    cancelled_at: float
    on_silent: Callable[[], None]
    is_reported: bool = False

    @property
    def silent_at(self) -> float:
        """Trio time from which the call counts as silent."""
        return self.cancelled_at + limits.CANCEL_ACK_SECONDS


class AbandonedCalls:
    """Abandoned calls to one process, until their ends are known."""

    __slots__ = ("_calls", "_is_watched", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._calls: dict[int, AbandonedCall] = {}
        self._is_watched = False

    def __iter__(self) -> Iterator[AbandonedCall]:
        """Iterate over the calls, oldest first."""
        return iter(list(self._calls.values()))

    def add(self, call: AbandonedCall) -> None:
        """Record an abandoned call; report it once if it stays silent for too long (rule C2)."""
        self._calls[call.call_id] = call
        if call.silent_at <= trio.current_time():
            self._report(call)
        elif not self._is_watched:
            self._is_watched = self.peer.proc.serve(self._watch)
            if not self._is_watched:  # this process is shutting down and starts no more tasks
                self._report(call)

    def ended(self, call_id: int) -> None:
        """Remove a call that has ended on the peer, and its load on the member."""
        found = self._calls.pop(call_id, None)
        if found is not None:
            found.box.load -= 1

    def clear(self) -> None:
        """Drop all calls: the process has ended."""
        self._calls.clear()

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        try:
            while unreported := [call for call in self if not call.is_reported]:
                await trio.sleep_until(min(call.silent_at for call in unreported))
                for call in self:
                    if not call.is_reported and call.silent_at <= trio.current_time():
                        self._report(call)
        finally:
            self._is_watched = False

    def _report(self, call: AbandonedCall) -> None:
        call.is_reported = True
        now = trio.current_time()
        _log.warning(
            "%s was abandoned: it has not acknowledged its cancel for %.1f s, is %.1f s old and may still run; "
            "later messages to its actor may wait behind it (%s)",
            call.what,
            now - call.cancelled_at,
            now - call.started_at,
            describe(call.where()),
        )
        call.on_silent()
