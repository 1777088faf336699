"""The controller's part in ending deadlocks: one search at a time for the whole family (rule C8).

A suspicion of any process starts a search (`_routing/deadlock.py`), which asks the processes that it leads to. The victim
gets its error before anything else is looked at, so no deadlock gets two victims; then what was stuck is looked at
again, for one call may have closed two cycles.

The first search of a suspicion takes waits with a deadline for waits without one, as most suspicions end there. What it
finds stuck is searched again without them: a deadlock that is left has a victim, one that is not is only told of.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._routing.deadlock import Deadlock, Question, Search
from trimesh._runtime.actors.supervision_log import log_line
from trimesh._runtime.calls.circle import error_of
from trimesh._runtime.peers.parcel import Parcel
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeRef
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


class Judge:
    """Searches and decides, in the controller; asleep in every other process."""

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
        """Look soon whether one of these is stuck."""
        for ref in refs:
            if len(self._suspects) < limits.DEADLOCK_NODES_MAX:
                self._suspects[ref] = None
        self._suspicion.set()

    @property
    def may_ask(self) -> bool:
        """Whether this process is the controller of its family: only that one is answered."""
        return self._proc.family is not None and self._proc.family.root is None

    def new_look(self) -> int:
        """Return the number of a look; the next one is taken, too."""
        return next(self._looks)

    def also_tell(self, search: Search | None) -> None:
        """Give answers to another search as well; see `BlockedSearch`. None for no other."""
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
        """Deal with one deadlock that is reached from `starts`; return False when there is none."""
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
        """Say once that calls wait for themselves until a deadline, here and to those who have made them."""
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
        """Return a process with a link to it, or None when it is gone, or another program's, which is never asked."""
        peer = self._proc.peer(ProcId(proc_id))
        if self._proc.family is not None and self._proc.family.is_foreign(peer.proc_id):
            return None
        if peer.link is None and peer.death is None and self._proc.family is not None:
            await self._proc.family.connect([peer])
        return peer if peer.link is not None and peer.death is None else None

    def _do_without_the_silent(self, search: Search) -> None:
        """A process that is stopped, or busy, does not hold up the others; what it says later is a new suspicion."""
        search.questions.clear()
        for proc_id in search.silent:
            self._late[proc_id] = search.starts
            search.gone(proc_id)

    async def _carry_out(self, verdict: Deadlock) -> None:
        """Have the victim ended, and wait until that is done, or its process is gone, or stopped."""
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
            raise ProtocolError(f"suspicions go to the controller, got one of process {peer.proc_id}")
        self.suspect(message.refs)

    def _take_seen(self, peer: Peer, message: messages.Seen, bodies: list[memoryview]) -> None:
        if len(bodies) != 1:
            raise ProtocolError(f"an answer must have one body of reports, got {len(bodies)}")
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
