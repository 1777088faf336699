"""The accounts of slots and of stored items, alone: no tasks, no clock."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import pytest
from tests.rows import rows

from trimesh.service.accounts import ReplayAccount, ReplayItem, SlotAccount, SlotLease, estimate_bytes


def item(value: int, version: int = 0, group: int | None = None, priority: float = 1.0, size: int = 1) -> ReplayItem:
    return ReplayItem(value, version=version, group=group, priority=priority, size=size)


def filled(count: int, capacity: int = 100, max_age: int | None = None) -> ReplayAccount:
    account = ReplayAccount(capacity, 1000, seed=3, max_age=max_age)
    for number in range(count):
        account.add(item(number, group=number // 4))
    return account


def test_slots_are_counted_once_whatever_becomes_of_leases() -> None:
    """Y7."""
    for seed in range(200):
        rng = random.Random(seed)
        account = SlotAccount(batch=rng.randint(1, 4), staleness=rng.randint(0, 3), version=0)
        waiting: list[SlotLease] = []
        held: list[SlotLease] = []
        for _ in range(200):
            match rng.randrange(5):
                case 0 | 1:
                    waiting.append(account.ask(rng.randint(1, account.capacity)))
                case 2 if held:
                    account.end(held.pop(rng.randrange(len(held))), well=rng.random() < 0.7)
                case 3 if waiting:
                    account.withdraw(waiting.pop(rng.randrange(len(waiting))))
                case 4:
                    account.advance(account.version + 1)
            granted = account.grant()
            assert granted == waiting[: len(granted)]
            del waiting[: len(granted)]
            held += granted
            assert account.running == sum(lease.group for lease in held)
            assert account.begun == account.running + account.returned + account.handed_on
            assert 0 <= account.in_use <= account.capacity
            assert not waiting or account.in_use + waiting[0].group > account.capacity


def test_work_in_order_is_trained_within_the_staleness() -> None:
    """Y7."""
    for batch, staleness in ((1, 0), (2, 1), (3, 4)):
        account = SlotAccount(batch, staleness, version=0)
        done: list[int] = []
        ages: list[int] = []
        for _ in range(50):
            lease = account.ask(1)
            while account.grant():
                assert lease.version is not None
                account.end(lease, well=True)
                done.append(lease.version)
                lease = account.ask(1)
            account.withdraw(lease)
            ages += [account.version - version for version in done[:batch]]
            del done[:batch]
            account.advance(account.version + 1)
        assert max(ages) == staleness


def test_each_version_that_is_skipped_frees_the_slots_of_a_batch() -> None:
    """Y7."""
    account = SlotAccount(2, 3, version=5)
    for _ in range(7):
        account.ask(1)
    for lease in account.grant():
        account.end(lease, well=True)
    assert account.advance(7) is True
    assert (account.in_use, account.finished, account.version) == (3, 3, 7)
    assert account.advance(7) is False
    account.release(1)
    assert account.in_use == 2
    account.ask(5)
    [lease] = account.grant()
    assert lease.version == 7
    account.advance(10)  # three batches, of which one slot and the running ones are left
    assert (account.in_use, account.finished, account.running) == (5, 0, 5)


def test_loaded_slots_go_on_and_what_was_held_is_lost() -> None:
    """Y7."""
    account = SlotAccount(2, 1, version=1)
    first, second, third = (account.ask(1) for _ in range(3))
    assert account.grant() == [first, second, third]
    account.end(first, well=True)
    account.end(second, well=False)
    loaded = SlotAccount(2, 1, version=0)
    loaded.load({**account.state(), "lost": 4, "begun": 7})
    assert (loaded.version, loaded.in_use, loaded.running) == (1, 1, 0)
    assert loaded.begun == loaded.returned + loaded.handed_on + loaded.lost == 7
    waiting = SlotAccount(2, 1, version=0)
    waiting.ask(1)
    with pytest.raises(ValueError, match="before the first lease"):
        waiting.load(account.state())


def test_slots_refuse_what_cannot_be() -> None:
    """Y7."""
    account = SlotAccount(2, 0, version=3)
    assert account.advance(3) is False
    with pytest.raises(ValueError, match="at least the current one"):
        account.advance(2)
    with pytest.raises(ValueError, match="0 to 0 slots, those of finished work, got 1"):
        account.release(1)
    account.ask(1)
    with pytest.raises(ValueError, match="before the first lease"):
        account.load(account.state())


def test_items_are_counted_once_whatever_becomes_of_them() -> None:
    """Y8."""
    for seed in range(200):
        rng = random.Random(seed)
        account = ReplayAccount(20, 60, seed, rng.choice([None, 0, 2]))
        taken: list[int] = []
        for number in range(300):
            match rng.randrange(7):
                case 0 | 1 | 2 if account.has_room(size := rng.randint(1, 9)):
                    account.add(item(number, max(0, account.version - rng.randint(0, 3)), size=size))
                case 3:
                    account.hold(rng.randint(1, 4), rng.choice([None, 1]))
                case 4 if account.holds:
                    hold = rng.choice(list(account.holds))
                    taken += [one.value for one in account.holds[hold][1]]
                    account.confirm(hold)
                case 5 if account.holds:
                    account.put_back(rng.choice(list(account.holds)))
                case 6:
                    account.advance(account.version + rng.randint(0, 1))
            there = list(account.items.values())
            held = [one for _, items in account.holds.values() for one in items]
            assert account.added == len(there) + len(held) + account.taken + account.evicted.total()
            assert account.bytes == sum(one.size for one in there + held) <= 60
            assert len(there) + len(held) <= 20
            assert list(account.items) == sorted(account.items)
            assert account.max_age is None or all(account.version - one.version <= account.max_age for one in there)
        assert len(taken) == len(set(taken)) == account.taken


def test_batches_are_the_oldest_that_are_young_enough() -> None:
    """Y8."""
    account = ReplayAccount(10, 100, 0, None)
    for number, version in enumerate([0, 2, 1, 2]):
        account.add(item(number, version))
    account.advance(2)
    assert account.hold(3, 0) is None
    hold = account.hold(2, 0)
    assert hold is not None
    assert [one.value for one in account.holds[hold][1]] == [1, 3]
    account.put_back(hold)
    assert [one.value for one in account.items.values()] == [0, 1, 2, 3]


def test_draws_follow_from_the_seed_and_go_on_after_a_load() -> None:
    """Y9."""
    first, second = filled(20), filled(20)
    drawn = [[one.value for one in account.sample(5, None, "uniform") or []] for account in (first, second)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 5
    loaded = ReplayAccount(100, 1000, seed=99, max_age=None)
    loaded.load(first.state())
    drawn = [[one.value for one in account.sample(5, None, "uniform") or []] for account in (first, loaded)]
    assert drawn[0] == drawn[1]
    assert loaded.state() == first.state()


def test_what_is_held_is_saved_as_stored_and_bounds_hold_after_a_load() -> None:
    """Y9: items in the hands of a trainer that is resumed are neither lost nor trained twice."""
    account = filled(6)
    hold = account.hold(2, None)
    assert hold is not None
    state = account.state()
    whole, small = ReplayAccount(10, 100, 0, None), ReplayAccount(4, 100, 0, None)
    whole.load(state)
    assert [one.value for one in whole.items.values()] == [0, 1, 2, 3, 4, 5]
    small.load(state)
    assert [one.value for one in small.items.values()] == [2, 3, 4, 5]
    assert small.evicted == {"full": 2}


def test_draws_are_uniform_by_priority_or_of_whole_groups() -> None:
    """Y8."""
    account = filled(20)
    found = Counter(one.value for _ in range(2000) for one in account.sample(5, None, "uniform") or [])
    assert all(400 < found[value] < 600 for value in range(20))  # 500 each; 5 standard deviations are 97
    for one in account.items.values():
        one.priority = 9.0 if one.value == 7 else 1.0
    found = Counter(one.value for _ in range(2000) for one in account.sample(1, None, "priority") or [])
    assert 530 < found[7] < 760  # 9 of 28 are 643; 5 standard deviations are 104
    groups = [one.group for one in account.sample(2, None, "group") or []]
    assert sorted(Counter(groups).values()) == [4, 4]
    assert account.sample(6, None, "group") is None


def test_slots_of_what_was_taken_are_free_with_the_next_version() -> None:
    """Y7: not before, or what is begun would be too old when it is trained."""
    account = filled(4, max_age=1)
    hold = account.hold(2, None)
    assert hold is not None
    assert account.slots == 4
    account.confirm(hold)
    assert account.slots == 4
    early = account.hold(1, None)
    assert early is not None
    account.advance(1)
    assert account.slots == 1
    account.confirm(early)
    assert account.slots == 1
    account.advance(2)
    assert (account.slots, account.evicted) == (0, {"stale": 1})


# ---- sizes ---------------------------------------------------------------------------------------------------------


@rows(
    ("value", "parts", "text"),
    [
        ([1, 2.0, True, None, 1 << 100], [1, 2.0, True, None, 1 << 100], 0),
        (((1, 2), {}), [(1, 2), 1, 2, {}], 0),
        ({"a": [1]}, [[1], 1], 1),
        ([[1], "ab"], [[1], 1], 2),
    ],
)
def test_estimate_is_the_sum_of_all_parts(value: Any, parts: list[Any], text: int) -> None:
    assert estimate_bytes(value) == sum(map(sys.getsizeof, [value, *parts])) + text


def test_numbers_of_a_prompt_are_estimated_by_no_function_of_python() -> None:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        estimate_bytes(list(range(1_000)))
    finally:
        sys.setprofile(None)
    assert calls == 1
