"""Shared memory and semaphores of `multiprocessing` that actors leave are removed, however their process ends (Z05)."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, Isolate, endpoint, this_host

pytestmark = pytest.mark.real

FOLDER = Path("/dev/shm")


class Shared(NamedTuple):
    """What an actor made, by its names in the folder, and the pid of the tracker that knows of it.

    Tests ask for these names only: others of this file, and other programs, put theirs in the same folder.
    """

    names: tuple[str, str]
    tracker: int


def are_there(names: tuple[str, ...]) -> list[bool]:
    return [(FOLDER / name).exists() for name in names]


class Leaving(Actor):
    """Makes what outlives a process unless somebody removes it."""

    @endpoint
    def share(self) -> Shared:
        """Make a segment and a semaphore."""
        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        self.lock = multiprocessing.get_context("spawn").Lock()
        semaphore: Any = self.lock
        tracker: Any = resource_tracker
        return Shared(
            (self.memory.name.removeprefix("/"), "sem." + semaphore._semlock.name.removeprefix("/")),
            int(tracker._resource_tracker._pid),
        )

    @endpoint
    def remove(self) -> None:
        self.memory.close()
        self.memory.unlink()


def is_gone(pid: int) -> Callable[[], bool]:
    """Return what waits for the end of a process that is not ours to reap, and tells whether it came."""
    fd = os.pidfd_open(pid)

    def wait() -> bool:
        try:
            waiter = select.poll()
            waiter.register(fd, select.POLLIN)
            return bool(waiter.poll(HANG_SECONDS * 1000))
        finally:
            os.close(fd)

    return wait


async def test_what_is_left_is_removed_when_the_block_ends() -> None:
    """At a normal exit, before the block is done."""
    async with this_host().spawn_procs({"n": 2}) as procs:
        leaving = await procs.spawn("leaving", Leaving)
        first = await leaving.slice(n=0).share.call_one()
        second = await leaving.slice(n=1).share.call_one()
        assert are_there(first.names + second.names) == [True] * 4

    assert are_there(first.names + second.names) == [False] * 4


async def test_what_was_removed_is_not_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    """The tracker is the one of Python: it knows of both."""
    async with this_host().spawn_procs({}) as procs:
        leaving = await procs.spawn("leaving", Leaving)
        await leaving.share.call_one()
        await leaving.remove.call_one()

    assert "shared_memory" not in capfd.readouterr().err


async def test_what_a_killed_process_leaves_is_removed_while_others_live() -> None:
    """SIGKILL, as out of memory: the tracker ends soon after its users."""
    async with this_host().spawn_procs({"n": 2}, supervision=Isolate()) as procs:
        leaving = await procs.spawn("leaving", Leaving)
        kept = await leaving.slice(n=1).share.call_one()
        lost = await leaving.slice(n=0).share.call_one()
        wait = is_gone(lost.tracker)
        killed = procs.statistics().members[0].pid
        assert killed is not None
        assert are_there(lost.names) == [True, True]

        os.kill(killed, signal.SIGKILL)

        assert await trio.to_thread.run_sync(wait)
        assert are_there(lost.names) == [False, False]
        assert are_there(kept.names) == [True, True]


SCRIPT = """
import trio
from trimesh import this_host
from tests.lifetime.test_shared_memory import Leaving

async def main():
    async with this_host().spawn_procs({}) as procs:
        shared = await (await procs.spawn("leaving", Leaving)).share.call_one()
        print(*shared.names, shared.tracker, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_what_is_left_when_the_controller_is_killed_is_removed() -> None:
    """Z04: all are killed at once, and the tracker is not."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        memory, semaphore, tracker = program.stdout.readline().split()
        wait = is_gone(int(tracker))
        assert are_there((memory, semaphore)) == [True, True]

        program.kill()

        assert wait()
    assert are_there((memory, semaphore)) == [False, False]
