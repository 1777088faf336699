"""How long a cast takes, and where the time goes: `PYTHONPATH=src:. python -m tests.native.measure_casts 8`.

Every figure is a median over real processes. *loop* is the call of the library that writes the frame to all rings:
the rows for one reader show what a frame written once, for all, would cost. *wakes* is the call that wakes the
readers. *all answered* ends when the last answer has come. docs/design/links.md draws the conclusion.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import trio

from trimesh._transport.interface import Link, LinkDown
from trimesh._transport.messages.outgoing import Bodies
from trimesh._transport.native.transport import NativeTransport
from trimesh.ids import ProcId

ROUNDS = 300
LARGE_ROUNDS = 10


class Answers:
    """Counts what comes."""

    def __init__(self) -> None:
        self._missing = 0
        self._all = trio.Event()

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._all.set()

    def link_down(self, link: Link, down: LinkDown) -> None:
        raise AssertionError(f"a reader has ended: {down}")

    def link_stalled(self, link: Link, seconds: float) -> None:
        raise AssertionError(f"a reader has not run for {seconds} s")

    async def wait(self, count: int) -> None:
        """Wait for `count` answers to what was sent just now."""
        self._missing += count
        self._all = trio.Event()
        if self._missing > 0:
            await self._all.wait()


def median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:9.1f} us"


async def measure_small(transport: NativeTransport, links: list[Link], answers: Answers, size: int) -> None:
    """Measure the parts of a cast of `size` bytes."""
    ffi, lib = transport.library.ffi, transport.library.lib
    handles = ffi.new("uint32_t[]", [link.handle for link in links])
    statuses, cursors = ffi.new("int32_t[]", len(links)), ffi.new("tm_cursor[]", len(links))
    bodies = Bodies(transport.library, transport.bus, [bytes(size)])
    head = b"echo-control"
    for count in (1, len(links)):
        parts: list[tuple[float, float, float]] = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            lib.tm_links_send(
                transport.bus, handles, count, head, len(head), bodies.spans, bodies.count, statuses, cursors
            )
            written = time.perf_counter()
            lib.tm_flush(transport.bus)
            woken = time.perf_counter()
            await answers.wait(count)
            parts.append((written - start, woken - written, time.perf_counter() - start))
        loop, wakes, whole = (median(list(part)) for part in zip(*parts, strict=True))
        print(f"{size:9} B to {count:2}: loop {loop}, wakes {wakes}, all answered {whole}")


async def measure_large(transport: NativeTransport, links: list[Link], answers: Answers, size: int) -> None:
    """Measure a cast of `size` bytes that nobody looks at."""
    group = transport.define_group(links)
    body = bytearray(size)
    took: list[float] = []
    for _ in range(LARGE_ROUNDS):
        start = time.perf_counter()
        group.cast(b"echo-control", [body])
        await answers.wait(len(links))
        took.append(time.perf_counter() - start)
    print(f"{size:9} B to {len(links):2}: first {took[0] * 1e6:.1f} us, then {median(took[1:])}")


def start(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a reader at the other end of a link."""
    command = [sys.executable, str(Path(__file__).with_name("peer.py")), "serve", "local", str(sock.fileno()), "0"]
    return subprocess.Popen(command, pass_fds=[sock.fileno()], stdout=subprocess.DEVNULL)


async def main(readers: int) -> None:
    transport = NativeTransport(ProcId(1))
    answers = Answers()
    with contextlib.ExitStack() as stack:
        links = []
        for _ in range(readers):
            mine, theirs = socket.socketpair()
            with theirs:
                stack.callback(start(theirs).wait)
            links.append(transport.open_link(mine, local=True, lease=False))
        stack.callback(transport.close)  # before the waiting: it ends the readers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.run, answers)
            for link in links:
                await link.up.wait()
            for size in (100, 8192):
                await measure_small(transport, links, answers, size)
            for size in (1 << 20, 1 << 26):
                await measure_large(transport, links, answers, size)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    print(f"{os.cpu_count()} processors, this one may use {len(os.sched_getaffinity(0))}")
    trio.run(main, int(sys.argv[1]))
