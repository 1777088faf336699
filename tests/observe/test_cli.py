"""The command `trimesh`, run in this process against a run in this process (Q3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import trio
import trio.testing

from trimesh import Actor, endpoint, this_host

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run
from trimesh.cli.text import clean, duration, one_line, size
from trimesh.observe import ObservedRun, runs

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("patient")]


class Keeper(Actor):
    @endpoint
    async def hold(self) -> None:
        await trio.sleep_forever()

    @endpoint
    def pid(self) -> int:
        """Return that of its process."""
        return os.getpid()


async def told(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return exit code and output of a command."""
    capfd.readouterr()
    code = await trio.to_thread.run_sync(run, arguments)
    return code, capfd.readouterr().out


@pytest.mark.daily
async def test_ps_shows_what_lives(capfd: pytest.CaptureFixture[str]):
    """Q3, Q18: as a tree, and as JSON; the first line says that nothing wrong was found."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        await procs.spawn("keepers", Keeper)
        code, text = await told(capfd, "ps")
        assert code == 0
        assert "procs[gpus=1]" in text
        assert "keepers[gpus=0] (Keeper)" in text
        assert text.splitlines()[0] == f"run {os.getpid()}: nothing wrong found"
        code, text = await told(capfd, "ps", "--json")
        [seen] = json.loads(text)
        assert [proc["name"] for proc in seen["procs"]] == ["controller", "procs[gpus=0]", "procs[gpus=1]"]


@pytest.mark.daily
async def test_number_of_a_worker_is_no_run(capfd: pytest.CaptureFixture[str]):
    """Q19: the run that it belongs to is named."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        keepers = await procs.spawn("keepers", Keeper)
        pid = await keepers.slice(gpus=1).pid.call_one()
        assert (await trio.to_thread.run_sync(run, ("calls", "--pid", str(pid)))) == 3
    said = capfd.readouterr().err
    assert (
        f"process {pid} as its controller; it is procs[gpus=1] of run {os.getpid()}: write --pid {os.getpid()}" in said
    )


OTHER_RUN = """
import trio, trimesh
async def main():
    async with trimesh.this_host().spawn_procs({"others": 1}):
        print("ready", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


async def test_ps_shows_the_others_if_one_run_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def runs_of_which_one_ends() -> list[ObservedRun]:
        found = runs()
        assert len(found) == 2
        other.kill()
        other.wait()
        return found

    with subprocess.Popen([sys.executable, "-c", OTHER_RUN], stdout=subprocess.PIPE) as other:  # noqa: ASYNC220
        assert other.stdout is not None
        assert await trio.to_thread.run_sync(other.stdout.readline) == b"ready\n"
        monkeypatch.setattr("trimesh.cli.commands.runs", runs_of_which_one_ends)
        async with this_host().spawn_procs({"gpus": 1}):
            code = await trio.to_thread.run_sync(run, ("ps",))
    text, said = capfd.readouterr()
    assert code == 0
    assert "procs[gpus=0]" in text
    assert f"trimesh: the run of process {other.pid} has ended" in said


async def test_ps_without_a_run(capfd: pytest.CaptureFixture[str]):
    assert (await told(capfd, "ps"))[0] == 3
    assert (await told(capfd, "ps", "--pid", "1"))[0] == 3


async def test_wrong_use_is_told(capfd: pytest.CaptureFixture[str]):
    assert (await told(capfd, "ps", "--dance"))[0] == 2


def test_names_cannot_steer_the_terminal():
    """Escapes of terminals, carriage returns and turns of the reading direction are shown as what they are."""
    assert clean("a\x1b[2Jb\r\u202ec") == "a\\x1b[2Jb\\r\\u202ec"
    assert one_line("a\nb\tc") == "a b c"
    assert one_line("x" * 300) == "x" * 199 + "…"


@pytest.mark.daily
def test_numbers_are_for_people():
    seconds = (0.25, 0.999, 1.0, 3.21, 59.9, 60.0, 245, 3_600, 7380, -5.0)
    assert [duration(one) for one in seconds] == [
        *("0.25 s", "1.00 s", "1.0 s", "3.2 s", "59.9 s", "1 min 0 s", "4 min 5 s", "1 h 0 min", "2 h 3 min", "-5.0 s"),
    ]
    sizes = (0, 1_023, 1_024, 2_048, 1 << 20, 5 << 20, 1 << 50)
    assert [size(one) for one in sizes] == ["0 B", "1023 B", "1 KiB", "2 KiB", "1.0 MiB", "5.0 MiB", "1024.0 TiB"]


@pytest.mark.daily
def test_refusal_beside_several_runs_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """It says what to write, with a pid that is there."""
    monkeypatch.setattr("trimesh.observe.run.runs", lambda: [ObservedRun(FakeClient(pid)) for pid in (41, 42)])  # pyright: ignore[reportArgumentType]
    assert run(["calls"]) == 3
    said = capfd.readouterr().err
    assert "--pid 41 " in said
    assert "got none of 41, 42:" in said


class FakeClient:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def close(self) -> None:
        """Do nothing."""
