"""One process of a family: the tables that connect links, actors and calls.

All state of a process is reachable from its `Proc`, so that a simulation can hold many. It dispatches frames; it never
runs user code or waits.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import trio

from trimesh import limits
from trimesh._routing.collector import Outcome, Raised, Returned
from trimesh._runtime.actors.agent import Agent
from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.actors.reports import serve_reports
from trimesh._runtime.calls.membership import Membership
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.calls.outgoing_stream import serve_streams
from trimesh._runtime.channels.registry import Channels
from trimesh._runtime.deadlocks import Deadlocks
from trimesh._runtime.holds import Holds
from trimesh._runtime.life.tracing import serve_traced
from trimesh._runtime.meshes.block import StoppingBlocks
from trimesh._runtime.metrics import metrics_of
from trimesh._runtime.peers.deaths import Deaths, ProcDeath
from trimesh._runtime.peers.incoming import EarlyCalls, IncomingCall, ItemSender, refuse
from trimesh._runtime.peers.peer import LoopbackLink, Parcel, Peer, Route
from trimesh._runtime.peers.senders import check_agent_caller, check_sender
from trimesh._runtime.services.bulk import Bulk
from trimesh._runtime.services.registry import Services, known_services
from trimesh._runtime.sites import Sites
from trimesh._runtime.snapshot import Inquiries
from trimesh._runtime.system.cpu_binding import host_name
from trimesh._runtime.tasks.background import Tasks
from trimesh._runtime.values.codec import make_values, take_payload
from trimesh._runtime.values.endpoint_spec import GENERATOR
from trimesh._runtime.watch.events import Journal
from trimesh._transport.interface import Buffer, DownReason, Link, LinkDown, LinkGroup, Transport
from trimesh._wire import messages
from trimesh._wire.messages import Calls
from trimesh.errors import ProtocolError, TrimeshInternalError
from trimesh.ids import ID_MAX, CallId, MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.life.family import Family
    from trimesh._runtime.life.job_hosts import SharedHosts
    from trimesh._runtime.life.ownership import OwnedProcs
    from trimesh._runtime.meshes.actor_members import ActorMembers
    from trimesh._runtime.meshes.block import Block
    from trimesh._runtime.meshes.member import Member
    from trimesh._runtime.recording import FlightRecorder
    from trimesh._runtime.system.records import HostShare


class Proc:
    """One process in its family.

    Attributes:
        proc_id: This incarnation; the epoch of its frames.
        cells: Actors that live here.
        owners: Actor meshes that this process owns, by id.
        members: Child processes that this process owns.
        shared: Its process meshes on which others may spawn, by id.
        memberships: Members by rank, for each mesh that this process has handles on.
        blocks, stopping_blocks: Open blocks of this process, and those that are being left.
        family: Notified of every lost link; opens new ones.
        nursery, actors: Tasks of the runtime; tasks of actors, which end before the others.
        has_crashed: Whether an internal error has ended it.
        new_call_id: Returns the number of the next call.
        now: Returns the Trio time; while it runs, at a third of the cost of `trio.current_time()`.
        is_simulated: Whether its peers are in this very process, and share its clock.
        dropped_replies: Replies that arrived after their call was given up.
        routes: Handlers of messages other than calls and replies, by class of message.
        deadlocks, early: Search for call cycles; calls to actors that are still being spawned.
        journal, inquiries, holds: Events of its members; queries to them; threads held by debuggers.
        on_gone, on_link: Called with each peer that is gone, once its calls are settled; with each that gets a link.
        recorder: Writes the flight record; None without.
        gpu_use: Use in percent of its GPUs, and the bytes that it has there.
        metrics: Logged values, counters, gauges and histograms.
        calls: Outgoing calls without an outcome, by number.
        channels: The channels of this process, and its ports of others.
        sites: Test hooks; None outside of tests.
        share: Share of the host that a placement gives it; None without one.
        bulk: Memory granted to others, and access to memory that others grant.
        above: State of packages above the runtime for this process, by class.
        services: Delivers the messages of those packages.
        plain_hosts: Names of its hosts that have sessions without TLS.
    """

    __slots__ = (
        "_deaths",
        "_groups",
        "_of_link",
        "_peers",
        "_random",
        "_serving",
        "above",
        "actors",
        "blocks",
        "bulk",
        "calls",
        "cells",
        "channels",
        "deadlocks",
        "dropped_replies",
        "early",
        "family",
        "gpu_use",
        "has_crashed",
        "holds",
        "host_name",
        "inquiries",
        "is_simulated",
        "journal",
        "loopback",
        "members",
        "memberships",
        "metrics",
        "new_call_id",
        "now",
        "nursery",
        "on_gone",
        "on_link",
        "owners",
        "pid",
        "plain_hosts",
        "proc_id",
        "recorder",
        "routes",
        "services",
        "share",
        "shared",
        "shared_hosts",
        "sites",
        "stopping_blocks",
        "transport",
        "values",
    )

    def __init__(
        self,
        proc_id: ProcId,
        transport: Transport,
        *,
        seed: int | None = None,
        main: ModuleType | None = None,
        pickled: bool = True,
    ) -> None:
        self.proc_id, self.transport = proc_id, transport
        self.host_name, self.pid = host_name(), os.getpid()
        self.cells: dict[MeshId, Cell] = {}
        self.owners: dict[MeshId, ActorMembers] = {}
        self.shared: dict[MeshId, OwnedProcs] = {}
        self.shared_hosts: dict[int, SharedHosts] = {}
        self.members: dict[ProcId, Member] = {}
        self.memberships: weakref.WeakValueDictionary[MeshId, Membership] = weakref.WeakValueDictionary()
        self.blocks: list[Block] = []
        self.stopping_blocks, self.has_crashed, self.dropped_replies = StoppingBlocks(), False, 0
        self.family: Family | None = None
        self.routes: dict[type[messages.Message], Route] = {messages.Define: Peer.take_definition}
        self.on_gone, self.on_link = list[Callable[[Peer], None]](), list[Callable[[Peer], None]]()
        self.recorder: FlightRecorder | None = None
        ports = self.channels = Channels(self)
        self.values = make_values(proc_id, main, ports.reducers(), ports.bindings(), Agent.spawn, pickled=pickled)
        self.sites: Sites | None = None
        self.share: HostShare | None = None
        self.above, self.plain_hosts = dict[type, object](), set[str]()
        self.services = Services(self, known_services)
        self.bulk = Bulk(self)
        self._serving: trio.Nursery | None = None
        serve_streams(self)
        serve_reports(self)
        self.deadlocks: Deadlocks = Deadlocks(self)
        serve_several_calls(self)
        serve_traced(self)
        self.journal, self.inquiries, self.holds = Journal(), Inquiries(self), Holds(self)
        self.now: Callable[[], float] = trio.current_time
        self.is_simulated: bool = seed is not None
        self.metrics, self.gpu_use = metrics_of(self), (0, 0)
        # Ids need to be unique, not secret; in a simulation the same in each run.
        self._random: random.Random = random.Random(seed) if seed is not None else random.SystemRandom()  # noqa: S311
        self._peers, self._of_link = dict[ProcId, Peer](), dict[Link, Peer]()
        self.calls: dict[int, OutgoingCall] = {}
        self.new_call_id: Callable[[], CallId] = map(CallId, itertools.count(1)).__next__
        self._groups, self._deaths = LinkGroups(transport.define_group), Deaths()
        self.loopback, self.early = LoopbackLink(self), EarlyCalls(self)
        self.adopt_link(proc_id, self.loopback)
        self.nursery: Tasks  # of `run`
        self.actors: trio.Nursery  # the same

    # ---- life ------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def run(self, agent: Cell, on_ready: Callable[[], None]) -> None:
        """Serve links and hold the tasks of actors, until cancelled.

        Args:
            agent: The first actor.
            on_ready: Called when the agent serves.
        """
        self.now = trio.lowlevel.current_clock().current_time
        links = trio.CancelScope(shield=True)
        async with trio.open_nursery() as nursery:
            self.nursery = Tasks(partial(crash, self), nursery)
            self.nursery.start_soon(self._serve_links, links)
            try:
                async with trio.open_nursery() as self.actors:
                    await self.actors.start(agent.run)
                    on_ready()
                    await agent.ended.wait()
                    error = TrimeshInternalError("the agent of this process has ended")
                    error.__cause__ = agent.cause
                    crash(self, error)
                    raise error
            finally:
                links.cancel(reason="every actor of this process has ended")

    async def _serve_links(self, scope: trio.CancelScope) -> None:
        """Serve links for as long as actors unwind: their clean-up may call others."""
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.transport.run, self)
                    nursery.start_soon(self.loopback.run)
                    nursery.start_soon(self.deadlocks.run)
                    self._serving = nursery
        finally:
            self._serving = None

    def serve(self, service: Callable[..., Awaitable[object]], *args: Any) -> bool:
        """Run a task while links are served; return False, without running it, once that is over."""
        if self._serving is None:
            return False
        self._serving.start_soon(service, *args)
        return True

    def pump(self, seconds: float) -> None:
        """Read received frames, and wait at most `seconds` for one, without letting any task run.

        For synchronous functions that need an answer; never call it where frames are read.

        Raises:
            RuntimeError: This process is simulated.
        """
        self.transport.pump(self, seconds)

    def new_id(self) -> int:
        """Draw a number for a process or a mesh that is unique in the family."""
        return self._random.randrange(1, ID_MAX)

    def chance(self) -> float:
        """Draw a number between 0 and 1."""
        return self._random.random()

    # ---- peers -----------------------------------------------------------------------------------------------

    @property
    def me(self) -> Peer:
        """This process as a peer of itself."""
        return self.peer(self.proc_id)

    def peer(self, proc_id: ProcId) -> Peer:
        """Return the record of a process, known or not yet."""
        found = self._peers.get(proc_id)
        if found is None:
            death = self.death_of(proc_id)
            found = Peer(self, proc_id, death=death)
            if death is None:  # of an ended process only its death is kept
                self._peers[proc_id] = found
        return found

    def death_of(self, proc_id: ProcId) -> ProcDeath | None:
        """Return how a process has ended, or None if nothing is known of its end."""
        member = self.members.get(proc_id)
        return self._deaths.of(proc_id) or (None if member is None else member.death)

    def find_peer(self, proc_id: int) -> Peer | None:
        """Return the record of a process that is known and not gone, or None."""
        return self._peers.get(ProcId(proc_id))

    def peers(self) -> Sequence[Peer]:
        """Return every known process that is not gone."""
        return list(self._peers.values())

    def adopt_link(self, proc_id: ProcId, link: Link) -> Peer:
        """Put a link to `proc_id` into service; the first one is used for sending."""
        peer = self.peer(proc_id)
        self._of_link[link] = peer
        if peer.link is None:
            peer.link, peer.no_link = link, None
            for listener in self.on_link:
                listener(peer)
        return peer

    def _links_of(self, peer: Peer) -> list[Link]:  # both sides may have made one
        return [link for link, owner in self._of_link.items() if owner is peer]

    def _drop_links(self, peer: Peer) -> None:
        peer.link = None
        for link in self._links_of(peer):
            del self._of_link[link]
            self._groups.forget(link)
            link.abort()

    def is_stranger(self, peer: Peer) -> bool:
        """Return whether a process that may live has no link; children are started with one."""
        return peer.link is None and peer.death is None and peer.proc_id not in self.members

    def declare_gone(self, peer: Peer, death: ProcDeath) -> None:
        """Settle everything that waits for `peer`, and cancel its requests here. Idempotent.

        The owner of the process decides first what the death means for its block (rule X3).
        """
        if peer.death is not None:
            return
        peer.death = death
        self._drop_links(peer)
        for call in list(peer.calls):
            call.peer_gone(peer)
        for incoming in list(peer.inbound.values()):
            self._cancel_incoming(incoming, "other", "the process of the caller has ended")
        for listener in self.on_gone:
            listener(peer)
        peer.shed()
        self.early.forget(peer)
        self._peers.pop(peer.proc_id, None)
        self._deaths.add(peer.proc_id, death)

    def end_cell(self, mesh: MeshId) -> None:
        """Forget an actor that has ended for good, also at its senders. Idempotent."""
        self.cells.pop(mesh, None)
        self.early.ended(mesh)
        for peer in self._peers.values():
            peer.end_count(mesh)

    # ---- calls -----------------------------------------------------------------------------------------------

    def unended_calls(self) -> Sequence[OutgoingCall]:
        """Return the outgoing calls without an outcome."""
        return list(self.calls.values())

    def cast(self, peers: Sequence[Peer], parcel: Parcel) -> trio.Event | None:
        """Send one parcel to several peers, copied once where the transport can."""
        links = tuple(peer.link for peer in peers if peer.link is not None and peer.link is not self.loopback)
        if len(links) < len(peers) and self.me in peers:
            self.loopback.send(parcel.head, parcel.bodies)
        if not links:
            return None
        return self._groups.of(links).cast(parcel.head, parcel.bodies, flow=parcel.flow)

    # ---- frames ----------------------------------------------------------------------------------------------

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        """Dispatch one received message."""
        peer = self._of_link.get(link)
        if peer is None:
            return
        try:
            message = messages.decode(head)
            if self.sites is not None and not self.sites.received(self, peer, link, message):
                return
            outcome: Outcome
            if type(message) is messages.Call:
                self.take_call(peer, link, message, len(head), bodies)
                return
            if type(message) is messages.Return:
                if bodies or peer.carried is not None:
                    outcome = Returned(*take_payload(message.payload, bodies), peer.take_carried())
                else:
                    outcome = Returned(message.payload)
            elif type(message) is messages.Error:
                outcome = Raised(*take_payload(message.payload, bodies), peer.take_carried())
            elif type(message) is messages.CancelAck or type(message) is messages.Refused:
                outcome = message
            else:
                self._take_other(peer, message, bodies)
                return
            call = self.calls.get(message.call)
            if call is None:
                self.dropped_replies += 1
                peer.abandoned.ended(message.call)
                self._acknowledged(peer, message)
            else:
                call.terminal(peer, outcome, message.dequeued)
        except ProtocolError as error:
            self.misbehaved(link, error)

    def _take_other(self, peer: Peer, message: messages.AnyMessage, bodies: list[memoryview]) -> None:
        """Dispatch a message other than a call or a reply."""
        if type(message) is messages.Cancel:
            self._cancel(peer, message)
        elif type(message) is messages.Credit:
            self._acknowledged(peer, message)
        else:
            route = self.routes.get(type(message))
            if route is None:
                raise ProtocolError(f"this process handles no {type(message).__name__} messages")
            check_sender(peer, type(message))
            route(peer, message, bodies)

    def misbehaved(self, link: Link, error: ProtocolError) -> None:
        """End a link whose peer has broken the rules."""
        link.abort()
        self.link_down(link, LinkDown(DownReason.PROTOCOL, str(error)))

    def link_down(self, link: Link, down: LinkDown) -> None:
        """Take a link out of service; the family finds out why it has ended."""
        peer = self._of_link.pop(link, None)
        if peer is None:
            return
        self._groups.forget(link)
        if down.reason is DownReason.PROTOCOL:
            self._drop_links(peer)
        if peer.link is link:  # frames of another link, if there is one, are read before the peer counts as lost
            peer.link = next(iter(self._links_of(peer)), None)
        is_harmless = link.hand_over(peer.link)
        if peer.death is None and self.family is not None:
            self.family.link_lost(peer, down, is_harmless=is_harmless)

    def link_stalled(self, link: Link, seconds: float) -> None:
        """Handle a stall of a peer's loop, or its end; the owner of the peer reports it."""
        peer = self._of_link.get(link)
        if peer is not None:
            peer.stalled(seconds)
            if (member := self.members.get(peer.proc_id)) is not None:
                member.stall.take(seconds)

    def take_call(self, peer: Peer, link: Link, message: messages.Call, size: int, bodies: list[memoryview]) -> None:
        """Accept a received call; `size` is the size of its head, as the sender's window counts it."""
        peer.calls_received += 1
        number = message.call
        carried = None if peer.carried is None else peer.take_carried()
        early_cancel = peer.early_cancels.pop(number, None) if peer.early_cancels else None
        mesh = message.mesh
        cell = self.cells.get(mesh)
        if cell is None:
            self.early.hold(peer, link, message, size, bodies, carried, early_cancel)
            return
        count = peer.count_of(mesh)
        nbytes = size
        payload: Buffer = message.payload
        if bodies:
            nbytes += sum(body.nbytes for body in bodies)
            payload, bodies = take_payload(message.payload, bodies)
        if not mesh:  # AGENT
            check_agent_caller(peer, message.endpoint)
        spec = cell.endpoints.get(message.endpoint)
        if spec is None:
            refuse(link, number, mesh, count, nbytes, "unknown", f"no endpoint is called {message.endpoint!r}")
            return
        if (spec.kind is GENERATOR) is not (message.window > 0):
            kind = (
                "not a generator endpoint, so use `call`" if message.window else "a generator endpoint, so use `stream`"
            )
            text = f"{message.endpoint} is {kind}"
            refuse(link, number, mesh, count, nbytes, "unknown", text)
            return
        now = self.now()
        deadline = math.inf if message.budget is None else now + message.budget
        call = IncomingCall(peer, link, number, mesh, spec, payload, bodies, nbytes, count, deadline, now, carried)
        call.view, call.caller = message.view, message.caller
        if message.window:
            call.items = ItemSender(message.window)
        if number:
            if number in peer.inbound:
                raise ProtocolError(f"a call id must not be used twice, got {number} again")
            peer.inbound[number] = call
        if early_cancel is not None:
            call.cancel("caller", early_cancel)
            call.cancelled()
            return
        cell.deliver(call)

    def _acknowledged(self, peer: Peer, message: messages.Terminal | messages.Credit) -> None:
        box = peer.find_outbox(message.mesh)
        if box is not None:  # else of a mesh that has ended, or that nothing was sent to
            box.told(message.dequeued)

    def _cancel(self, peer: Peer, message: messages.Cancel) -> None:
        call = peer.inbound.get(message.call)
        if call is not None:
            self._cancel_incoming(call, "caller", message.reason)
        elif not self.early.cancel(peer, message.call, message.reason) and message.position > peer.calls_received:
            # It has overtaken its call, which is still to arrive: positions count the calls of the link.
            if len(peer.early_cancels) >= limits.EARLY_CANCELS_MAX:
                raise ProtocolError(f"at most {limits.EARLY_CANCELS_MAX} cancels may precede their calls, got more")
            peer.early_cancels[message.call] = message.reason

    def _cancel_incoming(self, call: IncomingCall, by: str, reason: str) -> None:
        cell = self.cells.get(call.mesh)
        if cell is not None:
            cell.cancel(call, by, reason)


