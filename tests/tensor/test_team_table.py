"""The store of a team: keys, and how ranks agree on generations of a group and on who left what (N3)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.rows import rows

from trimesh import limits
from trimesh.errors import ProtocolError

pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.groups.stores import Found, TeamTable

GROUP = "gpus"


class Answers(list[Found]):
    """What one question was answered."""

    @property
    def one(self) -> Found:
        [found] = self
        return found


def ask(table: TeamTable, verb: str, keys: Sequence[str] = (), values: Sequence[Any] = (), *numbers: int) -> Answers:
    answers = Answers()
    table.ask("asker", verb, list(keys), list(values), list(numbers), answers.append)
    return answers


def join(table: TeamTable, place: int, number: int, *places: int) -> Answers:
    return ask(table, "join", [GROUP], [], place, number, *places)


def leave(table: TeamTable, place: int, number: int, error: Any = "why") -> None:
    assert ask(table, "leave", [], [error], place, number).one.failure is None


def why(table: TeamTable, place: int, number: int, *places: int) -> Any:
    failure = ask(table, "why", [GROUP], [], place, number, *places).one.failure
    return None if failure is None else (failure.place, failure.error)


# ---- keys ----------------------------------------------------------------------------------------------------


def test_get_waits_for_the_key() -> None:
    table = TeamTable()
    early, both = ask(table, "get", ["a"]), ask(table, "wait", ["a", "b"])
    assert not ask(table, "check", ["a"]).one.number
    ask(table, "set", ["a"], [b"1"])
    assert early.one.values == [b"1"]
    assert not both
    ask(table, "set", ["b"], [b""])
    assert both.one.failure is None
    assert ask(table, "check", ["a", "b"]).one.number
    assert ask(table, "count").one.number == 2


def test_add_swap_and_delete() -> None:
    table = TeamTable()
    assert [ask(table, "add", ["n"], [], amount).one.number for amount in (2, 3, -1)] == [2, 5, 4]
    assert ask(table, "swap", ["n"], [b"5", b"9"]).one.values == [b"4"]
    assert ask(table, "swap", ["n"], [b"4", b"9"]).one.values == [b"9"]
    assert ask(table, "swap", ["new"], [b"", b"x"]).one.values == [b"x"]
    assert ask(table, "swap", ["other"], [b"old", b"x"]).one.values == [b"old"]
    assert [ask(table, "delete", ["n"]).one.number for _ in range(2)] == [1, 0]
    ask(table, "set", ["word"], [b"abc"])
    with pytest.raises(ProtocolError, match="number"):
        ask(table, "add", ["word"], [], 1)


@pytest.mark.parametrize(
    ("verb", "keys", "values", "numbers"),
    [
        ("fly", [], [], []),
        ("set", ["a"], ["text"], []),
        ("get", [], [], []),
        ("join", [GROUP], [], [3, 1, 0, 1]),  # a rank that is none of the group
        ("join", [GROUP], [], []),
        ("leave", [], [], [0, 1]),
    ],
)
def test_nonsense_is_refused(verb: str, keys: list[str], values: list[Any], numbers: list[int]) -> None:
    with pytest.raises(ProtocolError):
        ask(TeamTable(), verb, keys, values, *numbers)


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUP_KEYS", 2)
    table = TeamTable()
    for key in ("a", "b", "a"):
        ask(table, "set", [key], [b""])
    with pytest.raises(ProtocolError, match="GROUP_KEYS"):
        ask(table, "set", ["c"], [b""])


def test_asker_that_is_gone_is_forgotten() -> None:
    table = TeamTable()
    waiting = ask(table, "get", ["a"])
    table.gone("asker")
    ask(table, "set", ["a"], [b""])
    assert not waiting


# ---- groups --------------------------------------------------------------------------------------------------


def test_generation_is_made_of_joins_of_all_for_one_operation() -> None:
    table = TeamTable()
    first = join(table, 0, 5, 0, 1)
    assert not first
    second = join(table, 1, 5, 0, 1)
    assert first.one.number == second.one.number == 1
    assert [join(table, place, 9, 0, 1) for place in (1, 0)][1].one.number == 2


def test_leave_fails_the_operation_for_all_and_no_later_one() -> None:
    table = TeamTable()
    early = join(table, 0, 5, 0, 1, 2)
    leave(table, 1, 5, "poison")
    assert early.one.failure is not None
    assert early.one.failure.error == "poison"
    late = join(table, 2, 5, 0, 1, 2)
    assert late.one.failure is not None
    assert why(table, 0, 5, 0, 1, 2) == (1, "poison")
    assert why(table, 1, 5, 0, 1, 2) is None  # the one that has left knows
    assert why(table, 0, 7, 0, 1, 2) is None
    joins = [join(table, place, 7, 0, 1, 2) for place in (0, 1, 2)]
    assert [one.one.number for one in joins] == [1, 1, 1]


def test_first_to_leave_is_the_cause_and_others_of_the_team_are_none() -> None:
    table = TeamTable()
    leave(table, 7, 5, "elsewhere")
    leave(table, 1, 5, "first")
    leave(table, 0, 5, "second")
    assert why(table, 2, 5, 0, 1, 2) == (1, "first")
    leave(table, 1, 6, None)
    assert why(table, 2, 6, 0, 1, 2) == (1, "first")  # for the reason of its last time


def test_rank_that_has_gone_on_is_not_waited_for() -> None:
    table = TeamTable()
    behind = join(table, 0, 5, 0, 1)
    ahead = join(table, 1, 6, 0, 1)
    assert behind.one.failure is not None
    assert behind.one.failure.place == 1
    assert not ahead
    assert join(table, 0, 6, 0, 1).one.number == 1
    leave(table, 1, 9)
    assert join(table, 0, 8, 0, 1).one.failure is not None


def test_leave_frees_those_that_make_the_generation() -> None:
    table = TeamTable()
    for place in (0, 1, 2):
        join(table, place, 5, 0, 1, 2)
    waiting, other = ask(table, "get", [f"{GROUP}/1/2"]), ask(table, "get", ["hosts/1/2"])
    leave(table, 0, 6)  # it has made its part and gone on: the rest is on its way
    assert not waiting
    leave(table, 2, 5, "cannot")
    assert waiting.one.failure is not None
    assert waiting.one.failure.error == "cannot"
    assert not other


def test_keys_of_a_generation_go_with_it() -> None:
    table = TeamTable()
    for number, place in itertools.product((1, 2, 3), (0, 1)):
        generation = join(table, place, number, 0, 1)
        if generation:
            for key in range(2):
                ask(table, "set", [f"{GROUP}/{generation.one.number}/{key}"], [b""])
    assert ask(table, "count").one.number == 2


@rows("seed", range(100))
def test_ranks_agree_whatever_the_order(seed: int) -> None:
    """All ranks run the same operations; some fail at some. Each collective is done by all of them or by none."""
    drawn = random.Random(seed)
    places = tuple(range(drawn.randint(2, 4)))
    operations = 12
    failing = {(place, number) for place in places for number in range(operations) if drawn.random() < 0.15}
    collective = [drawn.random() < 0.6 for _ in range(operations)]
    table = TeamTable()
    done: dict[int, list[int]] = {number: [] for number in range(operations)}
    failed: dict[int, list[int]] = {number: [] for number in range(operations)}
    at = dict.fromkeys(places, 0)
    waiting: dict[int, Answers] = {}

    def ready() -> list[int]:
        return [place for place in places if at[place] < operations and (place not in waiting or waiting[place])]

    while ready():
        place = drawn.choice(ready())
        number = at[place]
        if place in waiting:
            (done if waiting.pop(place).one.failure is None else failed)[number].append(place)
        elif (place, number) in failing:
            leave(table, place, number)
            failed[number].append(place)
        elif collective[number]:
            waiting[place] = join(table, place, number, *places)
            continue
        at[place] += 1

    assert not waiting
    for number in range(operations):
        if not collective[number]:
            continue
        is_broken = any(one == number for _, one in failing)
        assert sorted(failed[number] if is_broken else done[number]) == list(places)
