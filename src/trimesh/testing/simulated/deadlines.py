"""Checks that are due at a time of the virtual clock: budgets that have run out, cancels that have come.

    callee   budget or cancel has come --TICK--> the call is cancelled, or has ended
    caller   deadline has passed, or cancelled --TICK--> it gives the call up --its patience--> it has left

The patience is `limits.CANCEL_ACK_SECONDS`, or what `options(abandon_after=...)` says.

One task makes all checks of a run, and begins with the first: who has no deadline pays nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

import attrs
import trio

from trimesh import limits
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._wire import messages
from trimesh.ids import ProcId
from trimesh.testing.simulated.oracles import Oracles

TICK: Final = 1e-3
"""Virtual seconds by which a check comes later than what it looks for: tasks of the same moment run in any order."""


@attrs.define(eq=False)
class Deadlines:
    """Watches the budgets and cancels of one run.

    Attributes:
        oracles: Told of breaches.
        proc: Finds a simulated process.
        drifts: Tells whether the clock of a process runs at a rate of its own, so that its budgets do, too.
        start_soon: Starts a task of the simulation.
    """

    oracles: Oracles
    proc: Callable[[ProcId], Proc]
    drifts: Callable[[ProcId], bool]
    start_soon: Callable[..., None]
    _due: list[tuple[float, int, Callable[[], None]]] = attrs.field(factory=list[tuple[float, int, Callable[[], None]]])
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)
    _news: trio.Event | None = None
    _expiries: dict[tuple[ProcId, ProcId, int], float] = attrs.field(factory=dict[tuple[ProcId, ProcId, int], float])

    # ---- what happens ----------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, message: messages.Message) -> None:
        """Take one message that has come to `proc`, before it is read there."""
        if isinstance(message, messages.Call) and message.budget is not None:
            expiry = trio.current_time() + message.budget
            self._expiries[peer.proc_id, proc.proc_id, message.call] = expiry
            self._at(expiry + TICK, lambda: self._look_at_callee(proc, peer, message.call, "its budget has run out"))
            self._watch_caller(self.proc(peer.proc_id), message.call)
        elif isinstance(message, messages.Cancel):
            now = trio.current_time()
            self._at(now + TICK, lambda: self._look_at_callee(proc, peer, message.call, "its caller has cancelled it"))
            caller = self.proc(peer.proc_id)
            call = caller.calls.get(message.call)
            if call is not None:
                self._look_at_caller(caller, call)

    def _watch_caller(self, proc: Proc, number: int) -> None:
        call = proc.calls.get(number)
        if call is not None and call.budget is not None:
            self._at(call.started_at + call.budget + TICK, lambda: self._look_at_caller(proc, call))

    def started(self, proc_id: ProcId, call: IncomingCall) -> None:
        """Take the start of an endpoint, in its task."""
        expiry = self._expiries.get((call.peer.proc_id, proc_id, call.call_id), math.inf)
        if expiry == math.inf or self.drifts(proc_id):
            return
        if trio.current_time() > expiry:
            self.oracles.breach("OR-5", f"{call.spec.name} has started after its budget had run out")
        if trio.current_effective_deadline() > expiry + TICK:
            self.oracles.breach("OR-5", f"{call.spec.name} may run longer than its budget")

    # ---- checks ----------------------------------------------------------------------------------------------

    def _look_at_callee(self, proc: Proc, peer: Peer, number: int, why: str) -> None:
        call = peer.inbound.get(number)
        if call is None or call.ended or proc.proc_id in self.oracles.exited:
            return
        if call.is_cancelled or self.drifts(proc.proc_id):
            return
        self.oracles.breach("OR-5", f"call {number} of {call.spec.name} goes on although {why}")

    def _look_at_caller(self, proc: Proc, call: OutgoingCall) -> None:
        # Of several calls that one task waits for, those that were given up are let go when it looks at them.
        if type(call) is OutgoingCall and call.is_given_up and proc.calls.get(call.call_id) is call:
            chosen = call.request.abandon_after
            due = trio.current_time() + (limits.CANCEL_ACK_SECONDS if chosen is None else chosen) + TICK
            self._at(due, lambda: self._look_whether_left(proc, call))

    def _look_whether_left(self, proc: Proc, call: OutgoingCall) -> None:
        if proc.calls.get(call.call_id) is call and proc.proc_id not in self.oracles.exited:
            text = f"call {call.call_id} of {call.what} was given up, and its caller has not left within the bound"
            self.oracles.breach("OR-5", text)

    # ---- time ------------------------------------------------------------------------------------------------

    def _at(self, time: float, check: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._numbers), check))
        if self._news is None:
            self._news = trio.Event()
            self.start_soon(self._run)
        elif self._due[0][0] == time:
            self._news.set()

    async def _run(self) -> None:
        while True:
            while self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[2]()
            self._news = trio.Event()
            with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf):
                await self._news.wait()
