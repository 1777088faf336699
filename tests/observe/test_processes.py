"""`trimesh ps`: what is wrong is its first line, marked in its tree, and the exit code (Q18)."""

from __future__ import annotations

import re

import msgspec
import pytest

pytest.importorskip("cyclopts")

from trimesh import limits
from trimesh._wire.observed import (
    ActorRow,
    CallRow,
    DiskRow,
    EventRow,
    GPURow,
    HostRow,
    JobRow,
    PinRow,
    ProcRow,
    PublicationRow,
    WaitRow,
)
from trimesh.cli.processes import is_wrong, run_lines, stop_lines
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
        taken_at=3.0, procs=(root, *procs), actors=tuple(actors), calls=calls, **fields
    )


def shown(seen: RunSnapshot) -> str:
    return "\n".join(line.plain for line in run_lines(seen))


def line_of(name: str, text: str) -> str:
    return next(line for line in text.splitlines() if name in line)


def test_run_that_is_well() -> None:
    seen = run_of(proc(0), proc(1), calls=(call(0, 1, age=9.0), call(1, age=9.0)))

    text = shown(seen)
    assert not is_wrong(seen)
    assert "deadlocked" not in text
    assert text.startswith(
        "a run: nothing wrong found; 1 call waits for workers[gpus=1].step, running for 9.0 s; see: "
    )
    assert "  host  " not in text
    assert shown(run_of(proc(0))).startswith("a run: nothing wrong found\n")


def test_ranks_whose_calls_wait_for_each_other() -> None:
    seen = run_of(proc(0), proc(1), proc(2), calls=(call(0, 1), call(1, 0), call(2)))

    text = shown(seen)
    assert is_wrong(seen)
    first = "a run: 2 calls wait for each other: workers[gpus=0].step → workers[gpus=1].step"
    assert text.splitlines()[0] == f"{first}; see: trimesh calls --waits"
    assert "running, deadlocked" in line_of("procs[gpus=0]", text)
    assert "deadlocked" not in line_of("procs[gpus=2]", text)


def test_reader_that_keeps_a_version() -> None:
    row = PublicationRow(
        proc="1", number=1, latest=2, slots=2, pins=(PinRow(proc="2", version=1, seconds=75.0),), pinned=(1,),
        is_waiting=True,
    )  # fmt: skip
    seen = run_of(proc(0), proc(1), publications=(row,))

    assert shown(seen).startswith("a run: procs[gpus=1] has version 1 of procs[gpus=0] pinned, ")
    assert "pins versions" in line_of("─ procs[gpus=1]", shown(seen))
    assert is_wrong(seen)


def test_memory_of_one_among_many() -> None:
    seen = run_of(*(proc(rank) for rank in range(3)), proc(3, memory_bytes=532 * MIB))

    text = shown(seen)
    assert text.startswith("a run: procs[gpus=3] has 532.0 MiB of memory, where others of procs have 44.0 MiB; see: ")
    assert "running, leaking?" in line_of("─ procs[gpus=3]", text)
    assert is_wrong(seen)


def test_hosts_of_a_run_on_several() -> None:
    text = shown(run_of(proc(0), proc(1, host="b")))
    assert line_of("procs[gpus=1]", text).split()[1:] == [
        "procs[gpus=1]",
        "b",
        "running",
        "44.0",
        "MiB",
        "workers[gpus=1]",
    ]
    assert "3 processes on 2 hosts" in text


def test_call_that_has_run_for_long_is_shown_with_its_line() -> None:
    """Whether an event that it waits for will ever be set is not known; since when it waits, is."""
    text = shown(run_of(proc(0), proc(1), calls=(call(0, age=limits.STALL_SECONDS + 36.0), call(1))))

    assert "workers[gpus=0].step running for 41.0 s at train.py:12 in step" in text.splitlines()[-2]
    assert "workers[gpus=1].step" not in text


def test_stop_names_what_does_not_hear_of_it() -> None:
    busy = proc(1, state="stuck", stalled_seconds=66.0, pid=7)

    assert list(stop_lines(5, None)) == ["interrupted run 5"]
    assert list(stop_lines(5, run_of(proc(0), busy))) == [
        "interrupted run 5: its blocks stop 2 processes, each within its grace",
        "  procs[gpus=1]  pid 7  is stuck for 1 min 6 s: it is killed after the grace if that lasts",
    ]


def test_use_of_processors_and_gpus() -> None:
    """Q18: between two snapshots; unknown of a process that does not answer, and without GPUs there is no column."""
    before = run_of(proc(0, cpu_seconds=5.0), proc(1))
    after = run_of(proc(0, cpu_seconds=6.5, gpu_percent=88, gpu_memory_bytes=34 << 30), proc(1))
    text = "\n".join(line.plain for line in run_lines(msgspec.structs.replace(after, taken_at=5.0), before))

    assert " 75 %  44.0 MiB  88 %  34.0 GiB  " in line_of("─ procs[gpus=0]", text)
    assert "%" not in line_of("─ procs[gpus=1]", text)
    assert "gpu " not in shown(run_of(proc(0)))


