"""The hosts of one job in the controller: sessions that carry them, and the block that owns what is started there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import trio

from trimesh._runtime.hosts.host_group import ManyHosts
from trimesh._runtime.hosts.host_roster import HostRoster
from trimesh._runtime.hosts.job_host import JobHost
from trimesh._runtime.hosts.job_place import Successors
from trimesh._runtime.hosts.session_pipe import SessionPipe
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.ownership import OwnedHost
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.meshes.block import Block, run_block
from trimesh._runtime.peers.losses import HostLoss
from trimesh._transport.native.transport import NativeTransport
from trimesh._transport.relay import (
    OpenedChannel,
    Relay,
    Session,
    SessionDown,
    SessionEnding,
    SessionEvent,
    SessionInterrupted,
)
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.ids import ProcId


class HostSessions:
    """The sessions of one process, and what hears of them.

    Attributes:
        on_down: Called when a session is over, after its pipe has been told.
        on_interrupted: Called when one has lost its connection.
    """

    def __init__(self) -> None:
        self._pipes: dict[Session, SessionPipe] = {}
        self.on_down: Callable[[SessionDown], None] = lambda _: None
        self.on_interrupted: Callable[[SessionInterrupted], None] = lambda _: None

    def begin(
        self, relay: Relay, peer: ProcId, *, is_dialler: bool, lease_seconds: float, session_id: int = 0
    ) -> SessionPipe:
        """Begin a session, and return what carries records over it."""
        pipe, control = SessionPipe.pair()
        pipe.session = relay.open_session(
            control, peer=peer, is_dialler=is_dialler, lease_seconds=lease_seconds, session_id=session_id
        )
        self._pipes[pipe.session] = pipe
        return pipe

    def end(self, pipe: SessionPipe) -> None:
        """End a session at once, and what carries records over it; nothing is heard of it any more."""
        self._pipes.pop(pipe.session, None)
        pipe.session.abort()
        pipe.close()

    def take(self, event: SessionEvent) -> None:
        pipe = self._pipes.get(event.session)
        if pipe is None:
            return
        match event:
            case OpenedChannel(_, channel, purpose):
                pipe.opened(channel, purpose)
            case SessionDown(session, ending, reason):
                del self._pipes[session]
                self.on_down(event)
                pipe.lose(f"{ending.value}: {reason}", is_orderly=ending is SessionEnding.BYE)
            case SessionInterrupted():
                self.on_interrupted(event)
            case _:
                pass


@asynccontextmanager
async def open_hosts_proc(*, pickled: bool | None = None) -> AsyncGenerator[Proc, None]:
    """Use the process of the controller for a job.

    Raises:
        SpawnError: This process is a worker, or a simulated one, which have no jobs.
    """
    async with lease_proc(pickled) as (proc, family):
        if family.siblings is None or not isinstance(proc.transport, NativeTransport):
            raise SpawnError(
                "a job is entered by the program itself, not by a process of a mesh: open it there, and hand meshes on"
            )
        yield proc


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def own_hosts(
    proc: Proc, name: str, hosts: Sequence[JobHost], grace: float, successors: Successors
) -> AsyncGenerator[tuple[OwnedHost, ManyHosts], None]:
    """Run a block that owns what is spawned on hosts.

    It fails when one is lost that no mesh has a process on, and that no spare host can take the place of.

    Args:
        proc: The controller.
        hosts: In the order of the mesh.
        successors: See `JobPlace`.
    """
    block = Block(proc, name, grace)

    def lost(loss: HostLoss) -> None:
        if not block.is_stopping:
            block.fail(loss())

    group = HostRoster(hosts, successors, proc.members, lost).all
    async with run_block(block):
        yield OwnedHost(proc, block, group), group
