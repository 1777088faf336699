"""Deadlock detection: ends calls that wait for themselves with a `DeadlockError`, at once (rule C8).

A call that has to wait for a slot is checked once, `limits.DEADLOCK_SEARCH_SECONDS` later. If all calls that hold the
slots wait for others, the controller is notified. It searches (`_routing/deadlock.py`) and decides which call fails.

One check is enough. In a deadlock, let *c* be the queued call that entered its mailbox last. Every running call of the
deadlock waits for a queued one, through running calls that were started for it. So every wait of the deadlock existed
when *c* arrived. The calls that hold the slots of *c* are part of the deadlock, so each of them was waiting when *c*
was checked, and the search starts from one of them and reaches all.

Other waits that can be the last edge of a cycle are checked in the same way: a call that arrives during the first half
of its actor's `lifespan` (the spawn is awaited), one that waits for a restart (the new spawn is awaited), a generator
whose consumer takes nothing (its slot is awaited), and a consumer of the next of several results (each result wakes it,
so its wait for the last possible one is new). A message without room is checked by its sender. Room is made without a
message (`_routing/collector.py`), so the check is repeated while the message waits, at growing intervals.

The cost without a deadlock: a flag when a call has to wait, and a check of waiting calls at most every
`limits.DEADLOCK_SEARCH_SECONDS`, only while calls wait.

Waits with a deadline are suspected, too: such a deadlock is reported but not broken.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from trimesh import limits
from trimesh._routing.deadlock import Deadlock, Question, Search, answer, stuck_nodes
from trimesh._runtime.actors.reports import log_line
from trimesh._runtime.calls.outgoing import Circles, error_of
from trimesh._runtime.peers.peer import Parcel
from trimesh._runtime.tasks.background import effective_deadline
from trimesh._runtime.wait_graph import LocalWaits
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport
from trimesh.errors import DeadlockError, ProtocolError, set_origin
from trimesh.ids import MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.actors.mailbox import Mailbox, SlotGroup
    from trimesh._runtime.calls.outgoing import AnyWait, OutgoingCall
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer
    from trimesh._runtime.values.endpoint_spec import MeshInfo

_UNCOUNTED: Final = -1
"""Instead of `taken_before_it` before the first check of a message without room."""


class RestartWait:
    """A task waits, in the owner of a mesh, until a member has been restarted.

    Attributes:
        mesh, rank: The member.
        is_bounded: Whether the task had a deadline when it began to wait.
        scope: Around the wait.
        error: Raised when the scope has been cancelled.
    """

    __slots__ = ("error", "is_bounded", "mesh", "rank", "scope")

    def __init__(self, mesh: MeshId, rank: int, *, is_bounded: bool) -> None:
        self.mesh, self.rank, self.is_bounded = mesh, rank, is_bounded
        self.scope = trio.CancelScope()
        self.error: DeadlockError | None = None


class Deadlocks:
    """Deadlock watch of one process; in the controller also the judge of its family.

    Attributes:
        circles: Calls of this process in a reported cycle that a deadline will break.
        restarts: Tasks of this process that wait for restarts of its own meshes.
    """

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._numbers = itertools.count(1)
        self._crowded: list[SlotGroup] = []
        self._early: list[Mailbox] = []
        self._any: dict[AnyWait, None] = {}
        self._unsent: dict[OutgoingCall, int] = {}  # with `taken_before_it` at the last check, or `_UNCOUNTED`
        self.restarts: dict[trio.lowlevel.Task, RestartWait] = {}
        self._new_restarts: list[RestartWait] = []
        self._has_moved = False  # the last check found that messages ahead of one of them had been taken
        self._news = trio.Event()
        self._judge = Judge(proc)
        self.circles = Circles(proc)
        proc.routes[messages.Look] = self._take_look
        proc.routes[messages.Break] = self._take_break

    def look(self) -> LocalWaits:
        """Return the wait graph of this process now, including waits with a deadline."""
        return LocalWaits(self._proc, self._numbers, bounded=True)

    async def run(self) -> None:
        """Run the watch and the judge until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._judge.run)

    # ---- the watch -------------------------------------------------------------------------------------------

    def crowded(self, group: SlotGroup) -> None:
        """Schedule a check: a call has to wait for a slot of `group`."""
        self._crowded.append(group)
        self._news.set()

    def early(self, mailbox: Mailbox) -> None:
        """Schedule a check: a call has to wait until an actor serves, and the actor's `lifespan` may wait for it."""
        self._early.append(mailbox)
        self._news.set()

    def producer_waits(self, call: IncomingCall) -> None:
        """Schedule a check if calls wait for the slot of a generator endpoint, which waits for its consumer."""
        cell = self._proc.cells.get(call.mesh)
        group = None if cell is None else cell.mailbox.group_of(call)
        if group is not None and group.queue and not group.is_watched:
            group.is_watched = True
            self.crowded(group)

    def awaits_any(self, wait: AnyWait) -> None:
        """Schedule a check: a task waits for the next result of a stream or a map."""
        self._any[wait] = None
        self._news.set()

    @contextmanager
    def waiting_for_restart(self, info: MeshInfo, rank: int, *, is_request: bool) -> Generator[None]:
        """Wait in this block until a member has been restarted; schedule a check.

        Args:
            is_request: Whether the task waits for another process, whose deadline counts, not for itself.

        Raises:
            DeadlockError: The restart waits for this task, and this wait is the victim.
        """
        task = trio.lowlevel.current_task()
        is_bounded = not is_request and effective_deadline() != math.inf
        wait = self.restarts[task] = RestartWait(info.mesh, rank, is_bounded=is_bounded)
        self._new_restarts.append(wait)
        self._news.set()
        try:
            with wait.scope:
                yield
        finally:
            del self.restarts[task]
        if wait.error is not None:
            set_origin(wait.error, info.origin(rank))
            raise wait.error

    def unsent(self, call: OutgoingCall) -> None:
        """Schedule checks: a message has to wait for room in a mailbox."""
        self._unsent[call] = _UNCOUNTED
        self._news.set()

    async def _watch(self) -> None:
        patience = limits.DEADLOCK_SEARCH_SECONDS
        while True:
            with trio.move_on_after(patience if self._unsent else math.inf):
                await self._news.wait()
            patience = limits.DEADLOCK_SEARCH_SECONDS if self._news.is_set() else 2 * patience
            await trio.sleep(limits.DEADLOCK_SEARCH_SECONDS)
            began = trio.current_time()
            suspects = self._find_suspects()
            took = trio.current_time() - began
            if self._has_moved:  # the first check without movement finds the deadlock: do not delay it
                patience = limits.DEADLOCK_SEARCH_SECONDS
            if suspects:
                await self._tell(suspects)
            await trio.sleep(limits.DEADLOCK_PAUSE_FACTOR * took)

    def _find_suspects(self) -> Sequence[NodeRef]:
        """Return suspects: a running call of each group whose slots may never get free, and other waits to check."""
        self._news = trio.Event()
        groups, self._crowded = self._crowded, []
        mailboxes, self._early = self._early, []
        waits_for_any, self._any = self._any, {}
        restarts, self._new_restarts = self._new_restarts, []
        for group in groups:
            group.is_watched = False
        for mailbox in mailboxes:
            mailbox.is_watched = False
        stuck = self._stuck()
        if not (groups or mailboxes or waits_for_any or restarts or stuck):
            return ()
        look = LocalWaits(self._proc, self._numbers, bounded=True)
        suspects: dict[NodeRef, None] = {}
        for group in groups:
            if group.queue and group.is_full and all(look.has_waits(call) for call in group.running):
                suspects[look.ref_of(next(iter(group.running)))] = None
        suspects |= dict.fromkeys(ref for mailbox in mailboxes if (ref := look.spawn_ref(mailbox)) is not None)
        suspects |= dict.fromkeys(ref for wait in waits_for_any if (ref := look.next_ref(wait)) is not None)
        suspects |= {look.ref_of(call): None for call, wait in look.of_restarts.items() if wait in restarts}
        for call in stuck:
            suspects |= dict.fromkeys(look.unsent_ref(call, peer) for peer in call.peers() if call.is_unsent_to(peer))
        return self._without_the_free(suspects, look)

    def _stuck(self) -> Sequence[OutgoingCall]:
        """Return the calls without room for which no message was taken from a mailbox since the last check.

        A call whose predecessors are taken gets its turn; in a deadlock nothing is taken, so a later check finds it.
        The first check only counts: the turn of the loop that sends a thousand calls takes as long as the wait for a
        check, and what was taken meanwhile has not been read.
        """
        found: list[OutgoingCall] = []
        self._has_moved = False
        for call, before in list(self._unsent.items()):
            if not call.is_unsent:
                del self._unsent[call]
                continue
            now = call.taken_before_it()
            if now != before:
                self._unsent[call] = now
                self._has_moved = True
            elif call.waiter is not None:
                found.append(call)
        return found

    def in_the_way(self, task: trio.lowlevel.Task, proc_id: ProcId) -> tuple[Sequence[int], Sequence[NodeRef]]:
        """Return the nodes that have to end before a task of this process can go on.

        Returns:
            Numbers of the calls of this process to `proc_id` that are in the way. If there are none, but other
            processes are in the way: what the task waits for.
        """
        look = LocalWaits(self._proc, self._numbers)
        waits = look.waits_of(task)
        nodes = {report.ref: report for report in answer(waits, look.look_up)}
        edges = {edge for node in nodes.values() for edge in node.waits_for} | set(waits)
        there = {edge for edge in edges if edge.proc == proc_id and edge.kind in (NodeKind.CALL, NodeKind.SOURCE)}
        stuck = stuck_nodes(nodes, there) | there
        if any(ref in stuck for ref in waits):
            return [edge.b for edge in there], []
        elsewhere = {edge for edge in edges if edge.proc != self._proc.proc_id}
        stuck = stuck_nodes(nodes, elsewhere) | elsewhere
        return [], waits if any(ref in stuck for ref in waits) else []

    def search_now(self, starts: Sequence[NodeRef]) -> BlockedSearch | None:
        """Begin a search without tasks: whether any of `starts` waits for an actor of this process.

        Returns:
            The search, or None if this process is not the controller of its family. End it with `end_search_now`.
        """
        if not self._judge.may_ask:
            return None
        found = BlockedSearch(self._proc, self._numbers, self._judge.new_look(), starts)
        self._judge.also_tell(found.search)
        return found

    def end_search_now(self) -> None:
        """End such a search: ignore answers that are still on their way."""
        self._judge.also_tell(None)

    def _without_the_free(self, suspects: Iterable[NodeRef], look: LocalWaits) -> Sequence[NodeRef]:
        """Return the suspects that are stuck if everything in other processes is."""
        nodes = {report.ref: report for report in answer(suspects, look.look_up)}
        elsewhere = {edge for node in nodes.values() for edge in node.waits_for if edge.proc != self._proc.proc_id}
        stuck = stuck_nodes(nodes, elsewhere)
        return [ref for ref in suspects if ref in stuck]

    async def _tell(self, suspects: Sequence[NodeRef]) -> None:
        family = self._proc.family
        if family is None or family.root is None:
            self._judge.suspect(suspects)
            return
        root = self._proc.peer(family.root)
        await family.connect([root])
        for few in _in_heads(suspects):
            root.send(Parcel(messages.encode(messages.Suspect(few))))

    # ---- answers ---------------------------------------------------------------------------------------------

    def _take_look(self, peer: Peer, message: messages.Look, _: list[memoryview]) -> None:
        look = LocalWaits(self._proc, self._numbers, bounded=message.bounded)
        own = [ref for ref in message.refs if ref.proc == self._proc.proc_id]
        reports = observed.encode(answer(own, look.look_up))
        peer.send(Parcel(messages.encode(messages.Seen(message.look)), [reports]))

    def _take_break(self, peer: Peer, message: messages.Break, bodies: list[memoryview]) -> None:
        if len(bodies) != 1:
            raise ProtocolError(f"Break must have one body, the cycle; got {len(bodies)} bodies")
        error = error_of(observed.decode_reports(bodies[0]))
        look = LocalWaits(self._proc, self._numbers)
        report = look.look_up(message.victim)
        if report is not None and report.can_break and set(report.waits_for) == set(message.holders):
            self._end(message.victim, look, error)
        peer.send(Parcel(messages.encode(messages.Broken(message.look))))

    def _end(self, victim: NodeRef, look: LocalWaits, error: DeadlockError) -> None:
        if victim.kind is NodeKind.UNSENT:
            found = look.find_unsent(victim)
            assert found is not None
            outgoing, peer = found
            outgoing.fail_unsent(peer, error)
            return
        call = look.find_call(victim)
        assert call is not None
        if (wait := look.of_restarts.get(call)) is not None:
            wait.error = error
            wait.scope.cancel(reason="the restart waits for it")
            return
        cell = self._proc.cells[call.mesh]
        cell.mailbox.remove(call)
        call.failed(self._proc.values.encode_error(error, cell.origin(call.spec.name)))


