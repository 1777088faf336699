r"""How other processes have ended, for as long as a process may ask.

DT-1 of the last `limits.DEATHS` the whole diagnosis is remembered, of the last `limits.GONE_PEERS` that they are gone.

Calls that were given up before their end was known: what is remembered of them, and said.

    cancelled --the caller's patience--> abandoned --terminal frame, or death of the process--> forgotten
                                              \--limits.CANCEL_ACK_SECONDS after the cancel--> silent: said once

Whoever has made the call is gone. The callee may still run, hold its slot and change things; its answer is dropped. So
it counts as load of its member, and `trimesh.dump` shows it, until its end is known.
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
    """The end of one process, made once and handed on; called, it makes the error of one call to it.

    Attributes:
        text: Of the errors.
        kind: Their class.
        exit: The exit report: which process, how, its last output, when; None where none came.
        reason: See `ProcDied.reason`; "" for what the exit report says.
        by: "grace" when it was killed for want of grace, "kill" when the user wanted that.
        record: File of its flight record, or "".
        loss: The loss of its host, which makes the errors then.
        cause: What has ended the runtime of this very process.
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
        """Return the error of a call; `maybe_executed` says whether the call may have run."""
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
    """Return the end of a process that has ended as it should."""
    return ProcDeath(message, MeshStopped)


def left(message: str) -> ProcDeath:
    """Return the end of a process that was taken out of its mesh."""
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
    """Return the death that an exit report tells of; `silent` names the limit of silence that the process broke."""
    if report is not None and report.lost_host is not None:
        loss = HostLoss.of(report.lost_host)
        return ProcDeath(loss.text, HostLost, report, loss=loss)
    silence = f"stopped for longer than limits.{silent} ({getattr(limits, silent):g} s)" if silent else ""
    if report is None or not report.is_known:
        text = f"{label} {silence or 'was lost'}; no exit report came{note}"
        return ProcDeath(text, reason="stopped" if silent else "lost", by=by, record=record)
    verb = "was killed by" if report.signal is not None else "ended with"
    how = f"{silence}, then ended" if silent else f"{verb} {report.describe()}"
    text = f"{label} {how} (pid {report.pid}){note}"
    from trimesh._wire.exceptions.tracebacks import last_words  # noqa: PLC0415 - only deaths need it

    if words := last_words(report.stderr_tail):
        text += f"; last output: {words}"
    return ProcDeath(text, exit=report, reason="stopped" if silent else "", by=by, record=record)


class Deaths:
    """The deaths that one process has heard of."""

    def __init__(self) -> None:
        self._of: dict[ProcId, ProcDeath] = {}
        self._diagnosed: deque[ProcId] = deque()

    def __len__(self) -> int:
        return len(self._of)

    def add(self, proc_id: ProcId, death: ProcDeath) -> None:
        """Remember a death, forget the oldest."""
        self._of[proc_id] = death
        self._diagnosed.append(proc_id)
        if len(self._diagnosed) > limits.DEATHS:
            self._of[self._diagnosed.popleft()] = _ENDED_LONG_AGO
        if len(self._of) > limits.GONE_PEERS:
            del self._of[next(iter(self._of))]

    def of(self, proc_id: ProcId) -> ProcDeath | None:
        """Return how a process has ended; None if it is not gone, or too long ago."""
        return self._of.get(proc_id)


_ENDED_LONG_AGO: Final = ProcDeath(
    f"the process died before the last {limits.DEATHS} that did; how is not remembered", reason="lost"
)


# ---- losses ----------------------------------------------------------------------------------------------------------

# How a host was lost, with all that ran there: one failure, and what each of its processes has died of.


