"""Casts to several processes of one other host: which leaf is offered what, and what goes in chunks instead."""

from __future__ import annotations

import random

import pytest
from tests.rows import rows
from tests.transport import casts

from trimesh import limits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    casts.make_small(monkeypatch)


def test_bodies_enter_once_and_each_leaf_is_offered_them():
    host = casts.Host()
    one = host.cast(3, bytes(100), bytes(28))

    assert one.offers == [[], [], []]
    host.carry()

    assert host.entered == [bytes(100) + bytes(28) + bytes(28) + bytes(36)]
    assert all(len(offers) == 1 for offers in one.offers)
    for leaf in range(3):
        assert host.kept == {1}
        one.take(leaf)
    host.carry()
    assert host.kept == set()
    assert host.caster.kept == 0
    assert one.told == 3


def test_leaf_whose_turn_comes_later_is_offered_at_once():
    host = casts.Host()
    one = host.cast(2, bytes(200), begun=1)
    host.carry()
    assert [len(offers) for offers in one.offers] == [1, 0]

    one.begin(1)

    assert [len(offers) for offers in one.offers] == [1, 1]


def test_what_cannot_be_kept_goes_in_chunks_to_each():
    host = casts.Host()
    host.refuses = True
    one = host.cast(2, bytes(200), begun=1)
    host.carry()
    one.begin(1)
    host.carry()

    assert one.in_chunks == [0, 1]
    assert host.kept == set()


@pytest.mark.parametrize("leaves", [1, 2])
def test_small_bodies_and_single_leaves_are_no_cast(leaves):
    host = casts.Host()
    size = limits.HOST_CAST_BYTES_MIN - limits.HOST_CAST_ALIGNMENT if leaves == 2 else 200

    assert host.caster.begin([bytes(size)], leaves) is None


def test_cast_waits_for_no_room():
    host = casts.Host()
    first = host.cast(2, bytes(limits.HOST_CAST_BYTES - 64))
    assert host.caster.begin([bytes(128)], 2) is None
    host.carry()
    for leaf in range(2):
        first.take(leaf)

    assert host.caster.begin([bytes(128)], 2) is not None


def test_no_more_than_some_casts_are_kept():
    host = casts.Host()
    for _ in range(limits.HOST_CASTS_MAX):
        host.cast(2, bytes(128))

    assert host.caster.begin([bytes(128)], 2) is None


def test_end_of_the_channel_sends_all_in_chunks_that_was_not_offered():
    host = casts.Host()
    offered, waiting = host.cast(2, bytes(200)), None
    host.carry()
    waiting = host.cast(2, bytes(200))

    host.caster.close()

    assert offered.in_chunks == []
    assert waiting.in_chunks == [0, 1]
    assert host.caster.begin([bytes(200)], 2) is None


def test_body_that_no_leaf_needs_any_more_is_not_carried():
    host = casts.Host()
    one = host.cast(2, bytes(200))
    one.end(0)
    one.end(1)
    host.carry()

    assert host.entered == []
    assert host.caster.kept == 0


def test_answer_about_what_was_let_go_is_ignored():
    host = casts.Host()
    one = host.cast(2, bytes(200))
    host.carry(answer=False)
    one.end(0)
    one.end(1)

    host.caster.answered(1, b"there")
    host.carry()

    assert host.kept == set()


@rows("seed", range(40))
def test_each_leaf_is_settled_once_whatever_happens(seed):
    """HB-1 to HB-3."""
    casts.run(random.Random(seed))
