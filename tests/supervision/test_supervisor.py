"""The supervisor: which units, in which order, and when it gives up (R01-R05, P4, SU-1 to SU-4)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimesh._supervision.policy import Backoff, Restart
from trimesh._supervision.supervisor import Begin, GiveUp, Phase, Round, Supervisor
from trimesh.errors import RestartLimit

UNITS = [(0, 1), (2, 3), (4, 5)]
NO_JITTER = Backoff(1.0, cap=8.0, factor=2, jitter=0)


def supervisor(strategy: Any = "one_for_one", units: Sequence[Sequence[int]] = UNITS, **options: Any) -> Supervisor:
    options = {"backoff": NO_JITTER, "intensity": 3, "period": 60.0} | options
    return Supervisor("procs", Restart(strategy, **options), units)


def begin(decision: Any) -> Round:
    assert isinstance(decision, Begin)
    return decision.round


def finish(machine: Supervisor, round_: Round) -> None:
    machine.is_down(round_)
    machine.rested(round_)
    machine.started(round_)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("one_for_one", [2, 3]),
        ("one_for_all", [0, 1, 2, 3, 4, 5]),
        ("rest_for_one", [2, 3, 4, 5]),
    ],
)
def test_strategy_restarts_its_units_in_spawn_order(strategy: str, ranks: list[int]) -> None:
    """R01-R03."""
    round_ = begin(supervisor(strategy).failed(3, KeyError(), now=0.0))

    assert round_.ranks == ranks
    assert round_.failed == {3}
    assert round_.phase is Phase.DOWN


def test_units_are_restarted_independently() -> None:
    machine = supervisor()
    first = begin(machine.failed(0, KeyError(), 0.0))
    second = machine.failed(2, KeyError(), 0.0)

    assert isinstance(second, Begin)
    assert second.replaced == ()
    assert machine.rounds == [first, second.round]


def test_backoff_grows_with_the_failures_of_a_unit() -> None:
    machine = supervisor(intensity=10)
    delays: list[float] = []
    for now in range(4):
        round_ = begin(machine.failed(0, KeyError(), float(now)))
        delays.append(machine.is_down(round_))
        finish(machine, round_)

    assert delays == [1.0, 2.0, 4.0, 8.0]
    assert begin(machine.failed(2, KeyError(), 4.0)).delay == 1.0


def test_limit_carries_every_cause_oldest_first() -> None:
    """R04, P4: the last one included."""
    machine = supervisor(intensity=2)
    causes = [KeyError(number) for number in range(3)]
    for cause in causes[:2]:
        finish(machine, begin(machine.failed(0, cause, 0.0)))
    decision = machine.failed(4, causes[2], 1.0)

    assert isinstance(decision, GiveUp)
    assert isinstance(decision.error, RestartLimit)
    assert decision.error.causes == tuple(causes)
    assert "intensity=2 in period=60 s" in str(decision.error)
    assert "KeyError: 2" in str(decision.error)


def test_limit_forgets_failures_older_than_the_period() -> None:
    """R04."""
    machine = supervisor(intensity=1, period=10.0)
    for now in (0.0, 10.0, 20.0):
        finish(machine, begin(machine.failed(0, KeyError(), now)))

    assert isinstance(machine.failed(0, KeyError(), 29.9), GiveUp)


def test_no_restart_at_all_with_intensity_zero() -> None:
    assert isinstance(supervisor(intensity=0).failed(0, KeyError(), 0.0), GiveUp)


def test_failure_while_a_round_starts_counts() -> None:
    """R05."""
    machine = supervisor(intensity=1)
    round_ = begin(machine.failed(0, KeyError(1), 0.0))
    machine.is_down(round_)
    machine.rested(round_)
    decision = machine.failed(1, KeyError(2), 0.0)

    assert isinstance(decision, GiveUp)
    assert [cause.args for cause in decision.error.causes] == [(1,), (2,)]


def test_failed_start_counts_and_begins_anew() -> None:
    """R05."""
    machine = supervisor(intensity=2)
    first = begin(machine.failed(0, KeyError(), 0.0))
    machine.is_down(first)
    machine.rested(first)
    decision = machine.start_failed(first, KeyError(), 0.0)

    assert isinstance(decision, Begin)
    assert decision.replaced == (), "it has ended by itself"
    assert decision.round.ranks == [0, 1]
    assert decision.round.delay == 2.0
    assert first.phase is Phase.OVER
    assert machine.start_failed(first, KeyError(), 0.0) is None, "a round that was replaced has nothing to say"


@pytest.mark.parametrize("is_resting", [False, True])
def test_failure_of_what_is_being_taken_down_is_part_of_it(is_resting: bool) -> None:
    """SU-2: it does not count, and its cause is kept."""
    machine = supervisor(intensity=1)
    round_ = begin(machine.failed(0, KeyError(1), 0.0))
    if is_resting:
        machine.is_down(round_)
    assert machine.failed(1, KeyError(2), 0.0) is None
    assert round_.failed == {0, 1}
    finish(machine, round_)
    decision = machine.failed(1, KeyError(3), 0.0)

    assert isinstance(decision, GiveUp)
    assert [cause.args for cause in decision.error.causes] == [(1,), (2,), (3,)]


def test_round_that_needs_a_unit_of_another_takes_its_place() -> None:
    """SU-1: of rest_for_one, a later failure of an earlier unit."""
    machine = supervisor("rest_for_one")
    first = begin(machine.failed(4, KeyError(), 0.0))
    decision = machine.failed(2, KeyError(), 0.0)

    assert isinstance(decision, Begin)
    assert decision.replaced == (first,)
    assert decision.round.ranks == [2, 3, 4, 5]


def test_member_that_left_is_not_restarted() -> None:
    machine = supervisor()
    round_ = begin(machine.failed(0, KeyError(), 0.0))
    machine.leave(0)

    assert round_.ranks == [1]
    assert machine.round_of(0) is None


def test_stopped_supervisor_asks_for_nothing() -> None:
    """SU-4."""
    machine = supervisor()
    round_ = begin(machine.failed(0, KeyError(), 0.0))
    machine.stop()

    assert round_.phase is Phase.OVER
    assert machine.failed(2, KeyError(), 0.0) is None
    assert machine.start_failed(round_, KeyError(), 0.0) is None


# ---- schedules -------------------------------------------------------------------------------------------------------

POLICIES = st.builds(
    lambda strategy, intensity, period: Restart(strategy, intensity=intensity, period=period, backoff=NO_JITTER),
    st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
    st.integers(0, 4),
    st.sampled_from([1.0, 5.0, 1e9]),
)


@given(POLICIES, st.integers(0, 2**32))
def test_schedules_agree_with_a_plain_account(policy: Restart, seed: int) -> None:
    """SU-1 to SU-4 over random schedules, against a list of times and a table of who is down."""
    chance = random.Random(seed)
    machine = Supervisor("procs", policy, UNITS)
    now, counted, causes = 0.0, list[float](), list[tuple[float, Exception]]()
    down = set[int]()
    for step in range(60):
        now += chance.choice([0.0, 0.5, 1.0])
        if machine.rounds and chance.random() < 0.6:
            round_ = chance.choice(machine.rounds)
            if round_.phase is Phase.DOWN:
                machine.is_down(round_)
            elif round_.phase is Phase.RESTING:
                machine.rested(round_)
            else:
                machine.started(round_)
                down.difference_update(round_.ranks)
            continue
        rank, cause = chance.randrange(6), KeyError(step)
        before = machine.round_of(rank)
        counts = before is None or before.phase is Phase.STARTING
        decision = machine.failed(rank, cause, now)
        causes.append((now, cause))
        if not counts:
            assert decision is None
            continue
        counted.append(now)
        is_too_often = sum(at > now - policy.period for at in counted) > policy.intensity
        if is_too_often:
            assert isinstance(decision, GiveUp)
            assert list(decision.error.causes) == [cause for at, cause in causes if at > now - policy.period]
            assert machine.failed(rank, cause, now) is None
            return
        assert isinstance(decision, Begin)
        down.update(decision.round.ranks)
        assert rank in decision.round.ranks
        check_rounds(machine, down)


def check_rounds(machine: Supervisor, down: set[int]) -> None:
    """Whoever is down is in one round, and the rounds have nobody else."""
    ranks = [rank for round_ in machine.rounds for rank in round_.ranks]
    assert len(ranks) == len(set(ranks))
    assert set(ranks) == down
    for round_ in machine.rounds:
        assert round_.ranks == [rank for unit in round_.units for rank in UNITS[unit]]
        assert list(round_.units) == sorted(round_.units)


def test_failed_start_of_a_round_that_all_members_have_left_begins_none() -> None:
    """A round without members would keep those of its unit from ever being restarted again (SU-2)."""
    machine = supervisor(units=[(0,), (1,)])
    round_ = begin(machine.failed(1, KeyError(), 0.0))
    machine.is_down(round_)
    machine.rested(round_)
    machine.leave(1)

    assert machine.start_failed(round_, KeyError(), 1.0) is None
    assert machine.rounds == []
    assert begin(machine.failed(1, KeyError(), 2.0)).ranks == [1]


def test_round_knows_its_cause_and_how_far_it_is() -> None:
    machine = supervisor()
    cause = KeyError("why")
    round_ = begin(machine.failed(0, cause, 0.0))
    assert round_.cause is cause
    phases: list[Phase] = []
    for step in (machine.is_down, machine.rested, machine.started):
        step(round_)
        phases.append(round_.phase)
    assert phases == [Phase.RESTING, Phase.STARTING, Phase.OVER]


def test_what_has_been_handed_to_another_does_not_count_any_more() -> None:
    """P1: after giving up, the supervisor goes on with a clean record."""
    machine = supervisor(intensity=1)
    finish(machine, begin(machine.failed(0, KeyError(), 0.0)))
    assert isinstance(machine.failed(0, KeyError(), 1.0), GiveUp)
    assert machine.is_stopped
    machine.resume()
    assert not machine.is_stopped
    finish(machine, begin(machine.failed(0, KeyError(), 2.0)))
    assert isinstance(machine.failed(0, KeyError(), 3.0), GiveUp)
