"""Reservations on hosts: what the placements of this process have taken, and the share of each placed process.

    place --solve--> slots on accounts --launch of rank r--> share of slot r: UUIDs of GPUs, CPUs
                          |                                       ^
                          '--the host was replaced: inspected again, the same positions--'

RV-1 All slots of a reservation are added in one step, after the solver has found room for all of them.
RV-2 A slot names its GPUs and CPUs by position, so a process that starts again has the same ones, and on a replaced
     host those of the same number.
RV-3 A reservation ends with its block, but not before the last mesh that was spawned on it.
RV-4 Memory counts as free that was free when nothing was reserved there: a placed process is not counted twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec
import trio

from trimesh._runtime.system import HostShare, Inventory
from trimesh._runtime.values import MeshInfo
from trimesh._supervision.placement import Capacity, Demand, GPUCapacity, Shortage, Spot, solve
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshErrorGroup, SpawnError, leaves
from trimesh.ids import AGENT, MeshId
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc

Inspect = Callable[[], Awaitable[Inventory]]
"""Inspects one host."""


class Taken(msgspec.Struct, frozen=True):
    """What the processes of one name have reserved on a host.

    Attributes:
        name: Name of their `Need`.
        mesh: Name of the mesh that was spawned on them; "" while there is none.
        count: Number of processes.
        gpus: GPUs: a half counts as 0.5.
        uuids: UUIDs of these GPUs.
        cpus: CPUs that they are bound to.
        memory: Bytes of memory.
    """

    name: str
    mesh: str
    count: int
    gpus: float
    uuids: tuple[str, ...]
    cpus: tuple[int, ...]
    memory: int


class Resources(Inventory, frozen=True):
    """Resources of one host, as `hosts.resources()` returns them.

    Attributes:
        cpus: CPUs that processes there may run on: the affinity of the agent.
        nodes: NUMA node of each of these CPUs; -1 if unknown.
        cpu_limit: Number of CPUs whose time they may use, by the quota of the cgroup; None for no limit.
        memory: Bytes of memory: of the machine, or the limit of the cgroup.
        memory_free: Bytes that were available when the host was inspected.
        gpus: GPUs that are visible to the agent.
        no_gpus: Reason why there are none; else "".
        labels: Labels of the host, by its setting `labels`.
        taken: Reservations of this program's placements.
    """

    taken: tuple[Taken, ...] = ()


class ReservedSlot:
    """Reserved place of one process: positions of its GPUs and CPUs in the inventory of its host."""

    __slots__ = ("account", "cpus", "demand", "gpus", "places")

    def __init__(self, account: Account, places: ReservedPlaces, gpus: tuple[int, ...]) -> None:
        self.account = account
        self.places = places
        self.demand = places.demand
        self.gpus = gpus
        self.cpus: tuple[int, ...] = ()

    @property
    def gpu_part(self) -> Fraction:
        return min(self.demand.gpus, Fraction(1))

    def share(self) -> HostShare:
        found, demand = self.account.inventory, self.demand
        return HostShare(
            name=self.places.name,
            gpus=tuple(found.gpus[one].uuid for one in self.gpus),
            gpu_part=float(self.gpu_part),
            gpu_memory=demand.gpu_memory,
            cpus=tuple(sorted(found.cpus[one] for one in self.cpus)),
            memory=demand.memory,
        )


class Account:
    """One host: its inventory, and the slots that are reserved there.

    Attributes:
        name: Name of the host.
        host: The host that was inspected; another one takes its place after a loss.
    """

    def __init__(self, name: str, host: object, inventory: Inventory) -> None:
        self.name = name
        self.host: object = host
        self.inventory = inventory
        self.slots: list[ReservedSlot] = []
        self._inspecting = trio.Lock()

    def update(self, name: str, host: object, inventory: Inventory) -> None:
        """Take a newer inventory, unless the reservations here began with the present one (RV-4), or need it."""
        if not self.slots or (host is not self.host and not self._lacking(inventory)):
            self.name, self.host, self.inventory = name, host, inventory

    async def follow(self, name: str, host: object, inspect: Inspect) -> None:
        """Inspect the host that has taken the place of the inspected one, if it has.

        Raises:
            SpawnError: It was lost, too, or lacks what is reserved here.
        """
        async with self._inspecting:
            if host is self.host:
                return
            try:
                found = await inspect()
            except MeshErrorGroup as group:
                cause = next(iter(leaves(group)))
                raise SpawnError(f"{name}, which took the place of {self.name}, could not be inspected: {cause}") from (
                    cause
                )
            lacking = self._lacking(found)
            if lacking:
                raise SpawnError(
                    f"{name}, which took the place of {self.name}, must have what is reserved there, but has "
                    f"{lacking}: replace it by a host like {self.name}, or place the processes anew"
                )
            self.name, self.host, self.inventory = name, host, found

    def _lacking(self, found: Inventory) -> str:
        gpus = 1 + max((gpu for slot in self.slots for gpu in slot.gpus), default=-1)
        cpus = 1 + max((cpu for slot in self.slots for cpu in slot.cpus), default=-1)
        if len(found.gpus) < gpus:
            return f"{len(found.gpus)} GPUs instead of {gpus}" + (f" ({found.no_gpus})" if found.no_gpus else "")
        if len(found.cpus) < cpus:
            return f"{len(found.cpus)} CPUs instead of {cpus}"
        for gpu in range(gpus):
            reserved = sum(slot.demand.gpu_memory for slot in self.slots if gpu in slot.gpus)
            if reserved > found.gpus[gpu].memory:
                return f"{found.gpus[gpu].memory} bytes of memory on GPU {gpu} instead of {reserved}"
        memory = sum(slot.demand.memory for slot in self.slots)
        return f"{found.memory} bytes of memory instead of {memory}" if memory > found.memory else ""

    # ---- what is left ----------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        found = self.inventory
        cpus = len(found.cpus) if found.cpu_limit is None else min(len(found.cpus), int(found.cpu_limit))
        free = [Fraction(1)] * len(found.gpus)
        gpu_memory = [gpu.memory_free for gpu in found.gpus]
        for slot in self.slots:
            for gpu in slot.gpus:
                free[gpu] -= slot.gpu_part
                gpu_memory[gpu] -= slot.demand.gpu_memory
        gpus = zip(free, gpu_memory, found.gpus, strict=True)
        return Capacity(
            max(0, cpus - sum(slot.demand.cpus for slot in self.slots)),
            max(0, found.memory_free - sum(slot.demand.memory for slot in self.slots)),
            tuple(GPUCapacity(part, max(0, memory), gpu.is_slice, gpu.node) for part, memory, gpu in gpus),
            found.labels,
        )

    def add(self, slots: Sequence[ReservedSlot]) -> None:
        """Add slots that the solver has placed here, and choose their CPUs."""
        for slot in slots:
            self.slots.append(slot)
            taken = {cpu for other in self.slots for cpu in other.cpus}
            slot.cpus = self._choose_cpus(slot, [cpu for cpu in range(len(self.inventory.cpus)) if cpu not in taken])

    def _choose_cpus(self, slot: ReservedSlot, free: Sequence[int]) -> tuple[int, ...]:
        """Choose CPUs of one NUMA node if one has enough: that of most of the GPUs, then the fullest."""
        count, nodes = slot.demand.cpus, self.inventory.nodes
        near = [self.inventory.gpus[gpu].node for gpu in slot.gpus]
        by_node: dict[int, list[int]] = {}
        for cpu in free:
            by_node.setdefault(nodes[cpu], []).append(cpu)
        order = sorted(by_node.items(), key=lambda one: (len(one[1]) < count, -near.count(one[0]), len(one[1]), one[0]))
        return tuple(cpu for _, cpus in order for cpu in cpus)[:count]

    def taken(self) -> tuple[Taken, ...]:
        """Return what is reserved here, by names in the order of reservation."""
        by_places: dict[ReservedPlaces, list[ReservedSlot]] = {}
        for slot in self.slots:
            by_places.setdefault(slot.places, []).append(slot)
        return tuple(self._taken_by(places, slots) for places, slots in by_places.items())

    def _taken_by(self, places: ReservedPlaces, slots: Sequence[ReservedSlot]) -> Taken:
        shares = [slot.share() for slot in slots]
        return Taken(
            places.name,
            places.mesh,
            len(slots),
            float(sum(slot.demand.gpus for slot in slots)),
            tuple(dict.fromkeys(uuid for share in shares for uuid in share.gpus)),
            tuple(sorted(cpu for share in shares for cpu in share.cpus)),
            sum(share.memory for share in shares),
        )

    def resources(self, found: Inventory) -> Resources:
        return Resources(**msgspec.structs.asdict(found), taken=self.taken())


class ReservedPlaces:
    """Places of the processes of one name, by rank.

    Attributes:
        mesh: Name of the mesh that lives on them; "" while there is none.
    """

    def __init__(self, name: str, demand: Demand) -> None:
        self.name = name
        self.demand = demand
        self.slots: list[ReservedSlot] = []
        self.mesh = ""


class Reservation:
    """All places of one placement, as its block owns them; see `Owned`."""

    def __init__(self, proc: Proc, places: Mapping[str, ReservedPlaces], on_closed: Callable[[], None]) -> None:
        self.places = places
        self.is_closed = False
        self._on_closed = on_closed
        whole = Region(Extent(), mesh=MeshId(proc.proc_id))
        self.info = MeshInfo(AGENT, "placement", None, whole, (), proc.proc_id)

    def close(self) -> None:
        """Free the places; those of a mesh that has not ended follow with its end (RV-3). Idempotent."""
        self.is_closed = True
        self.free()

    def free(self) -> None:
        """Free the places of a closed reservation without a mesh."""
        if not self.is_closed:
            return
        for places in self.places.values():
            if not places.mesh:
                for slot in places.slots:
                    if slot in slot.account.slots:
                        slot.account.slots.remove(slot)
        self._on_closed()

    def cancel_background(self, reason: str) -> None:
        """Do nothing: a reservation runs nothing."""

    async def drain(self) -> list[Exception]:
        """Do nothing: see above."""
        return []

    async def stop(self, deadline: float) -> list[Exception]:
        """Free the places; the meshes on them, adopted later, have ended."""
        del deadline
        await trio.lowlevel.checkpoint()
        self.close()
        return []

    def abandon(self) -> None:
        """Do nothing: places are free once their processes have ended."""

    def kill_now(self) -> None:
        """Do nothing: the block kills the processes."""


class Ledger:
    """Reservations of one process, by host."""

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._accounts: dict[object, Account] = {}

    @asynccontextmanager
    async def changing(self) -> AsyncGenerator[None, None]:
        """Surround an inspection and what follows from it; a second one waits."""
        try:
            async with self._lock:
                yield
        finally:
            self._forget_free()

    @staticmethod
    def of(proc: Proc) -> Ledger:
        found = proc.above.setdefault(Ledger, Ledger())
        assert isinstance(found, Ledger)
        return found

    def account(self, key: object, name: str, host: object, found: Inventory) -> Account:
        """Return the account of a host that was just inspected."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(name, host, found)
        account.update(name, host, found)
        return account

    async def reserve(self, proc: Proc, accounts: Sequence[Account], demands: Mapping[str, Demand]) -> Reservation:
        """Reserve all of some demands, or none, within `changing`.

        Raises:
            SpawnError: There is no room; the text has what is short, and by whom it is taken.
        """
        inventories = list[Inventory]()
        found: dict[str, tuple[Spot, ...]] | Shortage = Shortage()
        while inventories != [account.inventory for account in accounts]:  # a lost host may be replaced meanwhile
            inventories = [account.inventory for account in accounts]
            capacities = [account.capacity() for account in accounts]
            if proc.is_simulated:
                await trio.lowlevel.checkpoint()
                found = solve(capacities, demands)
            else:
                found = await trio.to_thread.run_sync(solve, capacities, demands)
        if isinstance(found, Shortage):
            raise SpawnError(shortage_text(found, demands, accounts))
        reserved = {name: ReservedPlaces(name, demand) for name, demand in demands.items()}
        for name, places in reserved.items():
            places.slots = [ReservedSlot(accounts[spot.host], places, spot.gpus) for spot in found[name]]
        for account in accounts:
            # The largest shares first: each has the better chance to be within one node.
            slots = [slot for places in reserved.values() for slot in places.slots if slot.account is account]
            account.add(sorted(slots, key=lambda slot: -slot.demand.cpus))
        return Reservation(proc, reserved, self._forget_free)

    def _forget_free(self) -> None:
        """Forget the accounts of hosts without reservations, unless one is being made."""
        if self._lock.locked():
            return
        for key in [key for key, account in self._accounts.items() if not account.slots]:
            del self._accounts[key]


