"""Calls and their waits as text: what is alike is one line, however many there are."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cyclopts")

from trimesh._wire.observed import CallRow, WaitRow
from trimesh.cli.text import call_lines, is_id, short_ids, short_place, wait_lines
from trimesh.observe import RunSnapshot


def call(number: int, mesh: str, rank: int, *waits: str, state: str = "") -> CallRow:
    return CallRow(
        id=f"c0ffee{number:010x}.{number}@{rank:016x}",
        proc=f"{rank:x}",
        name=f"{mesh}[gpus={rank}]",
        mesh=mesh,
        endpoint="step",
        caller="controller",
        state=state or ("waiting" if waits else "running"),
        age=9.0,
        waits=tuple(WaitRow(kind="call", call=other) for other in waits),
    )


def test_calls_that_wait_alike_are_one() -> None:
    """Q2: each trainer waits for its own generator, those for one store; a trainer that does not is shown."""
    store = call(0, "store", 0)
    generators = [call(rank + 1, "generator", rank, store.id) for rank in range(8)]
    trainers = [call(rank + 20, "trainer", rank, one.id) for rank, one in enumerate(generators)]
    odd = call(40, "trainer", 9, store.id)
    lines = list(wait_lines(RunSnapshot(taken_at=0.0, calls=(store, *reversed(generators), *trainers, odd))))

    assert [re.split(r"(?<=\S)  ", line)[0] for line in lines[:-1]] == [
        "call",
        "trainer[gpus=0].step",
        "└─ waits for generator[gpus=0].step",
        "   └─ waits for store[gpus=0].step",
        "trainer[gpus=9].step",
        "└─ waits for store[gpus=0].step",
    ]
    assert " and 7 " in lines[1]
    assert lines[-2].endswith("(see above)")
    assert lines[-1] == "store[gpus=0].step waits for no call: running for 9.0 s; 17 calls wait for it"


def test_ids_are_as_short_as_tells_them_apart() -> None:
    """Q5: what is shown names one call, whole or short."""
    calls = [
        call(1, "a", 0x1234_5678_9ABC_DEF0),
        call(1, "a", 0x1234_5678_9ABC_DEF1),
        call(2, "a", 0x1234_0000_0000_0000),
    ]
    ids = short_ids(calls)

    assert ids[calls[2].id] == "c0ff.2@1234"
    for one in calls:
        assert [other.id for other in calls if is_id(ids[one.id], other.id)] == [one.id]
        assert is_id(one.id, one.id)
    assert not is_id("c0ff.1@", calls[0].id)


def test_places_are_short() -> None:
    assert short_place('File "work/train.py", line 12, in step') == "train.py:12 in step"
    assert short_place("work/train.py:12 in step") == "train.py:12 in step"
    assert short_place("its process is silent") == "its process is silent"


def test_ten_thousand_calls_are_few_lines() -> None:
    """Q2: with a chain of waits among them that is long."""
    chain = [call(10_000 + at, "chain", at, call(10_001 + at, "chain", at + 1).id) for at in range(200)]
    store = call(0, "store", 0)
    calls = (store, *(call(rank + 1, "trainer", rank, store.id) for rank in range(10_000)), *chain)
    lines = [*call_lines(calls, shows_all=False), *wait_lines(RunSnapshot(taken_at=0.0, calls=calls))]

    assert len(lines) < 500
