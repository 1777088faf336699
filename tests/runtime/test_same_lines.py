"""Identical lines of many processes on other hosts, shown as one."""

from __future__ import annotations

from trimesh import limits
from trimesh._runtime.system.output import STDERR, STDOUT, SameLines
from trimesh._runtime.system.records import OutputChunk

SHOWN = limits.OUTPUT_SAME_SHOWN


def chunk(rank: int, *lines: bytes, mesh: str = "procs", stream: int = STDOUT, dropped: int = 0) -> OutputChunk:
    return OutputChunk(f"{mesh}[gpus={rank}]", stream, dropped, lines)


def test_first_ones_are_shown_and_the_rest_is_counted_once() -> None:
    """H12: x120 of 128 ranks."""
    same = SameLines()
    shown = same.take([chunk(rank, b"loading") for rank in range(128)], 10.0)
    assert shown == [chunk(rank, b"loading") for rank in range(SHOWN)]
    assert same
    assert same.due(10.9) == []
    assert same.due(11.0) == [OutputChunk("procs", STDOUT, 0, (b"(x120 more) loading",))]
    assert not same
    assert same.due(20.0) == []


def test_other_lines_streams_and_meshes_are_not_the_same() -> None:
    """H12"""
    same = SameLines()
    several = [
        *(chunk(rank, b"a", b"%d" % rank) for rank in range(SHOWN)),
        chunk(1, b"a", stream=STDERR),
        chunk(1, b"a", mesh="others"),
    ]
    assert same.take(several, 0.0) == several
    assert same.take([chunk(SHOWN, b"a", b"99", dropped=3), chunk(SHOWN + 1, b"a")], 0.5) == [
        chunk(SHOWN, b"99", dropped=3)
    ]
    assert same.take([chunk(0, b"a")], 1.0) == [OutputChunk("procs", STDOUT, 0, (b"(x2 more) a",)), chunk(0, b"a")]


def test_one_process_that_repeats_itself_is_shown() -> None:
    """H12"""
    same = SameLines()
    several = [chunk(0, b"step")] * 50
    assert same.take(several, 0.0) == several
    assert not same


def test_lines_beyond_what_is_kept_are_shown() -> None:
    """H12: memory is bounded."""
    same = SameLines()
    several = [chunk(0, *(b"%d" % number for number in range(limits.OUTPUT_SAME_KEPT)))]
    assert same.take(several, 0.0) == several
    more = [chunk(rank, b"more") for rank in range(SHOWN + 5)]
    assert same.take(more, 0.5) == more
