"""Commands that end with the call, and all that they have started."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh

# Starts a grandchild in the background, which ignores SIGTERM, and writes both pids when it does.
PARENT = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE)
child.stdout.readline()
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
if sys.argv[2] == "leave":
    sys.exit(3)
time.sleep(600)
"""


async def _pids(path: Path) -> list[int]:
    while not (text := _read(path)):  # noqa: ASYNC110 - no event tells of it
        await trio.sleep(0.01)
    return list(map(int, text.split()))


async def _gone(pid: int) -> None:
    """Wait until a process that is no child of ours is gone, or a zombie of who reaps it."""
    with trio.fail_after(HANG_SECONDS):
        while (stat := _read(Path(f"/proc/{pid}/stat"))) and stat.rpartition(")")[2].split()[0] != "Z":  # noqa: ASYNC110
            await trio.sleep(0.01)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize("how", ["polite", "stubborn"])
async def test_cancel_ends_the_command_and_what_it_has_started(tmp_path: Path, how: str) -> None:
    """SIGTERM, then SIGKILL to all; also where the command itself has ended by the first."""
    pids: list[int] = []
    async with trio.open_nursery() as nursery:
        command = [sys.executable, "-c", PARENT, str(tmp_path / "pids"), how]
        process: trio.Process = await nursery.start(partial(_run, command))
        pids = await _pids(tmp_path / "pids")
        assert pids[0] == process.pid == os.getpgid(pids[1])
        nursery.cancel_scope.cancel()
    assert process.returncode == (-signal.SIGTERM if how == "polite" else -signal.SIGKILL)
    await _gone(pids[1])


async def _run(command: list[str], *, task_status: trio.TaskStatus[trio.Process]) -> None:
    try:
        await trimesh.run_process(command, grace=0.2, task_status=task_status)
    except trio.Cancelled:  # bare, as of any other call
        raise
    raise AssertionError


async def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """Though it holds the pipe that is read to its end."""
    command = [sys.executable, "-c", PARENT, str(tmp_path / "pids"), "leave"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        await trimesh.run_process(command, capture_stdout=True, capture_stderr=True)
    assert caught.value.returncode == 3
    await _gone((await _pids(tmp_path / "pids"))[1])


async def test_result_and_options_are_those_of_trio(tmp_path: Path) -> None:
    """Input, output, working directory, shell."""
    done = await trimesh.run_process("cat; pwd", shell=True, stdin=b"in ", capture_stdout=True, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == b"in " + os.fsencode(tmp_path) + b"\n"
    assert (await trimesh.run_process(["false"], check=False)).returncode == 1
    with pytest.raises(FileNotFoundError):
        await trimesh.run_process([str(tmp_path / "missing")])


@pytest.mark.parametrize("grace", [-1, math.nan])
async def test_grace_must_be_a_time(grace: float) -> None:
    with pytest.raises(ValueError, match="grace"):
        await trimesh.run_process(["true"], grace=grace)


@pytest.mark.parametrize("name", ["deliver_cancel", "start_new_session", "process_group", "preexec_fn"])
async def test_what_it_decides_itself_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        options: dict[str, Any] = {name: None}
        await trimesh.run_process(["true"], **options)
