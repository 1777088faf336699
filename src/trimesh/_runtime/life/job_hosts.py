"""Which hosts of a job a mesh of hosts shows, and what is started on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from trimesh._runtime.life.ownership import OwnedHost
from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


class HostGroup(Protocol):
    """Hosts that can be used as one; see `trimesh._runtime.hosts`, which is imported when there is a job."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in order."""
        ...

    def select(self, ranks: Sequence[int]) -> Any:
        """Return some of them, as a host."""
        ...


class JobHosts(msgspec.Struct, frozen=True):
    """The hosts of a job that a mesh of them shows.

    Attributes:
        whole, region: All of them; those that are shown.
        parts: Names that the job gives, each to the hosts from one rank up to another one.
        group: All of them, to start processes on.
    """

    whole: Region
    region: Region
    parts: Mapping[str, tuple[int, int]]
    group: HostGroup

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts that are shown, in order."""
        return tuple(self.group.names[rank] for rank in self.region.ranks())

    def part(self, region: Region) -> JobHosts:
        """Return what shows other ones."""
        return JobHosts(self.whole, region, self.parts, self.group)

    def extent_of(self, per_host: Extent) -> Extent:
        """Return the extent of processes, some on each host.

        Raises:
            ShapeError: A label is one of the hosts, too.
        """
        own = self.region.extent
        both = [label for label in per_host if label in own]
        if both:
            raise ShapeError(f"the processes of a host have labels of their own, got {both[0]!r}, which the hosts have")
        return Extent({**own, **per_host})

    def owned(self, owned: OwnedHost | None) -> OwnedHost:
        """Return the block that owns what is started on them, with these hosts."""
        assert owned is not None
        return OwnedHost(owned.proc, owned.block, self.group.select(self.region.ranks()))
