"""Rates, budgets and hedge delays, without tasks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from trimesh import limits
from trimesh.service.request_policies import AttemptBudget, HedgeDelay, Rate, TokenBucket


@pytest.mark.parametrize("seed", range(20))
def test_no_period_has_more_than_its_rate(seed: int):
    """RB-2."""
    dice = random.Random(seed)
    rate = Rate(dice.uniform(0.5, 20), burst=dice.uniform(1, 10))
    bucket, now, begun = TokenBucket(rate, 0.0), 0.0, list[tuple[float, float]]()
    for _ in range(500):
        now += dice.choice([0.0, dice.expovariate(rate.per_second)])
        cost = dice.uniform(0.1, rate.burst)
        seconds = bucket.take(now, cost)
        if seconds:
            now += seconds * (1 + 1e-9)
            assert bucket.take(now, cost) == 0.0
        begun.append((now, cost))
    for first in range(len(begun)):
        total = 0.0
        for time, cost in begun[first:]:
            total += cost
            assert total <= rate.per_second * (time - begun[first][0]) + rate.burst + 1e-6


def test_request_that_costs_more_than_the_burst_begins_and_is_paid_later():
    bucket = TokenBucket(Rate(1, burst=2), 0.0)
    assert bucket.take(0.0, 5) == 0.0
    assert bucket.take(0.0, 1) == pytest.approx(4.0)
    assert bucket.take(4.0, 1) == 0.0


def test_burst_is_that_of_a_second():
    assert (Rate(10).burst, Rate(0.5).burst) == (10, 1)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_attempts_are_a_share_of_the_requests(share: float):
    """RB-1."""
    budget = AttemptBudget(share)
    taken = 0
    for _ in range(1_000):
        budget.note_request()
        taken += sum(budget.take() for _ in range(3))
    assert taken <= 1_000 * share + limits.POOL_BUDGET_START
    assert taken >= 1_000 * share - 1


def test_hedge_waits_for_samples_and_follows_them():
    delay = HedgeDelay("p95")
    for number in range(1, limits.POOL_HEDGE_SAMPLES + 1):
        assert delay.seconds("a") is None
        delay.note("a", 0.0, float(number))
    assert delay.seconds("a") == pytest.approx(19.0 * 1.1)
    assert delay.seconds("b") is None
    assert HedgeDelay(0.5).seconds("b") == 0.5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Rate(0), "above 0"),
        (lambda: Rate(1, burst=0), "above 0"),
        (lambda: Rate(math.inf), "above 0"),
        (lambda: AttemptBudget(1.1), "from 0 to 1"),
        (lambda: HedgeDelay(0), 'or "p95"'),
        (lambda: HedgeDelay("p99"), 'or "p95"'),
    ],
)
def test_numbers_out_of_bounds_are_refused(make: Any, text: str):
    with pytest.raises(ValueError, match=text):
        make()
