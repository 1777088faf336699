"""Interface of a host that starts processes: a real machine with its spawner, or a simulated one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.records import HostShare
from trimesh._transport.interface import Link
from trimesh.config import Settings
from trimesh.errors import SpawnError
from trimesh.ids import ProcId
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._wire.observed import ActorRow, HostRow


class LaunchRequest(msgspec.Struct, frozen=True):
    """One process to start.

    Attributes:
        proc_id: Its id, chosen by the owner.
        mesh: Name of its process mesh.
        whole: The mesh as spawned.
        rank: Its rank in the mesh.
        incarnation: 0 for the first process at this rank.
        env: Environment variables that override the caller's.
        output: "forward", "inherit", "discard", or a path.
        python: Another interpreter, or None.
        preload: Modules to import first, unless the host has them.
        grace: Seconds for clean-up.
        cpus: CPUs that it is restricted to; empty for all of the host's.
        pickled: Whether values are pickled in the family.
        record: Folder of the flight records of the run; empty for none.
        share: Its share of the host; None outside of placements.
        prepare: Completes the request for the host of a job that it goes to, which a replacement may change; None for a
            request that is complete.
        entry: `module:function` to run instead of serving the owner, for fault-injecting tests; None serves.
    """

    proc_id: ProcId
    mesh: str
    whole: Region
    rank: int
    incarnation: int
    env: Mapping[str, str]
    output: Any
    python: str | None
    preload: tuple[str, ...]
    grace: float
    seed: int
    cpus: tuple[int, ...] = ()
    pickled: bool = True
    settings: Settings = Settings()
    record: str = ""
    entry: str | None = None
    share: HostShare | None = None
    prepare: Callable[[LaunchRequest, Any], Awaitable[LaunchRequest]] | None = None


class NoLinkError(SpawnError):
    """This process lacks the memory or descriptors for a link; the other process may be alive."""


class ProcessState(NamedTuple):
    """A process as the kernel of its host sees it.

    Attributes:
        letter: Its state; empty if it is gone.
        cpu_seconds, memory_bytes: As in `ProcRow`.
        actors: Its actors, from its flight record.
    """

    letter: str
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    actors: tuple[ActorRow, ...] = ()


class HostChild(Protocol):
    """A started process."""

    @property
    def host_name(self) -> str: ...

    @property
    def loss(self) -> HostLoss | None:
        """Loss of its host; None while the host is up, or if it cannot fail without this process."""
        ...

    @property
    def lease(self) -> str:
        """Name of the limit that bounds its silence."""
        ...

    @property
    def report_seconds(self) -> float:
        """Maximum seconds from the end of its link to its exit report or the loss of its host."""
        ...

    @property
    def pid(self) -> int: ...

    @property
    def link(self) -> Link:
        """Owner's end of the link to the process."""
        ...

    async def spawner_state(self) -> str | None:
        """Return the kernel state of its spawner, as `kernel_state` does."""
        ...

    async def kernel_state(self, record: str = "") -> ProcessState | None:
        """Return its state from the host's kernel; None if the host does not reply.

        Args:
            record: Its flight record, if its actors are wanted, too.

        Waits for the host's reply.
        """
        ...

    def signal(self, signum: int) -> None:
        """Send a signal to its whole process group; never blocks."""
        ...


class Host(Protocol):
    """A machine, real or simulated, that starts processes of one kind (interpreter and preloaded modules)."""

    @property
    def name(self) -> str: ...

    async def launch(self, request: LaunchRequest, on_exit: Callable[[ExitReport], None]) -> HostChild:
        """Start a process; if cancelled, no process is left.

        Args:
            request: What to start.
            on_exit: Called once, from a task of the host, when the process has ended.

        Raises:
            SpawnError: It could not be started; the text names the point and the cause.
        """
        ...

    async def connect(self, target: ProcId) -> Link:
        """Open a link to a process of the family that this process has no link to.

        Raises:
            SpawnError: The process is gone.
            NoLinkError: It may be alive, but the system refuses memory or descriptors for the link.
        """
        ...

    async def exit_of(self, target: ProcId) -> ExitReport:
        """Wait for the exit report of any process of the family."""
        ...

    def retire(self) -> None:
        """Note that no more launches follow: the host may end with the last process that it started."""

    async def flush_output(self) -> None:
        """Wait, for a bounded time, until output written so far by its processes is forwarded."""
        ...


class PreloadingHost(msgspec.Struct, frozen=True):
    """A host whose new processes import some modules first: `preload` on the host that a worker shares with others."""

    host: Host
    preload: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.host.name

    async def launch(self, request: LaunchRequest, on_exit: Callable[[ExitReport], None]) -> HostChild:
        modules = tuple(dict.fromkeys((*self.preload, *request.preload)))
        return await self.host.launch(msgspec.structs.replace(request, preload=modules), on_exit)

    async def connect(self, target: ProcId) -> Link:
        return await self.host.connect(target)

    async def exit_of(self, target: ProcId) -> ExitReport:
        return await self.host.exit_of(target)

    def retire(self) -> None:
        """End early; see `Host.retire`."""
        self.host.retire()

    async def flush_output(self) -> None:
        await self.host.flush_output()


class ServedHost(Host, Protocol):
    """A machine that an agent serves for this process."""

    async def machine(self) -> HostRow | None:
        """Return the figures of the machine; None if its agent is lost. Waits for its reply."""
        ...