# ---- refusals --------------------------------------------------------------------------------------------------------


def shortage_text(shortage: Shortage, demands: Mapping[str, Demand], accounts: Sequence[Account]) -> str:
    """Return the error text of a placement that does not fit."""
    where = f"{len(accounts)} hosts" if len(accounts) > 1 else accounts[0].name
    if shortage.is_limit:
        return (
            "no placement was found within limits.PLACEMENT_CHECKS_MAX tries; there may be one: place the largest "
            f"needs first, in a placement of their own. {_left(accounts)}"
        )
    if not shortage.name:
        wanted = ", ".join(f"{name!r}: {_wanted(demand)}" for name, demand in demands.items())
        short = f", more {shortage.resource} than is free" * bool(shortage.resource)
        return (
            f"{where} must have room for all that is placed together, got {wanted}{short}: lower a count, or add "
            f"hosts. {_left(accounts, shortage.resource)}"
        )
    demand = demands[shortage.name]
    if shortage.resource == "hosts with its labels":
        labels = ", ".join(f"{name}={value}" for name, value in demand.labels.items())
        known = "; ".join(f"{one.name} has {_labels(one)}" for one in accounts[:4])
        return (
            f"no host has the labels {labels} that {shortage.name!r} needs: {known}: set TRIMESH_LABELS in the "
            "environment of the agents of hosts that have them"
        )
    return (
        f"{where} must have room for all processes of {shortage.name!r}, got {_wanted(demand)} each, of which "
        f"{shortage.fits} fit by {shortage.resource}: lower its count, or add hosts. "
        f"{_left(accounts, shortage.resource)}"
    )