def test_slow_rank_and_rank_that_has_left() -> None:
    """Q18: both are marked, as what may be as it should."""
    late = tuple(msgspec.structs.replace(call(rank, age=30.0), id=f"0.1@{rank}", called=8) for rank in range(8))

    slow = run_of(*(proc(rank) for rank in range(8)), calls=late[3:4])
    assert shown(slow).startswith("a run: workers.step has ended on 7 of 8 members, but not on workers[gpus=3], for ")
    assert "running, slow?" in line_of("─ procs[gpus=3]", shown(slow))
    left = run_of(*(proc(rank) for rank in range(8)), calls=late[:3] + late[4:])
    assert shown(left).startswith("a run: workers[gpus=3] is not in workers.step, in which 7 others are, for 30.0 s; ")
    assert "running, left?" in line_of("─ procs[gpus=3]", shown(left))
    assert is_wrong(slow)
    assert is_wrong(left)


def died(rank: int, at: float, incarnation: int = 0, kind: str = "Died") -> EventRow:
    name, text = f"procs[gpus={rank}]", f"ProcDied: procs[gpus={rank}] was killed by SIGKILL (pid {incarnation})"
    return EventRow(number=int(at), at=at, kind=kind, name=name, mesh="procs", text=text, is_failure=kind == "Died")


def test_death_and_restarts() -> None:
    """Q18: a death says how, one that was restarted is nothing wrong, a member that keeps dying is one problem."""
    job = JobRow(id="0", pid=7, host="a", command="/usr/bin/python train.py", record="/records")
    events = (died(1, 1.0),)
    text = shown(run_of(proc(0), proc(1, state="dead"), events=events, failures=events, job=job))
    assert text.startswith("run 7: procs[gpus=1] was killed by SIGKILL (pid 0); see: trimesh autopsy --pid 7\n")
    assert "python train.py  running" in text.splitlines()[1]

    again = (*events, died(1, 2.0, kind="Restarted"))
    seen = run_of(proc(0), proc(1, incarnation=1), events=again, failures=events, job=job)
    assert not is_wrong(seen)
    assert shown(seen).startswith("run 7: nothing wrong found\nprocs[gpus=1] died and was restarted: ProcDied: ")
    assert "running, restarted 1 x" in line_of("─ procs[gpus=1]", shown(seen))

    loop = tuple(died(1, number, int(number), kind) for number in range(1, 4) for kind in ("Died", "Restarted"))
    deaths = tuple(event for event in loop if event.is_failure)
    seen = run_of(proc(0), proc(1, incarnation=3), events=loop, failures=deaths, job=job)
    assert shown(seen).startswith("run 7: procs[gpus=1] died 3 times in 2.0 s; see: trimesh autopsy --pid 7\n")
    assert is_wrong(seen)


def test_lost_host_and_call_of_all() -> None:
    """Q18: the host is named rather than one of its processes; a call of many is no line of each."""
    lost = "HostLost: the host b was lost with all its processes: its agent sent nothing for 4 s"
    rows = tuple(msgspec.structs.replace(died(rank, 1.0), text=lost) for rank in (1, 2))
    calls = tuple(msgspec.structs.replace(call(rank, age=30.0), called=3) for rank in range(3))
    seen = run_of(proc(0), proc(1, state="dead"), proc(2, state="dead"), calls=calls, events=rows, failures=rows)

    assert shown(seen).startswith("a run: the host b was lost with all its processes: its agent sent nothing for 4 s; ")
    assert shown(seen).splitlines()[1] == "    procs[gpus=1] and 1 more died"
    assert "workers[gpus=0].step running" not in shown(seen)


def test_many_processes_that_are_alike_are_counted() -> None:
    """Q18: those that run, and those with the same problem at the same line."""
    stack = 'File "train.py", line 3 in step'
    stuck = [proc(rank, state="stuck", stack=stack) for rank in range(30)]
    text = shown(run_of(*stuck, *(proc(rank) for rank in range(30, 90))))

    assert text.count("─ procs[") == 8 + 20
    assert text.splitlines()[-1] == "└─ and 62 processes more (--all shows them): 22 stuck, 40 running"
    assert "\n".join(line.plain for line in run_lines(run_of(*stuck), shows_all=True)).count("─ procs[") == 30


def test_machines_of_a_run_on_several_hosts() -> None:
    """With all their programs; one whose agent is silent comes first."""
    figures = {"cpus": 8, "memory_bytes": 64 << 30, "memory_free_bytes": 16 << 30}
    disks = (DiskRow(path="/tmp", nbytes=9 << 30, free_bytes=1 << 30),)
    gpus = tuple(GPURow(index=index, percent=70 + index, celsius=50 + index) for index in range(2))
    hosts = [
        (
            HostRow(name="b", agent="silent", state="silent"),
            HostRow(
                name="a", at=at, cpu_seconds=3 * at, received_bytes=int(at) << 20, disks=disks, gpus=gpus, **figures
            ),
        )
        for at in (1.0, 2.0)
    ]
    earlier, seen = (RunSnapshot(taken_at=3.0, procs=(proc(0),), hosts=rows) for rows in hosts)

    lines = [line.plain for line in run_lines(seen, earlier)]
    at = next(number for number, line in enumerate(lines) if line.startswith("host  "))
    assert lines[at + 1].split() == ["b", "agent", "silent"]
    assert re.split(" {2,}", lines[at + 2]) == [
        "a", "running", "3.0 of 8", "48.0 GiB of 64.0 GiB", "1.0 MiB/s", "70 % 71 %, 51 °C", "1.0 GiB in /tmp",
    ]  # fmt: skip
    assert not any(line.startswith("host  ") for line in shown(run_of(proc(0))).splitlines())
