"""Hosts of a job in the program that opened it: those that a host mesh shows, code on them, and their lending."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import trio

from trimesh._runtime.calls.membership import family_of
from trimesh._runtime.life.ownership import Leases, OwnedHost, lend, open_procs
from trimesh._runtime.meshes.proc_members import ProcMembers
from trimesh._runtime.spawner.proc_options import ProcOptions
from trimesh._runtime.system.child import checked_variables, output_of
from trimesh._runtime.values.endpoint_spec import HostsInfo, MeshInfo
from trimesh._supervision.policy import FailFast, Policy
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager, contextmanager
from trimesh.errors import ProtocolError, ShapeError
from trimesh.ids import ProcId
from trimesh.plain_numbers import real_number, whole_number
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.hosts.host_group import ManyHosts


class HostCode(msgspec.Struct, frozen=True):
    """Code that a block of `hosts.sync` or `hosts.install` has brought to a host.

    Attributes:
        paths: First entries of `sys.path` of the processes there.
        env: Variables of their environment.
        packages: Entries after those of the program, before those of a Python installation.
    """

    paths: tuple[bytes, ...]
    env: Mapping[str, str]
    packages: tuple[bytes, ...] = ()


class HostsNotice:
    """Warning, given once, that the hosts of the program are about to end."""

    def __init__(self) -> None:
        self._told = trio.Event()
        self._text = ""

    def tell(self, text: str) -> None:
        self._text = text
        self._told.set()

    async def wait(self) -> str:
        """Wait for the warning and return its text."""
        await self._told.wait()
        return self._text


class ShownHosts(msgspec.Struct, frozen=True):
    """Hosts of a job that a host mesh shows.

    Attributes:
        whole, region: All hosts; the shown ones.
        parts: Names that the job gives, each with its range of host ranks.
    """

    whole: Region
    region: Region
    parts: Mapping[str, tuple[int, int]]

    @property
    def all_names(self) -> Sequence[str]:
        """Names of all hosts, by rank."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the shown hosts, in order."""
        return tuple(self.all_names[rank] for rank in self.region.ranks())

    def part(self, region: Region) -> Self:
        """Return the same job with other hosts shown."""
        return msgspec.structs.replace(self, region=region)

    def extent_of(self, per_host: Extent) -> Extent:
        """Return the extent of processes, some on each host.

        Raises:
            ShapeError: The hosts have one of the labels, too.
        """
        own = self.region.extent
        both = [label for label in per_host if label in own]
        if both:
            raise ShapeError(f"processes need labels that their hosts do not have, got {both[0]!r}, a label of both")
        return Extent({**own, **per_host})


class ReferredHosts(ShownHosts, frozen=True):
    """Shared hosts of a job that another process owns.

    Attributes:
        info: Their description by the owner.
    """

    info: HostsInfo

    @property
    def all_names(self) -> Sequence[str]:
        return self.info.names


