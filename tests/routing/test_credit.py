"""Credits: a full mailbox makes its sender wait, and never for ever (S07, CR-1)."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimesh._routing.collector import ReceiveCount, SendWindow
from trimesh.errors import ProtocolError


def test_window_is_bounded_by_messages():
    window = SendWindow(3, 1_000)
    for _ in range(3):
        assert window.has_room(1)
        window.sent(1)
    assert not window.has_room(0)
    assert window.waiting == 3
    assert window.acknowledged(1)
    assert window.has_room(0)
    assert window.waiting == 2


def test_window_is_bounded_by_bytes():
    window = SendWindow(100, 1_000)
    window.sent(600)
    assert window.has_room(400)
    assert not window.has_room(401)
    window.acknowledged(1)
    assert window.has_room(401)


def test_one_message_above_the_bound_goes_out_alone():
    """A window that is empty takes anything."""
    window = SendWindow(100, 1_000)
    assert window.has_room(10**9)
    window.sent(10**9)
    assert not window.has_room(1)
    window.acknowledged(1)
    assert window.has_room(10**9)


def test_little_that_waits_does_not_hold_up_a_large_message():
    """CR-1: what the receiver need not report does not count."""
    window = SendWindow(100, 1_000, report_bytes=100)
    window.sent(100)
    assert window.has_room(10**9)
    window.sent(1)
    assert not window.has_room(10**9)
    assert window.has_room(899)


@given(
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 10),
    st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=20),
)
def test_try_sent_is_has_room_and_sent(messages_max: int, bytes_max: int, report: int, steps: list[tuple[int, bool]]):
    one, other = (SendWindow(messages_max, bytes_max, report) for _ in range(2))
    for nbytes, is_taken in steps:
        has_room = one.has_room(nbytes)
        if has_room:
            one.sent(nbytes)
        assert other.try_sent(nbytes) is has_room
        if is_taken and one.waiting:
            total = one.acknowledged_total + 1
            assert one.acknowledged(total)
            assert other.acknowledged(total)
        assert (one.waiting, one.sent_total) == (other.waiting, other.sent_total)


def test_total_that_is_late_or_repeated_does_no_harm():
    window = SendWindow(10, 1_000)
    for _ in range(5):
        window.sent(1)
    assert window.acknowledged(3)
    assert not window.acknowledged(3)
    assert not window.acknowledged(1)
    assert window.waiting == 2


@pytest.mark.parametrize("total", [4, 2**62])
def test_total_above_what_was_sent_breaks_the_protocol(total: int):
    window = SendWindow(10, 1_000)
    for _ in range(3):
        window.sent(1)
    with pytest.raises(ProtocolError, match="credit"):
        window.acknowledged(total)
    assert window.waiting == 3


def test_receiver_reports_after_so_many_messages():
    count = ReceiveCount(report_every=3, report_bytes=1_000)
    for number in range(1, 4):
        assert not count.is_due
        count.take(0)
        assert count.dequeued == number
    assert count.is_due
    assert count.report() == 3
    assert not count.is_due


def test_receiver_reports_after_so_many_bytes():
    count = ReceiveCount(report_every=100, report_bytes=1_000)
    count.take(1_000)
    assert not count.is_due
    count.take(1)
    assert count.is_due
    assert count.report() == 2
    count.take(1_000)
    assert not count.is_due


@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=200), st.integers(1, 10), st.integers(0, 800))
def test_sender_never_waits_for_a_receiver_that_has_taken_everything(sizes: list[int], every: int, nbytes: int):
    """CR-1: with reports only when they are due, every message gets through, whatever the sizes."""
    window = SendWindow(every, 1_000, report_bytes=nbytes)
    count = ReceiveCount(every, nbytes)
    mailbox: deque[int] = deque()
    waiting = deque(sizes)
    while waiting or mailbox:
        while waiting and window.has_room(waiting[0]):
            window.sent(waiting[0])
            mailbox.append(waiting.popleft())
        assert mailbox, "the sender waits, and the receiver has nothing to do"
        assert len(mailbox) <= every
        while mailbox:
            count.take(mailbox.popleft())
            if count.is_due:
                window.acknowledged(count.report())
    window.acknowledged(count.report())
    assert window.waiting == 0


def test_totals_count_what_was_sent_and_what_was_reported():
    window = SendWindow(2, 100)
    window.sent(10)
    window.sent(10)
    assert window.has_room(1) is False
    assert window.acknowledged(1) is True
    assert window.acknowledged(1) is False  # it says nothing new
    assert (window.sent_total, window.acknowledged_total, window.waiting) == (2, 1, 1)


def test_receiver_has_news_until_it_has_reported():
    count = ReceiveCount(4, 100)
    assert count.has_news is False
    count.take(10)
    assert count.has_news is True
    count.report()
    assert count.has_news is False
