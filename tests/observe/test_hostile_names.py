"""Names, lines and errors that would steer a terminal: every command shows them as escapes (Q3)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

from trimesh import Actor, Isolate, endpoint, observe, this_host

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("patient")]

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\u2066z"
"""A title and a cleared screen, by ESC and by the one-byte CSI; a carriage return, a backspace, turned directions."""


class Hostile(Actor):
    """An actor whose words are chosen by an enemy."""

    @endpoint
    async def say(self) -> None:
        """Write the words to both streams."""
        print(HOSTILE, flush=True)
        print(HOSTILE, file=sys.stderr, flush=True)

    @endpoint
    async def fail(self) -> None:
        """Raise them."""
        raise ValueError(HOSTILE)

    @endpoint
    async def hold(self) -> None:
        """Wait for ever."""
        await trio.sleep_forever()


Hostile.__qualname__ = HOSTILE


def steering(text: str) -> list[str]:
    """Return the characters of a text that are not to be seen, but for the newlines."""
    return [char for char in text if not char.isprintable() and char != "\n"]


async def test_no_command_prints_what_steers_a_terminal(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """Actors, classes, output and errors; of a run that lives, and in the report that is sent to others."""
    report = tmp_path / "report.txt"

    async def told(*arguments: str) -> str:
        capfd.readouterr()
        await trio.to_thread.run_sync(run, arguments)
        out, err = capfd.readouterr()
        assert not steering(err), arguments
        return out + err

    async with this_host().spawn_procs({"gpus": 2}, name=HOSTILE, supervision=Isolate()) as procs:
        hostile = await procs.spawn(HOSTILE, Hostile)
        await hostile.say.call()
        shown = ""
        while shown.count("z\n") < 4:  # the program's own terminal shows what two ranks write to two streams as it is
            shown += "".join(capfd.readouterr())
            await trio.lowlevel.checkpoint()
        with pytest.raises(ExceptionGroup):
            await hostile.fail.call()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hostile.slice(gpus=0).hold.call_one)
            while not [call for call in (await observe.snapshot()).calls if call.state == "running"]:
                await trio.lowlevel.checkpoint()
            await procs.kill([{"gpus": 1}])
            while len(await told("logs", "--all")) < 4 * len(HOSTILE):
                pass
            said = {
                command: await told(*command.split())
                for command in ("ps", "ps --all", "calls", "calls --all", "calls --waits", "stack", "events", "logs")
            }
            said["autopsy"] = await told("autopsy", "--pid", str(os.getpid()))
            said["kill"] = await told("kill", HOSTILE)
            said["metrics"] = await told("metrics")
            await told("report", str(report))
            nursery.cancel_scope.cancel()
    said["report"] = report.read_text(encoding="utf-8")
    assert {command: steering(text) for command, text in said.items()} == {command: [] for command in said}
    for command in ("ps", "calls", "stack", "events", "logs", "autopsy", "report"):
        assert "a\\x1b]0;owned\\x07\\x1b[2J\\x9b31m" in said[command], command
