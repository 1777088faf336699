"""Shared memory and semaphores of `multiprocessing` that actors leave are removed, however their process ends (Z05)."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, Isolate, endpoint, this_host

pytestmark = pytest.mark.real

FOLDER = Path("/dev/shm")


class Leaving(Actor):
    """Makes what outlives a process unless somebody removes it."""

    @endpoint
    def share(self, name: str) -> int:
        """Return the pid of the tracker."""
        self.memory = shared_memory.SharedMemory(name, create=True, size=4096)
        self.lock = multiprocessing.get_context("spawn").Lock()
        tracker: Any = resource_tracker
        return int(tracker._resource_tracker._pid)

    @endpoint
    def remove(self) -> None:
        self.memory.close()
        self.memory.unlink()


def names() -> set[str]:
    """Return what is there."""
    return set(os.listdir(FOLDER))


@pytest.fixture
def before() -> set[str]:
    """What was there."""
    return names()


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


def new_name() -> str:
    return f"left-{secrets.token_hex(8)}"


def left(before: set[str]) -> set[str]:
    """Return the names of these tests, and of semaphores, that came since."""
    return {name for name in names() - before if name.startswith(("left-", "sem.mp-"))}


async def test_what_is_left_is_removed_when_the_block_ends(before: set[str]) -> None:
    """At a normal exit, before the block is done."""
    async with this_host().spawn_procs({"n": 2}) as procs:
        leaving = await procs.spawn("leaving", Leaving)
        await leaving.slice(n=0).share.call_one(new_name())
        await leaving.slice(n=1).share.call_one(new_name())
        assert len(left(before)) == 4

    assert left(before) == set()


async def test_what_was_removed_is_not_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    """The tracker is the one of Python: it knows of both."""
    async with this_host().spawn_procs({}) as procs:
        leaving = await procs.spawn("leaving", Leaving)
        await leaving.share.call_one(new_name())
        await leaving.remove.call_one()

    assert "shared_memory" not in capfd.readouterr().err


async def test_what_a_killed_process_leaves_is_removed_while_others_live(before: set[str]) -> None:
    """SIGKILL, as out of memory: the tracker ends soon after its users."""
    async with this_host().spawn_procs({"n": 2}, supervision=Isolate()) as procs:
        leaving = await procs.spawn("leaving", Leaving)
        await leaving.slice(n=1).share.call_one(new_name())
        kept = left(before)
        trackers = await leaving.slice(n=0).share.call_one(new_name())
        wait = is_gone(trackers)
        killed = procs.statistics().members[0].pid
        assert killed is not None

        os.kill(killed, signal.SIGKILL)

        assert await trio.to_thread.run_sync(wait)
        assert left(before) == kept


SCRIPT = """
import sys, trio
from trimesh import this_host
from tests.lifetime.test_shared_memory import Leaving

async def main():
    async with this_host().spawn_procs({}) as procs:
        print(await (await procs.spawn("leaving", Leaving)).share.call_one(sys.argv[1]), flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_what_is_left_when_the_controller_is_killed_is_removed(before: set[str]) -> None:
    """Z04: all are killed at once, and the tracker is not."""
    command = [sys.executable, "-c", SCRIPT, new_name()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        wait = is_gone(int(program.stdout.readline()))
        assert len(left(before)) == 2

        program.kill()

        assert wait()
    assert left(before) == set()
