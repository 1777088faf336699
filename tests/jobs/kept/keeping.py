"""Kept jobs for tests: their state in a folder of the test, their processes looked at from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import see, state

from trimesh import Actor, endpoint, jobs, limits
from trimesh.jobs.kept.state import KeptState
from trimesh.testing import zombie_guard

PROGRAM = """
import sys, trio
from trimesh import jobs
from tests.jobs.kept.keeping import Worker

async def main():
    async with jobs.attach(sys.argv[1]) as hosts:
        async with hosts.spawn_procs({"procs": 2}) as procs, procs.spawn("w", Worker) as w:
            print(*[pid for pids in await w.pids.call() for pid in pids], flush=True)
            await trio.sleep_forever()

trio.run(main)
"""
"""Attaches, says the pids of its processes, and stays."""


class Worker(Actor):
    """What the tests call."""

    @endpoint
    async def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    async def pids(self) -> tuple[int, int, int]:
        """Return the pids of this process, of its spawner, and of the agent."""
        spawner = os.getppid()
        seen = see(spawner)
        assert seen is not None
        return os.getpid(), spawner, seen.parent


@contextmanager
def kept_in(folder: Path) -> Generator[None, None, None]:
    """Have state files below `folder`, and keepers that the zombie guard does not know: they outlive tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.delenv(zombie_guard.MARKER, raising=False)
        patch.setattr(limits, "AGENT_EXIT_SECONDS", 6.0)  # for the words of a keeper on a busy machine
        yield


def below(pid: int) -> list[int]:
    """Return a process, and all that it has started, directly or not, and that lives."""
    found = {pid}
    parents = {int(one): seen.parent for one in os.listdir("/proc") if one.isdigit() and (seen := see(int(one)))}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


async def wait_gone(pids: list[int]) -> None:
    """Wait until processes have ended; what is left fails the test."""
    with trio.move_on_after(HANG_SECONDS):
        while any(state(pid) for pid in pids):  # noqa: ASYNC110 - not children of this process
            await trio.sleep(0.01)
    left = {pid: seen for pid in pids if (seen := see(pid)) and state(pid)}
    assert not left


def keeper_of(folder: Path, name: str) -> int:
    """Return the process that a state file names."""
    return msgspec.json.decode((folder / "trimesh" / "jobs" / f"{name}.json").read_bytes(), type=KeptState).pid


@attrs.define
class Attached:
    """A program of its own that is attached.

    Attributes:
        process: It.
        pids: Of what it has started on the hosts: workers, spawners, agents.
        pidfds: Of those, which cannot come to mean others.
    """

    process: trio.Process
    pids: list[int]
    pidfds: list[int]

    async def wait_gone(self) -> None:
        """Wait until all that it has started has ended; what is left fails the test."""
        with trio.move_on_after(HANG_SECONDS / 2) as scope:  # the test says what is left before it is given up
            for pidfd in self.pidfds:
                await trio.lowlevel.wait_readable(pidfd)
        assert not scope.cancelled_caught, [see(pid) for pid in self.pids]


@asynccontextmanager
async def attached_program(name: str) -> AsyncGenerator[Attached, None]:
    """Run `PROGRAM` while the body does; it is killed then."""
    process = await trio.lowlevel.open_process([sys.executable, "-c", PROGRAM, name], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pidfds = list[int]()
    async with process.stdout as stdout:
        try:
            line = b""
            while not line.endswith(b"\n"):
                more = await stdout.receive_some()
                assert more, "the program has ended"
                line += more
            pids = [int(word) for word in line.split()]
            pidfds += map(os.pidfd_open, pids)
            yield Attached(process, pids, pidfds)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def double_on(name: str, pki: jobs.OwnPKI | None = None) -> list[int]:
    """Attach, call an actor on each host, and return what they say."""
    async with (
        jobs.attach(name, pki=pki) as hosts,
        hosts.spawn_procs({}) as procs,
        procs.spawn("workers", Worker) as workers,
    ):
        return list(await workers.double.call(21))
