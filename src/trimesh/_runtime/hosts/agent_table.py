"""The agents of one authority, in the controller, which hands on what two of them say to each other before they can.

AQ-1 An agent is told of the loss of another one once, at once, and nothing about that one afterwards.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from trimesh._runtime.spawner.socket import Received, close_all
from trimesh._runtime.system.records import Listening, Parted, Relayed, Tunnel
from trimesh.errors import LimitExceeded

if TYPE_CHECKING:
    from trimesh._runtime.hosts.remote_host import RemoteHost

_log = logging.getLogger("trimesh")


class AgentTable:
    """Agents that may talk to each other, as one authority has certified them.

    Attributes:
        relayed: Pairs of names of hosts whose messages go, or have gone, through this process, with the reason.
    """

    def __init__(self) -> None:
        self.relayed: dict[tuple[str, str], str] = {}
        self._hosts: dict[int, RemoteHost] = {}

    def add(self, host: RemoteHost) -> None:
        self._hosts[host.place.agent] = host

    def part(self, host: RemoteHost) -> None:
        """Let all others end their sessions with a host: it is lost, or not used any more. Idempotent."""
        if self._hosts.pop(host.place.agent, None) is not None:
            for other in self._hosts.values():
                other.client.post(Parted(host.place.agent))

    def take(self, host: RemoteHost, received: Received) -> None:
        """Take what the agent of a host says about another one."""
        record, own = received.record, host.place.agent
        assert isinstance(record, Listening | Tunnel | Relayed | Parted)
        other = self._hosts.get(record.agent)
        if other is None or own not in self._hosts:
            close_all(received.fds)
            return
        match record:
            case Tunnel():
                with suppress(LimitExceeded, OSError):  # the end of the socket says so
                    other.client.post(Tunnel(own), received.fds)
                return
            case Listening(addresses=addresses):
                other.client.post(Listening(own, addresses))
            case Relayed(text=text):
                self._say_relayed(host.name, other.name, text)
            case Parted():
                other.client.post(Parted(own, is_lost=False))
        close_all(received.fds)

    def _say_relayed(self, name: str, other: str, text: str) -> None:
        if (name, other) in self.relayed:
            return
        self.relayed[name, other] = text
        _log.warning(
            "%s cannot reach %s directly, so their messages go through the host of this program: %s", name, other, text
        )
