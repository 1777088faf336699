"""Ends calls that wait for themselves with a `DeadlockError`, at once (rule C8).

A call that has to wait for a slot is looked at `limits.DEADLOCK_SEARCH_SECONDS` later, once. If all the calls that hold
the slots wait for others, the controller is told, which searches (`judge.py`) and says which call is to fail.

Why one look is enough: let a deadlock stand, and let *c* be the call among its queued ones that came
last into its mailbox. Every running call of the deadlock waits for one that is queued, by way of running ones, which
were started for it; so whatever waits in the deadlock waited already when *c* came. The calls that hold the slots
which *c* waits for are part of the deadlock, so each of them waited when *c* was looked at, and the search that follows
starts from one of them and reaches all.

Other waits that can be the last edge of a cycle are looked at in the same way: of a call that comes while its actor is
still in the first half of its `lifespan` (the spawn is waited for), of a generator whose consumer takes
nothing (its slot is waited for), and of a consumer for the next of several results (each that comes wakes it, so the
last one that could come is waited for anew). A message that finds no room is looked at by its sender; but room is made
without a word (`_routing/collector.py`), so it is looked at again as long as it waits, ever more seldom.

A deadlock of calls costs those that are not in one: a flag when a call has to wait, and a look at what waits here at
most every `limits.DEADLOCK_SEARCH_SECONDS`, only while calls do.

Waits that a deadline will end arouse the same suspicion: who judges tells of such a deadlock, and lets it be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._routing.deadlock import answer, stuck_nodes
from trimesh._runtime.calls.circle import Circles, error_of
from trimesh._runtime.deadlock.blocked_search import BlockedSearch
from trimesh._runtime.deadlock.judge import Judge
from trimesh._runtime.deadlock.waiting import LocalWaits
from trimesh._runtime.peers.parcel import Parcel
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeKind, NodeRef
from trimesh.errors import DeadlockError, ProtocolError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.actors.mailbox import Mailbox, SlotGroup
    from trimesh._runtime.calls.outgoing import AnyWait, OutgoingCall
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer


class Deadlocks:
    """The watch of one process, and, in the controller, the judge of the family.

    Attributes:
        circles: The calls of this process that wait for themselves until a deadline.
    """

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._numbers = itertools.count(1)
        self._crowded: list[SlotGroup] = []
        self._early: list[Mailbox] = []
        self._any: dict[AnyWait, None] = {}
        self._unsent: dict[OutgoingCall, int] = {}  # and what had been taken before each when it was looked at last
        self._has_moved = False  # what some of them waits for was taken, when they were looked at last
        self._news = trio.Event()
        self._judge = Judge(proc)
        self.circles = Circles(proc)
        proc.routes[messages.Look] = self._take_look
        proc.routes[messages.Break] = self._take_break

    def look(self) -> LocalWaits:
        """Look who waits for whom in this process, waits with a deadline included."""
        return LocalWaits(self._proc, self._numbers, bounded=True)

    async def run(self) -> None:
        """Watch, and judge, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._judge.run)

    # ---- the watch -------------------------------------------------------------------------------------------

    def crowded(self, group: SlotGroup) -> None:
        """Learn that a call has to wait for a slot."""
        self._crowded.append(group)
        self._news.set()

    def early(self, mailbox: Mailbox) -> None:
        """Learn that a call has to wait until an actor serves: its `lifespan` may wait for that call."""
        self._early.append(mailbox)
        self._news.set()

    def producer_waits(self, call: IncomingCall) -> None:
        """Learn that a generator endpoint waits for its consumer; that matters to those who wait for its slot."""
        cell = self._proc.cells.get(call.mesh)
        group = None if cell is None else cell.mailbox.group_of(call)
        if group is not None and group.queue and not group.is_watched:
            group.is_watched = True
            self.crowded(group)

    def awaits_any(self, wait: AnyWait) -> None:
        """Learn that a task waits for the next result of a stream or a map."""
        self._any[wait] = None
        self._news.set()

    def unsent(self, call: OutgoingCall) -> None:
        """Learn that a message has to wait for room."""
        self._unsent[call] = call.taken_before_it()
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
            if self._has_moved:  # so the next look is the first that can tell
                patience = limits.DEADLOCK_SEARCH_SECONDS
            if suspects:
                await self._tell(suspects)
            await trio.sleep(limits.DEADLOCK_PAUSE_FACTOR * took)

    def _find_suspects(self) -> Sequence[NodeRef]:
        """Return one waiting call for each group of slots that may never get free, and the messages without room."""
        self._news = trio.Event()
        groups, self._crowded = self._crowded, []
        mailboxes, self._early = self._early, []
        waits_for_any, self._any = self._any, {}
        for group in groups:
            group.is_watched = False
        for mailbox in mailboxes:
            mailbox.is_watched = False
        stuck = self._stuck()
        if not (groups or mailboxes or waits_for_any or stuck):
            return ()
        look = LocalWaits(self._proc, self._numbers, bounded=True)
        suspects: dict[NodeRef, None] = {}
        for group in groups:
            if group.queue and group.is_full and all(look.has_waits(call) for call in group.running):
                suspects[look.ref_of(next(iter(group.running)))] = None
        suspects |= dict.fromkeys(ref for mailbox in mailboxes if (ref := look.spawn_ref(mailbox)) is not None)
        suspects |= dict.fromkeys(ref for wait in waits_for_any if (ref := look.next_ref(wait)) is not None)
        for call in stuck:
            suspects |= dict.fromkeys(look.unsent_ref(call, peer) for peer in call.peers() if call.is_unsent_to(peer))
        return self._without_the_free(suspects, look)

    def _stuck(self) -> Sequence[OutgoingCall]:
        """Return the calls without room for which none was made since they were looked at last.

        What waits behind others that are taken gets its turn; in a deadlock nothing is taken, so it is found then.
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
        """Return what has to end before a task of this process can go on.

        Returns:
            The calls of this process to another one, and what the task waits for if other processes are part of it.
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
        """Begin a search without tasks: whether what this process waits for needs an actor of it.

        Returns:
            The search, or None if this process is not the controller of its family. Call `end_search_now`, too.
        """
        if not self._judge.may_ask:
            return None
        found = BlockedSearch(self._proc, self._numbers, self._judge.new_look(), starts)
        self._judge.also_tell(found.search)
        return found

    def end_search_now(self) -> None:
        """Take no answers to such a search any more."""
        self._judge.also_tell(None)

    def _without_the_free(self, suspects: Iterable[NodeRef], look: LocalWaits) -> Sequence[NodeRef]:
        """Leave out what can end, even if everything elsewhere is stuck."""
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
            raise ProtocolError(f"the end of a deadlock must come with its cycle, got {len(bodies)} bodies")
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
        cell = self._proc.cells[call.mesh]
        cell.mailbox.remove(call)
        call.failed(self._proc.values.encode_error(error, cell.origin(call.spec.name)))


def _in_heads(refs: Sequence[NodeRef]) -> Iterator[tuple[NodeRef, ...]]:
    for start in range(0, len(refs), limits.DEADLOCK_REFS_MAX):
        yield tuple(refs[start : start + limits.DEADLOCK_REFS_MAX])
