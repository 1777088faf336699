"""Histories that one order explains, and those that none does; and the table that shows them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.rows import rows

from trimesh import limits
from trimesh.testing import Model, NotLinearizable, Operation, UndecidedError, check_linearizable


def op(
    client: str, call: tuple[Any, ...], begin: float, end: float | None, result: Any = None, status="ok"
) -> Operation:
    """Make an operation; without an end its outcome is unknown."""
    if end is None:
        return Operation(client, call, (begin, 0))
    return Operation(client, call, (begin, 0), status, result, (end, 0))


def is_linearizable(operations: Sequence[Operation], model: Model) -> bool:
    try:
        check_linearizable(operations, model)
    except NotLinearizable:
        return False
    return True


REGISTER, COUNTER, QUEUE = Model.register(0), Model.counter(), Model.queue()

KNOWN = {
    "nothing": (REGISTER, True, []),
    "reads of what was written": (
        REGISTER,
        True,
        [op("a", ("write", 1), 0, 1), op("b", ("read",), 2, 3, 1)],
    ),
    "stale read": (REGISTER, False, [op("a", ("write", 1), 0, 1), op("b", ("read",), 2, 3, 0)]),
    "old or new while it is written": (
        REGISTER,
        True,
        [op("a", ("write", 1), 0, 9), op("b", ("read",), 1, 2, 0), op("b", ("read",), 3, 4, 1)],
    ),
    "new, then old while it is written": (
        REGISTER,
        False,
        [op("a", ("write", 1), 0, 9), op("b", ("read",), 1, 2, 1), op("c", ("read",), 3, 4, 0)],
    ),
    "two orders of two writes": (
        REGISTER,
        False,
        [
            op("a", ("write", 1), 0, 5),
            op("b", ("write", 2), 0, 5),
            op("c", ("read",), 6, 7, 1),
            op("d", ("read",), 8, 9, 2),
        ],
    ),
    "one of two exchanges wins": (
        REGISTER,
        True,
        [op("a", ("cas", 0, 1), 0, 2, result=True), op("b", ("cas", 0, 2), 0, 2, result=False)],
    ),
    "both win": (
        REGISTER,
        False,
        [op("a", ("cas", 0, 1), 0, 2, result=True), op("b", ("cas", 0, 2), 0, 2, result=True)],
    ),
    "unknown write that happens late": (
        REGISTER,
        True,
        [op("a", ("write", 1), 0, None), op("b", ("read",), 1, 2, 0), op("b", ("read",), 3, 4, 1)],
    ),
    "unknown write that never happens": (REGISTER, True, [op("a", ("write", 1), 0, None), op("b", ("read",), 1, 2, 0)]),
    "unknown write that is seen and unseen": (
        REGISTER,
        False,
        [op("a", ("write", 1), 0, None), op("b", ("read",), 1, 2, 1), op("b", ("read",), 3, 4, 0)],
    ),
    "effect of what has failed": (
        REGISTER,
        False,
        [op("a", ("write", 1), 0, 1, status="fail"), op("b", ("read",), 2, 3, 1)],
    ),
    "equal moments": (REGISTER, True, [op("a", ("write", 1), 0, 1), op("b", ("read",), 1, 2, 0)]),
    "sums": (COUNTER, True, [op("a", ("add", 1), 0, 4, 3), op("b", ("add", 2), 1, 3, 2), op("a", ("read",), 5, 6, 3)]),
    "lost update": (COUNTER, False, [op("a", ("add", 1), 0, 4, 1), op("b", ("add", 1), 1, 3, 1)]),
    "first in, first out": (
        QUEUE,
        True,
        [
            op("a", ("put", 1), 0, 1),
            op("a", ("put", 2), 2, 3),
            op("b", ("get",), 2, 9, 1),
            op("c", ("get",), 4, 5, 2),
        ],
    ),
    "overtaken": (
        QUEUE,
        False,
        [op("a", ("put", 1), 0, 1), op("a", ("put", 2), 2, 3), op("b", ("get",), 4, 5, 2), op("b", ("get",), 6, 7, 1)],
    ),
    "got from an empty queue": (QUEUE, False, [op("b", ("get",), 0, 1, 1), op("a", ("put", 1), 2, 3)]),
    "a value added twice": (
        Model.set(),
        False,
        [op("a", ("add", 1), 0, 1, result=True), op("b", ("add", 1), 2, 3, result=True)],
    ),
    "values are independent": (
        Model.set(),
        True,
        [
            op("a", ("add", 1), 0, 1, result=True),
            op("b", ("has", 2), 2, 3, result=False),
            op("b", ("discard", 1), 4, 5, result=True),
        ],
    ),
    "registers by key": (
        Model.register(0).keyed(),
        False,
        [op("a", ("write", "x", 1), 0, 1), op("b", ("read", "y"), 2, 3, 0), op("b", ("read", "x"), 4, 5, 0)],
    ),
}


@rows("name", KNOWN)
def test_known_history(name):
    model, expected, operations = KNOWN[name]
    assert is_linearizable(operations, model) is expected


# ---- beside a checker that tries everything --------------------------------------------------------------------------


def by_force(operations: Sequence[Operation], model: Model) -> bool:
    """Try all orders of all choices of unknown operations."""
    known = [one for one in operations if one.status == "ok"]
    unknown = [one for one in operations if one.status == "unknown"]
    for count in range(len(unknown) + 1):
        for happened in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *happened]):
                if _is_in_time(order) and _is_explained(order, model):
                    return True
    return False


def _is_in_time(order: Sequence[Operation]) -> bool:
    return not any(
        later.status == "ok" and later.end < earlier.begin for earlier, later in itertools.combinations(order, 2)
    )


def _is_explained(order: Sequence[Operation], model: Model) -> bool:
    state = model.initial
    for one in order:
        answer = model.step(state, one.call)
        if answer is None or (one.status == "ok" and answer[1] != one.result):
            return False
        state = answer[0]
    return True


def histories(calls: st.SearchStrategy[tuple[tuple[Any, ...], Any]]) -> st.SearchStrategy[list[Operation]]:
    """Make small histories of arbitrary calls and results at arbitrary times, many of them equal."""
    one = st.builds(
        lambda called, begin, takes, status: Operation(
            "c", called[0], (begin, 0), status, called[1] if status == "ok" else None, (begin + takes, 0)
        ),
        calls,
        st.integers(0, 6),
        st.integers(0, 4),
        st.sampled_from(["ok", "ok", "ok", "ok", "unknown", "fail"]),
    )
    return st.lists(one, max_size=6)


SMALL = st.integers(0, 2)
READS = st.tuples(st.just(("read",)), SMALL)
OF_REGISTERS = READS | st.tuples(st.tuples(st.just("write"), SMALL), st.none())
OF_REGISTERS |= st.tuples(st.tuples(st.just("cas"), SMALL, SMALL), st.booleans())
OF_COUNTERS = READS | st.tuples(st.tuples(st.just("add"), st.just(1)), st.integers(0, 3))
OF_QUEUES = st.tuples(st.tuples(st.just("put"), SMALL), st.none()) | st.tuples(st.just(("get",)), SMALL)


@pytest.mark.parametrize(
    ("model", "calls"),
    [(REGISTER, OF_REGISTERS), (COUNTER, OF_COUNTERS), (QUEUE, OF_QUEUES)],
    ids=["reg", "sum", "fifo"],
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_same_verdict_as_by_force(model, calls, data):
    operations = data.draw(histories(calls))
    assert is_linearizable(operations, model) is by_force(operations, model)


@settings(max_examples=100, deadline=None)
@given(operations=histories(OF_REGISTERS))
def test_prefix_that_is_shown_fails_and_none_shorter_does(operations):
    failure = None
    try:
        check_linearizable(operations, REGISTER)
    except NotLinearizable as found:
        failure = found
    assume(failure is not None)
    assert not by_force(failure.prefix, REGISTER)
    end = failure.culprit.end
    begun = [one for one in operations if one.begin < end and one.status != "fail"]
    assert by_force([one if one.end < end else attrs.evolve(one, status="unknown") for one in begun], REGISTER)


# ---- bounds and words ------------------------------------------------------------------------------------------------


def test_long_history_of_few_clients_is_quick():
    operations = []
    for number in range(2_000):
        operations += [
            op("a", ("add", 1), number, number + 0.6, number + 1),
            op("b", ("read",), number, number + 0.5, number),
        ]
    check_linearizable(operations, COUNTER)


def test_many_unknown_operations_that_ask_the_same_are_no_worry():
    operations = [op(f"{number}", ("add", 1), number, None) for number in range(200)]
    check_linearizable([*operations, op("r", ("read",), 300, 301, 100)], COUNTER)
    assert not is_linearizable([*operations, op("r", ("read",), 300, 301, 201)], COUNTER)


def test_search_is_bounded(monkeypatch):
    monkeypatch.setattr(limits, "LINEARIZATION_STATES_MAX", 1_000)
    operations = [op(f"{number}", ("write", number), 0, 9) for number in range(20)]

    with pytest.raises(UndecidedError, match="LINEARIZATION_STATES_MAX"):
        check_linearizable([*operations, op("r", ("read",), 10, 11, 99)], REGISTER)


def test_wrong_models_are_refused_in_words():
    operations = [op("a", ("add", 1), 0, 1, 1)]
    with pytest.raises(TypeError, match="must be hashable"):
        check_linearizable(operations, Model([], lambda state, call: ([*state, call], 1)))
    with pytest.raises(TypeError, match=r"must return \(state, result\) or None"):
        check_linearizable(operations, Model(0, lambda state, _: state))
    with pytest.raises(ValueError, match=r"read\(\), write\(value\)"):
        check_linearizable(operations, REGISTER)


def test_failure_is_shown_as_a_table():
    operations = [
        op("a", ("write", 1), 0, 4),
        op("b", ("read",), 1, 2, 1),
        op("c", ("read",), 2.5, 3, 0),
        op("c", ("read",), 5, 6, 7),
    ]

    with pytest.raises(NotLinearizable) as caught:
        check_linearizable(operations, REGISTER)

    assert str(caught.value).splitlines() == [
        "not linearizable: no order of the operations explains c read() -> 0",
        "          time  a         b       c",
        "      0.000000  write(1)",
        "      1.000000  |         read()",
        "      2.000000  |         -> 1",
        "      2.500000  |                 read()",
        "      3.000000  |                 -> 0  <--",
        "an order that explains the operations before it: a write(1) unknown, b read() -> 1; the state is then 1",
    ]
    assert caught.value.culprit is operations[2]


def test_long_tables_are_cut(monkeypatch):
    monkeypatch.setattr(limits, "HISTORY_ROWS", 3)
    operations = [op("a", ("add", 1), number, number + 0.5, number + 1) for number in range(5)]

    with pytest.raises(NotLinearizable) as caught:
        check_linearizable([*operations, op("a", ("read",), 9, 10, 0)], COUNTER)

    assert "(9 events before)" in str(caught.value)
