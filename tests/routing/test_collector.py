"""The table of outcomes of one call (CO-1 to CO-4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimesh._routing.collector import (
    Collector,
    LocalFailure,
    Outcome,
    Raised,
    RankState,
    Returned,
    Withdrawn,
    is_failure,
)
from trimesh._wire.messages import CancelAck, Refused
from trimesh.errors import ProcDied

FAILURES: list[Outcome] = [
    Raised(b"error"),
    LocalFailure(ProcDied("died")),
    CancelAck(1, 2, 3, started=True, by="other", reason=""),
    CancelAck(1, 2, 3, started=True, by="budget", reason=""),
    CancelAck(1, 2, 3, started=True, by="stopped", reason=""),
    Refused(1, 2, 3, "stopped", ""),
]
OTHERS: list[Outcome] = [
    Returned(b"value"),
    Withdrawn(),
    CancelAck(1, 2, 3, started=True, by="caller", reason=""),
    CancelAck(1, 2, 3, started=False, by="caller", reason=""),
]


@pytest.mark.parametrize("outcome", FAILURES)
def test_failure_is_an_error_of_its_own(outcome: Outcome):
    """CO-4."""
    assert is_failure(outcome)


@pytest.mark.parametrize("outcome", OTHERS)
def test_value_or_our_own_cancel_is_no_failure(outcome: Outcome):
    """CO-4."""
    assert is_failure(outcome) is False


def test_empty_call_is_complete():
    """M6: a call of an empty view waits for no reply."""
    assert Collector(0, fail_fast=True).is_complete


def test_rank_settles_once():
    """CO-1: what comes later is refused and changes nothing."""
    collector = Collector(2, fail_fast=False)
    assert collector.settle(0, Returned(b"first"))
    assert not collector.settle(0, Raised(b"second"))
    assert collector.outcomes[0] == Returned(b"first")
    assert collector.failures == ()
    assert collector.remaining == 1


def test_all_failures_are_kept_in_the_order_seen():
    """CO-2, E02."""
    collector = Collector(4, fail_fast=True)
    for index in (2, 0, 3):
        assert collector.settle(index, Raised(bytes([index])))
    assert collector.failures == (2, 0, 3)
    assert list(collector.failed()) == [Raised(b"\2"), Raised(b"\0"), Raised(b"\3")]
    assert not collector.is_complete
    collector.settle(1, Returned(b""))
    assert collector.is_complete


def test_first_failure_asks_for_a_cancel():
    """CO-3: while others run, and only with `fail_fast`."""
    for fail_fast in (True, False):
        collector = Collector(2, fail_fast=fail_fast)
        assert not collector.wants_cancel
        collector.settle(0, Raised(b""))
        assert collector.wants_cancel is fail_fast
        collector.settle(1, Returned(b""))
        assert not collector.wants_cancel


def test_withdraw_settles_what_was_not_sent():
    """CO-4: what was sent goes on."""
    collector = Collector(4, fail_fast=False)
    collector.sent(1)
    collector.sent(3)
    collector.settle(3, Returned(b""))
    collector.withdraw_unsent()
    assert list(collector.running()) == [1]
    assert [collector.outcomes[index] for index in (0, 2)] == [Withdrawn(), Withdrawn()]
    assert collector.remaining == 1
    collector.withdraw_unsent()
    assert collector.remaining == 1


def test_rank_is_sent_once():
    """CO-1: an invariant of ours."""
    collector = Collector(1, fail_fast=False)
    collector.sent(0)
    with pytest.raises(AssertionError):
        collector.sent(0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["sent", "withdraw", *FAILURES, *OTHERS])), max_size=40),
    st.booleans(),
)
def test_collector_agrees_with_a_table(events: list[tuple[int, object]], fail_fast: bool):
    """CO-1 to CO-4 against a plain dictionary."""
    collector = Collector(5, fail_fast=fail_fast)
    state = dict.fromkeys(range(5), RankState.UNSENT)
    settled: dict[int, object] = {}
    failures: list[int] = []
    for index, event in events:
        if event == "sent":
            if state[index] is RankState.UNSENT:
                collector.sent(index)
                state[index] = RankState.SENT
        elif event == "withdraw":
            collector.withdraw_unsent()
            for other in [i for i in state if state[i] is RankState.UNSENT]:
                state[other] = RankState.SETTLED
                settled[other] = Withdrawn()
        else:
            assert collector.settle(index, event) is (index not in settled)  # type: ignore[arg-type]
            if index not in settled:
                state[index] = RankState.SETTLED
                settled[index] = event
                if event in FAILURES:
                    failures.append(index)
        assert collector.remaining == 5 - len(settled)
        assert collector.is_complete is (len(settled) == 5)
        assert collector.failures == tuple(failures)
        assert list(collector.running()) == [i for i in state if state[i] is RankState.SENT]
        assert collector.wants_cancel is (fail_fast and bool(failures) and len(settled) < 5)
        assert [collector.outcomes[i] for i in range(5)] == [settled.get(i) for i in range(5)]


def test_each_rank_tells_how_far_it_is():
    collector = Collector(3, fail_fast=False)
    collector.sent(0)
    collector.sent(1)
    collector.settle(1, Returned(b""))
    assert collector.size == 3
    assert list(collector.states()) == [RankState.SENT, RankState.SETTLED, RankState.UNSENT]
    assert [collector.is_running(index) for index in range(3)] == [True, False, False]
    assert list(collector.running()) == [0]
