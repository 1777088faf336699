"""Sessions between hosts by the native library: its thread moves the bytes, Trio's thread decides and hears of events.

The contract is the last part of `native/include/trimesh.h`.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._native import status
from trimesh._native.lib import Library, load
from trimesh._transport.relay.base import (
    ChannelEnded,
    HostConnection,
    OnEvent,
    OpenedChannel,
    SessionDown,
    SessionEnding,
    SessionInterrupted,
    SessionResumed,
    Statistics,
)
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

_EVENTS_MAX: Final = 256
"""Events that are told before other tasks have their turn."""

_ENDINGS: Final = {
    1: SessionEnding.LEASE,
    2: SessionEnding.BYE,
    3: SessionEnding.CLOSED,
    4: SessionEnding.PROTOCOL,
}


class NativeRelay:
    """All sessions of one process; see `Relay`. Made by `open_relay`."""

    def __init__(self, on_event: OnEvent) -> None:
        self.library: Library = load()
        out = self.library.ffi.new("tm_relay **")
        status.check(self.library.lib.tm_relay_create(out), "making a relay", limit="BUSES_MAX")
        self.handle: Any = out[0]
        self._bell = int(self.library.lib.tm_relay_bell(self.handle))
        self._event = self.library.ffi.new("tm_relay_event *")
        self._on_event = on_event
        self._sessions: dict[int, NativeSession] = {}

    def open_session(
        self, control: socket.socket, *, peer: ProcId, is_dialler: bool, lease_seconds: float, session_id: int = 0
    ) -> NativeSession:
        """See `Relay.open_session`.

        Raises:
            LimitExceeded: There are HOST_SESSIONS_MAX of the native library.
            OSError: The system refused memory.
        """
        if is_dialler != (session_id > 0):
            raise ValueError(f"who dials draws the number of the session, got {session_id} with {is_dialler=}")
        out = self.library.ffi.new("uint32_t *")
        rc = self.library.lib.tm_relay_begin(
            self.handle, session_id, round(lease_seconds * 1000), control.fileno(), out
        )
        status.check(rc, "beginning a session with a host", limit="HOST_SESSIONS_MAX")
        control.detach()
        session = self._sessions[out[0]] = NativeSession(self, out[0], peer)
        return session

    def forget(self, handle: int) -> None:
        """Tell nothing of a session any more."""
        self._sessions.pop(handle, None)

    async def serve(self) -> None:
        """Tell of events, until it is cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._bell)
            for _ in range(_EVENTS_MAX):
                if self.handle is None or not self.library.lib.tm_relay_poll(self.handle, self._event):
                    break
                session = self._sessions.get(self._event.session)
                if session is not None:
                    self._tell(session)

    def _tell(self, session: NativeSession) -> None:
        lib, event = self.library.lib, self._event
        said = bytes(self.library.ffi.buffer(event.bytes, event.size))
        if event.kind == lib.TM_RELAY_OPENED:
            self._on_event(OpenedChannel(session, event.channel, said))
        elif event.kind == lib.TM_RELAY_ENDED:
            self._on_event(ChannelEnded(session, event.channel))
        elif event.kind == lib.TM_RELAY_DOWN:
            session.is_connected = False
            session.abort()
            self._on_event(SessionDown(session, _ENDINGS[event.number], said.decode(errors="replace")))
        elif event.number != session.connections:
            return  # of a connection that was replaced meanwhile
        elif event.kind == lib.TM_RELAY_RESUMED:
            self._on_event(SessionResumed(session))
        else:
            session.is_connected = False
            self._on_event(SessionInterrupted(session, said.decode(errors="replace")))

    def close(self) -> None:
        """End all sessions without a word, and join the thread, which never waits."""
        for session in list(self._sessions.values()):
            session.abort()
        handle, self.handle = self.handle, None
        self.library.lib.tm_relay_destroy(handle)


