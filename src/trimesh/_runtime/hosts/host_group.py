"""Several hosts as one: processes of a mesh are started where their rank says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from trimesh._runtime.hosts.job_place import JobPlace
from trimesh._runtime.life.job_hosts import HostCode
from trimesh._runtime.peers.host import HostChild, LaunchRequest
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface import Link
from trimesh.errors import SpawnError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.hosts.host_roster import HostRoster

OnExit = Callable[[ExitReport], None]


class ManyHosts(msgspec.Struct, frozen=True):
    """Hosts in the order of a mesh, whose first dimensions are theirs; see `Host`.

    Attributes:
        roster: Where all those of the job are; None where these are chosen ones, to start processes on.
    """

    hosts: tuple[JobPlace, ...]
    roster: HostRoster | None = None

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(host.name for host in self.hosts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the machines, in order."""
        return tuple(host.name for host in self.hosts)

    def codes(self, kind: str) -> tuple[HostCode | None, ...]:
        """Return what is on `sys.path` of processes that are started there by a method of hosts, in order."""
        return tuple(host.code_of(kind) for host in self.hosts)

    def set_code(self, kind: str, ranks: Sequence[int], codes: Sequence[HostCode | None]) -> None:
        """Set what `codes` returns for some of them."""
        for rank, code in zip(ranks, codes, strict=True):
            self.hosts[rank].set_code(kind, code)

    async def replace(self, rank: int) -> None:
        await self.hosts[rank].replace()

    async def grow(self, count: int) -> ManyHosts:
        """Have more hosts, and return all of the job; see `HostRoster.grow`."""
        assert self.roster is not None
        return await self.roster.grow(count)

    def select(self, ranks: Sequence[int]) -> ManyHosts:
        return ManyHosts(tuple(self.hosts[rank] for rank in ranks))

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        index = request.rank * len(self.hosts) // request.whole.base.nelements
        return await self.hosts[index].launch(request, on_exit)

    async def connect(self, target: ProcId) -> Link:
        for host in self.hosts:
            try:
                return await host.connect(target)
            except SpawnError:
                continue
        raise SpawnError(f"no host of {self.name} knows process {target}")

    async def exit_of(self, target: ProcId) -> ExitReport:
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


def as_set(hosts: Sequence[JobPlace]) -> Sequence[JobPlace]:
    """Return hosts, each once."""
    return list(dict.fromkeys(hosts))
