"""The back ends that `test_transport.py` runs over, and a handler that writes down what it sees."""

from __future__ import annotations

import itertools
import random
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence

import attrs
import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh._transport.in_memory.transport import MemoryNetwork, MemoryTransport
from trimesh._transport.interface import DownReason, Link, LinkDown, Transport
from trimesh._transport.native.transport import NativeLink, NativeTransport
from trimesh.ids import ProcId

KIB = 1 << 10
MIB = 1 << 20
FRAGMENT = limits.FRAME_PAYLOAD_BYTES_MAX
SIZES = [0, 1, FRAGMENT - 1, FRAGMENT, FRAGMENT + 1, MIB, 40 * MIB]

WAIT_SECONDS = 20.0
"""A behaviour that has not come after this long will not come; nothing waits for it when all is well."""

FILL_BYTES = 32 << 20
"""More than any transport takes in for a peer that does not read."""


@attrs.define(eq=False)
class Received:
    """One message as a handler saw it."""

    link: Link
    head: bytes
    bodies: list[memoryview]

    @property
    def contents(self) -> list[bytes]:
        return [bytes(body) for body in self.bodies]


@attrs.define(eq=False)
class Recorder:
    """A handler that keeps everything in the order in which it came; `react` may answer."""

    messages: list[Received] = attrs.field(factory=list)
    downs: list[tuple[Link, LinkDown]] = attrs.field(factory=list)
    stalls: list[tuple[Link, float]] = attrs.field(factory=list)
    react: Callable[[Received], None] | None = None
    late: list[object] = attrs.field(factory=list)
    """What came from a link after its `link_down`; must stay empty."""
    _changed: trio.Event = attrs.field(factory=trio.Event)

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        message = Received(link, bytes(head), bodies)
        if self.is_down(link):
            self.late.append(message)
        self.messages.append(message)
        if self.react is not None:
            self.react(message)
        self._notify()

    def link_down(self, link: Link, down: LinkDown) -> None:
        if self.is_down(link):
            self.late.append(down)
        self.downs.append((link, down))
        self._notify()

    def link_stalled(self, link: Link, seconds: float) -> None:
        self.stalls.append((link, seconds))
        self._notify()

    def is_down(self, link: Link) -> bool:
        return any(link is seen for seen, _ in self.downs)

    def heads(self, link: Link | None = None) -> list[bytes]:
        return [message.head for message in self.messages if link is None or message.link is link]

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever something came."""
        with trio.fail_after(HANG_SECONDS):
            while not condition():
                await self._changed.wait()

    async def wait_messages(self, count: int) -> list[Received]:
        await self.wait(lambda: len(self.messages) >= count)
        return self.messages

    async def wait_down(self, link: Link) -> LinkDown:
        await self.wait(lambda: self.is_down(link))
        return next(down for seen, down in self.downs if seen is link)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Backend(ABC):
    """A way to make transports and to join them, all inside this process."""

    def __init__(self) -> None:
        self._proc_ids = map(ProcId, itertools.count(101))
        self._transports: list[Transport] = []
        self.closers: list[Callable[[], None]] = []
        """What a test has opened beside the transports."""

    def transport(self) -> Transport:
        """Return a new transport; closed by `close` at the latest."""
        made = self.make(next(self._proc_ids))
        self._transports.append(made)
        return made

    def close(self) -> None:
        """Close everything that this back end has made."""
        for close in (*self.closers, *(transport.close for transport in self._transports)):
            close()

    @abstractmethod
    def make(self, proc_id: ProcId) -> Transport: ...

    @abstractmethod
    def connect(self, a: Transport, b: Transport) -> tuple[Link, Link]:
        """Join two transports; return the end of each."""


class MemoryBackend(Backend):
    """Everything inside one Trio run."""

    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork()

    def make(self, proc_id: ProcId) -> Transport:
        return self.network.transport(proc_id)

    def connect(self, a: Transport, b: Transport) -> tuple[Link, Link]:
        assert isinstance(a, MemoryTransport)
        assert isinstance(b, MemoryTransport)
        return self.network.connect(a, b)


class NativeBackend(Backend):
    """Two buses of the native library in this process, joined by a socket.

    Args:
        local: Shared-memory rings beside the socket; else the native thread moves the bytes.
        tcp: Over loopback; else over a socketpair.
    """

    def __init__(self, *, local: bool = False, tcp: bool = False) -> None:
        super().__init__()
        self.local = local
        self.tcp = tcp

    def make(self, proc_id: ProcId) -> Transport:
        return NativeTransport(proc_id)

    def connect(self, a: Transport, b: Transport) -> tuple[Link, Link]:
        return tuple(self.open(end, sock) for end, sock in zip((a, b), self.sockets(), strict=True))

    def open(self, transport: Transport, sock: socket.socket) -> NativeLink:
        """Begin a link of `transport` over one end of a connection."""
        assert isinstance(transport, NativeTransport)
        return transport.open_link(sock, local=self.local, lease=False)

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """Return the two ends of a connection."""
        if not self.tcp:
            return socket.socketpair()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
            return near, far


BACKENDS: dict[str, Callable[[], Backend]] = {
    "memory": MemoryBackend,
    "native-ring": lambda: NativeBackend(local=True),
    "native-stream": NativeBackend,
    "native-tcp": lambda: NativeBackend(tcp=True),
}


@attrs.define(eq=False)
class World:
    """Transports of one back end and the nursery that runs them."""

    backend: Backend
    nursery: trio.Nursery

    def transport(self) -> Transport:
        return self.backend.transport()

    def connect(self, a: Transport, b: Transport) -> tuple[Link, Link]:
        return self.backend.connect(a, b)

    def start(self, transport: Transport) -> Recorder:
        """Run a transport until the end of the test; return what it sees."""
        recorder = Recorder()
        self.nursery.start_soon(transport.run, recorder)
        return recorder

    def pair(self) -> tuple[Link, Link, Recorder, Recorder]:
        """Return two running transports' joined ends and what each sees."""
        a, b = self.transport(), self.transport()
        here, there = self.connect(a, b)
        return here, there, self.start(a), self.start(b)


async def open_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A fixture function: a world of the back end that is the fixture's parameter."""
    backend = BACKENDS[request.param]()
    try:
        async with trio.open_nursery() as nursery:
            yield World(backend, nursery)
            nursery.cancel_scope.cancel()
    finally:
        backend.close()


def number(count: int) -> list[bytes]:
    """Return heads that tell the messages apart."""
    return [str(i).encode() for i in range(count)]


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes in which a piece that is lost, doubled or moved shows."""
    return random.Random(seed).randbytes(size)


async def wait_sent(events: Sequence[trio.Event | None]) -> None:
    """Wait until what was lent is given back."""
    with trio.fail_after(HANG_SECONDS):
        for event in events:
            if event is not None:
                await event.wait()


def fill(link: Link, piece: bytes) -> list[trio.Event | None]:
    """Send `piece`, numbered from 0, to a peer that does not read, until the last ones cannot have left.

    A ring, a library's buffers and a kernel's (up to 10 MiB for TCP on loopback) are full long before.
    """
    return [link.send(number.to_bytes(8, "big"), [piece]) for number in range(FILL_BYTES // len(piece))]


def check_down(recorder: Recorder, link: Link, reason: DownReason) -> None:
    """Exactly one `link_down`, and nothing of that link after it."""
    assert [down.reason for seen, down in recorder.downs if seen is link] == [reason]
    assert recorder.late == []
