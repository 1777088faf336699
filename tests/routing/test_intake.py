"""What a home counts of one sender (S03): room is told in time, and more than the room is refused."""

from __future__ import annotations

import random

import pytest
from tests.rows import rows

from trimesh import limits
from trimesh._routing.channel_accounts import Intake, port_window
from trimesh.errors import ProtocolError


def test_more_than_the_capacity_breaks_the_protocol():
    intake = Intake(2)
    intake.arrived(1)
    intake.arrived(1)
    with pytest.raises(ProtocolError, match="keep its credits"):
        intake.arrived(1)


def test_more_bytes_than_the_mailbox_takes_break_the_protocol():
    intake = Intake(100)
    intake.arrived(limits.MAILBOX_BYTES)
    with pytest.raises(ProtocolError, match="keep its credits"):
        intake.arrived(1)


def test_sender_that_has_used_its_window_is_told_of_every_item():
    """IN-2."""
    intake = Intake(10)
    for _ in range(10):
        intake.arrived(1)
    intake.take(1)
    assert intake.is_due
    assert intake.report() == 1
    intake.take(1)
    assert not intake.is_due
    intake.arrived(1)
    assert intake.is_due


def test_channel_without_room_lets_one_item_wait():
    assert port_window(0).messages_max == 1


@rows("seed", range(300))
def test_sender_and_home_agree_in_every_order(seed: int):
    """A sender that keeps its credits is never refused, and never waits while there is room for an item."""
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 3, 7, 64])
    window, intake = port_window(capacity), Intake(capacity)
    wire: list[int] = []
    told: list[int] = []
    waiting: list[int] = []
    for _ in range(300):
        choice = rng.randrange(4)
        size = rng.choice([1, 100, limits.MAILBOX_REPORT_BYTES, limits.MAILBOX_BYTES // 2])
        if choice == 0 and window.has_room(size):
            window.sent(size)
            wire.append(size)
        elif choice == 1 and wire:
            waiting.append(wire.pop(0))
            intake.arrived(waiting[-1])
        elif choice == 2 and waiting:
            intake.take(waiting.pop(0))
        elif choice == 3 and told:
            window.acknowledged(told.pop(0))
        if intake.is_due:
            told.append(intake.report())
        if not wire and not told:  # all news is in
            assert window.waiting < window.messages_max or len(waiting) == capacity
            assert waiting or window.has_room(limits.MAILBOX_BYTES * 2)


def test_sender_is_told_when_half_of_its_window_was_taken():
    intake = Intake(10)
    for _ in range(8):
        intake.arrived(1)
    for _ in range(4):
        intake.take(1)
    assert not intake.is_due
    intake.take(1)
    assert intake.is_due
    assert intake.report() == 5


@pytest.mark.parametrize("capacity", range(4))
def test_sender_with_little_room_is_told_of_each(capacity: int):
    intake = Intake(capacity)
    for total in (1, 2):
        intake.arrived(1)
        assert not intake.is_due
        intake.take(1)
        assert intake.is_due
        assert intake.report() == total
