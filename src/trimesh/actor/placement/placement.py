"""`hosts.resources()` and `hosts.place(...)`: what hosts have, and which processes get which part of it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from msgspec.structs import force_setattr

from trimesh import limits
from trimesh._runtime import life
from trimesh._runtime.peers import LaunchRequest
from trimesh._runtime.spawner import ProcOptions
from trimesh._runtime.system import (
    GPU,
    HostShare,
    Inventory,
    gpus_here,
    own_settings,
    simulated_inventory,
    take_inventory,
)
from trimesh._supervision.placement import Demand, Spread
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.placement.reservations import Account, Ledger, Reservation, ReservedPlaces, Resources, Taken
from trimesh.actor.spawning import checked_name
from trimesh.config import Settings, current, reread
from trimesh.context_managers import asynccontextmanager, contextmanager
from trimesh.errors import ShapeError, SpawnError
from trimesh.plain_numbers import real_number, suggestion, whole_number
from trimesh.shape.extent import Extent
from trimesh.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from trimesh._runtime.life import JobHosts, OwnedHost
    from trimesh.actor.host_mesh import HostMesh

__all__ = ["GPU", "HostShare", "Need", "Placement", "Places", "Resources", "Taken"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What each of some processes needs: `Need(gpus=1, cpus=8, count=4)`.

    Attributes:
        count: Number of processes.
        gpus: GPUs of each process: a whole number, or a part of one, such as 0.5, which it shares with other processes.
        gpu_memory: Bytes on each of its GPUs.
        cpus: CPUs (hardware threads) that only this process is bound to; 0 binds it to none.
        memory: Bytes of the host's memory.
        beside: Name of other processes. Process i of n is on the host of process `i * m // n` of those m, and on its
            GPU, if a part of that is left.
        spread: "pack" fills a host before the next one; "hosts" gives each host equally many, as far as they have room.
        labels: Labels that its host must have; see the setting `labels`.

    Memory is accounted, but not enforced.

    Raises:
        ValueError: A number is out of range, or a word is none of those above.
        TypeError: `beside` or `labels` is of another type.
    """

    count: int = 1
    gpus: float = 0
    gpu_memory: int = 0
    cpus: int = 0
    memory: int = 0
    beside: str | None = None
    spread: Spread = "pack"
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        for name, least, what in (
            ("count", 1, "a number of processes >= 1"),
            ("gpu_memory", 0, "a number of bytes, such as 40 << 30"),
            ("cpus", 0, "a whole number of CPUs; processes that share CPUs leave cpus= out"),
            ("memory", 0, "a number of bytes, such as 64 << 30"),
        ):
            value = whole_number(getattr(self, name))
            if value is None or value < least:
                raise ValueError(f"Need({name}=...) must be {what}, got {getattr(self, name)!r}")
            force_setattr(self, name, value)
        gpus = real_number(self.gpus)
        if gpus is None or not 0 <= gpus <= limits.PLACEMENT_PROCS_MAX or (gpus > 1 and gpus != int(gpus)):
            raise ValueError(
                f"Need(gpus=...) must be a whole number of GPUs, or a part of one below 1, got {self.gpus!r}"
            )
        if 0 < gpus < 1 / limits.PLACEMENT_SHARES_MAX:
            raise ValueError(
                f"Need(gpus=...) must be at least one in limits.PLACEMENT_SHARES_MAX ({limits.PLACEMENT_SHARES_MAX}), "
                f"got {self.gpus!r}"
            )
        force_setattr(self, "gpus", gpus)
        if self.gpu_memory and not gpus:
            raise ValueError("Need(gpu_memory=...) is for processes with GPUs, got gpus=0: add gpus=1")
        if self.spread not in ("pack", "hosts"):
            raise ValueError(f'Need(spread=...) must be "pack" or "hosts", got {self.spread!r}')
        self._check_others()

    def _check_others(self) -> None:
        beside: object = self.beside
        if beside is not None and not isinstance(beside, str):
            raise TypeError(f"Need(beside=...) must be the name of another need, got {beside!r}")
        if beside is not None and self.spread == "hosts":
            raise ValueError('Need(beside=...) decides the hosts, got spread="hosts" with it: leave spread out')
        labels: Any = self.labels
        if not isinstance(labels, Mapping):
            raise TypeError(f"Need(labels=...) must be a mapping of names to texts, got {labels!r}")
        given: dict[Any, Any] = {**labels}
        for name, value in given.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"Need(labels=...) must be a mapping of names to texts, got {name!r}: {value!r}")
        force_setattr(self, "labels", dict(self.labels))

    def _demand(self) -> Demand:
        gpus = Fraction(self.gpus).limit_denominator(limits.PLACEMENT_SHARES_MAX)
        return Demand(self.count, gpus, self.gpu_memory, self.cpus, self.memory, self.beside, self.spread, self.labels)


