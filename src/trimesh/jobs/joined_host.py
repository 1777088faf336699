"""One host from its token to its end, whoever has started its agent.

JH-1 A host holds its session from when it joins until it is released, or lost; the loss is told once.
JH-2 What its agent, its session or its spawner tells first is how it was lost.
"""

from __future__ import annotations

import trio

from trimesh import limits
from trimesh._runtime.hosts import RemoteHost, SessionPipe, open_remote_host
from trimesh._runtime.life import Proc
from trimesh._transport.relay.base import HostConnection, SessionDown, SessionEnding
from trimesh.errors import HostRefused, SpawnError
from trimesh.ids import ProcId
from trimesh.jobs.host_links import HostLinks
from trimesh.shape.point import Point


class JoinedHost:
    """A guest of the door, see `DoorGuest`, and what keeps it as a host. A subclass says who hears of it.

    Attributes:
        name: Of the host; "" while it has not said it.
        host: What processes are started on, once its agent has joined.
        is_ready: Whether they can be.
        joined: Set when it has a session.
        lost: Set when it is lost.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.host: RemoteHost | None = None
        self.is_ready = False
        self.joined = trio.Event()
        self.lost = trio.Event()
        self._links: HostLinks
        self._pipe: SessionPipe | None = None
        self._incarnation = ProcId(0)
        self._is_over = False

    # ---- who hears of it -------------------------------------------------------------------------------------

    def came(self) -> bool:
        """Learn that it has joined; return whether it is wanted still."""
        return True

    def became_ready(self) -> None:
        """Learn that processes can be started there."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Learn that it cannot be had."""
        raise NotImplementedError

    # ---- as a guest of the door ------------------------------------------------------------------------------

    def refused(self, error: Exception) -> None:
        """See `DoorGuest.refused`."""
        self.failed(HostRefused(f"the host {self.name or 'that has come'} may not join: {error}"))

    def connected(self, incarnation: ProcId, connection: HostConnection) -> bool:
        """See `DoorGuest.connected`."""
        if self._is_over or (self._pipe is None and not self.came()):
            return False
        if self._pipe is None:
            self._incarnation = incarnation
            self._pipe = self._links.begin(incarnation, self)
            self.joined.set()
        self._pipe.session.attach(connection)
        return True

    # ---- its life --------------------------------------------------------------------------------------------

    async def keep(self, proc: Proc, point: Point, release: trio.Event) -> None:
        """Keep it as a host until it is released or lost; what ran there is then told to end.

        Args:
            proc: The controller.
            point: Its place among the hosts.
            release: Set when it is not used any more.
        """
        await self.joined.wait()
        assert self._pipe is not None
        async with open_remote_host(proc, self._pipe, self.name, point, self._links.agents) as host:
            self.host = host
            host.on_agent_failed = self.agent_failed
            try:
                await host.wait_ready()
            except SpawnError as error:
                self.failed(error)
                return
            self.name = host.name
            self.is_ready = True
            if self._links.is_plain:
                proc.plain_hosts.add(host.name)
            self.became_ready()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_then_cancel, self.lost, nursery.cancel_scope)
                    await release.wait()
                    nursery.cancel_scope.cancel()
            finally:
                proc.plain_hosts.discard(host.name)

    def agent_failed(self, text: str) -> None:
        """Learn that its agent has ended, or is about to, in the words of the agent or of its connection."""
        self.lose("agent exit", text)

    def session_down(self, down: SessionDown) -> None:
        """Learn that its session is over."""
        match down.ending:
            case SessionEnding.LEASE:
                seconds = f"limits.HOST_LEASE_SECONDS ({limits.HOST_LEASE_SECONDS:g} s)"
                self.lose("lease", f"nothing was heard of its agent for {seconds}")
            case SessionEnding.BYE:
                self.agent_failed("its agent has ended")
            case _:
                self.lose(down.ending.value, down.reason)

    def lose(self, reason: str, text: str) -> None:
        """Learn that it is lost; see `HostLost.reason`."""
        if self.lost.is_set():
            return
        self._is_over = True
        self.lost.set()
        if not self.is_ready:
            self.failed(SpawnError(f"the host {self.name} was lost before it was ready: {text}"))
        elif self.host is not None:
            self.host.lose(reason, text)

    def close(self) -> None:
        """Let its agent in no more, and end its session."""
        self._is_over = True
        self._links.door.forget(self._incarnation)
        if self._pipe is not None:
            self._links.end(self._pipe)


async def _then_cancel(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
