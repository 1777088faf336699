"""Sizes of pools under load curves, without tasks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from trimesh.service.scaling import Latencies, LatencyTarget, Requests, Scaler

GROW, SHRINK = 3.0, 60.0


def sizes(curve: Callable[[float], float], seconds: int = 3_600, *, least: int = 1, most: int = 10) -> list[int]:
    """Return the size at each second under a demand in replicas."""
    scaler = Scaler(least, most, grow_after=GROW, shrink_after=SHRINK)
    size, found = least, []
    for now in range(seconds):
        size = scaler.step(float(now), size, curve(now))
        assert least <= size <= most
        found.append(size)
    return found


def changes(found: list[int]) -> list[tuple[int, int]]:
    """Return the second and the difference of each change."""
    return [
        (now + 1, after - before) for now, (before, after) in enumerate(itertools.pairwise(found)) if after != before
    ]


def turns(found: list[int]) -> int:
    """Return how often the direction changed."""
    signs = [difference > 0 for _, difference in changes(found)]
    return sum(one != other for one, other in itertools.pairwise(signs))


def test_step_is_followed_once_up_and_once_down():
    found = sizes(lambda now: 6.5 if 100 <= now < 1_000 else 1.0)
    assert [difference for _, difference in changes(found)] == [6, -5]
    [(up, _), (down, _)] = changes(found)
    assert up == 100 + GROW
    assert down == 1_000 + SHRINK
    assert found[-1] == 2  # one is full, within the tolerance


def test_ramp_is_followed_by_steps():
    found = sizes(lambda now: now / 360)
    assert found == sorted(found)
    assert found[-1] == 10
    assert len(changes(found)) <= 9


@pytest.mark.parametrize("period", [10, 30, 300, 1_200])
def test_sine_turns_no_more_often_than_the_load(period: int):
    found = sizes(lambda now: 5 + 4 * math.sin(2 * math.pi * now / period))
    assert turns(found) <= 2 * 3_600 / max(period, 2 * SHRINK)
    if period <= SHRINK:
        assert turns(found) == 0  # a load that comes back at once is never given up
        assert min(found[300:]) >= 5


def test_spikes_that_are_short_change_nothing():
    assert changes(sizes(lambda now: 9.0 if now % 50 < 2 else 0.9)) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_settles(seed: int):
    dice = random.Random(seed)
    found = sizes(lambda _: max(0.0, dice.gauss(4, 1.5)))
    assert changes(found[600:]) == [] or turns(found[600:]) <= 2
    assert 3 <= found[-1] <= 8


@pytest.mark.parametrize("seed", range(20))
def test_changes_are_bounded_whatever_the_load_does(seed: int):
    """SZ-1, SZ-2."""
    dice = random.Random(seed)
    loads = [dice.choice([0.0, 1e9, math.inf, dice.uniform(0, 12)]) for _ in range(400)]
    found = sizes(lambda now: loads[int(now) // 9], least=2, most=8)
    times = changes(found)
    assert all(later - earlier >= GROW for (earlier, _), (later, _) in itertools.pairwise(times))
    downs = [now for now, difference in times if difference < 0]
    assert all(later - earlier >= SHRINK for earlier, later in itertools.pairwise(downs))
    assert turns(found) <= 2 * 3_600 / SHRINK


def test_size_that_proved_too_small_is_tried_less_and_less():
    """A measure that falls when a replica is added, and rises when it is gone."""
    scaler = Scaler(1, 10, grow_after=GROW, shrink_after=SHRINK)
    size, found = 3, []
    for now in range(20_000):
        size = scaler.step(float(now), size, 4.0 if size < 4 else 2.0)
        found.append(size)
    late = [now for now, difference in changes(found) if difference < 0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(late)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 16 * SHRINK
    assert len(late) < 30


def test_size_out_of_bounds_is_corrected_at_once():
    scaler = Scaler(2, 4, grow_after=GROW, shrink_after=SHRINK)
    assert scaler.step(0.0, 1, 0.0) == 2
    assert scaler.step(1.0, 9, 9.0) == 4


def test_change_that_failed_is_not_tried_again_soon():
    scaler = Scaler(1, 4, grow_after=0.0, shrink_after=SHRINK)
    assert scaler.step(0.0, 1, 4.0) == 4
    scaler.failed(0.0)
    assert {scaler.step(now / 10, 1, 4.0) for now in range(1, 600)} == {1}
    assert scaler.step(61.0, 1, 4.0) == 4


class Replica:
    def __init__(self, limit: int = 4) -> None:
        self.limit, self.is_up, self.is_drained = limit, True, False


class Sample:
    """Statistics of a pool, as far as rules read them."""

    def __init__(self, *, running: int = 0, queued: int = 0, p95: float | None = None, replicas: int = 2) -> None:
        self.running, self.queued, self.arriving, self.p95 = running, queued, 0, p95
        self.replicas = [Replica() for _ in range(replicas)]


def test_requests_that_run_or_wait_are_shared_out():
    statistics: Any = Sample(running=8, queued=5)
    assert Requests(4).demand(statistics, 2) == 13 / 4


@pytest.mark.parametrize(
    ("sample", "size", "demand"),
    [
        (Sample(p95=3.0), 2, 3.0),
        (Sample(p95=90.0), 2, 4.0),  # at most twice
        (Sample(p95=1.9), 2, 2),
        (Sample(running=3, p95=0.1), 2, 2),  # one replica has too little room for them
        (Sample(running=2, p95=1.5), 2, 1 / 1.1),
        (Sample(running=3), 2, 2),
        (Sample(), 2, 0.0),
    ],
)
def test_latency_calls_for_replicas(sample: Any, size: int, demand: float):
    assert LatencyTarget(2.0).demand(sample, size) == pytest.approx(demand)


def test_quantiles_are_of_the_last_requests():
    latencies = Latencies()
    assert latencies.quantiles(0.0, 0.5, 0.95) == [None, None]
    for number in range(1, 101):
        latencies.add(0.0, float(number))
    assert latencies.quantiles(1.0, 0.5, 0.95) == [50.0, 95.0]
    assert latencies.quantiles(1e6, 0.5) == [None]
    latencies.add(2.0, 7.0)
    latencies.clear()
    assert latencies.quantiles(2.0, 0.5) == [None]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Requests(0), "above 0"),
        (lambda: LatencyTarget(math.nan), "above 0"),
        (lambda: Scaler(0, 2, grow_after=1, shrink_after=1), "1 <= least <= most"),
        (lambda: Scaler(3, 2, grow_after=1, shrink_after=1), "1 <= least <= most"),
        (lambda: Scaler(1, 2, grow_after=2, shrink_after=1), "grow_after <= shrink_after"),
    ],
)
def test_numbers_out_of_bounds_are_refused(make: Callable[[], object], text: str):
    with pytest.raises(ValueError, match=text):
        make()