def checked_needs(needs: Any) -> dict[str, Demand]:
    """Return the demands of a placement.

    Raises:
        TypeError: It is no mapping of names to needs.
        ValueError: It is empty or too large, or a need is beside none of them, or beside itself.
    """
    if not isinstance(needs, Mapping) or not needs:
        raise TypeError(f"place takes a mapping of names to needs, as in {{'trainers': Need(gpus=1)}}, got {needs!r}")
    found, given = dict[str, Demand](), dict[Any, Any]({**needs})
    for name, need in given.items():
        if not isinstance(need, Need):
            raise TypeError(f"place takes a Need for each name, got {need!r} for {name!r}: write Need(gpus=1, count=4)")
        found[checked_name(name)] = need._demand()  # noqa: SLF001 - of this module
    for name, demand in found.items():
        seen, other = [name], demand.beside
        while other is not None:
            if other not in found:
                raise ValueError(
                    f"Need(beside=...) must name another need of the placement, got {other!r}"
                    f"{suggestion(other, found)}: there are {', '.join(found)}"
                )
            if other in seen:
                raise ValueError(f"needs must not be beside each other in a circle, got {' -> '.join([*seen, other])}")
            seen.append(other)
            other = found[other].beside
    count = sum(demand.count for demand in found.values())
    if count > limits.PLACEMENT_PROCS_MAX:
        raise ValueError(
            f"a placement must have at most limits.PLACEMENT_PROCS_MAX ({limits.PLACEMENT_PROCS_MAX}) processes, got "
            f"{count}"
        )
    return found


# ---- inspection of hosts ---------------------------------------------------------------------------------------------


class Inspector(Actor):
    """Inspects its host, in a process of its own: a fault of the GPU driver ends no agent."""

    @endpoint
    async def inspect(self, *, is_here: bool = False) -> Inventory:
        """Return the inventory; settings of the program count on its own host only."""
        proc = life.current_proc()
        if proc.is_simulated:
            return simulated_inventory(proc.host_name)
        settings = own_settings(current() if is_here else Settings())
        visible = os.environ.get(_VISIBLE)
        gpus: tuple[GPU, ...] = ()
        why = f"the driver did not answer within limits.NVML_SECONDS ({limits.NVML_SECONDS:g} s)"
        with trio.move_on_after(limits.NVML_SECONDS):
            gpus, why = await trio.to_thread.run_sync(gpus_here, settings.nvml, visible, abandon_on_cancel=True)
        return take_inventory(settings.labels, gpus, why)


async def _inspect(hosts: HostMesh, job: JobHosts | None) -> ValueMesh[Inventory]:
    async with (
        hosts.spawn_procs({}, name="resources", preload=()) as procs,
        procs.spawn("resources", Inspector) as inspectors,
    ):
        return await inspectors.inspect.call(is_here=job is None)


async def resources(hosts: HostMesh, job: JobHosts | None) -> ValueMesh[Resources]:
    """Inspect hosts; see `HostMesh.resources`."""
    async with life.lease_proc() as (proc, _):
        ledger = Ledger.of(proc)
        async with ledger.changing():
            keys = _keys(job)
            found = await _inspect(hosts, job)
            resources = [
                ledger.account(key, name, host, one).resources(one)
                for (key, name, host), one in zip(keys, found, strict=True)
            ]
    return ValueMesh(found.region, tuple(resources))


def _keys(job: JobHosts | None) -> list[tuple[object, str, object]]:
    """Return place, name and present host of each host; this machine has no place."""
    if job is None:
        return [(None, "this host", None)]
    return [(place, place.name, place.host) for place in map(job.group.hosts.__getitem__, job.region.ranks())]


# ---- placements ------------------------------------------------------------------------------------------------------


