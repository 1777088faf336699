"""`trimesh top`: what processes do, as numbers and as a screen that keys drive."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, endpoint, limits, this_host
from trimesh._wire import observed
from trimesh.errors import ConnectError
from trimesh.observe import RunSnapshot, activity_between, find_run

pytest.importorskip("cyclopts")
pytest.importorskip("textual")

from textual.widgets import Input, Static

from trimesh.cli.commands import run
from trimesh.cli.top import COLUMNS, cells, chosen, detail, summary
from trimesh.cli.top_screen import DetailScreen, TopApp

HOSTILE = "[red]a\x1b]0;owned\x07\x1b[2J\r\u202ez"


class Holder(Actor):
    """Holds one call, and lets another wait."""

    @endpoint
    async def hold(self) -> None:
        """Wait for ever."""
        await trio.sleep_forever()


def seen_at(taken_at: float, received: int, *procs: str, state: str = "running") -> RunSnapshot:
    """Return a run whose processes have received so many messages, the first of them in a state."""

    def row(one: str, state: str) -> observed.ProcRow:
        return observed.ProcRow(id=one, name=f"procs[gpus={one}]", mesh="procs", point={"gpus": int(one)}, state=state)

    def link(one: str) -> observed.LinkRow:
        return observed.LinkRow(proc=one, peer="c", messages_received=received, bytes_sent=1024 * received)

    rows = (row(procs[0], state), *(row(one, "running") for one in procs[1:]))
    return RunSnapshot(taken_at=taken_at, procs=rows, links=tuple(map(link, procs)))


def test_rates_are_those_between_two_snapshots() -> None:
    """Per process, over all its links; a process that has come, and a link that has gone, count from nothing."""
    first, second = activity_between(seen_at(12.0, 50, "1", "2"), seen_at(10.0, 10, "1"))
    assert (first.received, first.sent, first.nbytes) == (20.0, 0.0, 20 * 1024.0)
    assert second.received == 25.0
    assert [one.received for one in activity_between(seen_at(12.0, 3, "1"), seen_at(10.0, 10, "1"))] == [0.0]
    assert [one.received for one in activity_between(seen_at(12.0, 3, "1"))] == [0.0]


def test_use_of_processors_is_between_two_snapshots() -> None:
    """Q18: known only where both have it: a process that does not answer sends none."""

    def seen(taken_at: float, *used: float) -> RunSnapshot:
        rows = (observed.ProcRow(id=str(at), name="p", cpu_seconds=seconds) for at, seconds in enumerate(used))
        return RunSnapshot(taken_at=taken_at, procs=tuple(rows))

    found = activity_between(seen(12.0, 7.0, 0.0, 3.0), seen(10.0, 4.0, 2.0, 0.0))
    assert [one.cpu for one in found] == [1.5, None, None]
    assert [cells(one)[COLUMNS.index("cpu")].plain for one in found] == ["150 %", "", ""]


def test_calls_and_mailboxes_are_those_of_the_process() -> None:
    actors = (
        observed.ActorRow(proc="1", name="a", mesh="a", queued=3, running=1),
        observed.ActorRow(proc="1", name="b", mesh="b", queued=1),
    )
    calls = tuple(
        observed.CallRow(id=f"{age}", proc="1", name="a", mesh="a", endpoint="e", age=age) for age in (2.0, 5.0)
    )
    found = seen_at(1.0, 0, "1", "2")
    one, other = activity_between(RunSnapshot(taken_at=1.0, procs=found.procs, actors=actors, calls=calls))
    assert (one.queued, one.running, one.oldest) == (4, 1, 5.0)
    assert (other.queued, other.running, other.oldest) == (0, 0, 0.0)


def test_rows_are_sorted_by_what_needs_a_look_and_filtered() -> None:
    rows = activity_between(seen_at(1.0, 0, "1", "2", "10", state="stuck"))
    assert [one.proc.id for one in chosen(rows, COLUMNS.index("process"), "")] == ["1", "2", "10"]
    assert chosen(list(reversed(rows)), COLUMNS.index("state"), "")[0].proc.id == "1"
    assert [one.proc.id for one in chosen(rows, 0, "", is_reversed=True)] == ["10", "2", "1"]
    assert [one.proc.id for one in chosen(rows, 0, "gpus=10")] == ["10"]
    assert [one.proc.id for one in chosen(rows, 0, "stuck")] == ["1"]
    for column in range(len(COLUMNS)):
        assert len(chosen(rows, column, "")) == 3


def test_names_steer_no_terminal_and_are_no_markup() -> None:
    """Q3: in rows, in the line on the run, in the detail."""
    proc = observed.ProcRow(id="1", name=HOSTILE, host=HOSTILE, last_event=HOSTILE, record=HOSTILE, stack=HOSTILE)
    call = observed.CallRow(id="1", proc="1", name=HOSTILE, mesh="m", endpoint=HOSTILE)
    job = observed.JobRow(id="1", pid=1, host=HOSTILE, command=HOSTILE)
    seen = RunSnapshot(taken_at=1.0, job=job, procs=(proc,), calls=(call,))
    (one,) = activity_between(seen)
    shown = [*cells(one), summary(seen), detail(one, [call])]
    for text in shown:
        assert all(char.isprintable() or char == "\n" for char in text.plain), text.plain
    assert shown[0].plain.startswith("[red]a")


def driven(ask: Callable[[], RunSnapshot], drive: Callable[[TopApp, Any], Awaitable[None]]) -> TopApp:
    """Run the screen without a terminal, and drive it; return it as it is when it has ended."""
    app = TopApp(ask, every=0.1)

    async def main() -> None:
        async with asyncio.timeout(HANG_SECONDS), app.run_test(size=(140, 30)) as pilot:
            await drive(app, pilot)

    asyncio.run(main())
    return app


async def until(pilot: Any, is_so: Callable[[], object]) -> None:
    while not is_so():
        await pilot.pause(0.02)


async def open_filter(app: TopApp, pilot: Any) -> None:
    """Open the filter; the focus moves later than the key is handled, and keys go where it is."""
    await pilot.press("slash")
    await until(pilot, lambda: isinstance(app.focused, Input))


def names(app: TopApp) -> list[str]:
    """Return the first column of the table as it is."""
    table = app.table
    return [str(cell) for cell in table.get_column_at(0)] if table.row_count else []


def text_of(app: TopApp, selector: str) -> str:
    """Return what parts of the screen in front show; "" before it has them."""
    return "".join(str(part.render()) for part in app.screen.query(selector).results(Static))


@pytest.mark.real
async def test_screen_shows_a_run_that_keys_sort_filter_and_look_into(tmp_path: Path) -> None:
    """A real run: its rows, one of them by a filter, its calls behind enter, and back."""

    async def drive(app: TopApp, pilot: Any) -> None:
        await until(pilot, lambda: len(names(app)) == 3)
        await until(pilot, lambda: any(one.queued for one in app.shown))
        assert "3 processes: running" in text_of(app, "#summary")
        await pilot.press(*"s" * (COLUMNS.index("waits") + 1), "S")
        await until(pilot, lambda: COLUMNS[app.column] == "waits")
        await until(pilot, lambda: names(app)[0] == "procs[gpus=1]")
        await pilot.press("r")
        await until(pilot, lambda: app.is_reversed and names(app)[-1] == "procs[gpus=1]")
        await pilot.press("r")
        await until(pilot, lambda: names(app)[0] == "procs[gpus=1]")
        assert "holders[gpus=1]" in [str(cell) for cell in app.table.get_column_at(COLUMNS.index("actors"))]
        await open_filter(app, pilot)
        await pilot.press(*"gpus=0")
        await until(pilot, lambda: names(app) == ["procs[gpus=0]"])
        await pilot.press("escape")
        await until(pilot, lambda: len(names(app)) == 3 and app.focused is app.table)
        app.table.move_cursor(row=names(app).index("procs[gpus=1]"))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DetailScreen) and "holders" in text_of(app, "#detail"))
        assert "holders[gpus=1].hold" in text_of(app, "#detail")
        (tmp_path / "top.svg").write_text(app.export_screenshot())
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, DetailScreen))
        assert names(app)[app.table.cursor_row] == "procs[gpus=1]"  # TP-2: after many looks
        app.simulate_key("q")  # `press` may wait for answers of what has ended by then
        while app.is_running:  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.02)

    with trio.fail_after(HANG_SECONDS):
        async with (
            this_host().spawn_procs({"gpus": 2}) as procs,
            procs.spawn("holders", Holder) as holders,
            trio.open_nursery() as nursery,
        ):
            for _ in range(3):
                nursery.start_soon(holders.slice(gpus=1).hold.call)
            with find_run() as one:
                await trio.to_thread.run_sync(driven, one.snapshot, drive)
            nursery.cancel_scope.cancel()
    assert "procs" in (tmp_path / "top.svg").read_text()


def test_rows_beyond_the_bound_are_counted_and_found_by_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOP_ROWS_MAX", 3)

    async def drive(app: TopApp, pilot: Any) -> None:
        await until(pilot, lambda: len(names(app)) == 3)
        assert "5 rows are not shown" in text_of(app, "#summary")
        await open_filter(app, pilot)
        await pilot.press(*"gpus=8")
        await until(pilot, lambda: names(app) == ["procs[gpus=8]"])
        assert "not shown" not in text_of(app, "#summary")

    driven(lambda: seen_at(1.0, 0, *map(str, range(1, 9))), drive)


def test_run_that_ends_leaves_what_was_seen_last() -> None:
    """TP-1: nothing is raised; the last rows stay, and the line says why."""
    answers = [seen_at(1.0, 0, "1", "2")]

    def ask() -> RunSnapshot:
        if answers:
            return answers.pop()
        raise ConnectError("run 7 has ended")

    async def drive(app: TopApp, pilot: Any) -> None:
        await until(pilot, lambda: "has ended" in text_of(app, "#summary"))
        assert names(app) == ["procs[gpus=1]", "procs[gpus=2]"]

    driven(ask, drive)


def test_answer_comes_before_a_screen_has_its_parts_and_after_all_are_closed() -> None:
    """TP-3."""
    seen = seen_at(1.0, 0, "1", "2")

    async def drive(app: TopApp, pilot: Any) -> None:
        screen = DetailScreen("2")
        app.push_screen(screen)
        assert not screen.query("#detail")
        app.saw(seen)
        await until(pilot, lambda: "procs[gpus=2]" in text_of(app, "#detail"))

    app = driven(lambda: seen, drive)
    app.saw(seen)
    app.lost("run 7 has ended")


@pytest.mark.real
async def test_without_a_terminal_one_table_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    async with this_host().spawn_procs({"gpus": 2}):
        capfd.readouterr()
        assert await trio.to_thread.run_sync(partial(run, ["top", "--every", "0.1"])) == 0
        out = capfd.readouterr().out
    assert all(column in out for column in COLUMNS)
    assert "procs[gpus=1]" in out


@pytest.mark.real
async def test_missing_textual_is_said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trimesh.cli.top_screen", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    async with this_host().spawn_procs({"gpus": 1}):
        assert await trio.to_thread.run_sync(partial(run, ["top"])) == 1
    assert "pip install 'trimesh-actors[top]'" in capfd.readouterr().err
