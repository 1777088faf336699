"""Publications that do not go on as they should, in words: who keeps which version, whose versions are not read."""

from __future__ import annotations

import pytest

pytest.importorskip("cyclopts")

from trimesh import limits
from trimesh._wire.observed import CallRow, PinRow, ProcRow, PublicationRow
from trimesh.cli.dashboard.problems import Problem, problems
from trimesh.cli.text import publication_lines
from trimesh.observe import RunSnapshot

LONG = limits.STALL_SECONDS
IN_KEEP = CallRow(
    id="0.1@r1",
    proc="r1",
    name="reader[gpus=1]",
    mesh="reader",
    endpoint="keep",
    state="running",
    age=90.0,
    at="line 7",
)


def run(*rows: PublicationRow, calls: tuple[CallRow, ...] = ()) -> RunSnapshot:
    procs = [
        ProcRow(id=f"{mesh[0]}{rank}", parent="0", name=f"{mesh}[gpus={rank}]", mesh=mesh, point={"gpus": rank})
        for mesh in ("trainers", "readers")
        for rank in range(3)
    ]
    return RunSnapshot(taken_at=1_000.0, procs=tuple(procs), publications=rows, calls=calls)


def published(
    rank: int, *pins: PinRow, number: int = 1, unread: int = 0, seconds: float = 99.0, is_waiting: bool = False
) -> PublicationRow:
    return PublicationRow(
        proc=f"t{rank}",
        number=number,
        member=f"trainer[gpus={rank}]",
        latest=9,
        slots=3,
        nbytes=3 << 20,
        is_waiting=is_waiting,
        pins=pins,
        unread=unread,
        unread_seconds=seconds,
    )


def told(*rows: PublicationRow, calls: tuple[CallRow, ...] = ()) -> list[Problem]:
    return [one for one in problems(run(*rows, calls=calls)) if one.kind in ("pinned", "unread")]


def test_reader_that_keeps_a_version_is_named_with_its_call():
    """It is wrong once a `publish` waits for it; while there are other slots, it is only unusual."""
    row = published(0, PinRow(proc="r1", version=4, seconds=LONG), PinRow(proc="r2", version=9, seconds=LONG))
    [one] = told(row, calls=(IN_KEEP,))
    assert (one.kind, one.names, one.at, one.is_sure) == ("pinned", ("readers[gpus=1]",), "line 7", False)
    assert one.title == "readers[gpus=1] has version 4 of trainer[gpus=0] pinned, which has blocked publish for 5.0 s"
    assert one.when == 1_000.0 - LONG
    assert "1 of 3 slots cannot be written to" in one.text
    assert "reader[gpus=1].keep" in one.text
    [one] = told(published(0, PinRow(proc="x", version=4, seconds=LONG), is_waiting=True))
    assert (one.names, one.is_sure, one.text[:13]) == (("process x",), True, "publish waits")


def test_reader_that_keeps_versions_of_many_ranks_is_told_once():
    """UV-3"""
    rows = [published(rank, PinRow(proc="r1", version=4, seconds=LONG + rank)) for rank in range(3)]
    [one] = told(*rows)
    assert "version 4 of trainer[gpus=0] and 2 more pinned, which has blocked publish for 7.0 s" in one.title


def test_reader_that_reads_is_not_told():
    """UV-1: it has a version for a moment, or no `publish` wants its memory."""
    brief = PinRow(proc="r1", version=4, seconds=LONG / 2)
    assert told(published(0, brief), published(1, PinRow(proc="r1", version=4))) == []


def test_publisher_whose_versions_are_not_read_is_named():
    """UV-2: by all of its ranks; a replica that is not read beside one that is, is as it should be."""
    [one] = told(published(0, unread=40), published(1, unread=41), published(1, number=2, unread=1))
    assert (one.kind, one.names, one.is_sure) == ("unread", ("trainer[gpus=0]", "trainer[gpus=1]"), False)
    assert one.title == "trainer[gpus=0] and 1 more has published 40 versions in 1 min 39 s that no process has read"
    assert "no reader" in one.text
    assert "6.0 MiB" in one.text
    assert told(published(0, unread=40), published(1)) == []
    assert told(published(0, unread=3)) == []
    assert told(published(0, unread=40, seconds=limits.UNREAD_SECONDS / 2)) == []


def test_lines_of_a_terminal_say_the_same():
    rows = published(0, PinRow(proc="r1", version=4, seconds=LONG)), published(1, number=2, unread=9)
    pinned, unread = publication_lines(run(*rows))
    assert pinned.startswith("pinned: readers[gpus=1] has version 4")
    assert unread.startswith("unread: trainer[gpus=1] has published 9 versions in 1 min 39 s")
