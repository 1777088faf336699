"""Kill what carries a job, at a stage of it: what the user sees, and that nothing is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs
from tests.jobs.kills.staged_agent import FOLDER, PYTHON_TEXT
from tests.patience import HANG_SECONDS

STAGES: Final = ("starting", "joining", "running", "stopping")
ROOT: Final = Path(__file__).parents[3]


@attrs.frozen
class Run:
    """A program that stands at a stage.

    Attributes:
        program: Its process.
        agent: Process id of the agent that stands there; of the second host where it runs.
        spawner: Of its spawner, or 0.
        pids: Of all processes on the hosts that are known.
    """

    program: subprocess.Popen[str]
    agent: int
    spawner: int
    pids: tuple[int, ...]


def controller(run: Run, _: object = None) -> None:
    """Kill the program."""
    run.program.kill()


def agent(run: Run, _: object = None) -> None:
    """Kill the agent that stands at the stage."""
    os.kill(run.agent, signal.SIGKILL)


def staged_python(folder: Path) -> Path:
    """Write an interpreter whose agents stand still."""
    path = folder / "python"
    path.write_text(PYTHON_TEXT.format(variable=FOLDER, folder=folder, root=ROOT, python=sys.executable))
    path.chmod(0o755)
    return path


def check_kill(
    job: str,
    stage: str,
    kill: Callable[[Run], None],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    seconds: float = HANG_SECONDS,
    is_held: bool = False,
) -> list[dict[str, str]] | None:
    """Bring a job to a stage, kill what `kill` says, and wait until all that it had is gone.

    Args:
        job: An expression.
        stage: One of `STAGES`.
        kill: Kills.
        folder: Empty, of the test.
        env: Variables of the program.
        seconds: After which the test has failed.
        is_held: Whether nothing that the job needs is killed: the program runs, and is ended in order.

    Returns:
        What the program has raised; None where it was killed.
    """
    (folder / "stage").write_text(stage)
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.kills.program", job, stage],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, FOLDER: str(folder), **(env or {})},
    )
    pidfds = dict[int, int]()
    with program:
        try:
            run = _wait_for(program, stage, folder)
            for pid in run.pids:
                with suppress(ProcessLookupError):  # of the other host, which is ending
                    pidfds[pid] = os.pidfd_open(pid)
            kill(run)
            (folder / "go").touch()
            if is_held:
                _let_go(run, stage)
            seen = _end_of(program, seconds)
            left = [pid for pid, pidfd in pidfds.items() if not select.select([pidfd], [], [], seconds)[0]]
            assert not left, f"processes are left: {left}"
        finally:
            program.kill()
            for pid, pidfd in pidfds.items():
                if not select.select([pidfd], [], [], 0)[0]:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
                del pid
    return seen


def _wait_for(program: subprocess.Popen[str], stage: str, folder: Path) -> Run:
    found: list[list[int]] = []
    if stage in ("running", "stopping"):
        found = _read(program)["pids"]
    agent = found[1][2] if found else 0
    if stage != "running":
        place, deadline = folder / "agent", time.monotonic() + HANG_SECONDS
        while not place.exists():
            assert time.monotonic() < deadline, f"no agent came to {stage}"
            assert program.poll() is None, f"the program has ended before an agent came to {stage}"
            time.sleep(0.01)
        agent = int(place.read_text())
    spawner = next((pids[1] for pids in found if pids[2] == agent), 0)
    return Run(program, agent, spawner, tuple({agent, *(pid for pids in found for pid in pids if _lives(pid))}))


def _let_go(run: Run, stage: str) -> None:
    """Wait until a program that goes on runs, and end it by SIGINT, as by Ctrl-C."""
    if stage in ("starting", "joining"):
        _read(run.program)
    if stage != "stopping":
        run.program.send_signal(signal.SIGINT)


def children_of(pid: int, name: str) -> list[int]:
    """Return the descendants of a process that run a program of this name."""
    found = list[int]()
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]  # of each thread its own
    for child in map(int, " ".join(texts).split()):
        try:
            if Path(f"/proc/{child}/comm").read_text().strip() == name:
                found.append(child)
            found += children_of(child, name)
        except FileNotFoundError:
            continue
    return found


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _read(program: subprocess.Popen[str]) -> Any:
    assert program.stdout is not None
    return json.loads(program.stdout.readline() or "{}")


def _end_of(program: subprocess.Popen[str], seconds: float) -> list[dict[str, str]] | None:
    try:
        out, _ = program.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError("the program does not end") from None
    lines = [json.loads(line) for line in out.splitlines()]
    return next((line["seen"] for line in lines if line["at"] == "end"), None)
