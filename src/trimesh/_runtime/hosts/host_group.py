"""Several hosts as one: processes of a mesh are started where their rank says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import trio

from trimesh._runtime.peers.host import HostChild, LaunchRequest
from trimesh._runtime.peers.losses import HostLoss
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface.base import Link
from trimesh.errors import SpawnError
from trimesh.ids import ProcId

OnExit = Callable[[ExitReport], None]


class JobHost(Protocol):
    """One host of a job, real or simulated; see `RemoteHost` and `Host`."""

    name: str
    loss: HostLoss | None
    is_loss_taken: bool
    on_lost: Callable[[HostLoss], None]

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        """Start a process."""
        ...

    async def connect(self, target: ProcId) -> Link:
        """Make a link to a process there."""
        ...

    async def exit_of(self, target: ProcId) -> ExitReport:
        """Wait for the end of a process there."""
        ...

    async def flush_output(self) -> None:
        """Wait until what was written there is shown."""


class ManyHosts(msgspec.Struct, frozen=True):
    """Hosts in the order of a mesh, whose first dimensions are theirs; see `Host`."""

    hosts: tuple[JobHost, ...]

    @property
    def name(self) -> str:
        """Names of the machines."""
        return ", ".join(dict.fromkeys(host.name for host in self.hosts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the machines, in order."""
        return tuple(host.name for host in self.hosts)

    def select(self, ranks: Sequence[int]) -> ManyHosts:
        """Return some of them."""
        return ManyHosts(tuple(self.hosts[rank] for rank in ranks))

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        """Start a process on the host of its rank; see `Host.launch`."""
        index = request.rank * len(self.hosts) // request.whole.base.nelements
        return await self.hosts[index].launch(request, on_exit)

    async def connect(self, target: ProcId) -> Link:
        """Make a link to a process of one of them; see `Host.connect`."""
        for host in self.hosts:
            try:
                return await host.connect(target)
            except SpawnError:
                continue
        raise SpawnError(f"no host of {self.name} knows process {target}")

    async def exit_of(self, target: ProcId) -> ExitReport:
        """Wait for the end of a process of one of them; see `Host.exit_of`."""
        report = ExitReport.unknown(target)
        for host in self.hosts:
            report = await host.exit_of(target)
            if report.is_known:
                break
        return report

    def retire(self) -> None:
        """Nothing: agents stay for as long as their job."""

    async def flush_output(self) -> None:
        """Wait until what processes of all of them have written is shown."""
        async with trio.open_nursery() as nursery:
            for host in as_set(self.hosts):
                nursery.start_soon(host.flush_output)


def as_set(hosts: Sequence[JobHost]) -> Sequence[JobHost]:
    """Return hosts, each once."""
    return list(dict.fromkeys(hosts))