class Places:
    """Reserved places of the processes of one name, for `spawn_procs(on=...)`: by rank, in the order of hosts.

    Attributes:
        name: Name of the need.
        count: Number of processes.
    """

    def __init__(self, grounds: ReservedHosts, reserved: ReservedPlaces) -> None:
        self.name = reserved.name
        self.count = len(reserved.slots)
        self._grounds = grounds
        self._reserved = reserved

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of the host of each process."""
        return tuple(slot.account.name for slot in self._reserved.slots)

    @property
    def shares(self) -> tuple[HostShare, ...]:
        """What each process gets."""
        return tuple(slot.share() for slot in self._reserved.slots)

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<places of {self.name}: {self.count} processes on {len(dict.fromkeys(self.hosts))} hosts>"

    # ---- for `HostMesh.spawn_procs` --------------------------------------------------------------------------

    def owner_for(self, owned: OwnedHost | None, job: JobHosts | None) -> OwnedHost:
        """Return the block that owns processes here, and their hosts by rank.

        Args:
            owned: Block of the host mesh that `spawn_procs` is called on.
            job: Hosts of that mesh; None for this machine.

        Raises:
            ValueError: The placement is one of other hosts.
        """
        own, hosts = self._grounds.owned, self._grounds.job
        roster = None if hosts is None else hosts.group.roster
        if (None if job is None else job.group.roster) is not roster or (job is not None and owned is None):
            raise ValueError(
                f"on= must be places on the hosts that spawn_procs is called on, got those of {self.name!r} on other "
                "hosts: call it on the hosts whose place() returned them"
            )
        if hosts is None:
            return own
        return hosts.placed(own, [self._grounds.rank_of(slot.account) for slot in self._reserved.slots])

    def extent_for(self, dims: Mapping[str, int] | None) -> Extent:
        """Return the extent of processes here: `{"procs": count}`, or the given dimensions.

        Raises:
            ShapeError: There are more processes than places, or a dimension "hosts" would mix hosts.
        """
        extent = Extent({"procs": self.count}) if dims is None else life.check_per_host(dims)
        if extent.nelements > self.count:
            raise ShapeError(
                f"a mesh on the places of {self.name!r} must have at most its {self.count} processes, got "
                f"{dict(extent)!r}, which are {extent.nelements}: raise count= of its Need"
            )
        if extent.labels[:1] == ("hosts",):
            each = extent.nelements // extent.size("hosts")
            ranks = [self._grounds.rank_of(slot.account) for slot in self._reserved.slots[: extent.nelements]]
            blocks = [ranks[start : start + each] for start in range(0, len(ranks), each)]
            if any(len(dict.fromkeys(block)) > 1 for block in blocks) or len(dict.fromkeys(ranks)) != len(blocks):
                per_host = {self.hosts[at]: ranks.count(rank) for at, rank in enumerate(ranks)}
                raise ShapeError(
                    f"the dimension 'hosts' must have one index for each host of {self.name!r}, got "
                    f"{dict(extent)!r} for {per_host}: leave the dimensions out, or name them otherwise"
                )
        return extent

    @contextmanager
    def claimed(self, mesh: str, options: ProcOptions) -> Generator[ProcOptions, None, None]:
        """Take the places for a mesh that is about to start, until it has ended; yield its options with them.

        Raises:
            SpawnError: Another mesh lives on them, or the block of the placement was left.
        """
        reserved = self._reserved
        if self._grounds.reservation.is_closed:
            raise SpawnError(f"the block of the placement that reserved {self.name!r} was left: place it anew")
        if reserved.mesh:
            raise SpawnError(
                f"places take one mesh at a time, and those of {self.name!r} have {reserved.mesh!r}: leave its block "
                "first, or place a need of its own"
            )
        reserved.mesh = mesh
        claim = ClaimedPlaces(self._grounds, reserved)
        try:
            yield msgspec.structs.replace(options, shares=claim)
        except BaseException:
            claim.release()
            raise


class ClaimedPlaces:
    """Places with a mesh on them; see `Shares`."""

    def __init__(self, grounds: ReservedHosts, reserved: ReservedPlaces) -> None:
        self.count = len(reserved.slots)
        self._grounds = grounds
        self._reserved = reserved
        self._is_released = False

    def request(self, request: LaunchRequest) -> LaunchRequest:
        """Return the launch request of a process with its share, or with the function that adds it.

        Raises:
            ValueError: `env=` sets the GPUs, too.
        """
        if _VISIBLE in request.env:
            raise ValueError(f"env= must not set {_VISIBLE} with on=, which sets it: leave it out")
        if self._grounds.job is None:
            return self._completed(request)
        return msgspec.structs.replace(request, prepare=self._prepare)

    def has_gpus(self, rank: int) -> bool:
        """Return whether a process gets GPUs, so that it sees no others."""
        return bool(self._reserved.slots[rank].share().gpus)

    async def _prepare(self, request: LaunchRequest, host: Any) -> LaunchRequest:
        account = self._reserved.slots[request.rank].account
        await account.follow(host.name, host, partial(self._grounds.inspect, account))
        return self._completed(request)

    def _completed(self, request: LaunchRequest) -> LaunchRequest:
        slot = self._reserved.slots[request.rank]
        share = slot.share()
        env = request.env
        if slot.account.inventory.gpus:  # also a process without a share sees none
            env = {**env, _VISIBLE: ",".join(share.gpus)}
        return msgspec.structs.replace(request, env=env, cpus=share.cpus or request.cpus, share=share, prepare=None)

    def release(self) -> None:
        """Note that the mesh has ended. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._reserved.mesh = ""
            self._grounds.reservation.free()


