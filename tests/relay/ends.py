"""Two sides of a session between hosts, each by either implementation, over real TCP and TLS."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Final, TypeVar

import pytest
import trio
from tests.native.tls_ends import Ends
from tests.relay.oracle import tasks

from trimesh._native.tls import State, TLSContext, TLSHello, TLSSession, TLSVerdict
from trimesh._transport import relay as native
from trimesh._transport.relay import HostConnection, OnEvent, Relay, Session, SessionEvent
from trimesh.ids import ProcId

pytest.importorskip("cryptography")

from trimesh.jobs.identity import Authority

EventT = TypeVar("EventT", bound=SessionEvent)
DIALLER, DIALLED = ProcId(2), ProcId(1)
OPENERS: Final[dict[str, Callable[[OnEvent], AbstractAsyncContextManager[Relay]]]] = {
    "native": native.open_relay,
    "trio": tasks.open_relay,
}
PAIRS: Final = [("native", "native"), ("trio", "trio"), ("native", "trio"), ("trio", "native")]
"""Who dials, and who is dialled."""


class Wires:
    """Makes connections of two hosts that trust each other.

    Attributes:
        mesh: That both are of.
        credentials: Of each.
    """

    def __init__(self) -> None:
        authority = Authority(time.time())
        self.mesh = authority.mesh
        self.credentials = {one: authority.credentials(one, time.time()) for one in (DIALLER, DIALLED)}
        self._contexts = {
            own: TLSContext(chain=its.chain, key=its.key, authority=its.authority)
            for own, its in self.credentials.items()
        }

    def open(self, own: ProcId) -> TLSSession:
        """Begin a TLS session."""
        hello = TLSHello(own, self.mesh, versions=("0", "0", ""))
        return self._contexts[own].open(hello, is_server=own == DIALLED)

    def tls(self) -> Ends:
        """Return both ends of a session that is open."""
        ends = Ends(self.open(DIALLER), self.open(DIALLED))
        ends.settle()
        ends.server.answer(TLSVerdict.ADMITTED)
        ends.settle()
        assert ends.client.state is ends.server.state is State.OPEN
        return ends

    def connect(self) -> tuple[HostConnection, HostConnection]:
        """Return both ends of a new connection."""
        client, server = tcp_pair()
        ends = self.tls()
        return HostConnection(client, ends.client), HostConnection(server, ends.server)

    def close(self) -> None:
        """Forget the credentials."""
        for context in self._contexts.values():
            context.close()


@contextmanager
def wires() -> Iterator[Wires]:
    """Use certificates for both sides."""
    made = Wires()
    try:
        yield made
    finally:
        made.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server = listener.accept()[0]
    for one in (client, server):
        one.setblocking(False)
    return client, server


class End:
    """One side: a relay with one session, and the near end of its channel 0.

    Attributes:
        relay, session: Of this side.
        control: The near end of channel 0.
        events: That have come and were not waited for.
    """

    def __init__(self, relay: Relay, *, is_dialler: bool, lease_seconds: float) -> None:
        self.relay = relay
        self.control, far = trio_pair()
        peer = DIALLED if is_dialler else DIALLER
        self.session: Session = relay.open_session(
            far, peer=peer, is_dialler=is_dialler, lease_seconds=lease_seconds, session_id=77 if is_dialler else 0
        )
        self.events: list[SessionEvent] = []
        self._has_more = trio.Event()

    def take(self, event: SessionEvent) -> None:
        """Take an event of the relay."""
        self.events.append(event)
        self._has_more.set()

    async def wait(self, kind: type[EventT]) -> EventT:
        """Wait for the next event of a kind, and take it; others stay."""
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
            self._has_more = trio.Event()
            await self._has_more.wait()


def trio_pair() -> tuple[trio.SocketStream, socket.socket]:
    """Return a local socket for the test, and its other end for a relay."""
    near, far = socket.socketpair()
    return trio.SocketStream(trio.socket.from_stdlib_socket(near)), far


@asynccontextmanager
async def open_end(kind: str, *, is_dialler: bool, lease_seconds: float = 30.0) -> AsyncGenerator[End, None]:
    """Use one side, without a connection."""
    ends: list[End] = []

    def take(event: SessionEvent) -> None:
        ends[0].take(event)

    async with OPENERS[kind](take) as relay:
        ends.append(End(relay, is_dialler=is_dialler, lease_seconds=lease_seconds))
        async with ends[0].control:
            yield ends[0]


async def receive_exactly(stream: trio.SocketStream, size: int) -> bytes:
    """Receive so many bytes."""
    data = bytearray()
    while len(data) < size:
        got = await stream.receive_some(size - len(data))
        assert got, f"the end came after {len(data)} of {size} bytes"
        data += got
    return bytes(data)
