"""What this room asks of its process, and of what other rooms keep in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import trio

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.channels.holding import Holding, Sending
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.tasks.background import Tasks
from trimesh.ids import MeshId, ProcId


class WatchedProc(Protocol):
    """The process that is described; see `Proc`."""

    @property
    def host_name(self) -> str:
        """Name of its machine."""
        ...

    @property
    def pid(self) -> int:
        """Its number on that machine."""
        ...

    @property
    def me(self) -> Peer:
        """This process as a peer of itself."""
        ...

    @property
    def cells(self) -> Mapping[MeshId, Cell]:
        """Actors that live in it."""
        ...

    @property
    def members(self) -> Mapping[ProcId, WatchedMember]:
        """Child processes that it owns."""
        ...

    @property
    def stopping_blocks(self) -> Iterable[LeavingBlock]:
        """Its blocks that are being left."""
        ...

    @property
    def channels(self) -> BlockedPorts:
        """Its channels."""
        ...

    @property
    def dropped_replies(self) -> int:
        """Replies that came after their call had been given up."""
        ...

    def peers(self) -> Sequence[Peer]:
        """Return every process that it knows and that is not gone."""
        ...

    def unended_calls(self) -> Sequence[OutgoingCall]:
        """Return its calls that wait for an outcome."""
        ...


class WatchedMember(Protocol):
    """A child process that is described; see `Member`."""

    @property
    def proc(self) -> TaskProc:
        """Its owner's process."""
        ...

    @property
    def peer(self) -> Peer:
        """The child as a peer."""
        ...

    @property
    def label(self) -> str:
        """`mesh{coordinates}`, for people."""
        ...

    @property
    def pid(self) -> int:
        """Its process id, or 0 before there is one."""
        ...

    @property
    def stack_fd(self) -> int:
        """Descriptor, in the child, that its stack is written to; -1 for none."""
        ...

    @property
    def gone(self) -> trio.Event:
        """Set when it has ended."""
        ...

    @property
    def is_expected(self) -> bool:
        """Whether it was asked to end."""
        ...

    @property
    def stall(self) -> Stalls:
        """Whether its Trio loop runs."""
        ...


class TaskProc(Protocol):
    """The process that watches a child; see `Proc`."""

    nursery: Tasks
    now: Callable[[], float]


class Stalls(Protocol):
    """When the Trio loop of a child did not run; see `StallReport`."""

    @property
    def seconds(self) -> float:
        """For how long it has not by now; 0 when it runs."""
        ...

    @property
    def count(self) -> int:
        """How often it has not."""
        ...


class LeavingBlock(Protocol):
    """A block that is being left; see `Block`."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def deadline(self) -> float | None:
        """End of its grace (Trio time), once clean-up has begun."""
        ...


class BlockedPorts(Protocol):
    """The channels of a process; see `Channels`."""

    def blocked(self) -> Iterable[tuple[Holding, Sending]]:
        """Return the sends that wait for room."""
        ...
