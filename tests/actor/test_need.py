"""`Need`: each field is checked, and the text says what to write."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from tests.rows import rows

from trimesh import Need, limits, this_host
from trimesh.actor.placement.placement import checked_needs


@rows(
    "wrong, kind, text",
    [
        ({"gpus": 1.5}, ValueError, "a whole number of GPUs, or a part of one below 1, got 1.5"),
        ({"gpus": -1}, ValueError, "got -1"),
        ({"gpus": "1"}, ValueError, "got '1'"),
        ({"gpus": float("nan")}, ValueError, "got nan"),
        ({"gpus": 0.0001}, ValueError, "PLACEMENT_SHARES_MAX"),
        ({"count": 0}, ValueError, "a number of processes >= 1, got 0"),
        ({"count": 2.5}, ValueError, "got 2.5"),
        ({"cpus": 0.5}, ValueError, "leave cpus= out, got 0.5"),
        ({"memory": "64GiB"}, ValueError, "such as 64 << 30, got '64GiB'"),
        ({"gpu_memory": 1}, ValueError, "add gpus=1"),
        ({"spread": "host"}, ValueError, '"pack" or "hosts", got \'host\''),
        ({"beside": "a", "spread": "hosts"}, ValueError, "leave spread out"),
        ({"beside": 3}, TypeError, "the name of another need, got 3"),
        ({"labels": ["fast"]}, TypeError, "a mapping of names to texts"),
        ({"labels": {"zone": 1}}, TypeError, "got 'zone': 1"),
        ({"gpu": 1}, TypeError, "gpu"),
    ],
)
def test_wrong_fields_are_refused(wrong: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        Need(**wrong)
    assert text in str(caught.value)


@rows(
    "needs, kind, text",
    [
        ({}, TypeError, "as in {'trainers': Need(gpus=1)}, got {}"),
        (Need(), TypeError, "a mapping of names to needs"),
        ({"a": {"gpus": 1}}, TypeError, "write Need(gpus=1, count=4)"),
        ({"": Need()}, ValueError, "1 to limits.NAME_CHARS_MAX"),
        ({"a": Need(beside="trainer"), "trainers": Need()}, ValueError, "got 'trainer' (is it trainers?)"),
        ({"a": Need(beside="b"), "b": Need(beside="a")}, ValueError, "in a circle, got a -> b -> a"),
        ({"a": Need(beside="a")}, ValueError, "in a circle, got a -> a"),
        ({"a": Need(count=limits.PLACEMENT_PROCS_MAX), "b": Need()}, ValueError, "PLACEMENT_PROCS_MAX"),
    ],
)
def test_wrong_needs_are_refused(needs: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        this_host().place(needs)
    assert text in str(caught.value)


def test_parts_of_a_gpu_are_exact() -> None:
    demands = checked_needs({"a": Need(gpus=1 / 3), "b": Need(gpus=0.333), "c": Need(gpus=2), "d": Need(gpus=0.1)})

    assert [one.gpus for one in demands.values()] == [
        Fraction(1, 3), Fraction(333, 1000), Fraction(2), Fraction(1, 10),
    ]  # fmt: skip
    assert Need(labels={"a": "b"}) == Need(labels={"a": "b"})
