"""Which seeds a test runs under."""

from __future__ import annotations

import itertools

import attrs
import pytest

from trimesh.testing import running
from trimesh.testing.running import SEEDED, SeedPlan, read_seed, runs_told


def test_test_says_how_many_unless_the_command_line_does():
    assert list(SeedPlan().seeds(3)) == [0, 1, 2]
    assert list(SeedPlan(first=5, count=2).seeds(3)) == [5, 6]
    assert list(SeedPlan(only=9, first=5, count=2, seconds=1.0).seeds(3)) == [9]


def test_seeds_go_on_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(100.0, 0.5)
    monkeypatch.setattr(running.time, "monotonic", lambda: next(clock))

    assert list(SeedPlan(first=7, seconds=1.5).seeds(99)) == [7, 8, 9]


def test_test_that_takes_longer_than_its_time_has_one_seed(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(100.0, 10.0)
    monkeypatch.setattr(running.time, "monotonic", lambda: next(clock))

    assert list(SeedPlan(seconds=1.5).seeds(99)) == [0]


def test_fresh_seeds_come_after_those_of_the_test(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(100.0, 0.5)
    monkeypatch.setattr(running.time, "monotonic", lambda: next(clock))
    plan = SeedPlan(fresh_first=70, fresh_seconds=1.0)

    assert list(plan.seeds(3)) == [0, 1, 2, 70, 71]
    assert list(attrs.evolve(plan, only=9).seeds(3)) == [9]


def test_seed_is_read_in_both_notations():
    assert [read_seed("42"), read_seed("0x2a")] == [42, 42]
    with pytest.raises(ValueError, match="invalid literal"):
        read_seed("old")


def test_fresh_seeds_differ():
    assert len({read_seed("fresh") for _ in range(4)}) > 1


def test_runs_are_summed_over_the_reports():
    reports = [[(SEEDED.name, 20)], [("other", 3)], [], [(SEEDED.name, 4)]]

    assert runs_told(reports, 7) == "2 tests under seeds, 24 runs: 4 to 20 seeds each, from 0x7 on"
    assert runs_told(reports, 0, 9).endswith(", from 0x0 on, then from 0x9 on")
    assert runs_told([[]], 7) == ""
