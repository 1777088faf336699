"""Actors that tell the test what becomes of them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from stage import say

import trimesh
from trimesh import Actor, endpoint, this_host

LIBC = ctypes.PyDLL(None)
"""Its functions keep the GIL, unlike those of `CDLL`."""


def rank() -> int:
    """Return the rank in the mesh that the running code belongs to."""
    return trimesh.current_rank()


class Quiet(Actor):
    """Serves, and says nothing by itself."""

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @endpoint(concurrency=64)
    async def sleep(self) -> None:
        """Run until cancelled."""
        say("running", rank=rank())
        try:
            await trio.sleep_forever()
        finally:
            say("unwound", rank=rank())

    @endpoint
    async def add(self, one: int, other: int) -> int:
        """Return the sum."""
        return one + other

    @endpoint
    async def fail_at(self, chosen: int) -> None:
        """Raise in one rank."""
        if rank() == chosen:
            raise ValueError("on purpose")

    @endpoint
    def hold_gil(self, seconds: float) -> None:
        """Sleep in C with the GIL held."""
        hold_gil(seconds)

    @endpoint(group="one", concurrency=1)
    def hold_gil_at(self, seconds: float, chosen: int) -> None:
        """The same in one rank; the others return at once."""
        if rank() == chosen:
            say("holding")
            hold_gil(seconds)

    @endpoint
    async def babble(self, kind: str, data: str, chosen: int) -> int:
        """Write to every socket of a kind that this process was started with; return how many there were."""
        return babble(socket.SocketKind[kind], data.encode()) if rank() == chosen else 0

    @endpoint
    async def flood(self, size: int) -> None:
        """Write `size` bytes as fast as they are taken."""
        say("running", rank=rank())
        lines = (b"x" * 99 + b"\n") * 100
        for _ in range(size // len(lines)):
            os.write(1, lines)
        say("flooded", rank=rank())

    @endpoint
    async def send_self(self, signum: int) -> None:
        """Signal the own process."""
        os.kill(os.getpid(), signum)
        await trio.sleep_forever()

    @endpoint
    async def leave(self, code: int, words: str = "") -> None:
        """End the process at once."""
        sys.stderr.write(words)
        sys.stderr.flush()
        os._exit(code)

    @endpoint
    async def fork(self, count: int) -> list[int]:
        """Fork processes that hold every descriptor of this one and wait for ever; return their pids."""
        return fork_many(count)

    @endpoint
    async def fork_session(self, count: int) -> list[int]:
        """Fork processes that leave the session and the process group, too."""
        return fork_many(count, is_leader=True)

    @endpoint
    async def fork_pool(self, count: int) -> list[int]:
        """Start a pool as `multiprocessing` and DataLoader do, its tracker and all."""
        self.pool = multiprocessing.get_context("fork").Pool(count)
        return [child.pid for child in multiprocessing.active_children() if child.pid is not None]

    @endpoint
    async def crash(self) -> None:
        """Read address 0."""
        ctypes.string_at(0)

    @endpoint
    async def ignore(self, signum: int) -> None:
        """Ignore a signal from now on."""
        signal.signal(signum, signal.SIG_IGN)

    @endpoint
    async def allow_tracer(self) -> None:
        """Let any process of this user trace this one, where the machine asks for such leave."""
        LIBC.prctl(ctypes.c_int(0x59616D61), ctypes.c_ulong(2**64 - 1), 0, 0, 0)

    @endpoint
    async def at_exit(self) -> None:
        """Say so when the process ends as it should."""
        atexit.register(say, "atexit", rank=rank())

    @endpoint
    async def crash_at_exit(self, chosen: int) -> None:
        """Read address 0 when the process of one rank ends as it should."""
        if rank() == chosen:
            atexit.register(ctypes.string_at, 0)

    @endpoint
    async def buffer(self, text: str) -> None:
        """Write without a newline, which leaves the text in the buffer."""
        sys.stdout.write(text)

    @endpoint
    async def write(self, out: str, err: str = "") -> None:
        """Write to both streams."""
        sys.stdout.write(out)
        sys.stdout.flush()
        sys.stderr.write(err)
        sys.stderr.flush()


class Talking(Quiet):
    """Says when it is up, and when it has been cleaned up."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Say both ends."""
        say("up", rank=rank(), mesh=trimesh.context().mesh)
        try:
            yield
        finally:
            say("down", rank=rank(), mesh=trimesh.context().mesh)


class Wordy(Quiet):
    """Writes much when it ends."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Write at the end."""
        yield
        for number in range(500):
            sys.stdout.write(f"line {number}\n")


class Stubborn(Quiet):
    """Cleans up for longer than it may."""

    def __init__(self, seconds: float | None = None, until: str | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.until = None if until is None else Path(until)

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Be shielded for `seconds` at the end, or until there is a file at a path."""
        try:
            yield
        finally:
            say("cleaning", rank=rank())
            with trio.CancelScope(shield=True), trio.move_on_after(self.seconds):
                while self.until is None or not self.until.exists():  # noqa: ASYNC110 - it is another process
                    await trio.sleep(math.inf if self.until is None else 0.01)
            say("cleaned", rank=rank())


class SlowToStart(Quiet):
    """Never gets through its constructor."""

    def __init__(self) -> None:
        say("constructing", rank=rank())
        while True:
            signal.pause()


class SlowToSettle(Quiet):
    """Never gets through the first half of its lifespan."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Wait to be cancelled."""
        say("constructing", rank=rank())
        await trio.sleep_forever()
        yield


class Nest(Quiet):
    """Opens a mesh of its own inside, down to a depth."""

    @endpoint
    async def nest(self, depth: int, width: int = 1) -> None:
        """Hold `depth` more levels of processes below this one."""
        say("level", depth=depth, rank=rank())
        if depth == 0:
            await trio.sleep_forever()
        async with this_host().spawn_procs({"n": width}, name=f"level{depth - 1}") as procs:
            inner = await procs.spawn("nest", Nest)
            await inner.nest.call(depth - 1, width)


def hold_gil(seconds: float) -> None:
    """Sleep in C with the GIL held."""
    say("running", rank=rank())
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:  # a signal cuts the sleep short
        LIBC.usleep(ctypes.c_uint(int(left * 1e6)))
    say("returned", rank=rank())


def babble(kind: socket.SocketKind, data: bytes) -> int:
    """Write to every Unix socket of this process of a kind."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as found:
            if found.family == socket.AF_UNIX and found.type == kind:
                found.send(data, socket.MSG_DONTWAIT)
                count += 1
    return count


def fork_many(count: int, *, is_leader: bool = False) -> list[int]:
    """Fork as a library would: the children keep all descriptors that fork leaves them; return their pids.

    With `is_leader` each leads a session of its own. Their name is inherited, so that none is ever without it.
    """
    pids = []
    own = Path("/proc/thread-self/comm").read_text()
    LIBC.prctl(ctypes.c_int(15), ctypes.c_char_p(b"foreign"), 0, 0, 0)  # PR_SET_NAME
    try:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                try:
                    if is_leader:
                        os.setsid()
                    while True:
                        signal.pause()
                finally:
                    os._exit(0)
            pids.append(pid)
    finally:
        LIBC.prctl(ctypes.c_int(15), ctypes.c_char_p(own.strip().encode()), 0, 0, 0)
    return pids
