"""What one rank of `call_settled` came to."""

from __future__ import annotations

import pytest

from trimesh import Outcome


def test_value():
    outcome = Outcome(value=3)
    assert outcome.ok
    assert outcome.error is None
    assert outcome.unwrap() == 3


def test_error():
    error = KeyError("gone")
    outcome: Outcome[int] = Outcome(error=error)
    assert not outcome.ok
    assert outcome.value is None
    with pytest.raises(KeyError) as caught:
        outcome.unwrap()
    assert caught.value is error


def test_none_is_a_value():
    outcome: Outcome[None] = Outcome(value=None)
    assert outcome.ok
    assert outcome.unwrap() is None


def test_outcomes_are_values():
    assert Outcome(value=1) == Outcome(value=1)
    with pytest.raises(AttributeError):
        Outcome(value=1).value = 2  # type: ignore[misc]
