"""Records between a controller and an agent, over a session between their hosts, as over a broker socket.

A record without a socket goes on channel 0, behind its length; one with a socket is the purpose of a new channel, which
carries the bytes of the socket. So a record with a socket may be overtaken by one without.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.socket import Received, close_all
from trimesh._transport.relay import Session
from trimesh.errors import LimitExceeded, ProtocolError

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16


class SessionPipe:
    """One end; see `RecordPipe`."""

    session: Session

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)  # noqa: FBT003
        self._control = control
        self._out = bytearray()
        self._in = bytearray()
        self._channels = deque[Received]()
        self._lost: str | None = None
        self.is_ended_in_order = False
        self._is_broken = False
        self._has_channel = trio.Event()

    @staticmethod
    def pair() -> tuple[SessionPipe, socket.socket]:
        """Return a pipe, and the socket of channel 0 for its session."""
        ours, theirs = socket.socketpair()
        return SessionPipe(ours), theirs

    # ---- out -------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Whether records wait for room, as a number."""
        return int(bool(self._out))

    def put(self, record: wire.AnyRecord, fds: Sequence[int] = ()) -> None:
        """Send a record, or queue it. Owns `fds`, at most one, a stream socket.

        Raises:
            LimitExceeded: It is too large, or there are too many channels.
        """
        if self._lost is not None:
            close_all(fds)
            return
        data = wire.encode(record)
        if fds:
            sock = socket.socket(fileno=fds[0])
            close_all(fds[1:])
            try:
                self.session.open_channel(sock, data)
            except LimitExceeded:
                sock.close()
                raise
        elif len(data) > limits.BROKER_RECORD_BYTES_MAX:
            raise LimitExceeded("BROKER_RECORD_BYTES_MAX", len(data))
        else:
            self._out += _LENGTH.pack(len(data)) + data

    def flush(self) -> bool:
        """Send what waits, as far as there is room; return whether nothing waits any more."""
        try:
            while self._out:
                del self._out[: self._control.send(self._out)]
        except (BlockingIOError, InterruptedError):
            return False
        return True

    async def wait_writable(self) -> None:
        """Wait until there may be room."""
        await trio.lowlevel.wait_writable(self._control)

    # ---- in --------------------------------------------------------------------------------------------------

    def opened(self, channel: int, purpose: bytes) -> None:
        """Take a channel that the peer has opened; called for each by whoever has the events of the session."""
        try:
            record = wire.decode(purpose)
        except ProtocolError as error:
            self.session.refuse_channel(channel)
            self.lose(str(error))
            return
        if isinstance(record, wire.Detached):
            self.session.refuse_channel(channel)
            self.lose("a record between hosts is whole, got one that is somewhere else")
            return
        try:
            ours, theirs = socket.socketpair()
        except OSError:  # no descriptor is left: the receiver sees that one is missing
            self.session.refuse_channel(channel)
            self._channels.append(Received(record, (), truncated=True))
        else:
            self.session.accept_channel(channel, theirs)
            self._channels.append(Received(record, (ours.detach(),), truncated=False))
        self._has_channel.set()

    def lose(self, reason: str, *, is_orderly: bool = False) -> None:
        """Learn that the session is over, and whether the peer has ended it in good order."""
        if self._lost is None:
            self._lost = reason
            self.is_ended_in_order = is_orderly
            self._has_channel.set()

    def receive(self) -> Received | None:
        """Return the next record, None when there is none yet.

        Raises:
            OSError: The session is over; the text says why.
            ProtocolError: What came is no record.
        """
        if self._channels:
            return self._channels.popleft()
        record = self._next_record()
        if record is not None:
            return Received(record, (), truncated=False)
        if self._lost is not None:
            raise ConnectionResetError(self._lost)
        return None

    def _next_record(self) -> wire.AnyRecord | None:
        while True:
            if len(self._in) >= _LENGTH.size:
                length = _LENGTH.unpack_from(self._in)[0]
                if length > limits.BROKER_RECORD_BYTES_MAX:
                    raise ProtocolError(f"a record has at most {limits.BROKER_RECORD_BYTES_MAX} bytes, got {length}")
                if len(self._in) >= _LENGTH.size + length:
                    data = bytes(self._in[_LENGTH.size : _LENGTH.size + length])
                    del self._in[: _LENGTH.size + length]
                    record = wire.decode(data)
                    if isinstance(record, wire.Detached):
                        raise ProtocolError("a record between hosts is whole, got one that is somewhere else")
                    return record
            if self._is_broken:
                return None
            try:
                more = self._control.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError:
                more = b""
            if not more:
                self._is_broken = True  # the session is over; why is told by `lose`
                return None
            self._in += more

    async def wait_readable(self) -> None:
        """Wait until there is something to receive, or the end."""
        if self._channels or self._lost is not None:
            await trio.lowlevel.checkpoint()
            return
        self._has_channel = trio.Event()
        if self._is_broken:
            await self._has_channel.wait()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_channel, nursery.cancel_scope)
            await trio.lowlevel.wait_readable(self._control)
            nursery.cancel_scope.cancel()

    async def _wait_for_channel(self, scope: trio.CancelScope) -> None:
        await self._has_channel.wait()
        scope.cancel()

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of it; sockets that have come and were not taken are closed."""
        self.lose("it was closed")
        for received in self._channels:
            close_all(received.fds)
        self._channels.clear()
        self._control.close()

    def fileno(self) -> int:
        """Return the descriptor of channel 0, -1 once closed."""
        return self._control.fileno()