class HostLoss(msgspec.Struct, frozen=True):
    """The loss of one host; called, it makes the error of a call to a process there, or of a block.

    Attributes:
        reason: See `HostLost.reason`.
        text: The same in words.
        point: Its place among the hosts of its job.
    """

    host: str
    reason: str
    text: str
    point: Point | None = None
    job: str = "hosts"

    @classmethod
    def of(cls, lost: LostHost) -> HostLoss:
        """Return the loss that another process has been told of."""
        point = Extent(hosts=lost.hosts).point(lost.rank) if lost.rank < lost.hosts else None
        return cls(lost.host, lost.reason, lost.text, point)

    @property
    def record(self) -> LostHost:
        """What other processes are told."""
        hosts, rank = (0, 0) if self.point is None else (self.point.extent.nelements, self.point.rank)
        return LostHost(self.host, self.reason, self.text, hosts, rank)

    def __call__(self, *, maybe_executed: bool = True) -> Exception:
        """Return an error of its own for one call, or for a block."""
        place = "" if self.point is None else f" {place_name(self.job, self.point)}"
        error = HostLost(
            f"the host {self.host}{place} was lost with all that ran there: {self.text}",
            host=self.host,
            point=self.point,
            reason=self.reason,
        )
        set_origin(error, Origin(self.point, self.job, host=self.host))
        return error


class ToldLosses:
    """The hosts whose loss a block has been told of: that is one failure, not one for each process there."""

    def __init__(self) -> None:
        self._told = set[tuple[str, Point | None]]()

    def is_told(self, error: Exception) -> bool:
        """Return whether an error is the loss of a host that was told before; it is from now on."""
        if not isinstance(error, HostLost):
            return False
        lost = (error.host, error.point)
        is_told = lost in self._told
        self._told.add(lost)
        return is_told


# ---- calls that were given up before their end was known: what is remembered of them, and said -----------------------

_log = logging.getLogger("trimesh")


class AbandonedCall(msgspec.Struct, eq=False):
    """One call to one member that no task waits for any more.

    Attributes:
        call_id: Its number.
        box: What it was sent by, of which it is a load.
        what: `mesh.endpoint`, for people.
        where: Gives the coordinates of the member.
        started_at: When it was sent (Trio time).
        cancelled_at: When its cancel was (the same).
        on_silent: Tells the owner of the member.
        is_said: Whether its silence has been told.
    """

    call_id: int
    box: Outbox
    what: str
    where: Callable[[], Origin]
    started_at: float
    cancelled_at: float
    on_silent: Callable[[], None]
    is_said: bool = False

    @property
    def silent_at(self) -> float:
        """When it counts as silent (Trio time)."""
        return self.cancelled_at + limits.CANCEL_ACK_SECONDS


class AbandonedCalls:
    """Those to one process, until their ends are known."""

    __slots__ = ("_calls", "_is_watched", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._calls: dict[int, AbandonedCall] = {}
        self._is_watched = False

    def __iter__(self) -> Iterator[AbandonedCall]:
        """Iterate over them, oldest first."""
        return iter(list(self._calls.values()))

    def add(self, call: AbandonedCall) -> None:
        """Remember a call that is given up; say so once, when it has been silent for long (rule C2)."""
        self._calls[call.call_id] = call
        if call.silent_at <= trio.current_time():
            self._say(call)
        elif not self._is_watched:
            self._is_watched = self.peer.proc.serve(self._watch)
            if not self._is_watched:  # nothing more is to come
                self._say(call)

    def ended(self, call_id: int) -> None:
        """Learn that a call which is not waited for has ended there: its member has one call less."""
        found = self._calls.pop(call_id, None)
        if found is not None:
            found.box.load -= 1

    def clear(self) -> None:
        """Forget all: the process has ended."""
        self._calls.clear()

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        try:
            while unsaid := [call for call in self if not call.is_said]:
                await trio.sleep_until(min(call.silent_at for call in unsaid))
                for call in self:
                    if not call.is_said and call.silent_at <= trio.current_time():
                        self._say(call)
        finally:
            self._is_watched = False

    def _say(self, call: AbandonedCall) -> None:
        call.is_said = True
        now = trio.current_time()
        _log.warning(
            "%s was given up: it has not acknowledged its cancel for %.1f s, is %.1f s old and may still run; "
            "later messages to its actor may wait behind it (%s)",
            call.what,
            now - call.cancelled_at,
            now - call.started_at,
            describe(call.where()),
        )
        call.on_silent()
