"""What carries the hosts of one block in the controller: a relay with its sessions, a door, the authority behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from typing import Final, Protocol

import trio

from trimesh import limits
from trimesh._runtime.hosts import AgentTable, HostSessions, SessionPipe
from trimesh._runtime.life import Proc
from trimesh._transport.relay.base import Relay, Session, SessionDown
from trimesh._transport.relay.native import open_relay
from trimesh.context_managers import asynccontextmanager
from trimesh.ids import ProcId
from trimesh.jobs.door import Door, DoorPlace, door_context, open_door_at
from trimesh.jobs.identity import PLAIN, Authority, Credentials, ForeignAuthority
from trimesh.jobs.pki import OwnPKI, plain_warning

_log: Final = logging.getLogger("trimesh")


class SessionHolder(Protocol):
    """Whose session it is."""

    def session_down(self, down: SessionDown) -> None:
        """Learn that it is over."""
        ...


class HostLinks:
    """The sessions of one block with its hosts, and the door at which those join. Made by `open_host_links`.

    Attributes:
        door: Where they join.
        is_plain: Whether sessions are without TLS.
        agents: Theirs, which may talk to each other.
    """

    def __init__(self, relay: Relay, sessions: HostSessions, door: Door, *, is_plain: bool) -> None:
        self.door = door
        self.is_plain = is_plain
        self.agents = AgentTable()
        self._relay = relay
        self._sessions = sessions
        self._holders: dict[Session, SessionHolder] = {}
        sessions.on_down = self._down

    def begin(self, incarnation: ProcId, holder: SessionHolder) -> SessionPipe:
        """Begin the session of a host that has joined, and return what carries records over it."""
        pipe = self._sessions.begin(self._relay, incarnation, is_dialler=False, lease_seconds=limits.HOST_LEASE_SECONDS)
        self._holders[pipe.session] = holder
        return pipe

    def end(self, pipe: SessionPipe) -> None:
        """End a session at once; its holder hears no more of it."""
        self._holders.pop(pipe.session, None)
        self._sessions.end(pipe)

    def _down(self, down: SessionDown) -> None:
        holder = self._holders.pop(down.session, None)
        if holder is not None:
            holder.session_down(down)


async def own_credentials(pki: OwnPKI | None, insecure: str, whose: str) -> Credentials | None:
    """Return what this process shows its hosts where certificates are not of the mesh; None where they are.

    Args:
        pki: Files of a site, see `OwnPKI`.
        insecure: See `Job`; where it is said, a warning is logged.
        whose: The job or door, for that.

    Raises:
        IdentityError: A file cannot be read.
    """
    if insecure:
        _log.warning("%s", plain_warning(whose))
        return PLAIN
    return None if pki is None else await trio.to_thread.run_sync(pki.read)


@asynccontextmanager
async def open_host_links(
    proc: Proc, place: DoorPlace, own: Credentials | None = None
) -> AsyncGenerator[HostLinks, None]:
    """Let hosts join while the body runs.

    Args:
        proc: The controller.
        place: Where it listens for them.
        own: Certificate of this process by an authority of the user's; None makes one for this mesh.
    """
    authority = Authority(time.time()) if own is None else ForeignAuthority(own)
    with door_context(proc.proc_id, authority) as context:
        sessions = HostSessions()
        async with (
            open_relay(sessions.take) as relay,
            open_door_at(place, proc.proc_id, authority, context) as door,
        ):
            yield HostLinks(relay, sessions, door, is_plain=own is not None and own.is_plain)
