"""Controllers that tests run in processes of their own, to end them in every way."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import trio
from tests.runtime.conftest import SERVE, ask, hear, nested, new_id, spawner_of, spec_of, tell

from trimesh import Actor, endpoint, this_host
from trimesh._runtime.spawner.launcher import open_spawner
from trimesh.ids import ProcId


def say(*numbers: int) -> None:
    """Print a line of integers for the test."""
    sys.stdout.write(" ".join(map(str, numbers)) + "\n")
    sys.stdout.flush()


class KillAtNth(trio.abc.Instrument):
    """Kills this process when any of its tasks has come to the nth checkpoint."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def die_at_nth(root_id: str, nth: str) -> None:
    """Open a spawner, launch, talk, leave; be killed at the nth step of that. Exit with 0 when it was done before."""

    async def main() -> None:
        async with open_spawner(ProcId(int(root_id)), entry=SERVE) as launcher:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(launcher.launch, spec_of())
            await launcher.flush_output()

    trio.run(main, instruments=[KillAtNth(int(nth))])


def hold(root_id: str, *habits: str) -> None:
    """Start workers with foreign children, print the pids of all there is to end, wait to be ended.

    Args:
        root_id: Of the family.
        habits: What else to do: "forks" (children of the controller that hold its sockets), "stops_workers",
            "stops_spawner", "nests" (a worker with workers of its own).
    """

    async def main() -> None:
        async with open_spawner(ProcId(int(root_id)), entry=SERVE) as launcher:
            workers = [await launcher.launch(spec_of()) for _ in range(3)]
            for worker in workers:
                await hear(worker)
            foreign = [await ask(workers[0], "fork", kind) for kind in ("group", "session", "daemon", "exec")]
            if "nests" in habits:
                foreign += await hear(await launcher.launch(nested(3)))
            if "forks" in habits:
                say(fork_holder())
            spawner = spawner_of(launcher)
            stopped = [*([spawner] if "stops_spawner" in habits else []),
                       *([worker.pid for worker in workers] if "stops_workers" in habits else [])]  # fmt: skip
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            say(spawner, *foreign, *(worker.pid for worker in workers))
            await trio.sleep_forever()

    trio.run(main)


class Forker(Actor):
    """Has children that are none of ours."""

    @endpoint
    async def fork(self) -> list[int]:
        """Fork one child that stays in the group and one that leaves it; return their pids."""
        pids = list[int]()
        for is_leaving in (False, True):
            receiver, sender = os.pipe()
            pid = os.fork()
            if pid == 0:
                if is_leaving:
                    os.setsid()
                os.write(sender, b"x")
                time.sleep(600)  # noqa: ASYNC251 - a child of its own
                os._exit(0)
            os.read(receiver, 1)
            os.close(receiver)
            os.close(sender)
            pids.append(pid)
        return pids

    @endpoint
    async def pids(self) -> list[int]:
        """Return the pids of the spawner and of this process."""
        return [os.getppid(), os.getpid()]


def hold_actor() -> None:
    """Have an actor with foreign children; print the pids of spawner, worker, and children; wait to be ended."""

    async def main() -> None:
        async with this_host().spawn_procs({"n": 1}) as procs:
            forker = await procs.spawn("forker", Forker)
            say(*await forker.pids.call_one(), *await forker.fork.call_one())
            await trio.sleep_forever()

    trio.run(main)


def fork_holder() -> int:
    """Fork a child past Python's hooks, as a C library would: it keeps a copy of every descriptor for a while."""
    libc = ctypes.CDLL(None)
    pid = libc.fork()
    if pid == 0:
        libc.sleep(600)
        libc._exit(0)
    return int(pid)


def preload_slowly(root_id: str, folder: str) -> None:
    """Open a spawner that imports a module which says its pid and sleeps."""
    sys.path.insert(0, folder)

    async def main() -> None:
        async with open_spawner(ProcId(int(root_id)), preload=["sleeps_on_import"], entry=SERVE):
            raise AssertionError("it must not become ready")

    trio.run(main)


def report_oom(group: str) -> None:
    """In a memory group, have one worker run out of memory and another be killed; print how each was reported."""
    with open(group, "w") as file:
        file.write(str(os.getpid()))

    async def main() -> None:
        async with open_spawner(new_id(), entry=SERVE) as launcher:
            children = [await launcher.launch(spec_of()) for _ in range(2)]
            for child in children:
                await hear(child)
            await tell(children[0], "eval", "len(bytearray(1 << 30))")
            report = await children[0].wait_exited()
            say(report.signal or 0, int(report.oom_killed))
            os.kill(children[1].pid, signal.SIGKILL)
            report = await children[1].wait_exited()
            say(report.signal or 0, int(report.oom_killed))

    trio.run(main)


def without_streams() -> None:
    """Close standard output and error, then start a worker in every output mode and see it run."""
    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = None  # type: ignore[assignment]

    async def main() -> None:
        async with open_spawner(new_id(), entry=SERVE) as launcher:
            for output in ("forward", "inherit", "discard"):
                child = await launcher.launch(spec_of(output=output))
                assert await hear(child) == "hello"
                assert await ask(child, "print", "stdout", "x\n")
                await tell(child, "exit", 0)
                assert (await child.wait_exited()).exit_code == 0

    trio.run(main)