# ---- end of a process whose own runtime has failed -------------------------------------------------------------------

_log = logging.getLogger("trimesh")


def crash(proc: Proc, cause: BaseException) -> None:
    """End a process whose runtime has failed: log that, fail its blocks, release everything that waits."""
    death = ProcDeath("the runtime of this process has failed; please report this", TrimeshInternalError, cause=cause)
    if not proc.has_crashed:
        _log.critical("the runtime of process %d has failed; please report this", proc.pid, exc_info=cause)
    proc.has_crashed = True
    for block in proc.blocks:
        block.fail(death())
    for member in proc.members.values():
        member.gone.set()
    for peer in proc.peers():
        proc.declare_gone(peer, death)


# ---- several calls in one message ------------------------------------------------------------------------------------


def serve_several_calls(proc: Proc) -> None:
    """Accept several calls in one message (docs/design/calls.md)."""
    proc.routes[Calls] = partial(_take_several, proc)


def _take_several(proc: Proc, peer: Peer, message: Calls, bodies: list[memoryview]) -> None:
    """Unpack several calls; see `Proc.take_call`.

    Raises:
        ProtocolError: The message has bodies or ports, or repeats a call id.
    """
    if bodies or peer.carried is not None:
        raise ProtocolError(f"Calls must have no bodies and no ports, got {len(bodies)} bodies")
    link = peer.link
    if link is None:
        return
    mesh = message.mesh
    cell = proc.cells.get(mesh)
    spec = None if cell is None else cell.endpoints.get(message.endpoint)
    if cell is None or spec is None or not mesh or spec.kind is GENERATOR or proc.sites is not None:
        _take_apart(proc, peer, message)
        return
    peer.calls_received += len(message.calls)
    count, inbound, now = peer.count_of(mesh), peer.inbound, proc.now()
    deadline = math.inf if message.budget is None else now + message.budget
    view, caller = message.view, message.caller
    taken: list[IncomingCall] = []
    for number, payload in message.calls:
        call = IncomingCall(
            peer, link, number, mesh, spec, payload, (), len(payload), count, deadline, now, None, view, caller
        )
        if number:
            if number in inbound:
                cell.deliver_all(taken)
                raise ProtocolError(f"a call id must not be used twice, got {number} again")
            inbound[number] = call
            if peer.early_cancels and (reason := peer.early_cancels.pop(number, None)) is not None:
                call.cancel("caller", reason)
                call.cancelled()
                continue
        taken.append(call)
    cell.deliver_all(taken)


