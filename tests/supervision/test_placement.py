"""The solver of placements: exact on small cases, deterministic, never over capacity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimesh import limits
from trimesh._supervision.placement import Capacity, Demand, GPUCapacity, Shortage, Spot, solve

HALF, THIRD = Fraction(1, 2), Fraction(1, 3)
Found = dict[str, tuple[Spot, ...]]


def gpus(count: int, memory: int = 80) -> tuple[GPUCapacity, ...]:
    return (GPUCapacity(memory=memory),) * count


def test_fills_a_host_before_the_next() -> None:
    found = solve([Capacity(gpus=gpus(4)), Capacity(gpus=gpus(4))], {"trainers": Demand(6, gpus=Fraction(1))})

    assert isinstance(found, dict)
    assert [(spot.host, *spot.gpus) for spot in found["trainers"]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_spreads_over_hosts() -> None:
    found = solve([Capacity(cpus=8), Capacity(cpus=2), Capacity(cpus=8)], {"envs": Demand(7, cpus=1, spread="hosts")})

    assert isinstance(found, dict)
    assert Counter(spot.host for spot in found["envs"]) == {0: 3, 1: 2, 2: 2}


def test_gpus_of_a_process_are_of_one_node() -> None:
    host = Capacity(gpus=tuple(GPUCapacity(node=node) for node in (0, 1, 0, 1, 0, 1)))
    found = solve([host], {"a": Demand(2, gpus=Fraction(2)), "b": Demand(1, gpus=Fraction(2))})

    assert isinstance(found, dict)
    assert [spot.gpus for spot in found["a"]] == [(0, 2), (1, 3)]
    assert found["b"] == (Spot(0, (4, 5)),)


def test_shares_of_one_gpu_lie_together() -> None:
    found = solve([Capacity(gpus=gpus(2))], {"a": Demand(3, gpus=THIRD), "b": Demand(1, gpus=Fraction(1))})

    assert isinstance(found, dict)
    assert {spot.gpus for spot in found["a"]} == {(1,)}
    assert found["b"] == (Spot(0, (0,)),)


def test_processes_beside_others_share_their_gpus_in_their_order() -> None:
    demands = {
        "generators": Demand(8, gpus=HALF, beside="trainers"),
        "trainers": Demand(8, gpus=HALF, spread="hosts"),
    }
    found = solve([Capacity(gpus=gpus(4)), Capacity(gpus=gpus(4))], demands)

    assert isinstance(found, dict)
    assert [spot.host for spot in found["generators"]] == [spot.host for spot in found["trainers"]]
    assert Counter(found["generators"]) == Counter(found["trainers"])


def test_two_slices_of_a_gpu_are_not_two_gpus() -> None:
    slices = (GPUCapacity(is_slice=True),) * 4

    assert solve([Capacity(gpus=slices)], {"a": Demand(1, gpus=Fraction(2))}) == Shortage("a", "GPUs", 0)
    assert isinstance(solve([Capacity(gpus=slices)], {"a": Demand(4, gpus=Fraction(1))}), dict)


@pytest.mark.parametrize(
    ("demand", "shortage"),
    [
        (Demand(5, gpus=Fraction(1)), Shortage("a", "GPUs", 4)),
        (Demand(2, gpus=Fraction(1), gpu_memory=100), Shortage("a", "GPUs", 0)),
        (Demand(3, cpus=3), Shortage("a", "CPUs", 2)),
        (Demand(1, memory=11), Shortage("a", "memory", 0)),
        (Demand(1, labels={"zone": "b"}), Shortage("a", "hosts with its labels", 0)),
        (Demand(2, cpus=1, memory=10), Shortage("a", "GPUs, CPUs and memory of one host", 1)),
    ],
)
def test_a_shortage_is_named(demand: Demand, shortage: Shortage) -> None:
    capacities = [Capacity(cpus=0, memory=10, gpus=gpus(2)), Capacity(cpus=7, memory=10, gpus=gpus(2))]
    capacities[0] = msgspec.structs.replace(capacities[0], labels={"zone": "a"})

    assert solve(capacities, {"a": demand}) == shortage


def test_a_search_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PLACEMENT_CHECKS_MAX", 3)

    assert solve([Capacity(cpus=1)] * 5, {"a": Demand(5, cpus=1)}) == Shortage(is_limit=True)


def test_a_large_placement_is_found_without_going_back() -> None:
    hosts = [Capacity(cpus=96, memory=1 << 40, gpus=gpus(8))] * 64
    demands = {
        "trainers": Demand(256, gpus=Fraction(1), cpus=8),
        "generators": Demand(512, gpus=HALF, cpus=4),
        "envs": Demand(512, cpus=2, spread="hosts"),
    }

    assert isinstance(solve(hosts, demands), dict)


# ---- properties --------------------------------------------------------------------------------------------------

PARTS = st.sampled_from([Fraction(0), THIRD, HALF, Fraction(2, 3), Fraction(1), Fraction(2)])
GPUS = st.lists(
    st.builds(
        GPUCapacity,
        free=st.sampled_from([HALF, Fraction(1), Fraction(1)]),
        memory=st.integers(1, 2),
        is_slice=st.booleans(),
    ),
    max_size=3,
)
CAPACITIES = st.lists(
    st.builds(
        Capacity,
        cpus=st.integers(0, 3),
        memory=st.integers(0, 3),
        gpus=GPUS.map(tuple),
        labels=st.sampled_from([{}, {}, {"zone": "a"}]),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def needs(draw: st.DrawFn) -> dict[str, Demand]:
    found: dict[str, Demand] = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        found[name] = Demand(
            draw(st.integers(1, 3 if len(found) < 2 else 2)),
            gpus=draw(PARTS),
            gpu_memory=draw(st.integers(0, 2)),
            cpus=draw(st.integers(0, 2)),
            memory=draw(st.integers(0, 2)),
            beside=draw(st.sampled_from([None, *found])),
            spread=draw(st.sampled_from(["pack", "hosts"])),
            labels=draw(st.sampled_from([{}, {}, {"zone": "a"}])),
        )
    names = draw(st.permutations(list(found)))
    return {name: found[name] for name in names}


def fits(capacities: Sequence[Capacity], demands: Mapping[str, Demand], spots: Found) -> bool:
    """Check all conditions of a placement, without the solver."""
    cpus = [one.cpus for one in capacities]
    memory = [one.memory for one in capacities]
    free = [[gpu.free for gpu in one.gpus] for one in capacities]
    gpu_memory = [[gpu.memory for gpu in one.gpus] for one in capacities]
    for name, demand in demands.items():
        if len(spots[name]) != demand.count:
            return False
        for at, spot in enumerate(spots[name]):
            there = capacities[spot.host]
            if not demand.labels.items() <= there.labels.items():
                return False
            if demand.beside is not None:
                others = spots[demand.beside]
                if others[at * len(others) // demand.count].host != spot.host:
                    return False
            whole = int(demand.gpus)
            if len(set(spot.gpus)) != (whole or bool(demand.gpus)) or len(set(spot.gpus)) != len(spot.gpus):
                return False
            if len(spot.gpus) > 1 and any(there.gpus[gpu].is_slice for gpu in spot.gpus):
                return False
            cpus[spot.host] -= demand.cpus
            memory[spot.host] -= demand.memory
            for gpu in spot.gpus:
                free[spot.host][gpu] -= min(demand.gpus, Fraction(1))
                gpu_memory[spot.host][gpu] -= demand.gpu_memory
    left = [*cpus, *memory, *(one for host in free for one in host), *(one for host in gpu_memory for one in host)]
    return all(one >= 0 for one in left)


def brute_force(capacities: Sequence[Capacity], demands: Mapping[str, Demand]) -> bool:
    """Try every assignment of every process to every host and GPU; those beside others come after them."""
    names = sorted(demands)  # in `needs`, a name is beside earlier ones only

    def choices(demand: Demand) -> list[Spot]:
        count = int(demand.gpus) or bool(demand.gpus)
        return [
            Spot(host, chosen)
            for host, one in enumerate(capacities)
            for chosen in combinations(range(len(one.gpus)), count)
        ]

    def search(at: int, spots: Found) -> bool:
        if at == len(names):
            return True
        demand = demands[names[at]]
        for chosen in product(choices(demand), repeat=demand.count):
            if demand.beside is None and list(chosen) != sorted(chosen):
                continue
            now = {**spots, names[at]: chosen}
            if fits(capacities, {name: demands[name] for name in names[: at + 1]}, now) and search(at + 1, now):
                return True
        return False

    return search(0, {})


@settings(max_examples=300, deadline=None)
@given(CAPACITIES, needs())
def test_a_placement_is_found_if_there_is_one_and_fits(capacities: list[Capacity], demands: dict[str, Demand]) -> None:
    found = solve(capacities, demands)

    if isinstance(found, Shortage):
        assert not found.is_limit
        assert not brute_force(capacities, demands)
    else:
        assert fits(capacities, demands, found)
        assert [spot.host for name, one in demands.items() if one.beside is None for spot in found[name]] == [
            host for name, one in demands.items() if one.beside is None for host in sorted(s.host for s in found[name])
        ]
    assert solve(capacities, demands) == found
