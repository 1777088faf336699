"""Which hosts of a job a mesh of hosts shows, and what is started on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trimesh._runtime.life.ownership import OwnedHost
from trimesh.errors import ShapeError
from trimesh.plain_numbers import whole_number
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.hosts.host_group import ManyHosts


class HostCode(msgspec.Struct, frozen=True):
    """Code that was brought to a host, or installed there, by a block of the program.

    Attributes:
        paths: First entries of `sys.path` of the processes there.
        env: Variables of their environment.
        packages: Entries after those of the program, before those of a Python installation.
    """

    paths: tuple[bytes, ...]
    env: Mapping[str, str]
    packages: tuple[bytes, ...] = ()


class HostsNotice:
    """What is said to the program before its hosts end, once."""

    def __init__(self) -> None:
        self._told = trio.Event()
        self._text = ""

    def tell(self, text: str) -> None:
        self._text = text
        self._told.set()

    async def wait(self) -> str:
        """Wait until it is said, and return it."""
        await self._told.wait()
        return self._text


class JobHosts(msgspec.Struct, frozen=True):
    """The hosts of a job that a mesh of them shows.

    Attributes:
        whole, region: All of them; those that are shown.
        parts: Names that the job gives, each to the hosts from one rank up to another one.
        group: All of them, to start processes on.
        notice: What is said before they end; None where nothing ever is.
    """

    whole: Region
    region: Region
    parts: Mapping[str, tuple[int, int]]
    group: ManyHosts
    notice: HostsNotice | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts that are shown, in order."""
        return tuple(self.group.names[rank] for rank in self.region.ranks())

    def part(self, region: Region) -> JobHosts:
        """Return what shows other ones."""
        return msgspec.structs.replace(self, region=region)

    def set_code(self, kind: str, codes: Sequence[HostCode | None]) -> None:
        """Set what is on `sys.path` of processes that are started on the hosts that are shown from now on.

        Args:
            kind: Which method of hosts does so, "sync" or "install".
            codes: For each host.
        """
        self.group.set_code(kind, self.region.ranks(), codes)

    async def replace(self, point: Mapping[str, int]) -> None:
        """Have another host at a place of those that are shown.

        Raises:
            ShapeError: There is no such place.
            SpawnError: The job has none, or it cannot be had.
        """
        region = self.region.slice(**point)
        if len(region) != 1:
            given = dict(point)
            raise ShapeError(f"one host is replaced at a time, got {given!r}, which are {len(region)}")
        await self.group.replace(next(iter(region.ranks())))

    async def grow(self, count: Any) -> JobHosts:
        """Have more hosts, and return what shows all of them.

        Raises:
            ValueError: It is no number of hosts, these are a part of them, or they would be too many.
            SpawnError, MeshErrorGroup: They cannot be had.
        """
        number = whole_number(count)
        if number is None or number < 1:
            raise ValueError(f"hosts.grow takes how many more there are to be, a number from 1 on, got {count!r}")
        if self.region != self.whole:
            raise ValueError(
                f"a job grows as a whole, and these are {len(self.region)} of its {len(self.whole)} hosts: call grow "
                "on the mesh that entering the job has returned; what it returns has the new ones last"
            )
        group: ManyHosts = await self.group.grow(number)
        whole = Region(Extent(hosts=len(group.names)))
        return msgspec.structs.replace(self, whole=whole, region=whole, group=group)

    def check_no_code(self, kind: str) -> None:
        """Check that no block of a method of hosts is open for one of those that are shown.

        Raises:
            RuntimeError: One has.
        """
        codes = self.group.codes(kind)
        taken = [self.group.names[rank] for rank in self.region.ranks() if codes[rank] is not None]
        if taken:
            instead = "name all paths in one call" if kind == "sync" else "name all packages in one file"
            raise RuntimeError(
                f"a host has the code of one block of hosts.{kind} at a time, and {', '.join(taken)} has some: "
                f"{instead}"
            )

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
