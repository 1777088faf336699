"""Where processes come from, as the runtime sees it: a real host with its spawner, or a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface import Link
from trimesh.config import Settings
from trimesh.errors import SpawnError
from trimesh.ids import ProcId
from trimesh.shape.region import Region


class LaunchRequest(msgspec.Struct, frozen=True):
    """One process to start.

    Attributes:
        proc_id: Its id, drawn by the owner.
        mesh: Name of its process mesh.
        whole: The mesh as spawned.
        rank: Its place there.
        incarnation: 0 for the first process at this place.
        env: Environment variables set over those of the caller.
        output: "forward", "inherit", "discard", or a path.
        python: Another interpreter, or None.
        preload: Modules to import first, unless the host has them.
        grace: Seconds for clean-up.
        cpus: It runs on these alone; empty for those of the host.
        pickled: Whether values are pickled in the family.
        record: Folder of the flight records of the run; empty for none.
        entry: `module:function` that it runs instead of serving its owner: what a test lets fail; None serves.
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


class NoLinkError(SpawnError):
    """This process has not got what a link takes, memory or descriptors; the other one may live."""


class HostChild(Protocol):
    """A started process."""

    @property
    def host_name(self) -> str: ...

    @property
    def loss(self) -> HostLoss | None:
        """How its host was lost; None while it is not, and for a host that cannot be lost without this process."""
        ...

    @property
    def lease(self) -> str:
        """Name of the limit of its silence."""
        ...

    @property
    def report_seconds(self) -> float:
        """From the end of its link until its exit report, or the loss of its host, at the latest."""
        ...

    @property
    def pid(self) -> int: ...

    @property
    def link(self) -> Link:
        """The owner's end of the link to it."""
        ...

    async def spawner_state(self) -> str | None:
        """Return the same of its spawner, whose parent it is."""
        ...

    async def kernel_state(self) -> str | None:
        """Return its state by the kernel of its host, a letter, "" where it is gone; None where that does not answer.

        Waits for an answer of its host.
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
        """Start a process; a cancel leaves none.

        Args:
            request: What to start.
            on_exit: Called once, from a task of the host, when it has ended.

        Raises:
            SpawnError: It could not be started; the text names the point and the cause.
        """
        ...

    async def connect(self, target: ProcId) -> Link:
        """Make a link to a process of the family that this one has none to.

        Raises:
            SpawnError: There is no such process any more.
            NoLinkError: It may be there, and the system refuses what the link takes.
        """
        ...

    async def exit_of(self, target: ProcId) -> ExitReport:
        """Wait for the exit report of any process of the family."""
        ...

    def retire(self) -> None:
        """Learn that nothing is launched any more: the host may end with the last process that it has started."""

    async def flush_output(self) -> None:
        """Wait, not for long, until what its processes have written so far is shown."""
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
