"""Wait graph of this process at one moment, for deadlock searches (rule C8).

Calls pay nothing for it. `LocalWaits` reads the tables and finds the call of a waiting task by walking up the task
tree: a task belongs to the call that cannot end before it. A task that an endpoint started elsewhere (in a nursery of
`lifespan`) may outlive the call, so it does not belong to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.actors.mailbox import Mailbox, SlotGroup
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.calls.outgoing_stream import OutgoingStream
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.tasks.coroutines import find_outside_tasks, outside_tasks_in
from trimesh._runtime.values.endpoint_spec import class_of
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport, Place
from trimesh.ids import AGENT, MeshId

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.calls.outgoing import AnyWait
    from trimesh._runtime.deadlocks import RestartWait
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.incoming import ItemSender
    from trimesh._runtime.peers.peer import Peer


class LocalWaits:
    """Waits of a process at the moment when this is made.

    Attributes:
        of_restarts: Running calls that wait for a restart under way.

    Args:
        numbers: Assigns numbers to nodes without a name.
        bounded: True to include waits that a deadline will end.
    """

    def __init__(self, proc: Proc, numbers: Iterator[int], *, bounded: bool = False) -> None:
        self._proc = proc
        self._numbers = numbers
        self._bounded = bounded
        self._of_task: dict[trio.lowlevel.Task, IncomingCall] = {}
        self._stand_ins: dict[trio.lowlevel.Task, IncomingCall] | None = None
        self._of_number: dict[int, IncomingCall] = {}
        self._edges: defaultdict[IncomingCall, list[NodeRef]] = defaultdict(list)
        self._unsent: dict[int, OutgoingCall] = {}
        self._of_waiter: defaultdict[trio.lowlevel.Task, list[NodeRef]] = defaultdict(list)
        self._any: defaultdict[AnyWait, list[NodeRef]] = defaultdict(list)
        self._any_of_number: dict[int, list[NodeRef]] = {}
        for cell in proc.cells.values():
            for group in cell.mailbox.groups():
                for call, task in group.running.items():
                    self._of_task[task] = call
                    if call.is_broadcast and call.number:
                        self._of_number[call.number] = call
        self._spawns = dict(self._find_spawns())
        remakers = dict(self._find_remakers())
        self._remakers = set(remakers.values())
        for peer in proc.peers():
            for outgoing in _calls_to(peer):
                self._read(outgoing, peer)
        for wait, refs in self._any.items():
            self._read_any(wait, refs)
        self.of_restarts: dict[IncomingCall, RestartWait] = {}
        for task, remaker in remakers.items():
            self._of_waiter[task] += self._of_waiter.get(remaker, ())
            if (waiting := self.call_of(task)) is not None:
                self.of_restarts[waiting] = proc.deadlocks.restarts[task]
        for task, refs in self._of_waiter.items():
            call_of_task = self.call_of(task)
            if call_of_task is not None:
                self._edges[call_of_task] += refs

    def _find_spawns(self) -> Iterator[tuple[IncomingCall, Cell]]:
        """Yield the running spawns of actors that do not serve yet."""
        for cell in self._proc.cells.values():
            if not cell.mailbox.is_open and not cell.ended.is_set():
                spawn = self.call_of(cell.task)  # a call of the agent, which lasts until `lifespan` has yielded
                if spawn is not None:
                    yield spawn, cell

    def _find_remakers(self) -> Iterator[tuple[trio.lowlevel.Task, trio.lowlevel.Task]]:
        """Yield the tasks that wait for restarts, each with the task that spawns the member it waits for."""
        for task, wait in self._proc.deadlocks.restarts.items():
            owner = self._proc.owners.get(wait.mesh)
            remaker = None if owner is None else owner.remaker(wait.rank)
            if remaker is not None and self._counts(wait):
                yield task, remaker

    def _read(self, outgoing: OutgoingCall, peer: Peer) -> None:
        wait = outgoing.any_wait
        task = outgoing.waiter if wait is None else wait.waiting_task
        if task is None:
            return
        is_remaker = task in self._remakers  # whatever deadline the block has in which it restarts
        counts = is_remaker or self._counts(outgoing if wait is None else wait)
        if not counts and not self._is_bounded_by_spawn(outgoing, task):
            return
        if outgoing.is_unsent_to(peer):
            ref = self.unsent_ref(outgoing, peer)
            self._unsent[outgoing.number] = outgoing
        elif isinstance(outgoing, OutgoingStream) and outgoing.window:
            come = outgoing.received_from(peer)
            ref = NodeRef(NodeKind.SOURCE, peer.proc_id, self._proc.proc_id, outgoing.call_id, come)
        else:
            ref = NodeRef(NodeKind.CALL, peer.proc_id, self._proc.proc_id, outgoing.call_id)
        (self._of_waiter[task] if wait is None else self._any[wait]).append(ref)
        for awaiter in outgoing.awaiters:
            self._of_waiter[awaiter].append(ref)

    def _counts(self, wait: OutgoingCall | AnyWait | ItemSender | RestartWait) -> bool:
        return self._bounded or not wait.is_bounded

    def _is_bounded_by_spawn(self, outgoing: OutgoingCall, task: trio.lowlevel.Task) -> bool:
        """Return whether a wait in the first half of a `lifespan` has no deadline but that of the spawn."""
        spawn = self.call_of(task) if self._spawns and outgoing.budget is not None else None
        if spawn is None or spawn not in self._spawns:
            return False
        assert outgoing.budget is not None
        return outgoing.started_at + outgoing.budget >= spawn.deadline - limits.DEADLINE_SKEW_SECONDS

    def _read_any(self, wait: AnyWait, refs: list[NodeRef]) -> None:
        task = wait.waiting_task
        assert task is not None
        if not wait.number:
            wait.number = next(self._numbers)
        self._any_of_number[wait.number] = refs
        self._of_waiter[task].append(NodeRef(NodeKind.NEXT, self._proc.proc_id, wait.number))

    def edges_of(self, call: IncomingCall) -> list[NodeRef]:
        """Return the nodes that must all end before a running call can."""
        edges = list(self._edges.get(call, ()))
        if call.items is not None and call.items.is_waiting and self._counts(call.items):
            told = call.items.window.acknowledged_total
            edges.append(NodeRef(NodeKind.CONSUMER, call.peer.proc_id, call.call_id, self._proc.proc_id, told))
        return edges

    def call_of(self, task: trio.lowlevel.Task | None) -> IncomingCall | None:
        """Return the running call that cannot end before `task` has, or None."""
        while task is not None:
            found = self._of_task.get(task) or self._of_stand_ins().get(task)
            if found is not None:
                return found
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return None

    def _of_stand_ins(self) -> dict[trio.lowlevel.Task, IncomingCall]:
        """Return the calls that run tasks of asyncio's loop, by the Trio tasks in which those tasks wait."""
        outside = find_outside_tasks()
        if self._stand_ins is None:
            self._stand_ins = {}
            if outside is not None:
                for task, call in self._of_task.items():
                    for one in outside_tasks_in(task):
                        stand_in = outside.in_trio(one)
                        if stand_in is not None:
                            self._stand_ins[stand_in] = call
        return self._stand_ins

    # ---- names -----------------------------------------------------------------------------------------------

    def ref_of(self, call: IncomingCall) -> NodeRef:
        """Return the name of a call to an actor of this process."""
        if not call.is_broadcast:
            return NodeRef(NodeKind.CALL, self._proc.proc_id, call.peer.proc_id, call.call_id)
        if not call.number:
            call.number = next(self._numbers)
            self._of_number[call.number] = call
        return NodeRef(NodeKind.MESSAGE, self._proc.proc_id, call.number)

    def unsent_ref(self, outgoing: OutgoingCall, peer: Peer) -> NodeRef:
        """Return the name of a message of this process that waits for room."""
        if not outgoing.number:
            outgoing.number = next(self._numbers)
        return NodeRef(NodeKind.UNSENT, self._proc.proc_id, outgoing.number, peer.proc_id)

    def next_ref(self, wait: AnyWait) -> NodeRef | None:
        """Return the name of a wait for the next result, if a call or a stream can wait for its task."""
        task = wait.waiting_task
        if task is None or wait.number not in self._any_of_number:
            return None
        others = (call for peer in self._proc.peers() for call in _calls_to(peer) if call.any_wait is not wait)
        takes = any(isinstance(call, OutgoingStream) and call.only_consumer is task for call in others)
        if self.call_of(task) is None and not takes:
            return None
        return NodeRef(NodeKind.NEXT, self._proc.proc_id, wait.number)

    def find_call(self, ref: NodeRef) -> IncomingCall | None:
        """Return the call of that name, if it has not ended."""
        if ref.kind is NodeKind.MESSAGE:
            return self._of_number.get(ref.a)
        peer = self._proc.find_peer(ref.a)
        return None if peer is None else peer.inbound.get(ref.b)

    def find_unsent(self, ref: NodeRef) -> tuple[OutgoingCall, Peer] | None:
        """Return the message of that name and its recipient, if it still waits."""
        outgoing, peer = self._unsent.get(ref.a), self._proc.find_peer(ref.b)
        if outgoing is None or peer is None or not outgoing.is_unsent_to(peer):
            return None
        return outgoing, peer

    def spawn_ref(self, mailbox: Mailbox) -> NodeRef | None:
        """Return the name of the spawn that calls in a mailbox wait for, if that spawn waits for others."""
        found = (spawn for spawn, cell in self._spawns.items() if cell.mailbox is mailbox and self.has_waits(spawn))
        spawn = next(found, None)
        return None if spawn is None else self.ref_of(spawn)

    # ---- reports ---------------------------------------------------------------------------------------------

    def any_of(self, ref: NodeRef) -> Sequence[NodeRef]:
        """Return the nodes of which any one ends the wait of a `NEXT` node."""
        return self._any_of_number.get(ref.a, ())

    def waits_of(self, task: trio.lowlevel.Task) -> list[NodeRef]:
        return list(self._of_waiter.get(task, ()))

    def has_waits(self, call: IncomingCall) -> bool:
        """Return whether a running call waits for others."""
        return bool(self.edges_of(call))

    def look_up(self, ref: NodeRef) -> NodeReport | None:
        """Return what the node of that name waits for; None if it does not wait, or is not there."""
        match ref.kind:
            case NodeKind.CALL | NodeKind.MESSAGE:
                return self._call(ref)
            case NodeKind.CALLER:
                return self._caller(ref)
            case NodeKind.UNSENT:
                return self._unsent_message(ref)
            case NodeKind.ROOM:
                return self._room(ref)
            case NodeKind.CONSUMER:
                return self._consumer(ref)
            case NodeKind.NEXT:
                refs = self._any_of_number.get(ref.a)
                return None if refs is None else NodeReport(ref, needs_all=False, waits_for=tuple(refs))
            case NodeKind.SOURCE:
                return self._source(ref)

    def _call(self, ref: NodeRef) -> NodeReport | None:
        call = self.find_call(ref)
        if call is None or call.ended or call.is_cancelled:
            return None
        cell = self._proc.cells.get(call.mesh)
        if cell is None:
            return None
        if not cell.mailbox.is_open:
            return self._early_call(ref, call, cell)
        group = cell.mailbox.group_of(call)
        if group is None:
            return None
        place = place_of(cell, call.spec.name)
        if call in group.running:
            if (made := self._spawns.get(call)) is not None:
                place = place_of(made, "lifespan")
            edges = tuple(dict.fromkeys(self.edges_of(call)))
            if not edges:
                return None
            is_request = call.mesh == AGENT and made is None  # of a call that waits for a replacement
            can_break = call in self.of_restarts
            return NodeReport(
                ref, needs_all=True, waits_for=edges, can_break=can_break, place=None if is_request else place
            )
        if not group.is_full or call not in group.queue:
            return None
        return NodeReport(ref, needs_all=False, waits_for=self._holders(group), can_break=True, place=place)

    def _early_call(self, ref: NodeRef, call: IncomingCall, cell: Cell) -> NodeReport | None:
        """Report a call that waits until its actor serves."""
        spawn = next((spawn for spawn, made in self._spawns.items() if made is cell), None)
        if spawn is None or not cell.mailbox.is_early(call):
            return None
        place = place_of(cell, call.spec.name)
        return NodeReport(ref, needs_all=False, waits_for=(self.ref_of(spawn),), can_break=True, place=place)

    def _holders(self, group: SlotGroup) -> tuple[NodeRef, ...]:
        return tuple(self.ref_of(call) for call in group.running)

    def _caller(self, ref: NodeRef) -> NodeReport | None:
        """Report the caller of a call, which waits for the call above it; None if no task here waits any more.

        A call with a budget always counts: the callee handles that deadline, and its own waits inherit it.
        """
        outgoing, peer = self._proc.calls.get(ref.a), self._proc.find_peer(ref.b)
        if outgoing is None or peer is None or not outgoing.is_open_at(peer) or outgoing.is_given_up:
            return None
        if outgoing.budget is None and not self._counts(outgoing):
            return None
        call = self.call_of(outgoing.part_of)
        above: tuple[NodeRef, ...] = ()
        if call is not None:
            if call.ended or call.is_cancelled:
                return None
            if not call.is_broadcast:
                above = (NodeRef(NodeKind.CALLER, call.peer.proc_id, call.call_id, self._proc.proc_id),)
        return NodeReport(ref, needs_all=True, waits_for=above)

    def _consumer(self, ref: NodeRef) -> NodeReport | None:
        """Report a consumer that waits for other calls; None while an acknowledgement of its items is in transit."""
        stream, peer = self._proc.calls.get(ref.a), self._proc.find_peer(ref.b)
        if not isinstance(stream, OutgoingStream) or peer is None or not stream.is_open_at(peer):
            return None
        task = stream.only_consumer
        edges = () if task is None else tuple(self._of_waiter.get(task, ()))
        if not edges or stream.is_given_up or stream.reported_to(peer) != ref.c:
            return None
        return NodeReport(ref, needs_all=True, waits_for=edges)

    def _source(self, ref: NodeRef) -> NodeReport | None:
        """Report a stream whose sent items have all arrived: more items need its call to go on."""
        call = self.find_call(ref)
        if call is None or call.items is None or call.items.window.sent_total != ref.c:
            return None
        return NodeReport(ref, needs_all=True, waits_for=(self.ref_of(call),))

    def _unsent_message(self, ref: NodeRef) -> NodeReport | None:
        found = self.find_unsent(ref)
        if found is None:
            return None
        outgoing, peer = found
        mesh = outgoing.mesh
        box = peer.find_outbox(mesh)
        if box is None:
            return None
        room = NodeRef(NodeKind.ROOM, peer.proc_id, mesh, self._proc.proc_id, box.window.acknowledged_total)
        return NodeReport(ref, needs_all=False, waits_for=(room,), can_break=True)

    def _room(self, ref: NodeRef) -> NodeReport | None:
        """Report a full mailbox: it has room for a sender once any of that sender's messages leaves it."""
        cell, peer = self._proc.cells.get(MeshId(ref.a)), self._proc.find_peer(ref.b)
        count = None if peer is None else peer.find_count(MeshId(ref.a))
        if cell is None or count is None or count.reported != ref.c:
            return None  # a report of room is in transit
        holders: dict[NodeRef, None] = {}
        if not cell.mailbox.is_open:
            return None
        for group in cell.mailbox.groups():
            if any(call.peer is peer for call in group.queue):
                if not group.is_full:
                    return None
                holders |= dict.fromkeys(self._holders(group))
        if not holders:
            return None
        return NodeReport(ref, needs_all=False, waits_for=tuple(holders), place=place_of(cell, ""))


def _calls_to(peer: Peer) -> Iterator[OutgoingCall]:
    """Return the unended calls of this process in which a peer takes part."""
    return (call for call in peer.calls if isinstance(call, OutgoingCall))


def place_of(cell: Cell, endpoint: str) -> Place:
    """Return the place of an endpoint, for texts; `endpoint` "" stands for the actor's mailbox."""
    spec, extent = cell.spec, cell.spec.point.extent
    key = spec.point.mesh
    return Place(
        spec.name,
        class_of(spec.cls).__qualname__,
        endpoint,
        tuple(extent.labels),
        tuple(extent.sizes),
        spec.point.rank,
        key if isinstance(key, int) else None,
    )