class Placement(Mapping[str, Places]):
    """Reserved places by name; see `HostMesh.place`."""

    def __init__(self, grounds: ReservedHosts) -> None:
        self._places = {name: Places(grounds, one) for name, one in grounds.reservation.places.items()}

    def __getitem__(self, name: str) -> Places:
        """Return the places of a name.

        Raises:
            KeyError: There are none; the text has the names.
        """
        try:
            return self._places[name]
        except KeyError:
            raise KeyError(f"the placement has no {name!r}: there are {', '.join(self._places)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<placement of {', '.join(self._places)}>"


class ReservedHosts:
    """Hosts of one placement.

    Attributes:
        owned: Block of the placement.
        job: The hosts; None for this machine.
        reservation: What it has reserved.
    """

    def __init__(
        self, owned: OwnedHost, hosts: HostMesh, job: JobHosts | None, accounts: Sequence[Account],
        reservation: Reservation,
    ) -> None:  # fmt: skip
        self.owned = owned
        self.job = job
        self.reservation = reservation
        self._hosts = hosts
        self._accounts = list(accounts)

    def rank_of(self, account: Account) -> int:
        """Return the rank of a host among all hosts of its job."""
        position = self._accounts.index(account)
        return 0 if self.job is None else list(self.job.region.ranks())[position]

    async def inspect(self, account: Account) -> Inventory:
        """Inspect the present host at the place of an account."""
        host = self._hosts._of_rank(self.rank_of(account))  # noqa: SLF001 - made of it
        [found] = await _inspect(host, self.job)
        return found


async def _reserve(
    hosts: HostMesh, owned: OwnedHost, job: JobHosts | None, demands: Mapping[str, Demand]
) -> tuple[Sequence[Account], Reservation]:
    ledger = Ledger.of(owned.proc)
    async with ledger.changing():
        keys = _keys(job)
        found = await _inspect(hosts, job)
        accounts = [ledger.account(key, name, host, one) for (key, name, host), one in zip(keys, found, strict=True)]
        return accounts, await ledger.reserve(owned.proc, accounts, demands)
    raise AssertionError("changing() has raised")


@asynccontextmanager
async def open_placement(
    hosts: HostMesh, owned: OwnedHost | None, job: JobHosts | None, demands: Mapping[str, Demand]
) -> AsyncGenerator[Placement, None]:
    """Reserve places in a block of their own, which also owns the meshes that are awaited on them."""
    if owned is None:
        settings = reread()
        refusal: SpawnError | None = None
        async with life.open_warm_host(settings.preload, settings.grace) as warm:
            host = hosts._on(warm)  # noqa: SLF001 - made of it
            try:
                reserved = await _reserve(host, warm, job, demands)
            except SpawnError as error:  # raised below: the block of the host would wrap it
                refusal = error
            else:
                async with _placed(host, warm, job, *reserved) as placement:
                    yield placement
        if refusal is not None:
            raise refusal
        return
    reserved = await _reserve(hosts, owned, job, demands)
    async with _placed(hosts, owned, job, *reserved) as placement:
        yield placement


@asynccontextmanager
async def _placed(
    hosts: HostMesh, owned: OwnedHost, job: JobHosts | None, accounts: Sequence[Account], reservation: Reservation
) -> AsyncGenerator[Placement, None]:
    try:
        async with life.open_part(owned, "placement") as part:
            part.block.adopt(reservation)
            yield Placement(ReservedHosts(part, hosts, job, accounts, reservation))
    finally:
        reservation.close()


async def adopt_placement(
    hosts: HostMesh, owned: OwnedHost | None, job: JobHosts | None, demands: Mapping[str, Demand]
) -> Placement:
    """Reserve places in the block of the hosts.

    Raises:
        RuntimeError: This host has no block.
    """
    if owned is None:
        raise RuntimeError(
            "awaiting place() needs a block that owns the reservation, and this_host() has none: write "
            "`async with this_host().place(...) as placement:`"
        )
    with owned.block.entering():
        accounts, reservation = await _reserve(hosts, owned, job, demands)
        owned.block.adopt(reservation)
        return Placement(ReservedHosts(owned, hosts, job, accounts, reservation))
    raise AssertionError("entering() has raised")
