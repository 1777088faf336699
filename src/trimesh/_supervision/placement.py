"""PURE: solver of placements: which host and which GPUs each process of a placement gets.

    capacities, demands --> one process after the other, with backtracking --> spots | shortage | limit reached

SV-1 No spot exceeds what its host and its GPUs have left.
SV-2 The same input gives the same spots.
SV-3 If any placement exists, one is found, unless the search reaches `limits.PLACEMENT_CHECKS_MAX`.

A state is what all hosts have left. States from which the rest cannot be placed are remembered; those that differ only
in the order of equal hosts or GPUs count as one, so interchangeable processes and hosts are not tried twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Literal

import msgspec

from trimesh import limits

Spread = Literal["pack", "hosts"]


class GPUCapacity(msgspec.Struct, frozen=True):
    """What one GPU has left.

    Attributes:
        free: Part that is not taken, 0 to 1.
        memory: Bytes that are not taken.
        is_slice: Whether it is a slice of a GPU (MIG), of which a process can use only one.
        node: NUMA node: a process gets GPUs of one node, if one of them has enough.
    """

    free: Fraction = Fraction(1)
    memory: int = 0
    is_slice: bool = False
    node: int = -1


class Capacity(msgspec.Struct, frozen=True):
    """What one host has left."""

    cpus: int = 0
    memory: int = 0
    gpus: tuple[GPUCapacity, ...] = ()
    labels: Mapping[str, str] = {}


class Demand(msgspec.Struct, frozen=True):
    """Processes of one name; see `Need`."""

    count: int = 1
    gpus: Fraction = Fraction(0)
    gpu_memory: int = 0
    cpus: int = 0
    memory: int = 0
    beside: str | None = None
    spread: Spread = "pack"
    labels: Mapping[str, str] = {}


class Spot(msgspec.Struct, frozen=True, order=True):
    """Place of one process: its host and GPUs, by index."""

    host: int
    gpus: tuple[int, ...] = ()


class Shortage(msgspec.Struct, frozen=True):
    """Reason why there is no placement.

    Attributes:
        name: The demand that cannot be placed; "" if each one could be alone.
        resource: "GPUs", "CPUs", "memory", "hosts with its labels", "GPUs, CPUs and memory of one host" or
            "".
        fits: Number of processes of that name that can be placed, as far as that resource is concerned.
        is_limit: Whether the search was given up.
    """

    name: str = ""
    resource: str = ""
    fits: int = 0
    is_limit: bool = False


def solve(capacities: Sequence[Capacity], demands: Mapping[str, Demand]) -> dict[str, tuple[Spot, ...]] | Shortage:
    """Place all processes of all demands, or none.

    Process i of n with `beside` is on the host of process `i * m // n` of the m others.

    Returns:
        Spots by name, in the order of hosts; or the reason why there are none.
    """
    short = _short_alone(capacities, demands) or _short_together(capacities, demands)
    return short or _Search(capacities, demands).run()


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _short_alone(capacities: Sequence[Capacity], demands: Mapping[str, Demand]) -> Shortage | None:
    for name, demand in demands.items():
        labelled = [one for one in capacities if _has_labels(one, demand)]
        if not labelled:
            return Shortage(name, "hosts with its labels")
        parts = {
            "GPUs": msgspec.structs.replace(demand, cpus=0, memory=0),
            "CPUs": Demand(demand.count, cpus=demand.cpus),
            "memory": Demand(demand.count, memory=demand.memory),
            "GPUs, CPUs and memory of one host": demand,
        }
        for resource, part in parts.items():
            fits = sum(_most(one, part) for one in labelled)
            if fits < demand.count:
                return Shortage(name, resource, fits)
    return None


def _short_together(capacities: Sequence[Capacity], demands: Mapping[str, Demand]) -> Shortage | None:
    wanted = demands.values()
    if sum(one.gpus * one.count for one in wanted) > sum(gpu.free for one in capacities for gpu in one.gpus):
        return Shortage(resource="GPUs")
    if sum(one.cpus * one.count for one in wanted) > sum(one.cpus for one in capacities):
        return Shortage(resource="CPUs")
    if sum(one.memory * one.count for one in wanted) > sum(one.memory for one in capacities):
        return Shortage(resource="memory")
    return None


def _has_labels(capacity: Capacity, demand: Demand) -> bool:
    return all(capacity.labels.get(name) == value for name, value in demand.labels.items())


def _most(capacity: Capacity, demand: Demand) -> int:
    """Return how many processes of one demand a host has room for."""
    found = demand.count
    if demand.cpus:
        found = min(found, capacity.cpus // demand.cpus)
    if demand.memory:
        found = min(found, capacity.memory // demand.memory)
    if demand.gpus >= 1:
        able = [gpu for gpu in capacity.gpus if gpu.free == 1 and gpu.memory >= demand.gpu_memory]
        found = min(found, len(able) if demand.gpus == 1 else sum(not gpu.is_slice for gpu in able) // int(demand.gpus))
    elif demand.gpus:
        found = min(found, sum(_shares_of(gpu, demand) for gpu in capacity.gpus))
    return found


def _shares_of(gpu: GPUCapacity, demand: Demand) -> int:
    shares = int(gpu.free / demand.gpus)
    return min(shares, gpu.memory // demand.gpu_memory) if demand.gpu_memory else shares


# ---- search ----------------------------------------------------------------------------------------------------------


class _Host:
    """What one host has left during the search; parts of GPUs are whole numbers of `unit`-ths."""

    def __init__(self, capacity: Capacity, unit: int, count: int) -> None:
        self.cpus = capacity.cpus
        self.memory = capacity.memory
        self.free = [int(gpu.free * unit) for gpu in capacity.gpus]
        self.gpu_memory = [gpu.memory for gpu in capacity.gpus]
        self.slices = [gpu.is_slice for gpu in capacity.gpus]
        self.nodes = [gpu.node for gpu in capacity.gpus]
        self.placed = [0] * count


class _Search:
    """Depth-first search, one process a level."""

    def __init__(self, capacities: Sequence[Capacity], demands: Mapping[str, Demand]) -> None:
        self._names = _ordered(demands)
        self._demands = [demands[name] for name in self._names]
        numbers = {name: number for number, name in enumerate(self._names)}
        self._beside = [None if one.beside is None else numbers[one.beside] for one in self._demands]
        free = [gpu.free for one in capacities for gpu in one.gpus]
        self._unit = math.lcm(*(one.denominator for one in [*free, *(demand.gpus for demand in self._demands)]))
        self._units = [int(one.gpus * self._unit) for one in self._demands]
        self._hosts = [_Host(one, self._unit, len(self._demands)) for one in capacities]
        self._labelled = [tuple(_has_labels(one, demand) for demand in self._demands) for one in capacities]
        self._followed = sorted({one for one in self._beside if one is not None})
        pairs = [(one, other) for one, other in zip(self._units, self._beside, strict=True) if other is not None]
        self._leaves_room = sorted({other for units, other in pairs if 0 < units < self._unit})
        # Only if each process has equally many beside it, the order of the hosts is of no importance.
        self._is_ordered = any(
            other is not None and one.count % self._demands[other].count
            for one, other in zip(self._demands, self._beside, strict=True)
        )
        self._levels = [(number, at) for number, one in enumerate(self._demands) for at in range(one.count)]
        self._spots: list[list[Spot]] = [[] for _ in self._demands]
        self._companions: list[list[Spot]] = [[] for _ in self._demands]
        self._failed = set[tuple[object, ...]]()
        self._checks = 0

    def run(self) -> dict[str, tuple[Spot, ...]] | Shortage:
        path = list[Iterator[Spot]]()
        while len(path) < len(self._levels):
            is_dead_end = bool(self._failed) and self._state(len(path)) in self._failed
            path.append(iter(()) if is_dead_end else self._candidates(len(path)))
            while not self._advance(path):
                if self._checks > limits.PLACEMENT_CHECKS_MAX:
                    return Shortage(is_limit=True)
                path.pop()
                self._failed.add(self._state(len(path)))
                if not path:
                    return Shortage()
                self._undo(len(path) - 1)
        return {name: tuple(self._order(number)) for number, name in enumerate(self._names)}

    def _advance(self, path: list[Iterator[Spot]]) -> bool:
        """Take the next candidate of the last level; return False if there is none."""
        spot = None if self._checks > limits.PLACEMENT_CHECKS_MAX else next(path[-1], None)
        if spot is None:
            return False
        number, _ = self._levels[len(path) - 1]
        self._take(number, spot, 1)
        self._spots[number].append(spot)
        return True

    def _undo(self, level: int) -> None:
        number, _ = self._levels[level]
        self._take(number, self._spots[number].pop(), -1)

    def _take(self, number: int, spot: Spot, sign: int) -> None:
        demand, host = self._demands[number], self._hosts[spot.host]
        host.cpus -= sign * demand.cpus
        host.memory -= sign * demand.memory
        host.placed[number] += sign
        part = min(self._units[number], self._unit)
        for gpu in spot.gpus:
            host.free[gpu] -= sign * part
            host.gpu_memory[gpu] -= sign * demand.gpu_memory

    def _order(self, number: int) -> list[Spot]:
        """Return the spots of a demand by rank: those beside others keep the order of the others."""
        spots = self._spots[number]
        return spots if self._beside[number] is not None else sorted(spots)

    # ---- candidates ------------------------------------------------------------------------------------------

    def _candidates(self, level: int) -> Iterator[Spot]:
        number, at = self._levels[level]
        if at == 0 and self._lacks_room(number):
            return
        seen = set[object]()
        for index, companion in self._hosts_for(number, at):
            self._checks += 1
            host, demand = self._hosts[index], self._demands[number]
            if not self._labelled[index][number] or host.cpus < demand.cpus or host.memory < demand.memory:
                continue
            choices = self._gpus_for(number, host, companion)
            first = next(choices, None)
            if first is None:
                continue
            yield Spot(index, first)
            # Resumed after a dead end: an equal host would be another one.
            state = index if self._is_ordered else self._state_of(index)
            if state not in seen:
                seen.add(state)
                for gpus in choices:
                    yield Spot(index, gpus)

    def _lacks_room(self, number: int) -> bool:
        """Return whether a demand from `number` on cannot be placed even alone."""
        left = [
            Capacity(
                host.cpus,
                host.memory,
                tuple(
                    GPUCapacity(Fraction(free, self._unit), memory, is_slice)
                    for free, memory, is_slice in zip(host.free, host.gpu_memory, host.slices, strict=True)
                ),
            )
            for host in self._hosts
        ]
        self._checks += len(left)
        return any(
            sum(_most(one, demand) for one, able in zip(left, self._labelled, strict=True) if able[other])
            < demand.count
            for other, demand in enumerate(self._demands)
            if other >= number
        )

    def _hosts_for(self, number: int, at: int) -> Iterator[tuple[int, Spot | None]]:
        """Yield hosts, preferred ones first, each with the process that the new one is beside."""
        other, demand = self._beside[number], self._demands[number]
        if other is not None:
            if at == 0:
                self._companions[number] = list(self._order(other))
            companion = self._companions[number][at * self._demands[other].count // demand.count]
            yield companion.host, companion
            return
        if demand.spread == "hosts":
            order = sorted(range(len(self._hosts)), key=lambda index: (self._hosts[index].placed[number], index))
            yield from ((index, None) for index in order)
            return
        last = (
            self._spots[number][-1].host if self._spots[number] else 0
        )  # hosts before it have no room for an equal one
        yield from ((index % len(self._hosts), None) for index in range(last, last + len(self._hosts)))

    def _gpus_for(self, number: int, host: _Host, companion: Spot | None) -> Iterator[tuple[int, ...]]:
        """Yield GPUs of a host for one process; of equal ones the first."""
        units, memory = self._units[number], self._demands[number].gpu_memory
        if units == 0:
            yield ()
            return
        part, count = (units, 1) if units < self._unit else (self._unit, units // self._unit)
        beside = () if companion is None else companion.gpus
        kinds: dict[tuple[int, int, bool], list[int]] = {}
        for gpu, free in enumerate(host.free):
            if free >= part and host.gpu_memory[gpu] >= memory and not (count > 1 and host.slices[gpu]):
                kinds.setdefault((free, host.gpu_memory[gpu], host.slices[gpu]), []).append(gpu)
        for members in kinds.values():
            members.sort(key=_order_by_node(host.nodes, members, beside, count))
        # The GPU of the process that it is beside first. Then the tightest fit; the loosest if others come beside it.
        tightest = sorted(kinds, reverse=number in self._leaves_room)
        order = sorted(tightest, key=lambda kind: kinds[kind][0] not in beside)
        for chosen in combinations_with_replacement(order, count):
            counts = {kind: chosen.count(kind) for kind in chosen}
            if all(times <= len(kinds[kind]) for kind, times in counts.items()):
                yield tuple(sorted(gpu for kind, times in counts.items() for gpu in kinds[kind][:times]))

    # ---- states ----------------------------------------------------------------------------------------------

    def _state(self, level: int) -> tuple[object, ...]:
        self._checks += len(self._hosts)
        states = [self._state_of(index) for index in range(len(self._hosts))]
        return (level, *(states if self._is_ordered else sorted(states)))

    def _state_of(self, index: int) -> tuple[object, ...]:
        host = self._hosts[index]
        gpus = sorted(zip(host.free, host.gpu_memory, host.slices, strict=True))
        beside = [
            placed
            for number, placed in enumerate(host.placed)
            if number in self._followed or self._beside[number] is not None
        ]
        return (host.cpus, host.memory, tuple(gpus), self._labelled[index], tuple(beside))


def _order_by_node(
    nodes: Sequence[int], members: Sequence[int], beside: Sequence[int], count: int
) -> Callable[[int], tuple[bool, bool, int, int, int]]:
    """Return the sorting key of equal GPUs: those of `beside` first, then of the fullest node that has `count`."""
    left = Counter(nodes[gpu] for gpu in members)
    return lambda gpu: (gpu not in beside, left[nodes[gpu]] < count, left[nodes[gpu]], nodes[gpu], gpu)


def _ordered(demands: Mapping[str, Demand]) -> list[str]:
    """Return the names in the order of the search: the largest first, those beside others after them."""

    def size(name: str) -> tuple[Fraction, int, int, int]:
        one = demands[name]
        return (one.gpus, one.gpu_memory, one.cpus, one.memory)

    found, rest = list[str](), sorted(demands, key=size, reverse=True)
    while rest:
        name = next(one for one in rest if demands[one].beside is None or demands[one].beside in found)
        found.append(name)
        rest.remove(name)
    return found
