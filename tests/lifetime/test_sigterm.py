"""SIGTERM to a program with open blocks, as Slurm, Kubernetes and systemd send it (Z03, O6)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.patience import HANG_SECONDS
from tests.runtime.processes import descendants, wait_gone

from trimesh._native import tls

pytestmark = pytest.mark.real

PROGRAM = Path(__file__).parent / "programs" / "terminated.py"


@contextmanager
def started(how: str) -> Iterator[subprocess.Popen[str]]:
    """Start the program, and wait until its two actors run."""
    command = [sys.executable, str(PROGRAM), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            read_until("ready", 2, process)
            yield process
        finally:
            process.kill()


def read_until(word: str, count: int, process: subprocess.Popen[str]) -> list[str]:
    """Read lines of output up to the nth with a word; return those."""
    assert process.stdout is not None
    found = list[str]()
    while len(found) < count:
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr is not None else ""
        found += [line] * (word in line)
    return found


@pytest.mark.daily
@pytest.mark.parametrize("how", ["plain", "busy", "asyncio", "blocking", "no Ctrl-C", "hosts"])
async def test_sigterm_cleans_up_and_ends_the_program_by_the_signal(how: str) -> None:
    """Z03, O6: also where its own code computes, under asyncio and `trimesh.blocking`, and on hosts of a job."""
    if how == "hosts" and not tls.library()[0]:
        pytest.skip(tls.library()[1])
    with started(how) as process:
        pids = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == -signal.SIGTERM, errors
    assert output.count("cleaned") == 2
    assert "after the block" not in output
    assert "Traceback" not in errors
    if how in ("plain", "busy"):
        assert "left" in output.splitlines()
    await wait_gone(pids)


@pytest.mark.daily
async def test_second_sigterm_ends_it_at_once() -> None:
    """Z03, O6: clean-up that would take 600 s is cut short; processes end by their lifelines."""
    with started("stubborn") as process:
        pids = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        read_until("cleaning", 2, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_SECONDS) == -signal.SIGTERM
    await wait_gone(pids)


async def test_code_that_never_ends_is_bounded() -> None:
    """O6: the program ends by itself `limits.SIGTERM_SECONDS` and the grace of its blocks later."""
    with started("endless") as process:
        pids = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_SECONDS) == -signal.SIGTERM
    await wait_gone(pids)


def test_handler_of_the_user_stays() -> None:
    """O6: it decides alone."""
    with started("own handler") as process:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 5
    assert output == "own handler\n"


async def test_forked_child_ends_at_once() -> None:
    """O4, O6: as without trimesh; the program and its block go on."""
    command = [sys.executable, str(PROGRAM), "forked"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        [line] = read_until("child", 1, process)
        child = int(line.split()[-1])
        read_until("ready", 2, process)
        os.kill(child, signal.SIGTERM)
        pidfd = os.pidfd_open(child)
        assert select.select([pidfd], [], [], HANG_SECONDS)[0], "the child lives"
        os.close(pidfd)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_SECONDS) == -signal.SIGTERM
    await wait_gone([child])
