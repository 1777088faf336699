"""Looks at a run: only while a browser follows, and what is left of a run that does not answer."""

from __future__ import annotations

import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from tests.dashboard.rigged import RiggedSource
from tests.patience import HANG_SECONDS

pytest.importorskip("cyclopts")

from trimesh._runtime.recording import FlightRecorder, RunFolder
from trimesh._wire import flight
from trimesh._wire.observed import ProcRow, ProcView
from trimesh.cli.dashboard.board import see
from trimesh.cli.dashboard.feed import PageFeed
from trimesh.cli.dashboard.runs import DeadRun
from trimesh.errors import ConnectError
from trimesh.observe import RunSnapshot
from trimesh.observe.past import Past
from trimesh.observe.sums import RunSums


def told(event: bytes) -> tuple[str, Any]:
    kind, data = event.decode().rstrip("\n").split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_run_is_asked_only_while_a_browser_follows():
    """DX-4: once at the start, so that the first browser has something at once."""
    source = RiggedSource(1, 2, is_well=True)
    feed = PageFeed(source, every=0.001)
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run)
            while feed.seen is None:  # noqa: ASYNC110 - what is looked for is not ours to change
                await trio.sleep(0.001)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert source.looks == 1
            numbers = list[int]()
            async with aclosing(feed.follow()) as events:
                assert told(await anext(events))[0] == "history"
                while len(numbers) < 4:
                    kind, board = told(await anext(events))
                    assert kind == "board"
                    numbers.append(board["number"])
            assert numbers == sorted(set(numbers))
            assert feed.followers == 0
            nursery.cancel_scope.cancel()


async def test_slow_follower_gets_the_newest_board():
    """FW-1: and those in between not at all."""
    feed = PageFeed(RiggedSource(1, 2, is_well=True), every=0.001)
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run)
            async with aclosing(feed.follow()) as events:
                await anext(events)
                first = told(await anext(events))[1]["number"]
                while feed.seen is None or feed.seen.board.number < first + 5:  # noqa: ASYNC110 - as above
                    await trio.sleep(0.001)
                assert told(await anext(events))[1]["number"] >= first + 5
            nursery.cancel_scope.cancel()


class PausedSource(RiggedSource):
    """Has a history of what was not asked for, and snapshots a minute apart."""

    def __init__(self) -> None:
        super().__init__(1, 2, is_well=True)
        self.asked = list[tuple[float, bool]]()

    def snapshot(self) -> RunSnapshot:
        self.looks += 59
        return super().snapshot()

    def past(self, after: float, *, curves: bool) -> Past:
        self.asked.append((after, curves))
        return Past((RunSums(at=after + 30.0, memory=7),))


async def test_time_in_which_no_browser_followed_is_filled_from_the_history():
    """FW-3: from the run's begin for the first one, with the curves; then from the last snapshot on."""
    source = PausedSource()
    feed = PageFeed(source, every=0.001)
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run)
            while feed.seen is None:  # noqa: ASYNC110 - as above
                await trio.sleep(0.001)
            await trio.testing.wait_all_tasks_blocked(0.01)
            async with aclosing(feed.follow()) as events:
                kind, history = told(await anext(events))
            nursery.cancel_scope.cancel()
    first = 1_800_000_000.0 + 60
    assert source.asked[:2] == [(0.0, True), (first, False)]
    assert kind == "history"
    assert [one["at"] for one in history][:4] == [30.0, first, first + 30.0, first + 60.0]
    assert (history[2]["memory"], history[2]["calls"]) == (7, None)


class FadingSource(RiggedSource):
    """Answers, does not, answers, and then has ended."""

    def snapshot(self) -> RunSnapshot:
        if self.looks == 1:
            self.looks += 1
            raise ConnectError("process 4242 has not answered within 10 s")
        self.is_gone = self.looks > 3
        return super().snapshot()


async def test_what_was_seen_last_stays():
    """FW-2: while the run is silent; it is live again when it answers; in the end it says what it has died of."""
    feed = PageFeed(FadingSource(1, 2, is_well=True), every=0.001)
    states = list[str]()
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            async with aclosing(feed.follow()) as events:
                nursery.start_soon(feed.run)
                await anext(events)
                while not states or states[-1] != "ended":
                    board = told(await anext(events))[1]
                    states += [board["state"]] if board["state"] not in states[-1:] else []
                    assert board["meshes"]
                    assert (board["said"] != "") == (board["state"] != "live")
            assert board["problems"][0]["kind"] == "ended"
            nursery.cancel_scope.cancel()
    assert states == ["live", "silent", "live", "ended"]


async def test_dead_run_has_the_processors_that_its_processes_used(tmp_path: Path):
    """RU-1: between the last two samples in each flight record; a process with one sample has none."""
    for number, seconds in ((1, (2.0, 3.0, 3.5)), (2, (7.0,))):
        proc = ProcRow(id=str(number), name=f"procs[gpus={number}]", mesh="procs", point={"gpus": number})
        head = flight.FlightHead(proc=proc, started_at=100.0)
        recorder = FlightRecorder(tmp_path / proc.id, head, lambda: 0.0)
        for at, cpu in enumerate(seconds):
            view = ProcView(proc=msgspec.structs.replace(proc, cpu_seconds=cpu))
            recorder.note(flight.SeenView(at=101.0 + 2 * at, trio_at=0.0, every=2.0, view=view))
    source = DeadRun(RunFolder(tmp_path, 100.0, 1, "1"))
    assert source.cores() == {"1": 0.25}
    [grid] = [one.grid for one in see(source.snapshot(), cores=source.cores()).placed]
    assert (grid.letters[-2:], grid.cpu[-2:]) == ("rr", (25, 0))
