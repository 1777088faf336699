"""All hosts of one job, which may become more while its block is open.

    places 0 .. n-1 --grow(k): started, joined--> places 0 .. n+k-1

HR-1 To grow is all or nothing: the new hosts are there at one moment, when processes can be started on all of them.
HR-2 One growth at a time; the places that there are stay as they are, and so does what shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import trio

from trimesh import limits
from trimesh._runtime.hosts.host_group import ManyHosts
from trimesh._runtime.hosts.job_host import JobHost
from trimesh._runtime.hosts.job_place import JobPlace, Successors
from trimesh._runtime.meshes.member import Member
from trimesh._runtime.peers.losses import HostLoss
from trimesh.ids import ProcId


class HostRoster:
    """The places of a job's hosts; see `JobPlace` for its arguments.

    Attributes:
        all: Those that there are now.
    """

    def __init__(
        self,
        hosts: Sequence[JobHost],
        successors: Successors,
        members: Mapping[ProcId, Member],
        on_lost: Callable[[HostLoss], None],
    ) -> None:
        self._successors = successors
        self._members = members
        self._on_lost = on_lost
        self._growing = trio.Lock()
        self.all = ManyHosts(self._places(hosts), self)

    def _places(self, hosts: Sequence[JobHost]) -> tuple[JobPlace, ...]:
        return tuple(JobPlace(host, self._successors, self._members, self._on_lost) for host in hosts)

    async def grow(self, count: int) -> ManyHosts:
        """Have more hosts after those that there are, and return all.

        Raises:
            ValueError: They would be too many.
            SpawnError, MeshErrorGroup: They cannot be had, see `Successors.grow`.
        """
        async with self._growing:
            first = len(self.all.hosts)
            if first + count > limits.JOB_HOSTS_MAX:
                raise ValueError(
                    f"a job has at most limits.JOB_HOSTS_MAX ({limits.JOB_HOSTS_MAX}) hosts, got {count} more than its "
                    f"{first}"
                )
            more = await self._successors.grow(count, first)
            self.all = ManyHosts((*self.all.hosts, *self._places(more)), self)
            return self.all
