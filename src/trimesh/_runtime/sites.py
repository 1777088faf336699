"""Test hooks: points where a test can observe or inject faults. Each is one branch on `Proc.sites`, None by default.

| site | when |
|---|---|
| `received` | a message has been read, before anything is done with it |
| `launching` | a process is about to be started; the test may change or refuse it |
| `dispatch` | a slot has taken a call from the mailbox; the returned endpoint runs instead |
| `operating` | a rank of a mesh of tensors is about to run operators; the test may fail or delay them |
| `answered` | the last frame of a call has been sent, or queued behind others |
| `moving` | a transfer of a buffer is about to start; the test may delay or fail it |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

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
    """Hooks that a test implements. The runtime's own tasks call them; they must not block, or raise anything else."""

    def received(self, proc: Proc, peer: Peer, link: Link, message: Message) -> bool:
        """Observe a message received by `proc`; return False to drop it."""
        ...

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        """Return the request to launch: `request`, or one of a process that ends early.

        Raises:
            SpawnError: Refuse the launch.
        """
        ...

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        """Return the endpoint to run for `call`, which a slot took: its own, or a faulty one."""
        ...

    def operating(self, proc_id: ProcId) -> AbstractContextManager[Any] | None:
        """Return a context in which a rank of a process runs operators, or None; called in the rank's thread."""
        ...

    def answered(self, call: IncomingCall) -> None:
        """Observe that a call has been answered; broadcasts are not."""
        ...

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Return a function to await before a transfer of a process, or None; if it raises, the transfer fails."""
        ...