def _labels(account: Account) -> str:
    return ", ".join(f"{name}={value}" for name, value in account.inventory.labels.items()) or "none"


def _wanted(demand: Demand) -> str:
    parts = [
        f"{_number(demand.gpus)} GPU{'s' * (demand.gpus > 1)}" * bool(demand.gpus),
        f"{size_text(demand.gpu_memory)} of GPU memory" * bool(demand.gpu_memory),
        f"{demand.cpus} CPU{'s' * (demand.cpus > 1)}" * bool(demand.cpus),
        f"{size_text(demand.memory)} of memory" * bool(demand.memory),
    ]
    return f"{demand.count} with {' and '.join(filter(None, parts)) or 'nothing'}"


def _number(value: Fraction) -> str:
    return f"{float(value):.3g}"


def size_text(count: int) -> str:
    """Return bytes in GiB, or MiB."""
    return f"{count / (1 << 30):.3g} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.3g} MiB"


def _left(accounts: Sequence[Account], resource: str = "") -> str:
    """Return what all hosts have left, and which names have the rest."""
    capacities = [account.capacity() for account in accounts]
    gpus = [gpu for one in capacities for gpu in one.gpus]
    free = {
        "GPUs": f"{_number(sum((gpu.free for gpu in gpus), Fraction(0)))} of {len(gpus)} GPUs",
        "CPUs": f"{sum(one.cpus for one in capacities)} CPUs",
        "memory": f"{size_text(sum(one.memory for one in capacities))} of memory",
    }
    text = f"Free: {free.get(resource) or ', '.join(free.values())}"
    by_name: dict[str, list[Taken]] = {}
    for taken in (taken for account in accounts for taken in account.taken()):
        by_name.setdefault(taken.name, []).append(taken)
    takers = list(filter(None, (_taker(parts, resource) for parts in by_name.values())))
    if takers:
        text += f"; taken by {', '.join(takers)}"
    reasons = list(dict.fromkeys(account.inventory.no_gpus for account in accounts if account.inventory.no_gpus))
    if resource == "GPUs" and reasons:
        text += f"; {accounts[0].name if len(accounts) == 1 else 'a host'} has no GPUs: {reasons[0]}"
    return text


def _taker(parts: Sequence[Taken], resource: str) -> str:
    """Return a name with what it has of a resource, or of all if that is none of them; "" if nothing."""
    gpus, memory = sum(one.gpus for one in parts), sum(one.memory for one in parts)
    has = {
        "GPUs": f"{gpus:.3g} GPUs" * bool(gpus),
        "CPUs": f"{sum(len(one.cpus) for one in parts)} CPUs" * any(one.cpus for one in parts),
        "memory": size_text(memory) * bool(memory),
    }
    found = ", ".join(filter(None, [has[resource]] if resource in has else has.values()))
    return f"{parts[0].name!r} ({found})" * bool(found)
