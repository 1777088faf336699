"""What must hold in every run, whatever the test is about. Fed with what happens; the first breach is kept.

    OR-1  A call gets at most one terminal frame from each rank, and one if its process lives to the end.
    OR-2  Calls of one process arrive at one actor in the order in which they were made, and start so in each group.
    OR-3  No call starts twice.
    OR-4  An error that was injected comes out: in the terminal frame of its call, or as a failure for the owner.
    OR-5  No call starts, or goes on without being cancelled, after its budget has run out or its cancel has come; a
          caller that gives a call up leaves within `limits.CANCEL_ACK_SECONDS` or `abandon_after` (`deadlines.py`).
    OR-6  A mailbox never holds more messages of one sender than `limits.MAILBOX_MESSAGES`, and what leaves it is
          credited to its sender.
    OR-7  The incarnation at one place only grows, and nothing is taken from one that is known to be gone.
    OR-8  When nothing is under way, nothing is left: no call, no message, no load; when the run is over, no actor,
          process, task or channel either.
    OR-9  What runs on a host of a job has ended when the controller gives the host up, if the host has not heard it.

They see frames and starts; the tables of the runtime are looked at twice: when the body of the test has ended, and
when the run is over (OR-6, OR-8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import attrs

from trimesh import limits
from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._wire import messages
from trimesh.ids import AGENT, ProcId
from trimesh.testing.plans.vocabulary import Place

Terminal = messages.Return | messages.Error | messages.CancelAck | messages.Refused
CallKey = tuple[ProcId, ProcId, int]
"""(caller, callee, number of the call)."""


class OracleError(AssertionError):
    """Something happened that must never happen: a bug of trimesh, or of what replaced a part of it."""


@attrs.define(eq=False)
class Oracles:
    """Watches one run.

    Attributes:
        breaches: What was broken, in order.
        exited: Processes that have ended.
    """

    breaches: list[str] = attrs.field(factory=list[str])
    exited: set[ProcId] = attrs.field(factory=set[ProcId])
    _arrived: dict[CallKey, str] = attrs.field(factory=dict[CallKey, str])
    _ended: dict[CallKey, str] = attrs.field(factory=dict[CallKey, str])
    _started: set[CallKey] = attrs.field(factory=set[CallKey])
    _cancelled: set[CallKey] = attrs.field(factory=set[CallKey])
    _last_arrival: dict[Any, int] = attrs.field(factory=dict[Any, int])
    _last_start: dict[Any, int] = attrs.field(factory=dict[Any, int])
    _received: dict[Any, int] = attrs.field(factory=dict[Any, int])
    _injected: dict[CallKey, str] = attrs.field(factory=dict[CallKey, str])
    _incarnations: dict[Place, int] = attrs.field(factory=dict[Place, int])

    def breach(self, rule: str, text: str) -> None:
        """Note that a rule was broken."""
        self.breaches.append(f"{rule}: {text}")

    # ---- what happens ----------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, message: Any) -> None:
        if peer.death is not None:
            self.breach("OR-7", f"a {type(message).__name__} was taken from a process that is known to be gone")
        if isinstance(message, messages.Call):
            self._call(proc, peer, message)
        elif isinstance(message, messages.Cancel):
            self._cancelled.add((peer.proc_id, proc.proc_id, message.call))
        elif isinstance(message, Terminal):
            key = (proc.proc_id, peer.proc_id, message.call)
            kind = type(message).__name__
            if key in self._ended:
                self.breach("OR-1", f"call {message.call} got {kind} after {self._ended[key]}")
            self._ended[key] = kind

    def _call(self, proc: Proc, peer: Peer, message: messages.Call) -> None:
        key = (peer.proc_id, proc.proc_id, message.call)
        where = (peer.proc_id, proc.proc_id, message.mesh)
        if message.call:
            if message.call <= self._last_arrival.get(where, 0):
                self.breach("OR-2", f"call {message.call} ({message.endpoint}) came after {self._last_arrival[where]}")
            self._last_arrival[where] = message.call
            self._arrived[key] = message.endpoint
        if message.mesh == AGENT:
            return
        if message.mesh not in proc.cells:  # it will be refused: there is no mailbox
            self._received.pop(where, None)
            return
        self._received[where] = self._received.get(where, 0) + 1
        count = peer.find_count(message.mesh)
        waiting = self._received[where] - (0 if count is None else count.dequeued)
        if waiting > limits.MAILBOX_MESSAGES:
            self.breach("OR-6", f"{waiting} messages of one sender wait for {message.endpoint}")

    def started(self, cell: Cell, call: IncomingCall) -> None:
        """Take the start of an endpoint."""
        what = f"{cell.spec.name}.{call.spec.name}"
        if call.is_expired:
            self.breach("OR-5", f"{what} has started after its budget had run out")
        if call.is_broadcast:
            return
        key = (call.peer.proc_id, cell.proc.proc_id, call.call_id)
        if key in self._started:
            self.breach("OR-3", f"call {call.call_id} of {what} has started twice")
        self._started.add(key)
        if key in self._cancelled:
            self.breach("OR-5", f"call {call.call_id} of {what} has started after its cancel had come")
        slots = (call.peer.proc_id, cell.proc.proc_id, call.mesh, call.spec.slots)
        if call.call_id < self._last_start.get(slots, 0):
            self.breach("OR-2", f"call {call.call_id} of {what} has started after {self._last_start[slots]}")
        self._last_start[slots] = call.call_id

    def injected(self, cell: Cell, call: IncomingCall) -> None:
        """Take an error that will be raised instead of running `call`."""
        if not call.is_broadcast:
            self._injected[call.peer.proc_id, cell.proc.proc_id, call.call_id] = f"{cell.spec.name}.{call.spec.name}"

    def launched(self, place: Place, incarnation: int) -> None:
        """Take the start of a process."""
        if incarnation <= self._incarnations.get(place, -1):
            self.breach("OR-7", f"incarnation {incarnation} at {place} after {self._incarnations[place]}")
        self._incarnations[place] = incarnation

    # ---- the end ---------------------------------------------------------------------------------------------

    def judge_calls(self, lived: Iterable[ProcId], severed: Collection[frozenset[ProcId]] = ()) -> None:
        """Look back at all calls, of which those between processes that have `lived` must be complete.

        Args:
            lived: Processes that were not ended from outside.
            severed: Pairs of them that have lost their link.
        """
        alive = set(lived)
        for (caller, callee, number), endpoint in self._arrived.items():
            if frozenset((caller, callee)) in severed:
                continue
            if {caller, callee} <= alive and (caller, callee, number) not in self._ended:
                self.breach("OR-1", f"call {number} of {endpoint} got no terminal frame")
        for key, what in self._injected.items():
            kind = self._ended.get(key)
            if frozenset(key[:2]) in severed:
                continue
            if set(key[:2]) <= alive and kind not in ("Error", "CancelAck"):
                self.breach("OR-4", f"the error injected into {what} came out as {kind}")

    def judge_loads(self, proc: Proc) -> None:
        """Look, at any moment, at what a process believes to be under way: nothing, when it waits for no call."""
        if proc.unended_calls():
            return
        for peer in proc.peers():
            abandoned = Counter(call.box for call in peer.abandoned)
            for _, box in peer.outboxes():
                if box.load != abandoned[box]:
                    self.breach("OR-8", f"a load of {box.load} is left, and {abandoned[box]} calls that were given up")

    def judge_sent(self, sender: Proc, receiver: Proc) -> None:
        """Look at what a process has sent to the actors of another, when nothing of it is on the wire.

        What was sent waits in a mailbox there, or has been taken out and is counted so: a message that is forgotten in
        between makes the window smaller for ever.
        """
        there = receiver.peer(sender.proc_id)
        for mesh, box in sender.peer(receiver.proc_id).outboxes():
            cell, count = receiver.cells.get(mesh), there.find_count(mesh)
            if cell is None:
                continue  # that there is none, and what it means, is told like what was taken
            waiting = sum(call.peer is there for call in cell.waiting())
            taken = 0 if count is None else count.dequeued
            if box.window.sent_total != taken + waiting:
                text = f"of {box.window.sent_total} messages to {cell.spec.name} {taken} were taken and {waiting} wait"
                self.breach("OR-6", text)

    def judge_credits(self, sender: Proc, receiver: Proc) -> None:
        """Look at what a process has been told of its messages to another, when no reply is on the wire either.

        A report travels with a reply, so one that is still under way is no report that was lost.
        """
        there = receiver.peer(sender.proc_id)
        for mesh, box in sender.peer(receiver.proc_id).outboxes():
            if mesh not in receiver.cells:
                self.breach(
                    "OR-8", f"a sender of {box.window.sent_total} messages to an actor that has ended keeps count"
                )
                continue
            count = there.find_count(mesh)
            reported = 0 if count is None else count.reported
            if box.window.acknowledged_total != reported:
                text = f"{reported} messages count as reported, and the sender knows of"
                self.breach("OR-6", f"{text} {box.window.acknowledged_total}")

    def judge_tables(self, proc: Proc, *, is_over: bool) -> None:
        """Look at what a process remembers when nothing is under way any more."""
        left: dict[str, list[Any]] = {"calls": [call.what for call in proc.unended_calls()]}
        for peer in proc.peers():
            left["messages of peers"] = [call.spec.name for call in peer.inbound.values()]
            left["early cancels"] = list(peer.early_cancels.values())
            left["queued messages"] = [mesh for mesh, box in peer.outboxes() if box.is_waiting]
            abandoned = Counter(call.box for call in peer.abandoned)
            left["loads"] = [box.load for _, box in peer.outboxes() if box.load != abandoned[box]]
            left["counts of ended actors"] = [mesh for mesh in peer.counts() if mesh not in proc.cells]
            for what in [what for what, things in left.items() if things]:
                self.breach("OR-8", f"{what} are left: {left[what]}")
        if is_over:
            cells = [cell.spec.name for mesh, cell in proc.cells.items() if mesh != AGENT]
            channels = proc.channels.open_channels
            if cells or proc.owners or proc.members or channels:
                text = f"left are {cells} {list(proc.owners)} {list(proc.members)}, and {channels} channels"
                self.breach("OR-8", text)

    def check(self) -> None:
        """Raise what was broken.

        Raises:
            OracleError: Something was.
        """
        if self.breaches:
            raise OracleError("\n".join(dict.fromkeys(self.breaches)))
