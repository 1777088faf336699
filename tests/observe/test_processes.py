"""The tree of `trimesh ps`: what is wrong is seen in it, and in the exit code."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("cyclopts")

from rich.console import Console

from trimesh import limits
from trimesh._wire.observed import ActorRow, CallRow, PinRow, ProcRow, PublicationRow, WaitRow
from trimesh.cli.processes import is_wrong, process_tree, stop_lines
from trimesh.observe import RunSnapshot

MIB = 1 << 20


def proc(rank: int, **fields: object) -> ProcRow:
    given: dict[str, object] = {"memory_bytes": 44 * MIB, "host": "a", **fields}
    return ProcRow(  # pyright: ignore[reportCallIssue]
        id=f"{rank + 1}", parent="0", name=f"procs[gpus={rank}]", mesh="procs", point={"gpus": rank}, **given
    )


def call(rank: int, *waits: int, age: float = 1.0) -> CallRow:
    return CallRow(
        id=f"c{rank}",
        proc=f"{rank + 1}",
        name=f"workers[gpus={rank}]",
        mesh="workers",
        endpoint="step",
        state="waiting" if waits else "running",
        age=age,
        at="train.py:12 in step",
        waits=tuple(WaitRow(kind="call", call=f"c{other}") for other in waits),
    )


def run_of(*procs: ProcRow, calls: tuple[CallRow, ...] = (), **fields: object) -> RunSnapshot:
    actors = [ActorRow(proc=one.id, name=f"workers[gpus={one.point['gpus']}]", mesh="workers") for one in procs]
    root = ProcRow(id="0", host="a", memory_bytes=50 * MIB)
    return RunSnapshot(  # pyright: ignore[reportCallIssue]
        taken_at=0.0, procs=(root, *procs), actors=tuple(actors), calls=calls, **fields
    )


def shown(seen: RunSnapshot) -> str:
    out = io.StringIO()
    Console(file=out, width=400).print(process_tree(seen))
    return out.getvalue()


def line_of(name: str, text: str) -> str:
    return next(line for line in text.splitlines() if name in line)


def test_run_that_is_well() -> None:
    seen = run_of(proc(0), proc(1), calls=(call(0, 1, age=9.0), call(1, age=9.0)))

    assert not is_wrong(seen)
    assert "circle" not in shown(seen)
    assert " on a" not in shown(seen)


def test_ranks_whose_calls_wait_for_each_other() -> None:
    seen = run_of(proc(0), proc(1), proc(2), calls=(call(0, 1), call(1, 0), call(2)))

    text = shown(seen)
    assert is_wrong(seen)
    assert "running, in a cycle of calls" in line_of("procs[gpus=0]", text)
    assert "circle" not in line_of("procs[gpus=2]", text)
    assert "2 calls wait for each other: workers[gpus=0].step → workers[gpus=1].step" in text


def test_reader_that_keeps_a_version() -> None:
    row = PublicationRow(
        proc="1", number=1, latest=2, slots=2, pins=(PinRow(proc="2", version=1, seconds=75.0),), pinned=(1,),
        is_waiting=True,
    )  # fmt: skip
    seen = run_of(proc(0), proc(1), publications=(row,))

    assert "pinned:" in shown(seen)
    assert is_wrong(seen)


def test_memory_of_one_among_many() -> None:
    seen = run_of(*(proc(rank) for rank in range(3)), proc(3, memory_bytes=532 * MIB))

    assert "procs[gpus=3] has 532.0 MiB of memory, where others of procs have 44.0 MiB" in shown(seen)
    assert not is_wrong(seen)


def test_hosts_of_a_run_on_several() -> None:
    assert "pid 0  on b  running" in line_of("procs[gpus=1]", shown(run_of(proc(0), proc(1, host="b"))))


def test_call_that_has_run_for_long_is_shown_with_its_line() -> None:
    """Whether an event that it waits for will ever be set is not known; since when it waits, is."""
    text = shown(run_of(proc(0), proc(1), calls=(call(0, age=limits.STALL_SECONDS + 36.0), call(1))))

    assert "step running for 41.0 s at train.py:12 in step" in line_of("workers[gpus=0]", text)
    assert "step" not in line_of("workers[gpus=1]", text)


def test_stop_names_what_does_not_hear_of_it() -> None:
    busy = proc(1, state="stuck", stalled_seconds=66.0, pid=7)

    assert list(stop_lines(5, None)) == ["interrupted run 5"]
    assert list(stop_lines(5, run_of(proc(0), busy))) == [
        "interrupted run 5: its blocks stop 2 processes, each within its grace",
        "  procs[gpus=1]  pid 7  is stuck for 1 min 6 s: it is killed after the grace if that lasts",
    ]