def _in_heads(refs: Sequence[NodeRef]) -> Iterator[tuple[NodeRef, ...]]:
    for start in range(0, len(refs), limits.DEADLOCK_REFS_MAX):
        yield tuple(refs[start : start + limits.DEADLOCK_REFS_MAX])


# ---- the controller's part in ending deadlocks: one search at a time for the whole family (rule C8) ------------------

# A suspicion of any process starts a search (`_routing/deadlock.py`), which queries the processes that it leads to. The
# victim gets its error before anything else is checked, so no deadlock gets two victims. Then all stuck nodes are
# suspected again, for one call may have closed two cycles.
#
# The first search of a suspicion includes waits with a deadline, and most suspicions end there. The nodes that it finds
# stuck are searched again without those waits. A deadlock found by both gets a victim; one that a deadline will break
# is only reported.


class Judge:
    """Searches for deadlocks and chooses victims, in the controller; idle in all other processes."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._looks = itertools.count(1, 2)
        self._suspects: dict[NodeRef, None] = {}
        self._suspicion = trio.Event()
        self._late: dict[int, Sequence[NodeRef]] = {}
        self._search: Search | None = None
        self._blocked: Search | None = None
        self._breaking: tuple[int, int] | None = None
        self._broken = trio.Event()
        self._news = trio.Event()
        self._told: deque[NodeRef] = deque(maxlen=limits.DEADLOCKS_KNOWN)
        proc.routes[messages.Suspect] = self._take_suspect
        proc.routes[messages.Seen] = self._take_seen
        proc.routes[messages.Broken] = self._take_broken
        proc.on_gone.append(self._peer_gone)

    def suspect(self, refs: Iterable[NodeRef]) -> None:
        """Schedule a search from these nodes. Nodes beyond `limits.DEADLOCK_NODES_MAX` are dropped."""
        for ref in refs:
            if len(self._suspects) < limits.DEADLOCK_NODES_MAX:
                self._suspects[ref] = None
        self._suspicion.set()

    @property
    def may_ask(self) -> bool:
        """True in the controller of the family: processes reply only to its queries."""
        return self._proc.family is not None and self._proc.family.root is None

    def new_look(self) -> int:
        """Return the number of a search's first look; its second look has the next number."""
        return next(self._looks)

    def also_tell(self, search: Search | None) -> None:
        """Pass answers to the search of a blocked function, too; None to stop. See `BlockedSearch`."""
        self._blocked = search

    async def run(self) -> None:
        """Judge until cancelled."""
        while True:
            await self._suspicion.wait()
            self._suspicion = trio.Event()
            starts, self._suspects = tuple(self._suspects), {}
            began = trio.current_time()
            if not await self._act_on(starts):
                await trio.sleep(limits.DEADLOCK_PAUSE_FACTOR * (trio.current_time() - began))

    async def _act_on(self, starts: Sequence[NodeRef]) -> bool:
        """Break or report one deadlock that is reached from `starts`; return False when there is none."""
        search = await self._search_from(starts, bounded=True)
        if not search.stuck:
            return False
        verdict = (await self._search_from(tuple(search.stuck), bounded=False)).verdict
        if verdict is not None:
            await self._carry_out(verdict)
        elif search.verdict is not None:
            await self._tell_of(search.verdict, search.callers)
        else:
            return False
        self.suspect(search.stuck)
        return True

    async def _tell_of(self, verdict: Deadlock, callers: Iterable[NodeRef]) -> None:
        """Report, once, a cycle that a deadline will break: log it, and notify the processes of its callers."""
        self._told.append(verdict.victim)
        text = str(error_of(verdict.cycle)).replace("waits for itself", "waits for itself, until a deadline ends it", 1)
        log_line(self._proc, text)
        calls: defaultdict[int, list[int]] = defaultdict(list)
        for ref in callers:
            calls[ref.proc].append(ref.a)
        for proc_id, numbers in calls.items():
            peer = await self._connected(proc_id)
            if peer is not None:
                head = messages.encode(messages.Circle(tuple(numbers[: limits.DEADLOCK_REFS_MAX])))
                peer.send(Parcel(head, [observed.encode(verdict.cycle)]))

    async def _search_from(self, starts: Sequence[NodeRef], *, bounded: bool) -> Search:
        self._search = search = Search(
            next(self._looks), starts, bounded=bounded, known=tuple(self._told) if bounded else ()
        )
        try:
            while not search.is_done:
                self._news = trio.Event()
                with trio.move_on_after(limits.DEADLOCK_ANSWER_SECONDS) as patience:
                    while search.questions:
                        await self._ask(search, search.questions.pop(0))
                    if not search.is_done:
                        await self._news.wait()
                if patience.cancelled_caught:
                    self._do_without_the_silent(search)
        finally:
            self._search = None
        return search

    async def _ask(self, search: Search, question: Question) -> None:
        peer = await self._connected(question.proc)
        if peer is None:
            search.gone(question.proc)
        else:
            peer.send(Parcel(messages.encode(messages.Look(question.look, question.refs, search.bounded))))

    async def _connected(self, proc_id: int) -> Peer | None:
        """Return a process with a link to it; None if it is gone, or belongs to another program: not queried."""
        peer = self._proc.peer(ProcId(proc_id))
        if self._proc.family is not None and self._proc.family.is_foreign(peer.proc_id):
            return None
        if peer.link is None and peer.death is None and self._proc.family is not None:
            await self._proc.family.connect([peer])
        return peer if peer.link is not None and peer.death is None else None

    def _do_without_the_silent(self, search: Search) -> None:
        """Go on without processes that do not answer (stopped, busy); a later answer is a new suspicion."""
        search.questions.clear()
        for proc_id in search.silent:
            self._late[proc_id] = search.starts
            search.gone(proc_id)

    async def _carry_out(self, verdict: Deadlock) -> None:
        """End the victim; wait until its process confirms or is gone, at most `limits.CANCEL_ACK_SECONDS`."""
        peer = await self._connected(verdict.victim.proc)
        if peer is None:
            return
        look = next(self._looks)
        self._breaking = (peer.proc_id, look)
        self._broken = trio.Event()
        head = messages.encode(messages.Break(look, verdict.victim, verdict.holders))
        peer.send(Parcel(head, [observed.encode(verdict.cycle)]))
        with trio.move_on_after(limits.CANCEL_ACK_SECONDS):
            await self._broken.wait()
        self._breaking = None

    # ---- messages --------------------------------------------------------------------------------------------

    def _take_suspect(self, peer: Peer, message: messages.Suspect, _: list[memoryview]) -> None:
        if self._proc.family is None or self._proc.family.root is not None:
            raise ProtocolError(f"Suspect must be sent to the controller, got one from process {peer.proc_id:x}")
        self.suspect(message.refs)

    def _take_seen(self, peer: Peer, message: messages.Seen, bodies: list[memoryview]) -> None:
        if len(bodies) != 1:
            raise ProtocolError(f"Seen must have one body, the reports; got {len(bodies)} bodies")
        reports = observed.decode_reports(bodies[0])
        if peer.proc_id in self._late:
            self.suspect(self._late.pop(peer.proc_id))
        if self._blocked is not None:
            self._blocked.answered(peer.proc_id, message.look, reports)
        if self._search is not None:
            self._search.answered(peer.proc_id, message.look, reports)
            self._news.set()

    def _take_broken(self, peer: Peer, message: messages.Broken, _: list[memoryview]) -> None:
        if self._breaking == (peer.proc_id, message.look):
            self._broken.set()

    def _peer_gone(self, peer: Peer) -> None:
        self._late.pop(peer.proc_id, None)
        if self._breaking is not None and self._breaking[0] == peer.proc_id:
            self._broken.set()
        if self._blocked is not None:
            self._blocked.gone(peer.proc_id)
        if self._search is not None:
            self._search.gone(peer.proc_id)
        self._news.set()


