"""Membership of one process in its family: hosts, connections and lost links.

Hosts start processes for it, links are made on demand, and each lost link is resolved to its cause.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.peers.deaths import ProcDeath, diagnosed, stopped
from trimesh._runtime.peers.host import Host, NoLinkError, PreloadingHost, ServedHost
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.spawner.client import Siblings
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.tasks.interrupt import run_to_end
from trimesh._runtime.values.endpoint_spec import MeshInfo
from trimesh._transport.interface import DownReason, LinkDown
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import LinkLost, SpawnError, TrimeshInternalError, leaves
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.programs.connection import ProgramConnection

Preload = tuple[str, ...]
OpenHost = Callable[[Preload], AbstractAsyncContextManager[Host]]
"""Opens the host of this machine with some modules preloaded; leaving it ends all that it started."""


class _Lease:
    """A host in use: opened by the first block that needs it, closed by the last."""

    def __init__(self) -> None:
        self.users = 0
        self.host: Host | None = None
        self.error: BaseException | None = None
        self.ready = trio.Event()
        self.release = trio.Event()
        self.closed = trio.Event()


class Family:
    """Hosts, relatives and connections of one process.

    Attributes:
        parent: Its owner, or None in the controller.
        parent_lost: Set when the link to the parent has ended.
        attached: In a worker, its host, which serves all meshes of the worker; None in the controller.
        root: The controller, or None in the controller itself.
        own_mesh: The process mesh that this one is a member of, as described by its owner; None in the controller.
        remotes: Hosts that agents serve for this process, in the order of joining.
        lost_hosts: Names of hosts that were lost and are not replaced, each with the reason.
        siblings: Spawners and agents of this process if it is the controller on a real machine; else None.
        neighbours: Other programs that this one has connected to, by the id of their controller.
        clients: Controllers of other programs that have connected to this one.
    """

    def __init__(
        self,
        proc: Proc,
        open_host: OpenHost,
        parent: ProcId | None = None,
        attached: Host | None = None,
        root: ProcId | None = None,
    ) -> None:
        self.proc = proc
        self.open_host = open_host
        self.parent = parent
        self.attached = attached
        self.root = root
        self.own_mesh: MeshInfo | None = None
        self.parent_lost = trio.Event()
        self.remotes = list[ServedHost]()
        self.lost_hosts: dict[str, str] = {}
        self.siblings: Siblings | None = None
        self.neighbours: dict[ProcId, ProgramConnection] = {}
        self.clients = set[ProcId]()
        self._leases: dict[Preload, _Lease] = {}
        self._ending: list[_Lease] = []
        self._connecting: dict[ProcId, trio.Event] = {}

    # ---- hosts -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def host(self, preload: Preload = ()) -> AsyncGenerator[Host, None]:
        """Use this machine's host, started by its first user and ended with its last.

        A worker has one host for all blocks, started without `preload`: each of its processes imports for itself.
        """
        if self.attached is not None:
            yield PreloadingHost(self.attached, preload) if preload else self.attached
            return
        lease = self._leases.get(preload)
        if lease is None:
            lease = self._leases[preload] = _Lease()
            self.proc.nursery.start_soon(self._keep, preload, lease)
        lease.users += 1
        try:
            await lease.ready.wait()
            if lease.error is not None:
                raise lease.error
            if lease.host is None:  # its task was cancelled, with the runtime
                raise TrimeshInternalError("the runtime of this process has failed; please report this")
            yield lease.host
        finally:
            lease.users -= 1
            if lease.users == 0:
                if self._leases.get(preload) is lease:
                    del self._leases[preload]
                if lease in self._ending:
                    self._ending.remove(lease)
                lease.release.set()
                _, interrupt = await run_to_end(lease.closed.wait)
                if interrupt is not None:
                    raise interrupt

    @trio.lowlevel.enable_ki_protection
    async def _keep(self, preload: Preload, lease: _Lease) -> None:
        try:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._cancel_when_released, lease, scope)
                    async with self.open_host(preload) as lease.host:
                        lease.ready.set()
                        with trio.CancelScope(shield=True):
                            await lease.release.wait()
                    nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - raised by all tasks that wait for the host
            lease.error = _single(error)
        finally:
            lease.ready.set()
            lease.closed.set()

    @trio.lowlevel.enable_ki_protection
    async def _cancel_when_released(self, lease: _Lease, scope: trio.CancelScope) -> None:
        """Cancel the start of a host that is released before it is ready."""
        await lease.release.wait()
        if lease.host is None:
            scope.cancel(reason="no task waits for this host any more")

    def retire(self, host: Host) -> None:
        """Note that one user of a host, which still holds it, starts no more processes there.

        If it is the only user, the host ends with its last process, and later users get another host.
        """
        for preload, lease in list(self._leases.items()):
            if lease.host is host and lease.users == 1:
                del self._leases[preload]
                self._ending.append(lease)
                host.retire()

    def open_hosts(self) -> list[Host]:
        """Return the hosts that can make connections: those of this machine, oldest first, then those of jobs."""
        if self.attached is not None:
            return [self.attached]
        near = [lease.host for lease in (*self._ending, *self._leases.values()) if lease.host is not None]
        return [*near, *self.remotes]

    # ---- connections -----------------------------------------------------------------------------------------

    def _brokers(self, peer: Peer) -> Sequence[Host | ProgramConnection]:
        """Return the hosts and programs that can make connections to a process."""
        known = [one for one in self.neighbours.values() if one.knows(peer.proc_id)]
        return known or [*self.open_hosts(), *self.neighbours.values()]

    def is_foreign(self, proc_id: ProcId) -> bool:
        """Return whether a process belongs to another program, not to this family."""
        return proc_id in self.clients or any(one.knows(proc_id) for one in self.neighbours.values())

    async def connect(self, peers: Sequence[Peer]) -> None:
        """Ensure that every peer has a link or is known to be gone. No checkpoint when all have one.

        If this process lacks a resource for a link, it tries again while the peer is not known to have ended.
        """
        await self.try_to_connect(peers)
        for peer in peers:
            for _ in range(limits.LINK_RETRIES_MAX):
                if not self.proc.is_stranger(peer):
                    break
                report = await self.exit_of(peer)
                if report is not None and report.is_known:
                    self._declare(peer, report)
                else:
                    await self.try_to_connect([peer])
            if peer.no_link is not None and self.proc.is_stranger(peer):
                self.proc.declare_gone(peer, peer.no_link)

    async def try_to_connect(self, peers: Sequence[Peer]) -> None:
        """As `connect`, but a peer may stay without a link for lack of a resource here: its `no_link` says why."""
        for peer in peers:
            peer.no_link = None
            while self.proc.is_stranger(peer) and peer.no_link is None:
                await self._connect(peer)

    async def _connect(self, peer: Peer) -> None:
        others = self._connecting.get(peer.proc_id)
        if others is not None:
            await others.wait()
            return
        done = self._connecting[peer.proc_id] = trio.Event()
        try:
            for host in self._brokers(peer):
                try:
                    self.proc.adopt_link(peer.proc_id, await host.connect(peer.proc_id))
                except NoLinkError as error:
                    peer.no_link = ProcDeath(str(error), LinkLost)
                    return
                except SpawnError:
                    continue
                return
            self._declare(peer, await self.exit_of(peer))
        finally:
            del self._connecting[peer.proc_id]
            done.set()

    # ---- lost links ------------------------------------------------------------------------------------------

    def link_lost(self, peer: Peer, down: LinkDown, *, is_harmless: bool) -> None:
        """Find out why a link has ended.

        Args:
            peer: The process on the other side.
            is_harmless: Whether nothing was lost, because the link never came up. The peer may have lacked a descriptor
                for its end; it is dead only if its host reports that.
        """
        member = self.proc.members.get(peer.proc_id)
        if member is not None:
            member.link_lost(down)
        elif peer.proc_id == self.parent:
            self.parent_lost.set()
        elif peer.link is None:
            self.proc.nursery.start_soon(partial(self._diagnose, peer, down, is_harmless=is_harmless))

    @trio.lowlevel.enable_ki_protection
    async def _diagnose(self, peer: Peer, down: LinkDown, *, is_harmless: bool) -> None:
        if down.reason is DownReason.CLOSED:
            self.proc.declare_gone(peer, stopped("the process has been stopped"))
            return
        if down.reason is DownReason.PROTOCOL:
            self.proc.declare_gone(peer, ProcDeath(f"the link was lost: {down.detail}", LinkLost))
            return
        report = await self.exit_of(peer)
        if report is not None or not is_harmless:
            self._declare(peer, report)

    @trio.lowlevel.enable_ki_protection
    async def find_out(self, peer: Peer) -> None:
        """Declare a process gone that is reported dead and has no link; a late link is read first.

        A connection that the process has requested arrives on the same path as its exit report, and before it.
        """
        report = await self.exit_of(peer)
        if peer.link is None:
            self._declare(peer, report)

    async def learn_end(self, peer: Peer) -> ProcDeath:
        """Return the death of a process that is known to have ended; wait briefly for its diagnosis."""
        return await self._wait_for_death(peer, self.find_out) or diagnosed("the process", None)

    async def learn_loss(self, peer: Peer) -> ProcDeath | None:
        """Return the death of a process after the loss of its connection; None if unknown: it may live."""
        return await self._wait_for_death(peer, self._find_out_if)

    async def _find_out_if(self, peer: Peer) -> None:
        report = await self.exit_of(peer)
        if report is not None and report.is_known and peer.link is None:
            self._declare(peer, report)

    async def _wait_for_death(self, peer: Peer, find_out: Callable[[Peer], Awaitable[None]]) -> ProcDeath | None:
        if peer.death is None:
            told = trio.Event()

            def listen(gone: Peer) -> None:
                if gone is peer:
                    told.set()

            self.proc.on_gone.append(listen)
            try:
                member = self.proc.members.get(peer.proc_id)
                # Wait for a child as long as its owner does: the loss of its host may arrive first.
                owner = 0.0 if member is None else member.report_seconds
                with trio.move_on_after(owner + limits.TRANSFER_END_SECONDS):
                    if self.proc.is_stranger(peer) and peer.proc_id != self.parent:
                        await find_out(peer)
                    else:
                        await told.wait()
            finally:
                self.proc.on_gone.remove(listen)
        return peer.death

    async def exit_of(self, peer: Peer) -> ExitReport | None:
        """Return the exit report of a process; None, or a report without a diagnosis, if no host has one soon."""
        report: ExitReport | None = None
        with trio.move_on_after(limits.EXIT_REPORT_SECONDS):
            for host in self._brokers(peer):
                report = await host.exit_of(peer.proc_id)
                if report.is_known:
                    break
        return report

    def _declare(self, peer: Peer, report: ExitReport | None) -> None:
        """Declare gone a process that another process owns, with the diagnosis of the host that started it."""
        if report is not None and report.exit_code == 0:
            self.proc.declare_gone(peer, stopped("the process has been stopped"))
        else:
            self.proc.declare_gone(peer, diagnosed("the process", report))


def _single(error: Exception) -> BaseException:
    """Unwrap the group that the nursery of `_keep` has put around one error."""
    found = list(leaves(error))
    return found[0] if len(found) == 1 else error