class JobHosts(ShownHosts, frozen=True):
    """Hosts of a job of this program.

    Attributes:
        group: All hosts, to start processes on.
        notice: Warning before they end; None where the job gives none.
    """

    group: ManyHosts
    notice: HostsNotice | None = None

    @property
    def all_names(self) -> Sequence[str]:
        return self.group.names

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of hosts that are lost and have not been replaced."""
        return frozenset(rank for rank, place in enumerate(self.group.hosts) if place.host.loss is not None)

    def info(self, owned: OwnedHost) -> HostsInfo:
        """Return their description for other processes."""
        proc = owned.proc
        return HostsInfo(owned.shared_as, proc.proc_id, family_of(proc), self.whole, self.all_names, self.parts)

    def set_code(self, kind: str, codes: Sequence[HostCode | None]) -> None:
        """Set the code of processes that are started on the shown hosts from now on.

        Args:
            kind: The method that brought it, "sync" or "install".
            codes: One for each shown host.
        """
        self.group.set_code(kind, self.region.ranks(), codes)

    async def replace(self, point: Mapping[str, int]) -> None:
        """Replace the host at a point of the shown ones.

        Raises:
            ShapeError: There is no such point.
            SpawnError: The job has no other host, or cannot start it.
        """
        region = self.region.slice(**point)
        if len(region) != 1:
            given = dict(point)
            raise ShapeError(f"hosts.replace takes the point of one host, got {given!r}, which selects {len(region)}")
        await self.group.replace(next(iter(region.ranks())))

    async def grow(self, count: Any) -> JobHosts:
        """Add hosts to the job; return it with all hosts shown.

        Raises:
            ValueError: `count` is not a positive number, only a part of the job is shown, or hosts would be too many.
            SpawnError, MeshErrorGroup: The hosts could not be acquired.
        """
        number = whole_number(count)
        if number is None or number < 1:
            raise ValueError(f"hosts.grow takes the number of hosts to add, 1 or more, got {count!r}")
        if self.region != self.whole:
            raise ValueError(
                f"a job grows as a whole, and these are {len(self.region)} of its {len(self.whole)} hosts: call grow "
                "on the mesh that entering the job returned; it returns a mesh with the new hosts last"
            )
        group: ManyHosts = await self.group.grow(number)
        whole = Region(Extent(hosts=len(group.names)))
        return msgspec.structs.replace(self, whole=whole, region=whole, group=group)

    def check_no_code(self, kind: str) -> None:
        """Check that no block of `hosts.sync` or `hosts.install` (`kind`) is open for a shown host.

        Raises:
            RuntimeError: One is open.
        """
        codes = self.group.codes(kind)
        taken = [self.group.names[rank] for rank in self.region.ranks() if codes[rank] is not None]
        if taken:
            instead = "name all paths in one call" if kind == "sync" else "name all packages in one file"
            raise RuntimeError(
                f"a host has the code of one block of hosts.{kind} at a time, and {', '.join(taken)} already has some: "
                f"{instead}"
            )

    def owned(self, owned: OwnedHost | None) -> OwnedHost:
        """Return the block that owns processes started on these hosts."""
        assert owned is not None
        return OwnedHost(owned.proc, owned.block, self.group.select(self.region.ranks()))

    def placed(self, owned: OwnedHost, ranks: Sequence[int]) -> OwnedHost:
        """Return the block that owns processes, of which each has a host of the job, by the rank of that."""
        return OwnedHost(owned.proc, owned.block, self.group.select(ranks, is_by_rank=True))


# ---- hosts that are lent to other processes of the family -----------------------------------------------------------


class SharedHosts:
    """Hosts of a job on which other processes of the family may spawn, at their owner.

    Args:
        hosts: All hosts of the job, also those that `grow` will add.
    """

    def __init__(self, owned: OwnedHost, hosts: ManyHosts) -> None:
        assert hosts.roster is not None
        self._owned = owned
        self._roster = hosts.roster

    def lend(
        self,
        leases: Leases,
        key: tuple[ProcId, int],
        ranks: Sequence[int],
        name: str,
        extent: Extent,
        said: Mapping[str, Any],
        policy: Policy | None,
    ) -> AsyncGenerator[MeshInfo, None]:
        """Start processes for another process; yield them once, and end them when this call ends.

        Args:
            leases: All leases of this process.
            key: The borrower, and the number that it has given the processes.
            ranks: Ranks of the hosts.
            extent: Of all processes; the first dimensions are those of the hosts.
            said: Options as `lent_options` makes them.
            policy: What the end of a process does; None for `FailFast()`.

        Raises:
            ProtocolError: The arguments fit no hosts.
        """
        owned, hosts = self._owned, self._roster.all
        is_right = isinstance(name, str) and isinstance(extent, Extent) and ranks and extent.nelements % len(ranks) == 0
        if not is_right or not all(type(one) is int and 0 <= one < len(hosts.hosts) for one in ranks):
            raise ProtocolError("processes on shared hosts need a name, an extent and ranks of these hosts")
        where = OwnedHost(owned.proc, owned.block, hosts.select(ranks))
        options = _options_from(said)

        @asynccontextmanager
        async def open_() -> AsyncGenerator[ProcMembers, None]:
            async with open_procs(name, extent, options, policy or FailFast(), where, key[0]) as procs:
                procs.fix_size("its first dimensions are those of its hosts")
                assert procs.members is not None
                yield procs.members

        return lend(leases, key, owned.block, open_(), f"the hosts of {name}")


@contextmanager
def share_hosts(owned: OwnedHost, hosts: ManyHosts) -> Generator[None, None, None]:
    """Let other processes of the family spawn on the hosts of a job while the body runs."""
    proc = owned.proc
    owned.shared_as = proc.new_id()
    proc.shared_hosts[owned.shared_as] = SharedHosts(owned, hosts)
    try:
        yield
    finally:
        del proc.shared_hosts[owned.shared_as]


def lent_options(options: ProcOptions, whole: Region) -> Mapping[str, Any]:
    """Return the options of processes on shared hosts, to be sent to the owner; runs the user's functions of points."""
    env, output = options.env, options.output
    return {
        "env": [dict(checked_variables(env(point), "env")) for point in whole.points()] if callable(env) else env,
        "output": [_sent(output(point)) for point in whole.points()] if callable(output) else _sent(output),
        "setup": options.setup,
        "python": options.python,
        "preload": options.preload,
        "grace": options.grace,
        "seed": options.seed,
        "shared": options.shared,
    }


def _sent(output: Any) -> tuple[str, bytes]:
    return output_of(output)


def _options_from(said: Mapping[str, Any]) -> ProcOptions:
    """Return options sent by a borrower.

    Raises:
        ProtocolError: They are none.
    """
    try:
        env: Any = said["env"]
        output: Any = said["output"]
        grace = real_number(said["grace"])
        if grace is None:
            raise ValueError("grace must be a number")
        return ProcOptions(
            _by_rank(env) if isinstance(env, list) else env,
            said["setup"],
            said["python"],
            tuple(said["preload"]),
            grace,
            _by_rank(_outputs(output)) if isinstance(output, list) else _output(output),
            seed=said["seed"],
            shared=bool(said["shared"]),
            settings=reread(),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"options of processes on shared hosts cannot be read: {error!r}") from error


def _by_rank(values: Any) -> Callable[[Point], Any]:
    """Return the function of a point that has these values."""
    return lambda point: values[point.rank]


def _outputs(sent: Any) -> list[Any]:
    return [_output(one) for one in sent]


def _output(sent: tuple[str, bytes]) -> Any:
    mode, path = sent
    return Path(os.fsdecode(path)) if path else mode
