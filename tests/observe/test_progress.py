"""What takes long shows that it does, where people look, and nowhere else (Q9)."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import configured, limits
from trimesh._runtime.watch import progress_view
from trimesh._runtime.watch.progress_view import ShownProgress, showing
from trimesh.actor.item_map import RankCalls

PROGRAM = """
import pathlib, sys, time, trio
from trimesh import limits, this_host
limits.PROGRESS_SECONDS = 0

def wait():
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)

async def main():
    async with this_host().spawn_procs({"gpus": 2}, setup=wait):
        print("ready", flush=True)
trio.run(main)
"""


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def choice() -> Iterator[None]:
    """What a test has chosen is forgotten."""
    yield
    trimesh.progress(None)


async def shown_for(seconds: float, *, total: int = 0, **proc: Any) -> None:
    """Do something for a time, half of it after half of the time."""
    async with trio.open_nursery() as nursery:
        found = SimpleNamespace(**{"is_simulated": False, "family": object(), "nursery": nursery} | proc)
        with showing(found, "counting", total) as progress:
            await trio.sleep(seconds / 2)
            progress.done += total // 2
            await trio.sleep(seconds / 2)
        nursery.cancel_scope.cancel()


async def test_log_has_a_line_now_and_then_where_it_is_asked_for(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q9: after two seconds, then every ten, and at the end."""
    with configured(progress="on"):
        await shown_for(30.5, total=8)
    assert capsys.readouterr().err.splitlines() == [
        "counting: 0 of 8, 2 s",
        "counting: 0 of 8, 12 s",
        "counting: 4 of 8, 22 s, 0.182/s, about 22 s left",
        "counting: 4 of 8, 30 s, 0.131/s, ended",
    ]


async def test_rate_and_time_left_are_those_of_the_step(autojump_clock: trio.testing.MockClock) -> None:
    """Q9: of what is counted, from where it is counted; hours are not told in seconds."""
    found = ShownProgress("copying", 10_000)
    await trio.sleep(100)
    assert found.text == "copying: 0 of 10000, 1 min 40 s"
    found.done = 100
    assert found.text == "copying: 100 of 10000, 1 min 40 s, 1/s, about 2 h 45 min left"
    found.done = 10_000
    assert found.text == "copying: 10000 of 10000, 1 min 40 s, 100/s"
    found.begin("waiting")
    assert found.text == "waiting: 1 min 40 s"
    await trio.sleep(10)
    found.done = 5
    assert found.text == "waiting: 5, 1 min 50 s, 0.5/s"


async def test_what_is_done_within_two_seconds_shows_nothing(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q9."""
    with configured(progress="on"):
        await shown_for(limits.PROGRESS_SECONDS - 0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("setting", "chosen", "proc"),
    [
        ("auto", None, {}),
        ("off", None, {}),
        ("on", False, {}),
        ("on", None, {"is_simulated": True}),
        ("on", True, {"family": None}),
    ],
    ids=["no terminal", "off", "chosen", "simulated", "worker"],
)
@pytest.mark.usefixtures("choice")
async def test_nothing_is_shown_elsewhere(
    autojump_clock: trio.testing.MockClock,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    chosen: bool | None,
    proc: dict[str, Any],
) -> None:
    """Q9: not where stderr is no terminal, not where it is switched off, not by workers and simulations."""
    trimesh.progress(chosen)
    with configured(progress=setting):
        await shown_for(60, **proc)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("choice")
async def test_choice_of_the_program_goes_before_the_setting(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q9."""
    trimesh.progress(True)
    with configured(progress="off"):
        await shown_for(4)
    assert capsys.readouterr().err == "counting: 2 s\ncounting: 4 s, ended\n"


async def test_line_of_a_terminal_is_gone_at_the_end(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q9: without rich; the line is cut to the width."""
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setenv("COLUMNS", "16")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    await shown_for(2.5, total=2)
    written = terminal.getvalue().split("\r\x1b[2K")
    assert set(written) == {"", "counting: 1 of "}
    assert written[-1] == ""


def test_stream_that_cannot_be_written_to_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q9: closed, or not there at all."""
    closed = io.StringIO()
    closed.close()
    progress: Any = SimpleNamespace(text="x")
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        progress_view.LogView().draw(progress)
        assert isinstance(progress_view.open_view(), progress_view.LogView)


@pytest.mark.daily
@pytest.mark.real
@pytest.mark.parametrize("has_rich", [True, False])
def test_terminal_shows_what_a_start_waits_for(has_rich: bool, tmp_path: Path) -> None:
    """Q9: until it is done; stdout stays what the program prints."""
    if has_rich:
        pytest.importorskip("rich")
    master, slave = pty.openpty()
    hidden = "" if has_rich else "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"
    with subprocess.Popen(
        [sys.executable, "-c", hidden + PROGRAM, str(tmp_path / "seen")],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    ) as program:
        os.close(slave)
        seen = b""
        while b"setting up the processes of procs" not in seen:
            seen += os.read(master, 4096)
        (tmp_path / "seen").touch()
        said, _ = program.communicate(timeout=HANG_SECONDS)
    os.close(master)
    assert (said, program.returncode) == ("ready\n", 0)


class Squares(trimesh.Actor):
    @trimesh.endpoint
    async def square(self, number: int) -> int:
        return number * number


@pytest.mark.daily
@pytest.mark.real
@pytest.mark.parametrize(("items", "shown"), [([1, 2, 3], "3 of 3"), (iter([1, 2, 3]), "3")])
async def test_map_shows_how_many_items_are_done(
    items: Any, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q9: of how many, if that is known."""
    monkeypatch.setattr(limits, "PROGRESS_SECONDS", 0)
    async with trimesh.this_host().spawn_procs({"gpus": 1}) as procs:
        squares = await procs.spawn("squares", Squares)
        with configured(progress="on"):
            async with squares.square.map(items) as results:
                await trio.testing.wait_all_tasks_blocked()
                async for _ in results:
                    pass
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"squares.square.map(): {shown}, ")
        assert last.endswith(", ended")


async def test_call_that_is_tried_again_is_no_map(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q9: of all calls only `map` shows how far it is."""
    calls: Any = RankCalls.__new__(RankCalls)
    calls._mesh, calls._spec = SimpleNamespace(name="w"), SimpleNamespace(name="step")
    with configured(progress="on"), calls._showing():
        await trio.sleep(60)
    assert capsys.readouterr().err == ""
