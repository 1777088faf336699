r"""What a whole run does: each process asks those that it owns, all at once and for a bounded time.

    owner --Observe--> child (asks its own children) --Observed: a table for each process--> owner
       \--signal, where no answer comes--> child: writes its tables, or at least the stack of its main thread

AS-1 A question takes no longer than its seconds, whatever the processes do.
AS-2 Every process that is owned is told of: by itself, else by what its owner knows, with its stack where there is one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.observing.view import STOPPED, look, memory_of, proc_name
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.system.exits import process_state
from trimesh._runtime.watch.stack import Report, read_report, request_report
from trimesh._wire import messages, observed
from trimesh.errors import ProtocolError
from trimesh.ids import AGENT, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.meshes.member import Member
    from trimesh._runtime.peers.peer import Peer

_POLL_SECONDS: Final = 0.005
_SHARE: Final = 0.8
"""Of the time in which a child has to answer, for those below it: the rest is for the way back."""


class Inquiry:
    """One question that is under way.

    Attributes:
        views: What has come, by the child.
        awaited: The children that have not answered.
        news: Set when the last one has.
    """

    def __init__(self, awaited: set[ProcId]) -> None:
        self.views: dict[ProcId, tuple[observed.ProcView, ...]] = {}
        self.awaited = awaited
        self.news = trio.Event()

    def drop(self, proc_id: ProcId) -> None:
        """Wait for a child no longer."""
        self.awaited.discard(proc_id)
        if not self.awaited:
            self.news.set()


class Inquiries:
    """The questions of one process, and its answers to its owner."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._numbers = itertools.count(1)
        self._open: dict[int, Inquiry] = {}
        proc.routes[messages.Observe] = self._take_question
        proc.routes[messages.Observed] = self._take_answer
        proc.routes[messages.Interrupt] = self._take_interrupt
        proc.on_gone.append(self._gone)

    async def ask(self, seconds: float = limits.OBSERVE_SECONDS) -> Sequence[observed.ProcView]:
        """Return what this process and all below it do, this one first.

        Args:
            seconds: For the answers.
        """
        proc = self._proc
        members = [member for member in proc.members.values() if not member.gone.is_set() and member.child is not None]
        by_signal = [member for member in members if member.stall.seconds and member.stack_fd >= 0]
        by_message = [member for member in members if member not in by_signal and member.peer.link is not None]
        number, question = next(self._numbers), Inquiry({member.peer.proc_id for member in by_message})
        self._open[number] = question
        patience = min(seconds / 2, limits.OBSERVE_LOOP_SECONDS + seconds / 4)
        try:
            head = messages.encode(messages.Observe(number, patience * _SHARE))
            for member in by_message:
                member.peer.send(Parcel(head))
            asked = AskedBySignal(by_signal)
            if question.awaited:
                with trio.move_on_after(patience):
                    await question.news.wait()
        finally:
            del self._open[number]
        silent = [member for member in by_message if member.peer.proc_id not in question.views]
        asked.add([member for member in silent if member.stack_fd >= 0 and not member.gone.is_set()])
        far = [member for member in silent if member.stack_fd < 0 and not member.gone.is_set()]
        states = await _states_of(far, min(seconds / 4, limits.OBSERVE_STATE_SECONDS))
        ends_at = time.monotonic() + seconds / 2
        while not asked.is_answered and time.monotonic() < ends_at:  # noqa: ASYNC110 - another process answers, by a file
            await trio.sleep(_POLL_SECONDS)
        below = [view for views in question.views.values() for view in views]
        return [look(proc), *below, *asked.views(), *states]

    # ---- messages --------------------------------------------------------------------------------------------

    def _take_question(self, peer: Peer, message: messages.Observe, _: list[memoryview]) -> None:
        seconds = min(max(message.seconds, 0.0), limits.OBSERVE_SECONDS)
        self._proc.serve(self._answer, peer, message.number, seconds)

    @trio.lowlevel.enable_ki_protection
    async def _answer(self, peer: Peer, number: int, seconds: float) -> None:
        views = tuple(await self.ask(seconds))
        peer.send(Parcel(messages.encode(messages.Observed(number)), [observed.encode(views)]))

    def _take_answer(self, peer: Peer, message: messages.Observed, bodies: list[memoryview]) -> None:
        if len(bodies) != 1:
            raise ProtocolError(f"what a process says of itself must come as one body, got {len(bodies)}")
        question = self._open.get(message.number)
        if question is not None and peer.proc_id in question.awaited:
            question.views[peer.proc_id] = observed.decode_views(bodies[0])
            question.drop(peer.proc_id)

    def interrupt(self, proc_id: int, caller: int, number: int, reason: str) -> str:
        """Have a call cancelled that this process, or one that it owns, runs; return why not, or an empty text."""
        if proc_id == self._proc.proc_id:
            return "" if self._cancel(caller, number, reason) else "it has ended"
        member = self._proc.members.get(ProcId(proc_id))
        if member is None or member.gone.is_set():
            return "its process has ended, or belongs to another one of the run"
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
        for question in self._open.values():
            question.drop(peer.proc_id)


async def _states_of(members: Sequence[Member], seconds: float) -> Sequence[observed.ProcView]:
    """Return what hosts say of processes there that say nothing themselves."""
    found: dict[Member, str | None] = {}

    @trio.lowlevel.enable_ki_protection
    async def ask(member: Member) -> None:
        if member.child is not None:
            found[member] = await member.child.kernel_state()

    if members:
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for member in members:
                    nursery.start_soon(ask, member)
    return [_view_by_state(member, found.get(member)) for member in members]


def _view_by_state(member: Member, letter: str | None) -> observed.ProcView:
    letter = observed.HOST_SILENT if letter is None else letter
    state = STOPPED.get(letter, "silent")
    return observed.ProcView(
        proc=observed.ProcRow(
            id=proc_name(member.peer.proc_id),
            state=state,
            stalled_seconds=member.stall.seconds,
            kernel_state=letter if state == "silent" else "",
        )
    )


class AskedBySignal:
    """Child processes that are asked by a signal, and answer in a file; see `watch/stack.py`."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._asked_at: dict[Member, float] = {}
        self._reports: dict[Member, Report] = {}
        self.add(members)

    def add(self, members: Sequence[Member]) -> None:
        for member in members:
            self._asked_at[member] = request_report(member.pid)

    @property
    def is_answered(self) -> bool:
        """Whether all have written their tables; looks now."""
        for member, asked_at in self._asked_at.items():
            found = self._reports.get(member)
            if found is None or found.tables is None:
                self._reports[member] = read_report(member.pid, member.stack_fd, asked_at)
        return all(report.tables is not None for report in self._reports.values())

    def views(self) -> list[observed.ProcView]:
        """Return what each has said, or what can be said of it."""
        return [_view_of(member, report) for member, report in self._reports.items()]


def _view_of(member: Member, report: Report) -> observed.ProcView:
    view: observed.ProcView | None = None
    if report.tables is not None:
        try:
            view = observed.decode_view(report.tables)
        except ProtocolError:  # the file was being written, or it is not ours
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
        )
        return observed.ProcView(proc=proc)
    proc = msgspec.structs.replace(view.proc, state=state, stack=stack, stalled_seconds=seconds)
    return msgspec.structs.replace(view, proc=proc)
