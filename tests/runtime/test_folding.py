"""What is said of processes that a block waits for: the same once (M4)."""

from __future__ import annotations

from trimesh._runtime.watch.report import NAMED_MAX, fold


def told(rank: int, *lines: str, doing: str = "called ranks.step for 2.0 s") -> tuple[str, int, list[str]]:
    label, pid = f"procs[gpus={rank}]", 4_000 + rank
    return label, pid, [f"  {label} pid {pid}: running, {doing}", *lines]


def test_same_is_said_once_with_the_names_of_the_others():
    """M4, FD-1: ages and points are not part of it; FD-2: the first is shown whole."""
    many = [told(rank, f"    ranks[gpus={rank}].step runs, 1.{rank} s old") for rank in range(8)]
    assert fold(many) == [
        *many[0][2],
        "    and the same of 7 other processes: procs[gpus=1] pid 4001, procs[gpus=2] pid 4002, "
        f"procs[gpus=3] pid 4003, procs[gpus={NAMED_MAX}] pid 4004 and 3 more",
    ]


def test_what_differs_is_said_of_each():
    one, other = told(1, "    File a.py, line 7, in wait"), told(2, "    File a.py, line 9, in wait")
    exiting = told(3, doing="asked to exit")
    assert fold([one, other, exiting, told(5, "    File a.py, line 7, in wait")]) == [
        *one[2],
        "    and the same of 1 other process: procs[gpus=5] pid 4005",
        *other[2],
        *exiting[2],
    ]


def test_of_few_nothing_is_added():
    assert fold([]) == []
    assert fold([told(0)]) == told(0)[2]
