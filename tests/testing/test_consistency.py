"""Effects that happen once, reads in order and fresh reads: what each check accepts and finds, also of planted bugs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.rows import rows

import trimesh
from trimesh import Actor, ProcDied, Restart, endpoint
from trimesh.testing import Chaos, History, Inconsistent, Operation, check_fresh, check_monotonic, check_once, simulate

RESTART = Restart("one_for_one", intensity=1_000, period=60)


def operation(client: str, call: tuple[Any, ...], begin: int, end: int, result: Any = None) -> Operation:
    return Operation(client, call, (float(begin), begin), "ok", result, (float(end), end))


# ---- effects ---------------------------------------------------------------------------------------------------------

RETURNED = operation("a", ("add", 1), 1, 2)
UNKNOWN = Operation("a", ("add", 2), (3.0, 3))
FAILED = Operation("a", ("add", 3), (4.0, 4), "fail", None, (5.0, 5))
OTHER = operation("a", ("get", 1), 6, 7)
ADDS = [RETURNED, UNKNOWN, FAILED, OTHER]


@pytest.mark.parametrize("effects", [[1], [1, 2]])
def test_effects_of_what_returned_and_perhaps_of_what_is_unknown(effects: list[int]) -> None:
    check_once(ADDS, "add", effects)


@pytest.mark.parametrize(
    ("effects", "text", "shown"),
    [
        ([], r"returned must have its effect, add\(1\) had none", (RETURNED,)),
        ([1, 1], r"add\(1\) had it 2 times", (RETURNED,)),
        ([1, 2, 2], r"add\(2\) had it 2 times", (UNKNOWN,)),
        ([1, 3], r"failed must have no effect, add\(3\)", (FAILED,)),
        ([1, 9], r"of the history, got \[9\]", ()),
    ],
)
def test_effects_that_do_not_fit(effects: list[int], text: str, shown: tuple[Operation, ...]) -> None:
    with pytest.raises(Inconsistent, match=text) as caught:
        check_once(ADDS, "add", effects)
    assert caught.value.operations == shown


def test_effects_need_keys_of_their_own() -> None:
    with pytest.raises(ValueError, match="got 1 twice"):
        check_once([RETURNED, RETURNED], "add", [1])


# ---- reads -----------------------------------------------------------------------------------------------------------


def test_client_that_reads_an_older_version_is_found() -> None:
    first, second = operation("a", ("read",), 1, 2, 5), operation("a", ("read",), 3, 4, 4)

    check_monotonic([first, operation("b", ("read",), 3, 4, 4)], "read")
    check_monotonic([first, operation("a", ("read",), 1, 4, 4)], "read")  # they overlap
    with pytest.raises(Inconsistent, match="an older version than before") as caught:
        check_monotonic([second, first], "read")
    assert caught.value.operations == (first, second)


@rows("seed", range(50))
def test_monotonic_reads_are_what_their_definition_says(seed: int) -> None:
    draw = random.Random(seed)
    times = draw.sample(range(1, 100), 12)
    reads = [
        operation(draw.choice("ab"), ("read",), min(pair), max(pair), draw.randrange(4))
        for pair in zip(times[::2], times[1::2], strict=True)
    ]
    expected = any(
        one.client == other.client and one.end is not None and one.end <= other.begin and other.result < one.result
        for one in reads
        for other in reads
    )
    try:
        check_monotonic(reads, "read")
        found = False
    except Inconsistent:
        found = True
    assert found == expected


WRITES = [
    operation("w", ("write", 1), 1, 2),
    operation("w", ("write", 2), 5, 8),
    Operation("w", ("write", 3), (20, 20)),
]


@pytest.mark.parametrize(("begin", "result"), [(0, None), (1, 1), (3, 1), (6, 1), (6, 2), (9, 2), (20, 3)])
def test_fresh_reads_are_accepted(begin: int, result: int | None) -> None:
    check_fresh([*WRITES, operation("r", ("read",), begin, begin + 100, result)], "read", "write")


@pytest.mark.parametrize(
    ("begin", "end", "result", "text"),
    [
        (3, 4, None, "must return what was written before it began"),
        (9, 10, 1, "must return what was written before it began"),
        (3, 4, 2, "written before, got 2"),
        (3, 4, 7, "must return a version that was written, got 7"),
    ],
)
def test_stale_reads_are_found(begin: int, end: int, result: int | None, text: str) -> None:
    with pytest.raises(Inconsistent, match=text):
        check_fresh([*WRITES, operation("r", ("read",), begin, end, result)], "read", "write")


def test_reads_may_be_as_old_as_they_are_allowed_to_be() -> None:
    read = operation("r", ("read",), 9, 10, 1)

    check_fresh([*WRITES, read], "read", "write", seconds=2.0)
    with pytest.raises(Inconsistent, match=r"written 0\.5 s before it began"):
        check_fresh([*WRITES, read], "read", "write", seconds=0.5)


# ---- planted bugs ----------------------------------------------------------------------------------------------------


class Ledger(Actor):
    """Adds numbers to a list that outlives it; `once` looks whether it has done so before."""

    def __init__(self, path: str, *, once: bool) -> None:
        self.path = Path(path)
        self.once = once

    @endpoint(idempotent=True)
    async def add(self, number: int) -> None:
        if not self.once or number not in numbers(self.path):
            with self.path.open("a") as file:
                file.write(f"{number}\n")
        await trio.sleep(0.1)  # a kill here loses the acknowledgement


def numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def add_under_kills(mesh: trimesh.ProcMesh, chaos: Chaos, path: Path, *, once: bool) -> History:
    """Add numbers, each again until it was acknowledged."""
    path.unlink(missing_ok=True)  # noqa: ASYNC240 - a simulation waits for no file
    ledger = await mesh.spawn("ledger", Ledger, str(path), once=once)
    history = History()
    async with chaos.safety(chaos.plan(kill=1, every=(0.05, 0.5)), duration=60):
        for number in range(20):
            with history.invoke("writer", "add", number) as adding:
                while True:
                    try:
                        await ledger.add.call_one(number)
                        adding.ok()
                        break
                    except ProcDied:
                        await trio.sleep(0.1)
    return history


@simulate(seeds=10, per_host={"gpus": 1}, supervision=RESTART)
async def test_repeated_effects_that_are_recognized_happen_once(
    mesh: trimesh.ProcMesh, chaos: Chaos, tmp_path: Path
) -> None:
    history = await add_under_kills(mesh, chaos, tmp_path / "ledger", once=True)

    check_once(history.operations, "add", numbers(tmp_path / "ledger"))


@simulate(seeds=10, per_host={"gpus": 1}, supervision=RESTART, sometimes=("found",))
async def test_effect_that_a_retry_repeats_is_found(mesh: trimesh.ProcMesh, chaos: Chaos, tmp_path: Path) -> None:
    history = await add_under_kills(mesh, chaos, tmp_path / "ledger", once=False)

    effects = numbers(tmp_path / "ledger")
    if len(effects) > len(set(effects)):
        chaos.sometimes("found")
        with pytest.raises(Inconsistent, match="times"):
            check_once(history.operations, "add", effects)


class Store(Actor):
    """Keeps a version, and copies it to a replica; `late` acknowledges a write before that."""

    def __init__(self, replica: Any = None, *, late: bool = False) -> None:
        self.replica = replica
        self.late = late
        self.version = 0

    @endpoint
    async def write(self, version: int) -> None:
        self.version = version
        if self.replica is not None and not self.late:
            await self.replica.write.call_one(version)

    @endpoint
    async def copy(self) -> None:
        if self.replica is not None:
            await self.replica.write.call_one(self.version)

    @endpoint
    async def read(self) -> int:
        return self.version


async def read_from_both(mesh: trimesh.ProcMesh, *, late: bool) -> History:
    """Write versions to a store, and read it and its replica in turn."""
    replica = await mesh.slice(gpus=0).spawn("replica", Store)
    store = await mesh.slice(gpus=1).spawn("store", Store, replica, late=late)
    history = History()
    for version in range(1, 4):
        with history.invoke("writer", "write", version) as writing:
            await store.write.call_one(version)
            writing.ok()
        for source in (store, replica):
            with history.invoke("reader", "read") as reading:
                reading.ok(await source.read.call_one())
        await store.copy.call_one()
    return history


@simulate(seeds=5)
async def test_replicated_store_is_consistent(mesh: trimesh.ProcMesh) -> None:
    history = await read_from_both(mesh, late=False)

    check_monotonic(history.operations, "read")
    check_fresh(history.operations, "read", "write", initial=0)


@simulate(seeds=5)
async def test_write_that_is_acknowledged_too_early_is_found(mesh: trimesh.ProcMesh) -> None:
    history = await read_from_both(mesh, late=True)

    with pytest.raises(Inconsistent, match="an older version than before"):
        check_monotonic(history.operations, "read")
    with pytest.raises(Inconsistent, match="must return what was written before it began"):
        check_fresh(history.operations, "read", "write", initial=0)
