"""What a stream socket between two processes costs more than the rings of one host: bare links, without calls.

python -m bench.scaling.wire KIND DESCRIPTOR    the other process, which answers every message by an empty one
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import trio

from trimesh._transport.interface import Lane, Link, LinkDown
from trimesh._transport.native.transport import NativeTransport
from trimesh.ids import ProcId

LINKS = 16
ROUNDS = 300
BODY_BYTES = 16 << 20
BODY_ROUNDS = 12
SEND_BYTES = 100


def least(seconds: list[float]) -> float:
    """Return the lower decile: what others compute only adds."""
    return sorted(seconds)[len(seconds) // 10]


@dataclass(frozen=True)
class WireCosts:
    """Lower deciles of one kind of link, in microseconds.

    Attributes:
        round_trip: A message to one process and its answer.
        cpu: What each further process costs the sender, the answer included; all threads.
        byte: Each byte of a large body, until its receiver has answered.
    """

    round_trip: float
    cpu: float
    byte: float


class Answers:
    """Counts what comes."""

    def __init__(self) -> None:
        self._missing = 0
        self._all = trio.Event()

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        self._missing -= 1
        if not self._missing:
            self._all.set()

    def link_down(self, link: Link, down: LinkDown) -> None:
        raise AssertionError(f"the other process has ended: {down}")

    def link_stalled(self, link: Link, seconds: float) -> None:
        """Take no notice: the machine is busy."""

    async def wait(self, count: int) -> None:
        """Wait for so many answers to what was sent just now."""
        self._missing, self._all = count, trio.Event()
        await self._all.wait()


class Echo:
    """Answers, until its link ends."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        link.send(b"taken", lane=Lane.CONTROL)

    def link_down(self, link: Link, down: LinkDown) -> None:
        self._scope.cancel()

    def link_stalled(self, link: Link, seconds: float) -> None:
        """Take no notice."""


async def serve(kind: str, descriptor: int) -> None:
    transport = NativeTransport(ProcId(2))
    transport.open_link(socket.socket(fileno=descriptor), local=kind == "ring", lease=False)
    async with trio.open_nursery() as nursery:
        await transport.run(Echo(nursery.cancel_scope))
    transport.close()


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets: of TCP for a stream, else the pair that goes with rings."""
    if kind == "ring":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


@asynccontextmanager
async def open_links(kind: str, count: int) -> AsyncIterator[tuple[NativeTransport, list[Link], Answers]]:
    """Start so many processes with a link each."""
    transport, answers = NativeTransport(ProcId(1)), Answers()
    async with AsyncExitStack() as stack:
        links: list[Link] = []
        for _ in range(count):
            near, far = pair(kind)
            command = [sys.executable, "-m", "bench.scaling.wire", kind, str(far.fileno())]
            process = subprocess.Popen(command, pass_fds=[far.fileno()])  # noqa: ASYNC220 - nothing else runs yet
            stack.callback(process.wait)
            far.close()
            links.append(transport.open_link(near, local=kind == "ring", lease=False))
        stack.callback(transport.close)  # before the waiting: it ends the processes
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(transport.run, answers)
        for link in links:
            await link.up.wait()  # type: ignore[attr-defined]
        yield transport, links, answers
        nursery.cancel_scope.cancel()


async def measure(kind: str) -> WireCosts:
    """Measure links of one kind: "ring" or "stream"."""
    async with open_links(kind, LINKS) as (transport, links, answers):
        trips: dict[int, float] = {}
        cpus: dict[int, float] = {}
        for count in (1, LINKS):
            group = transport.define_group(links[:count])
            spans: list[float] = []
            used: list[float] = []
            for _ in range(ROUNDS):
                start, cpu = time.perf_counter(), time.process_time()
                group.cast(b"message", [bytes(SEND_BYTES)])
                await answers.wait(count)
                spans.append(time.perf_counter() - start)
                used.append(time.process_time() - cpu)
            trips[count], cpus[count] = least(spans), least(used)
        body, spans = bytearray(BODY_BYTES), []
        for _ in range(BODY_ROUNDS):
            start = time.perf_counter()
            links[0].send(b"message", [body])
            await answers.wait(1)
            spans.append(time.perf_counter() - start)
    return WireCosts(
        round_trip=trips[1] * 1e6,
        cpu=(cpus[LINKS] - cpus[1]) / (LINKS - 1) * 1e6,
        byte=max(0.0, least(spans) - trips[1]) / BODY_BYTES * 1e6,
    )


if __name__ == "__main__":
    trio.run(serve, sys.argv[1], int(sys.argv[2]))
