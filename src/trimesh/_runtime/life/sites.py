"""Named places of the runtime where a test can look, or interfere: one branch each, on `Proc.sites`, None otherwise.

| site | when |
|---|---|
| `received` | a message has been read, before anything is done with it |
| `launching` | a process is about to be started; it may be started otherwise, or not at all |
| `dispatch` | a slot has taken a call from the mailbox; what is returned is run instead of the endpoint |
| `moving` | a transfer of a buffer is about to be made; it may have to wait, or fail |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from trimesh._runtime.actors.cell import DispatchSite
from trimesh._runtime.meshes.member import LaunchingSite
from trimesh._runtime.services.process import MovingSite
from trimesh.ids import MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.peers.peer import Peer
    from trimesh._transport.interface.base import Link, LinkDown
    from trimesh._wire.messages import Message


class ReadingProc(Protocol):
    """The process that has read a message; see `Proc`."""

    @property
    def proc_id(self) -> ProcId:
        """This incarnation."""
        ...

    @property
    def cells(self) -> Mapping[MeshId, Cell]:
        """Actors that live in it."""
        ...

    def link_down(self, link: Link, down: LinkDown) -> None:
        """Take a link out of service."""


class Sites(DispatchSite, MovingSite, LaunchingSite, Protocol):
    """What a test does at each site. Called by the runtime's own tasks; must not block and must not raise."""

    def received(self, proc: ReadingProc, peer: Peer, link: Link, message: Message) -> bool:
        """Look at one message that has come to `proc`; False for one that is to be lost."""
        ...
