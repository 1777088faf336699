"""Outgoing call to one or many actors: send, wait, cancel, wait for the acknowledgements.

The waiting task parks once and is woken once, when the call is complete or when the task has to act. That task decodes
the replies, never the task that drains the links.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio
from trio.lowlevel import current_task, wait_task_rescheduled

from trimesh import limits
from trimesh._routing.collector import POSTED, Collector, LocalFailure, Outcome
from trimesh._runtime.peers.deaths import AbandonedCall
from trimesh._runtime.peers.peer import Outbox, Parcel, Peer, Pending, SpreadParcel, Target
from trimesh._runtime.tasks.crossing import wake
from trimesh._runtime.values.codec import Guarded
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeReport, Place
from trimesh.config import current
from trimesh.errors import DeadlockError, ProtocolError, add_note, context_of, leaves, notes_on, place_name
from trimesh.ids import CallId, MeshId

if TYPE_CHECKING:
    from trimesh._runtime.calls.invocation import Request
    from trimesh._runtime.life.proc import Proc


class AnyWait(Protocol):
    """A wait for whichever of several ranks or calls comes next."""

    number: int
    is_bounded: bool

    @property
    def waiting_task(self) -> trio.lowlevel.Task | None:
        """The waiting task, or None if its result has arrived."""
        ...


class OutgoingCall:
    """A call that was sent and has not ended, or a broadcast that waits for room.

    Attributes:
        call_id: 0 for a broadcast.
        is_broadcast: Whether there are no replies.
        collector: The outcomes so far.
        aborted: Whether the waiting task was cancelled; a death is then not reported to it (rule X3).
        started_at: When it was sent (Trio time).
        cancelled_at: When cancels were sent to its ranks (Trio time), or None.
        is_bounded: Whether the waiting task had a deadline when it began to wait.
        awaiters: Tasks that await the outcome of a started call, while the call's own task waits for it.
        number: Number given by a deadlock search; 0 before.
    """

    __slots__ = (
        "_attachments",
        "_boxes",
        "_index",
        "_lent",
        "_pending",
        "_task",
        "_waits_here",
        "aborted",
        "awaiters",
        "budget",
        "call_id",
        "cancelled_at",
        "collector",
        "is_bounded",
        "is_broadcast",
        "number",
        "proc",
        "request",
        "started_at",
        "targets",
    )

    def __init__(
        self,
        proc: Proc,
        call_id: CallId,
        request: Request,
        targets: Sequence[Target],
        *,
        fail_fast: bool,
        budget: float | None = None,
        is_bounded: bool = False,
        awaiters: Sequence[trio.lowlevel.Task] = (),
        started_at: float | None = None,
    ) -> None:
        self.proc = proc
        self.awaiters = awaiters
        self.call_id = call_id
        self.is_broadcast = call_id == 0
        self.request = request
        count = len(targets)
        self.collector = Collector(count, fail_fast)
        self.aborted = False
        self.started_at = proc.now() if started_at is None else started_at
        self.budget = budget
        self.is_bounded = is_bounded
        self.number = 0
        # Thousands may be in flight: state that few calls need is created on demand.
        self._pending: dict[int, Pending] | None = None
        self._lent: tuple[trio.Event, ...] = ()
        if count == 1:
            target = targets[0]
            box = target.peer.boxes.get(target.mesh) or target.peer.outbox(target.mesh)
            self._index: Mapping[Peer, int] = box.index
            self._boxes: Sequence[Outbox] = box.alone
            self.targets: Sequence[Target] = box.targets
        else:
            self.targets = targets
            self._index = {target.peer: index for index, target in enumerate(targets)}
            self._boxes = [target.peer.boxes.get(target.mesh) or target.peer.outbox(target.mesh) for target in targets]
        self._task: trio.lowlevel.Task | None = None
        self.cancelled_at: float | None = None
        self._waits_here = False
        self._attachments: Sequence[object] = ()

    @property
    def what(self) -> str:
        """`mesh.endpoint`, for messages."""
        return self.request.what

    @property
    def mesh(self) -> MeshId:
        """The actor mesh that is addressed; a call to no member has none."""
        return self.targets[0].mesh

    @property
    def is_given_up(self) -> bool:
        """True while its cancel is in progress."""
        return self.cancelled_at is not None or self.aborted

    @property
    def waiter(self) -> trio.lowlevel.Task | None:
        """The task that waits for the outcome; None once it has been cancelled."""
        return None if self.is_given_up else self._task

    @property
    def any_wait(self) -> AnyWait | None:
        """The wait for several calls that this one is part of; None if it is awaited alone."""
        return None

    @property
    def part_of(self) -> trio.lowlevel.Task | None:
        """The task that wants the outcome, whether or not it is waiting now."""
        return self._task

    def is_open_at(self, peer: Peer) -> bool:
        """Return whether the rank in `peer` is not settled yet."""
        return self in peer.calls

    def is_unsent_to(self, peer: Peer) -> bool:
        """Return whether the message to `peer` still waits for room."""
        return self._pending is not None and self._index.get(peer) in self._pending

    @property
    def is_unsent(self) -> bool:
        """True while one of its messages waits for room."""
        return bool(self._pending)

    def taken_before_it(self) -> int:
        """Return how many messages its blocked targets have taken so far; blocked: no room for this call."""
        return sum([self._boxes[index].window.acknowledged_total for index in self._pending or ()])

    def index_of(self, peer: Peer) -> int:
        """Return the target index of the member in `peer`."""
        return self._index[peer]

    def fail_unsent(self, peer: Peer, error: Exception) -> None:
        """Withdraw the message to `peer`, which waits for room, and settle its rank with an error."""
        index = self._index[peer]
        self._withdraw(index)
        self._settle(index, LocalFailure(error))

    def peers(self) -> AbstractSet[Peer]:
        return self._index.keys()

    def _hold(self, attachments: Sequence[object]) -> None:
        """Keep objects that the arguments refer to until the call has ended."""
        self._attachments = attachments
        try:
            for thing in attachments:
                if isinstance(thing, Guarded):
                    thing.check(self.peers(), is_broadcast=self.is_broadcast)
        except TypeError:
            self._drop_unused()
            raise

    def start(self, parcel: Parcel) -> None:
        """Send to every target that has room, queue for the others, settle the dead ones.

        Raises:
            TypeError: The arguments refer to objects that cannot be sent to these actors.
        """
        if parcel.attachments:
            self._hold(parcel.attachments)
        if not self.is_broadcast:
            self.proc.calls[self.call_id] = self
        boxes = self._boxes
        is_cast = (bool(parcel.bodies) and len(boxes) > 1) or type(parcel) is SpreadParcel
        for box in boxes:
            if is_cast or box.peer.link is None:
                self._send_to_living(parcel)
                return
        positions = self.collector.positions
        for index, box in enumerate(boxes):
            sent = box.try_send(parcel)
            box.peer.calls[self] = None
            if sent is None:
                self._queue(index, box, parcel)
                continue
            position, lent = sent
            if lent is not None or self.is_broadcast:
                self._sent(index, position, lent)
            else:
                positions[index] = position
                box.load += 1
        if self._pending:
            self.proc.deadlocks.unsent(self)

    def _send_to_living(self, parcel: Parcel) -> None:
        """Do the same for targets that may be dead, and for bodies, which are copied once for all."""
        alive: list[int] = []
        for index, target in enumerate(self.targets):
            unreachable = target.peer.death or target.peer.no_link
            if unreachable is not None:
                self.collector.settle(index, LocalFailure(unreachable(maybe_executed=False)))
            else:
                alive.append(index)
        if self.collector.wants_cancel:  # some targets are dead: the others need not begin
            self.collector.withdraw_unsent()
            self._drop_unused()
            return
        for index in alive:
            self._boxes[index].peer.calls[self] = None
        self._send_to(alive, parcel)

    def _drop_unused(self) -> None:
        for box in self._boxes:
            box.drop_unused()

    def _send_to(self, alive: Sequence[int], parcel: Parcel) -> None:
        boxes = [self._boxes[index] for index in alive]
        if type(parcel) is not SpreadParcel and len(alive) > 1 and all(box.has_room(parcel.nbytes) for box in boxes):
            if parcel.definitions or parcel.attachments:
                for box in boxes:
                    box.peer.prepare(parcel.definitions, parcel.attachments)
            lent = self.proc.cast([box.peer for box in boxes], parcel)
            for index, box in zip(alive, boxes, strict=True):
                self._sent(index, box.count(parcel.nbytes), lent)
        else:
            for index, box in zip(alive, boxes, strict=True):
                self._send_or_queue(index, box, parcel.each[index] if type(parcel) is SpreadParcel else parcel)
            if self._pending:
                self.proc.deadlocks.unsent(self)

    def _send_or_queue(self, index: int, box: Outbox, parcel: Parcel) -> None:
        sent = box.try_send(parcel)
        if sent is None:
            self._queue(index, box, parcel)
        else:
            self._sent(index, *sent)

    def _queue(self, index: int, box: Outbox, parcel: Parcel) -> None:
        if self._pending is None:
            self._pending = {}
        self._pending[index] = box.queue(parcel, index, self._sent)

    def _sent(self, index: int, position: int, lent: trio.Event | None) -> None:
        if self._pending:
            self._pending.pop(index, None)
        self.collector.sent(index, position)
        if lent is not None and not lent.is_set() and lent not in self._lent:
            self._lent = (*self._lent, lent)
        if self.is_broadcast:
            self._settle(index, POSTED)
        else:
            self._boxes[index].load += 1

    def terminal(self, peer: Peer, outcome: Outcome, dequeued: int) -> None:
        """Process a terminal frame: a rank's outcome, and how many messages its actor has taken out.

        Raises:
            ProtocolError: The peer is not a target, or has already replied.
        """
        index = self._index.get(peer)
        if index is None or not self._settle(index, outcome):
            raise ProtocolError(f"a call gets one terminal frame from each rank, got another for call {self.call_id}")
        self._boxes[index].acknowledged(dequeued)

    def peer_gone(self, peer: Peer) -> None:
        """Settle the rank of a dead process with the error that its `death` creates."""
        index = self._index[peer]
        assert peer.death is not None
        is_pending = self._pending is not None and index in self._pending
        self._withdraw(index)
        self._settle(index, LocalFailure(peer.death(maybe_executed=not is_pending)))

    def _withdraw(self, index: int) -> None:
        """Withdraw a rank's message if it was not sent yet."""
        pending = self._pending.pop(index, None) if self._pending else None
        if pending is not None:
            box = self._boxes[index]
            box.peer.calls.pop(self, None)
            box.withdraw(pending)

    def _settle(self, index: int, outcome: Outcome) -> bool:
        """Record a rank's outcome and wake the waiting task if it has to act; False if it was settled before."""
        collector = self.collector
        if not collector.settle(index, outcome):
            return False
        box = self._boxes[index]
        box.peer.calls.pop(self, None)
        if collector.positions[index] and not self.is_broadcast:
            box.load -= 1
        if not collector.remaining:
            self._wake()
        elif collector.failures and collector.wants_cancel and self.cancelled_at is None:
            self.cancel_rest(f"another rank of {self.what} failed")
            self._wake()
        return True

    def forget(self) -> None:
        """Drop the call, which has ended or is abandoned; late replies are dropped and counted."""
        if self.collector.remaining and not self.is_broadcast:
            self._abandon()
        self.proc.calls.pop(self.call_id, None)

    def _abandon(self) -> None:
        """Abandon the running ranks; cancelled ones are recorded until they reply."""
        for index in self.collector.running():
            box = self._boxes[index]
            peer = box.peer
            if self.cancelled_at is None:
                box.load -= 1
                continue
            where = partial(self.request.origin, index)
            tell = partial(report_silent, self.proc, peer, self.mesh, self.what)
            peer.abandoned.add(
                AbandonedCall(self.call_id, box, self.what, where, self.started_at, self.cancelled_at, tell)
            )
        for box in self._boxes:
            box.peer.calls.pop(self, None)

    def cancel_rest(self, reason: str) -> None:
        """Withdraw unsent messages and send cancels to the running ranks. Idempotent."""
        if self.cancelled_at is not None:
            return
        self.cancelled_at = self.proc.now()
        for index in list(self._pending or ()):
            self._withdraw(index)
        self.collector.withdraw_unsent()
        is_leaving = any(not event.is_set() for event in self._lent)
        for index in self.collector.running():
            position = self.collector.positions[index]
            self._boxes[index].peer.cancel(self.call_id, position, reason, is_leaving=is_leaving)

    def _wake(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            if not self._waits_here:
                wake(task)

    def _wait_here(self) -> bool:
        """Poll for replies in the running task while no other task can run. Return whether the wait is over.

        Meanwhile snapshots and searches see the task as waiting.
        """
        task = self._task = current_task()
        wait_here = self.proc.transport.wait_here
        self._waits_here = True
        while self.part_of is not None and wait_here():
            pass
        self._waits_here = False
        if self.part_of is not None:
            self._task = None
            return False
        _count_checkpoint(task)
        return True

    def _park(self) -> Awaitable[None]:
        assert self._task is None
        self._task = current_task()
        return wait_task_rescheduled(self._abort)  # noqa: ASYNC105 - one coroutine less for each call

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self.aborted = True
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def wait(self) -> None:
        """Wait until the call is complete; if cancelled, cancel it remotely first (rule C2).

        Raises:
            trio.Cancelled: The caller's scope was cancelled; every rank has unwound or was abandoned.
        """
        try:
            if not self.collector.remaining:
                await trio.lowlevel.checkpoint()
            elif self.cancelled_at is None and not (self.proc.transport.waits_left and self._wait_here()):
                self._task = current_task()
                await wait_task_rescheduled(self._abort)
            if self.cancelled_at is not None:
                await self._wait_for_acknowledgements()
            if self._lent:
                await self._wait_until_buffers_return()
        except (trio.Cancelled, KeyboardInterrupt) as cut:
            self.cancel_rest(reason_of(cut, self.what))
            await self._wait_for_acknowledgements()
            raise
        finally:
            self.forget()

    async def wait_until(self, deadline: float) -> None:
        """Wait until the call is complete; at `deadline` (Trio time) abandon it without a cancel."""
        try:
            with trio.CancelScope(deadline=deadline):
                while not self.collector.is_complete:
                    await self._park()
        finally:
            self.forget()

    async def _wait_for_acknowledgements(self) -> None:
        assert self.cancelled_at is not None
        with trio.CancelScope(shield=True, deadline=self.cancelled_at + self.patience) as scope:
            while not self.collector.is_complete:
                await self._park()
                if not self.collector.is_complete:  # the set of silent ranks may have changed
                    scope.deadline = self.cancelled_at + self.patience
            if self.is_broadcast:
                scope.deadline = self.cancelled_at + self.patience
                await self._wait_until_buffers_return()

    async def _wait_until_buffers_return(self) -> None:
        """Wait until a broadcast's buffers may be written to again."""
        if self.is_broadcast:
            for event in self._lent:
                await event.wait()

    @property
    def patience(self) -> float:
        """Seconds that the caller waits for acknowledgements of its cancel (rule C2)."""
        return patience_of(self.request, [self._boxes[index].peer for index in self.collector.running()])

    def peer_stalled(self) -> None:
        """Note that the loop of a target process is stalled, so acknowledgements may not arrive."""
        if self.cancelled_at is not None:
            self._wake()

    def silent(self) -> list[int]:
        """Return the ranks that did not acknowledge in time."""
        return list(self.collector.running())


_ARE_COUNTED: Final = {"_cancel_points", "_schedule_points"} <= {
    field.name for field in getattr(trio.lowlevel.Task, "__attrs_attrs__", ())
}
"""True if this release of Trio counts checkpoints (`trio.testing.assert_checkpoints`) in the attributes known here."""


def _count_checkpoint(task: trio.lowlevel.Task) -> None:
    """Count a cancel point and a schedule point of a task, as Trio does."""
    counts: Any = task
    if _ARE_COUNTED:
        counts._cancel_points += 1  # noqa: SLF001 - they have no public name
        counts._schedule_points += 1  # noqa: SLF001


def patience_of(request: Request, peers: Collection[Peer]) -> float:
    """Return the seconds that a caller waits for `peers` to acknowledge its cancel."""
    chosen = current().abandon_after if request.abandon_after is None else request.abandon_after
    if chosen is not None:
        return chosen
    if peers and all(peer.is_stalled for peer in peers):
        return limits.STALLED_ACK_SECONDS
    return limits.CANCEL_ACK_SECONDS


def reason_of(cut: BaseException, what: str) -> str:
    """Return why a call was cancelled, from the exception that interrupted its caller."""
    reason = getattr(cut, "reason", None) if isinstance(cut, trio.Cancelled) else type(cut).__name__
    text = f"caller cancelled @{what}"
    return (f"{text}: {reason}" if reason else text)[: limits.REASON_CHARS_MAX]


# ---- reports to the owner of a member that does not acknowledge a cancel in time (rule C2) ---------------------------


def report_silent(proc: Proc, peer: Peer, mesh: MeshId, what: str) -> None:
    """Report to the owner of an actor that it did not acknowledge a cancel in time (rule C2)."""
    known = proc.memberships.get(mesh)
    if known is not None:
        proc.peer(known.info.owner).send(Parcel(messages.encode(messages.Silent(mesh, peer.proc_id, what))))


# ---- call cycles -----------------------------------------------------------------------------------------------------

# Call cycles broken by a deadline: logged once and noted on the resulting error.
#
# A deadlock that a deadline will end is not broken earlier. The deadlock search only reports it: to the controller's
# log, and to the processes that made the calls. A resulting error, such as a `TooSlowError`, carries it as a note.

_HEADING = "a deadline has ended a deadlock: "


class Circles:
    """Calls of one process that are reported to wait for themselves."""

    def __init__(self, proc: Proc) -> None:
        self._texts: dict[int, str] = {}
        proc.routes[messages.Circle] = self._take

    def _take(self, peer: Peer, message: messages.Circle, bodies: list[memoryview]) -> None:
        del peer
        if len(bodies) != 1:
            raise ProtocolError(f"a report of a deadlock must have one body, its cycle, got {len(bodies)} bodies")
        text = str(error_of(observed.decode_reports(bodies[0])))
        for call in message.calls:
            while len(self._texts) >= limits.DEADLOCKS_KNOWN:
                del self._texts[next(iter(self._texts))]
            self._texts[call] = text

    def explain(self, cut: trio.Cancelled, call_id: int) -> None:
        """Add a note to the cancel of a call that is known to have waited for itself."""
        text = self._texts.pop(call_id, None)
        if text is not None:
            add_note(cut, _HEADING + text)


def pass_on(error: BaseException) -> None:
    """Copy deadlock notes from the cancel behind each `TooSlowError` in `error` to that error."""
    for leaf in leaves(error):
        if isinstance(leaf, trio.TooSlowError) and (context := context_of(leaf)) is not None:
            known = notes_on(leaf)
            for note in dict.fromkeys(_notes(context)):
                if note not in known:
                    add_note(leaf, note)


def _notes(error: BaseException) -> Iterator[str]:
    for leaf in leaves(error):
        if isinstance(leaf, trio.Cancelled):
            yield from (note for note in notes_on(leaf) if note.startswith(_HEADING))


def error_of(reports: Sequence[NodeReport]) -> DeadlockError:
    """Return the error that shows a cycle, from the call that blocks the victim down to the victim.

    Raises:
        ProtocolError: No report has a place.
    """
    if reports and reports[-1].place is None:  # a message without room; the full mailbox represents it
        reports = [*reports[1:], reports[0]]
    cycle = [(report, report.place) for report in reports if report.place is not None]
    if not cycle:
        raise ProtocolError("a report of a deadlock must name the place of a call, got none")
    victim = _describe(cycle[-1][1])
    lines = [f"{victim} waits for itself:"]
    lines += [f"  {_describe(place)} {_relation(report)}" for report, place in cycle[:-1]]
    lines.append(f"  {victim}, which must wait until the first of these ends")
    return DeadlockError("\n".join(lines), cycle=[(place.actor, place.endpoint, place.point()) for _, place in cycle])


def _relation(report: NodeReport) -> str:
    return "runs, and awaits" if report.needs_all else "must wait until this ends:"


def _describe(place: Place) -> str:
    where = place_name(place.mesh, place.point())
    return f"{where}.{place.endpoint}" if place.endpoint else f"room in the mailbox of {where}"
