"""Named places of the runtime where a test can look, or interfere: one branch each, on `Proc.sites`, None otherwise.

| site | when |
|---|---|
| `received` | a message has been read, before anything is done with it |
| `launching` | a process is about to be started; it may be started otherwise, or not at all |
| `dispatch` | a slot has taken a call from the mailbox; what is returned is run instead of the endpoint |
| `moving` | a transfer of a buffer is about to be made; it may have to wait, or fail |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.host import LaunchRequest
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer
    from trimesh._runtime.values.endpoint_spec import EndpointSpec
    from trimesh._transport.interface import Link
    from trimesh._wire.messages import Message
    from trimesh.ids import ProcId


class Sites(Protocol):
    """What a test does at each site. Called by the runtime's own tasks; must not block and must not raise."""

    def received(self, proc: Proc, peer: Peer, link: Link, message: Message) -> bool:
        """Look at one message that has come to `proc`; False for one that is to be lost."""
        ...

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        """Return what is to be started for `request`: itself, or what ends early.

        Raises:
            SpawnError: It is not to be started.
        """
        ...

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        """Return what is run for `call`, which a slot has taken: its own endpoint, or one that misbehaves."""
        ...

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Return what a transfer of a process waits for before it is made, and fails if that raises; mostly None."""
        ...
