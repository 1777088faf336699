"""The host on this machine: real processes started by the spawner, with native links."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncGenerator, Callable

import trio

from trimesh import limits
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.peers.host import Host, LaunchRequest, NoLinkError, ProcessState
from trimesh._runtime.spawner.client import Siblings
from trimesh._runtime.spawner.launcher import ProcLauncher, open_spawner
from trimesh._runtime.spawner.socket import FarSocket
from trimesh._runtime.spawner.spawner_process import SpawnerProcess
from trimesh._runtime.system.child import Child, LaunchSpec
from trimesh._runtime.system.cpu_binding import host_name
from trimesh._runtime.system.exits import ExitReport, process_state
from trimesh._runtime.system.records import ENTRY
from trimesh._transport.interface import Link
from trimesh._transport.messages.casts import HostCaster
from trimesh._transport.native.transport import NativeLink, NativeTransport
from trimesh.config import current
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import LimitExceeded, MeshError, SpawnError
from trimesh.ids import ProcId


class LocalChild:
    """A started process and its link."""

    loss: HostLoss | None = None
    lease = "LEASE_SECONDS"

    def __init__(self, child: Child, link: NativeLink) -> None:
        self.child = child
        self.link = link

    @property
    def host_name(self) -> str:
        return host_name()

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def report_seconds(self) -> float:
        return limits.EXIT_REPORT_SECONDS

    async def spawner_state(self) -> str | None:
        """Return None, see `HostChild.spawner_state`: a stopped spawner here is continued when its block ends (Z06)."""
        await trio.lowlevel.checkpoint()
        return None

    async def kernel_state(self, record: str = "") -> ProcessState | None:
        del record
        await trio.lowlevel.checkpoint()
        return ProcessState(process_state(self.pid))

    def signal(self, signum: int) -> None:
        """Send a signal to its process group."""
        self.child.signal(signum)


class LocalHost:
    """This machine, served by one spawner.

    Attributes:
        transport: Serves the links of new processes.
        launcher: The connection to the spawner.
    """

    def __init__(self, transport: NativeTransport, launcher: ProcLauncher) -> None:
        self.transport = transport
        self.launcher = launcher

    @property
    def name(self) -> str:
        return host_name()

    async def launch(self, request: LaunchRequest, on_exit: Callable[[ExitReport], None]) -> LocalChild:
        child = await self.launcher.launch(spec_of(request), on_exit=on_exit)
        try:
            # The owner holds a lease on its child, never the child on its owner: a stopped owner must not end the job.
            link = self.transport.open_link(
                child.link, local=True, lease=True, peer=request.proc_id, hello_seconds=current().spawn_seconds
            )
            self.transport.watch(link, child.pidfd)  # the link has a copy, which goes with it
        except (OSError, LimitExceeded) as error:
            child.signal(signal.SIGKILL)
            raise SpawnError(f"cannot start {child.name}: no link to the new process: {error}") from error
        finally:
            child.close_at_end()
        return LocalChild(child, link)

    def retire(self) -> None:
        """End with the last process; see `Host.retire`."""
        self.launcher.retire()

    async def flush_output(self) -> None:
        """Wait until output written by the processes so far is shown; see `Host.flush_output`."""
        with trio.move_on_after(limits.OUTPUT_FLUSH_SECONDS):
            await self.launcher.flush_output()

    async def connect(self, target: ProcId) -> Link:
        try:
            sock = await self.launcher.connect(target)
        except MeshError as error:
            raise SpawnError(str(error)) from error
        try:
            return self.transport.open_link(
                sock, local=is_near(sock), lease=False, peer=target, lease_seconds=lease_of(sock)
            )
        except (OSError, LimitExceeded) as error:
            sock.close()
            raise NoLinkError(f"cannot open a link to process {target:x}: {error}") from error

    async def exit_of(self, target: ProcId) -> ExitReport:
        """Wait until any process of the family has ended; see `Host.exit_of`."""
        return await self.launcher.exit_of(target)


def is_near(sock: socket.socket) -> bool:
    """Return whether the other end of a spawner's socket is on this host."""
    return not isinstance(sock, FarSocket)


def lease_of(sock: socket.socket) -> float:
    """Return the silence limit in seconds for the other end of a spawner's socket; 0 for none, as on this host."""
    return 0 if is_near(sock) else limits.FAR_LINK_LEASE_SECONDS


def spec_of(request: LaunchRequest) -> LaunchSpec:
    extent = request.whole.base
    return LaunchSpec(
        proc_id=request.proc_id,
        mesh=request.mesh,
        labels=tuple(extent),
        sizes=tuple(extent.values()),
        rank=request.rank,
        incarnation=request.incarnation,
        seed=request.seed,
        grace=request.grace,
        env=request.env,
        output=request.output,
        python=request.python,
        preload=request.preload,
        cpus=request.cpus,
        pickled=request.pickled,
        settings=request.settings,
        record=request.record,
        entry=request.entry or ENTRY,
        share=request.share,
    )


def accept_links(
    proc: Proc, transport: NativeTransport, caster: HostCaster | None = None
) -> Callable[[ProcId, socket.socket], None]:
    """Return a function that puts a connection requested by another process into service.

    Args:
        caster: Carries casts to the host of the requesting process, if that is another host.
    """

    def accept(origin: ProcId, sock: socket.socket) -> None:
        try:
            link = transport.open_link(
                sock, local=is_near(sock), lease=False, peer=origin, lease_seconds=lease_of(sock)
            )
        except (OSError, LimitExceeded, trio.ClosedResourceError):
            sock.close()  # out of a resource, or this process ends; the other side sees an end
        else:
            link.caster = caster
            proc.adopt_link(origin, link)

    return accept


@asynccontextmanager
async def open_local_host(
    proc: Proc,
    transport: NativeTransport,
    preload: tuple[str, ...],
    siblings: Siblings,
    process: SpawnerProcess | None = None,
) -> AsyncGenerator[Host, None]:
    """Run a spawner for the controller; leaving ends it and every process it has started.

    Args:
        proc: The controller.
        preload: Modules that the spawner imports.
        siblings: The controller's other spawners.
        process: See `open_spawner`.
    """
    incoming = accept_links(proc, transport)
    async with open_spawner(
        proc.proc_id, preload=preload, incoming=incoming, siblings=siblings, process=process
    ) as launcher:
        yield LocalHost(transport, launcher)
