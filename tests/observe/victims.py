"""Programs that hang or fail, each in its own way: `python victims.py WAY`. They begin when their input has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from trimesh import Actor, current_point, endpoint, jobs, limits, rdma, this_host


class Worker(Actor):
    """Does what brings a run to a standstill."""

    def __init__(self) -> None:
        self.other_asks = trio.Event()

    @endpoint
    def rank(self) -> int:
        return os.getpid()

    @endpoint
    async def wait(self) -> None:
        await trio.sleep_forever()

    @endpoint
    async def leak(self) -> None:
        self.kept = b"x" * (300 << 20)
        await trio.sleep_forever()

    @endpoint
    def agent(self) -> int:
        """Return the agent of this host, whose child is the spawner of this process."""
        return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])

    @endpoint
    def compute(self) -> None:
        while True:
            pass

    @endpoint
    def hold_the_gil(self) -> None:
        """Wait in C for a lock that this thread holds: no signal interrupts that."""
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)

    @endpoint
    async def step(self, slow: int) -> None:
        if current_point()["gpus"] == slow:
            await trio.sleep_forever()

    @endpoint
    def meet_in_c(self, leaver: int) -> None:
        """Wait for a rank that does not come, as a collective does."""
        if current_point()["gpus"] != leaver:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=1_000)

    @endpoint
    async def ask(self, other: Any) -> None:
        """Ask another one when it is asking, too: neither can answer."""
        await other.begun.call_one()
        await self.other_asks.wait()
        await other.ask_back.call_one()

    @endpoint(group="begun")
    def begun(self) -> None:
        self.other_asks.set()

    @endpoint
    async def ask_back(self) -> None:
        return

    @endpoint
    async def publish(self, versions: int) -> rdma.Published:
        """Publish some versions; further calls go on with the same weights."""
        if not hasattr(self, "weights"):
            self.weights = rdma.Published()
        for _ in range(versions):
            await self.weights.publish({"w": b"x" * 100})
        return self.weights

    @endpoint
    async def keep(self, weights: rdma.Published) -> None:
        """Stay in the block in which a version is pinned."""
        async with weights.pin():
            await trio.sleep_forever()

    @endpoint
    def fail(self, rank: int) -> None:
        if current_point()["gpus"] == rank:
            raise ValueError("no such shard")

    @endpoint
    def crash(self, rank: int) -> None:
        """Crash in C that the library of Python has called."""
        if current_point()["gpus"] == rank:
            ctypes.string_at(0)

    @endpoint
    def die(self, rank: int) -> None:
        if current_point()["gpus"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)


async def within(seconds: float, call: Any, *args: Any) -> None:
    with trio.move_on_after(seconds):
        await call(*args)


SHORT: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "fails": lambda workers: workers.fail.call(3),
    "crashes": lambda workers: workers.crash.call(2),
    "dies": lambda workers: workers.die.call(1),
    "well": lambda workers: workers.rank.call(),
}


async def begin(workers: Any) -> None:
    """Say who works, and wait for the end of the input."""
    print(*(await workers.rank.call()).values(), flush=True)
    await trio.to_thread.run_sync(sys.stdin.read)


async def hang(workers: Any, way: str) -> None:
    async with trio.open_nursery() as nursery:
        match way:
            case "computes":
                nursery.start_soon(workers.slice(gpus=2).compute.call_one)
            case "holds the GIL":
                nursery.start_soon(workers.slice(gpus=1).hold_the_gil.call_one)
            case "leaks":
                nursery.start_soon(workers.slice(gpus=2).leak.call_one)
            case "floods":
                for _ in range(limits.MAILBOX_MESSAGES + 3):
                    nursery.start_soon(workers.slice(gpus=2).wait.call_one)
            case "slow":
                nursery.start_soon(workers.step.call, 2)
            case "left":
                nursery.start_soon(workers.meet_in_c.call, 1)
            case "keeps":
                weights = await workers.slice(gpus=0).publish.call_one(1)
                nursery.start_soon(workers.slice(gpus=2).keep.call_one, weights)
                nursery.start_soon(workers.slice(gpus=0).publish.call_one, 1_000)
            case "publishes in vain":
                nursery.start_soon(workers.slice(gpus=0).publish.call_one, 1 << 40)
            case "deadlock":  # under a deadline, so that no call is failed for it
                for rank in (0, 1):
                    one, other = workers.slice(gpus=rank), workers.slice(gpus=1 - rank)
                    nursery.start_soon(within, 1_000.0, one.ask.call_one, other)
            case _:
                await SHORT[way](workers)


async def main(way: str) -> None:
    async with this_host().spawn_procs({"gpus": 4}) as procs:
        workers = await procs.spawn("workers", Worker)
        await begin(workers)
        await hang(workers, way)


async def main_on_hosts() -> None:
    """Lose a host: its agent is killed while its processes are called."""
    async with jobs.LocalJob(2) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        await begin(workers)
        agents = list((await workers.agent.call()).values())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.wait.call)
            os.kill(agents[1], signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "loses a host":
        trio.run(main_on_hosts)
    else:
        trio.run(main, sys.argv[1])