# ---- blocked search --------------------------------------------------------------------------------------------------

# A search for a deadlock by a function that blocks without `await`: no task of this process runs meanwhile (rule N2).
#
# So every unended call to an actor of this process waits for the function, and the function waits for `starts`. Queries
# and answers are those of the judge. The blocked function reads the links itself and calls `go_on`.


class BlockedSearch:
    """Search on behalf of a blocked function.

    Args:
        numbers: As in `LocalWaits`.
        look: Number of the first look; the second has the next.
        starts: Nodes that the function waits for.
    """

    def __init__(self, proc: Proc, numbers: Iterator[int], look: int, starts: Sequence[NodeRef]) -> None:
        self._proc = proc
        self._numbers = numbers
        self._starts = tuple(starts)
        self._function = NodeRef(NodeKind.NEXT, proc.proc_id)  # number 0; waits of tasks are numbered from 1
        self.search = Search(look, [self._function])

    def go_on(self) -> IncomingCall | None:
        """Send pending queries; return the call to this process that the function waits for, once it is known."""
        search = self.search
        while search.questions:
            question = search.questions.pop(0)
            if question.proc == self._proc.proc_id:
                look = LocalWaits(self._proc, self._numbers)
                reports = answer(question.refs, partial(self._look_up, look))
                search.answered(question.proc, question.look, reports)
                continue
            peer = self._proc.find_peer(question.proc)
            if peer is None or peer.link is None:  # connecting would need tasks
                search.gone(question.proc)
            else:
                peer.send(Parcel(messages.encode(messages.Look(question.look, question.refs))))
        verdict = search.verdict
        if verdict is None or self._function not in verdict.stuck:
            return None
        look = LocalWaits(self._proc, self._numbers)
        ours = [ref for ref in verdict.stuck if ref.kind is NodeKind.CALL and ref.proc == self._proc.proc_id]
        return next((call for ref in sorted(ours) if (call := look.find_call(ref)) is not None), None)

    def _look_up(self, look: LocalWaits, ref: NodeRef) -> NodeReport | None:
        if ref == self._function:
            return NodeReport(ref, needs_all=True, waits_for=self._starts, can_break=True)
        if ref.kind is not NodeKind.CALL:
            return look.look_up(ref)
        call = look.find_call(ref)
        if call is None or call.ended:
            return None
        return NodeReport(ref, needs_all=True, waits_for=(self._function,))