@asynccontextmanager
async def open_relay(on_event: OnEvent) -> AsyncGenerator[NativeRelay, None]:
    """Serve sessions until the body ends, which aborts those that are left.

    Args:
        on_event: Called for each event; must not raise.

    Raises:
        NativeLibraryError: The native library cannot be loaded.
        OSError: The system refused a descriptor, memory or a thread.
    """
    relay = NativeRelay(on_event)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.serve)
            try:
                yield relay
            finally:
                nursery.cancel_scope.cancel(reason="the relay is closed")
    finally:
        relay.close()


class NativeSession:
    """One session; see `Session`.

    Attributes:
        peer: The incarnation at the other end.
        is_connected: Whether there is a connection, as far as is known.
        connections: How many it was given.
    """

    def __init__(self, relay: NativeRelay, handle: int, peer: ProcId) -> None:
        self.peer = peer
        self.is_connected = False
        self.connections = 0
        self._relay = relay
        self._handle = handle
        self._is_over = False
        self._last = Statistics(0, 0, 0, 0, 0, 0, 0, 0, 0)

    def __repr__(self) -> str:
        return f"<session with {self.peer:x}>"

    def attach(self, connection: HostConnection) -> None:
        sock, tls, wire, plain = connection
        if self._is_over:
            sock.close()
            tls.free()
            return
        ffi, lib = self._relay.library.ffi, self._relay.library.lib
        rc = lib.tm_relay_attach(
            self._relay.handle,
            self._handle,
            sock.fileno(),
            tls.handle,
            ffi.from_buffer("uint8_t[]", wire),
            len(wire),
            ffi.from_buffer("uint8_t[]", plain),
            len(plain),
        )
        status.check(rc, "attaching a connection to a host")
        sock.detach()
        tls.forget()
        self.connections += 1
        self.is_connected = True

    def open_channel(self, sock: socket.socket, purpose: bytes) -> int:
        if len(purpose) > limits.HOST_PURPOSE_BYTES_MAX:
            raise LimitExceeded("HOST_PURPOSE_BYTES_MAX", limits.HOST_PURPOSE_BYTES_MAX, "a purpose is too long")
        if self._is_over:
            sock.close()
            return 0
        ffi, lib = self._relay.library.ffi, self._relay.library.lib
        said, out = ffi.from_buffer("uint8_t[]", purpose), ffi.new("uint32_t *")
        rc = lib.tm_relay_open(self._relay.handle, self._handle, sock.fileno(), said, len(purpose), out)
        if rc == status.ERR_LIMIT:
            raise LimitExceeded("HOST_CHANNELS_MAX", limits.HOST_CHANNELS_MAX, "too many channels are open")
        status.check(rc, "opening a channel to a host")
        sock.detach()
        return int(out[0])

    def accept_channel(self, channel: int, sock: socket.socket) -> None:
        if self._is_over:
            sock.close()
            return
        rc = self._relay.library.lib.tm_relay_answer(self._relay.handle, self._handle, channel, sock.fileno())
        status.check(rc, "accepting a channel of a host")
        sock.detach()

    def refuse_channel(self, channel: int) -> None:
        if not self._is_over:
            rc = self._relay.library.lib.tm_relay_answer(self._relay.handle, self._handle, channel, -1)
            status.check(rc, "refusing a channel of a host")

    def drop_connection(self) -> None:
        self._end("TM_RELAY_DROP")

    def close(self) -> None:
        self._end("TM_RELAY_CLOSE")

    def abort(self) -> None:
        if not self._is_over:
            self._last = self.statistics()
            self._end("TM_RELAY_ABORT")
            self._is_over = True
            self.is_connected = False
            self._relay.forget(self._handle)

    def _end(self, how: str) -> None:
        if not self._is_over:
            lib = self._relay.library.lib
            status.check(lib.tm_relay_end(self._relay.handle, self._handle, getattr(lib, how)), "ending a session")

    def statistics(self) -> Statistics:
        """See `Session.statistics`; a session that is over has those of its end."""
        if self._is_over:
            return self._last
        counts = self._relay.library.ffi.new("tm_relay_counts *")
        rc = self._relay.library.lib.tm_relay_get_counts(self._relay.handle, self._handle, counts)
        status.check(rc, "looking at a session")
        return Statistics(*counts.counts)
