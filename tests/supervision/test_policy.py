"""Policies: what users may state, and the verdict over each failure (P2, R10, R11)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh._supervision.policy import (
    FAILURES,
    Backoff,
    Ending,
    FailFast,
    Isolate,
    MemberFailure,
    MeshState,
    Policy,
    Restart,
    Verdict,
    check_units,
    checked_policy,
    decide,
    ending_of,
    is_healing,
    judge,
    units_of,
)
from trimesh.errors import ActorFailed, HostLost, LinkLost, ProcDied, ShapeError, Unresponsive
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region

RESTARTED = {
    # (when, ending): the matrix of OTP
    ("permanent", Ending.NORMAL): True,
    ("permanent", Ending.CANCELLED): True,
    ("permanent", Ending.ERROR): True,
    ("transient", Ending.NORMAL): False,
    ("transient", Ending.CANCELLED): False,
    ("transient", Ending.ERROR): True,
    ("temporary", Ending.NORMAL): False,
    ("temporary", Ending.CANCELLED): False,
    ("temporary", Ending.ERROR): False,
}


@rows(("when", "ending"), list(RESTARTED))
def test_restart_follows_the_matrix_of_otp(when: Any, ending: Ending) -> None:
    """R10, R11: what is not restarted is given up, and is no failure of the block."""
    verdict = judge(MemberFailure(ProcDied, ending), Restart(when=when))

    assert verdict is (Verdict.RESTART if RESTARTED[when, ending] else Verdict.GIVE_UP)


@rows(("kind", "ending", "has_ended"), list(itertools.product(FAILURES, Ending, (True, False))))
def test_isolate_fails_nothing(kind: type[Exception], ending: Ending, has_ended: bool) -> None:
    expected = Verdict.GIVE_UP if has_ended else Verdict.NOTE

    assert judge(MemberFailure(kind, ending, has_ended), Isolate()) is expected


@pytest.mark.parametrize("kind", FAILURES)
def test_fail_fast_fails_on_all_but_silence(kind: type[Exception]) -> None:
    """P2, C2: an `Unresponsive` member fails the block only if the policy names it."""
    expected = Verdict.NOTE if kind is Unresponsive else Verdict.FAIL

    assert judge(MemberFailure(kind, has_ended=False), FailFast()) is expected
    assert judge(MemberFailure(kind, has_ended=False), FailFast(on=(kind,))) is Verdict.FAIL


@pytest.mark.parametrize("kind", [LinkLost, ActorFailed])
def test_restart_fails_on_an_end_that_it_does_not_name(kind: type[Exception]) -> None:
    assert judge(MemberFailure(kind), Restart()) is Verdict.FAIL
    assert judge(MemberFailure(kind, has_ended=False), Restart()) is Verdict.NOTE


KILLED = MemberFailure(ProcDied)
EXITED = MemberFailure(ProcDied, Ending.NORMAL)
HOST_LOST = MemberFailure(HostLost)
BROKEN = MemberFailure(ActorFailed, of="actor")
RAISED = MemberFailure(ActorFailed, has_ended=False, of="actor")
DONE = MemberFailure(ActorFailed, Ending.CANCELLED, of="actor")
HANDED_UP = MemberFailure(ActorFailed, has_ended=False, of="handed up")
HEALS_ACTORS = Restart(on=ActorFailed)  # type: ignore[arg-type]
HEALS_ERRORS = Restart(when="transient")

STATES = (
    MeshState(),
    MeshState(is_ending=True),
    MeshState(is_used_up=True),
    MeshState(is_used_up=True, is_stopping=True),
)


@rows(
    ("policy", "failure", "effects"),
    [
        # `?`: the failure handlers are asked first. In the order of STATES: while all goes well, while a round takes
        # the member down, when restarts are used up, and while the block is being left.
        (FailFast(), KILLED, "fail?"),
        (FailFast(), EXITED, "fail?"),
        (FailFast(), HOST_LOST, "fail?"),
        (FailFast(), BROKEN, "fail?"),
        (FailFast(), RAISED, "fail?"),
        (FailFast(), DONE, "give up"),
        (FailFast(), HANDED_UP, "fail?"),
        (FailFast(on=()), KILLED, "give up?"),
        (FailFast(on=()), EXITED, "give up"),
        (FailFast(on=()), RAISED, "note?"),
        (Isolate(), KILLED, "give up?"),
        (Isolate(), EXITED, "give up"),
        (Isolate(), RAISED, "note?"),
        (Isolate(), DONE, "give up"),
        (Isolate(), HANDED_UP, "note?"),
        (Restart(), KILLED, "restart?, restart, fail?, give up?"),
        (Restart(), EXITED, "restart?, restart, fail?, give up?"),
        (Restart(), HOST_LOST, "restart?, restart, fail?, give up?"),
        (Restart(), BROKEN, "fail?, restart, fail?, fail?"),
        (Restart(), RAISED, "note?, restart, note?, note?"),
        (Restart(), DONE, "give up, restart, give up, give up"),
        (Restart(), HANDED_UP, "restart?, restart?, fail?, note?"),
        (HEALS_ACTORS, KILLED, "fail?, restart, fail?, fail?"),
        (HEALS_ACTORS, EXITED, "give up, restart, give up, give up"),
        (HEALS_ACTORS, BROKEN, "restart?, restart, fail?, give up?"),
        (HEALS_ACTORS, RAISED, "restart?, restart, fail?, note?"),
        (HEALS_ACTORS, DONE, "restart, restart, fail, give up"),
        (HEALS_ERRORS, KILLED, "restart?, restart, fail?, give up?"),
        (HEALS_ERRORS, EXITED, "give up, restart, give up, give up"),
    ],
)
def test_what_follows_from_a_failure(policy: Policy, failure: MemberFailure, effects: str) -> None:
    """P1, P2, R10, R11: a policy that restarts nothing has one state."""
    states = STATES if isinstance(policy, Restart) else STATES[:1]

    found = [decide(failure, policy, state) for state in states]

    assert ", ".join(one.verdict.value + "?" * one.asks for one in found) == effects


@pytest.mark.parametrize(
    ("exit_code", "signal", "ending"),
    [
        (0, None, Ending.NORMAL),
        (3, None, Ending.ERROR),
        (None, 9, Ending.ERROR),
        (None, 15, Ending.CANCELLED),
        (None, 2, Ending.CANCELLED),
        (None, None, Ending.ERROR),
    ],
)
def test_ending_of_a_process(exit_code: int | None, signal: int | None, ending: Ending) -> None:
    assert ending_of(exit_code, signal) is ending


@rows(
    ("options", "error", "text"),
    [
        ({"strategy": "all"}, ValueError, "one_for_all"),
        ({"when": "never"}, ValueError, "temporary"),
        ({"intensity": -1}, ValueError, "intensity"),
        ({"intensity": 1.5}, ValueError, "intensity"),
        ({"intensity": True}, ValueError, "intensity"),
        ({"period": 0}, ValueError, "period"),
        ({"period": math.nan}, ValueError, "period"),
        ({"period": "60"}, ValueError, "period"),
        ({"along": 2}, TypeError, "along='replica'"),
        ({"backoff": 0.5}, TypeError, "write Backoff"),
        ({"on": (ValueError,)}, TypeError, "ProcDied, HostLost"),
        ({"on": "ProcDied"}, TypeError, "write on=(ProcDied"),
    ],
)
def test_restart_refuses_what_makes_no_sense(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        Restart(**options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"initial": -1}, "initial"),
        ({"cap": math.inf}, "cap"),
        ({"factor": 0.5}, "factor"),
        ({"jitter": 1.1}, "jitter"),
        ({"initial": "1"}, "initial"),
    ],
)
def test_backoff_refuses_what_makes_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Backoff(**options)


def test_on_takes_a_single_failure() -> None:
    assert Restart(on=ProcDied).on == (ProcDied,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "text"), [(Restart, "write Restart()"), ("restart", "Restart(...)"), (None, "got None")]
)
def test_supervision_refuses_what_is_no_policy(policy: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        checked_policy(policy)
    assert text in str(caught.value)


def test_backoff_grows_up_to_its_cap() -> None:
    backoff = Backoff(0.1, cap=1.0, factor=2, jitter=0)

    assert [backoff.delay(attempt) for attempt in range(1, 6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])
    assert backoff.delay(100_000) == 1.0
    assert Backoff(0).delay(100_000) == 0.0


@given(
    st.builds(Backoff, st.floats(0, 10), st.floats(0, 100), st.floats(1, 10), st.floats(0, 1)),
    st.integers(1, 10_000),
    st.floats(0, 1),
)
def test_backoff_stays_in_its_bounds(backoff: Backoff, attempt: int, luck: float) -> None:
    most = min(backoff.cap, backoff.delay(attempt))

    assert (1 - backoff.jitter) * most * 0.999_999 <= backoff.delay(attempt, luck) <= most


# ---- units -----------------------------------------------------------------------------------------------------------

WHOLE = Region(Extent(replica=2, gpus=3))


@pytest.mark.parametrize(
    ("along", "units"),
    [
        (None, [(0,), (1,), (2,), (3,), (4,), (5,)]),
        ("replica", [[0, 1, 2], [3, 4, 5]]),
        ("gpus", [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_unit_is_the_slice_along_a_dimension(along: str | None, units: Any) -> None:
    assert units_of(WHOLE, along) == units


def test_units_leave_missing_members_out() -> None:
    assert units_of(WHOLE.exclude_ranks([1, 3, 4, 5]), "replica") == [[0, 2]]


def test_units_need_a_dimension_that_is_there() -> None:
    check_units(Restart(along="gpus"), WHOLE.extent)
    check_units(Isolate(), WHOLE.extent)
    with pytest.raises(ShapeError, match="'replica', 'gpus'"):
        check_units(Restart(along="hosts"), WHOLE.extent)


@pytest.mark.parametrize(("policy", "heals"), [(FailFast(), False), (Isolate(), True), (Restart(), True)])
def test_policy_is_taken_as_it_is(policy: Policy, heals: bool) -> None:
    assert checked_policy(policy) is policy
    assert is_healing(policy) is heals


def test_backoff_that_grows_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="factor"):
        Backoff(factor=math.inf)