def _take_apart(proc: Proc, peer: Peer, message: Calls) -> None:
    """Handle each call as a message of its own, to be refused or inspected by a test."""
    for number, payload in message.calls:
        one = messages.Call(
            number, message.mesh, message.endpoint, message.budget, payload, 0, message.view, message.caller
        )
        link = peer.link
        if link is None:  # a test has ended it
            return
        if proc.sites is None or proc.sites.received(proc, peer, link, one):
            proc.take_call(peer, link, one, len(payload), [])


# ---- link groups of recent casts, kept for the next cast to the same links -------------------------------------------


class LinkGroups:
    """Cache of at most `limits.GROUPS_MAX` groups; the oldest one is evicted.

    Attributes:
        groups: The groups, by their links.
    """

    def __init__(self, define: Callable[[Sequence[Link]], LinkGroup]) -> None:
        self._define = define
        self.groups: dict[tuple[Link, ...], LinkGroup] = {}

    def of(self, links: tuple[Link, ...]) -> LinkGroup:
        group = self.groups.get(links)
        if group is None:
            if len(self.groups) >= limits.GROUPS_MAX:
                self.groups.pop(next(iter(self.groups))).close()
            group = self.groups[links] = self._define(links)
        return group

    def forget(self, link: Link) -> None:
        """Close every group that contains a link."""
        for links in list(self.groups):
            if link in links:
                self.groups.pop(links).close()
