"""Sessions between hosts by tasks of Trio: slower than the native library, and the measure of what it must do.

relay
  session: ticks
    connection: receiver --> HostSession --> channels' inboxes;  sender <-- HostSession <-- channels
    channel: reader of its socket, writer to it
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

import trio
from tests.relay.oracle.machine import (
    CONTROL,
    Bye,
    ChannelClosed,
    ChannelData,
    ChannelOpened,
    ChannelReset,
    HostSession,
    Resumed,
)

from trimesh import limits
from trimesh._native.tls import State, TLSSession
from trimesh._transport.relay import (
    ChannelEnded,
    HostConnection,
    OnEvent,
    OpenedChannel,
    SessionDown,
    SessionEnding,
    SessionInterrupted,
    SessionResumed,
    Statistics,
    send_everything,
)
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

_TICK_SECONDS: Final = 0.1
_READ_BYTES: Final = 1 << 16


class TrioRelay:
    """All sessions of one process; see `Relay`. Made by `open_relay`."""

    def __init__(self, nursery: trio.Nursery, on_event: OnEvent) -> None:
        self.nursery = nursery
        self.on_event = on_event

    def open_session(
        self, control: socket.socket, *, peer: ProcId, is_dialler: bool, lease_seconds: float, session_id: int = 0
    ) -> TrioSession:
        """See `Relay.open_session`."""
        machine = HostSession(is_dialler=is_dialler, lease_seconds=lease_seconds, session_id=session_id)
        session = TrioSession(self, machine, peer)
        session.join(CONTROL, control)
        self.nursery.start_soon(session.tick)
        return session


@asynccontextmanager
async def open_relay(on_event: OnEvent) -> AsyncGenerator[TrioRelay, None]:
    """Serve sessions until the body ends, which aborts those that are left.

    Args:
        on_event: Called for each event; must not raise.
    """
    async with trio.open_nursery() as nursery:
        relay = TrioRelay(nursery, on_event)
        try:
            yield relay
        finally:
            nursery.cancel_scope.cancel(reason="the relay is closed")


class TrioSession:
    """One session; see `Session`."""

    def __init__(self, relay: TrioRelay, machine: HostSession, peer: ProcId) -> None:
        self._relay = relay
        self._machine = machine
        self._peer = peer
        self._ends: dict[int, _End] = {}
        self._has_work = trio.Event()
        self._link: _Link | None = None
        self._connections = 0
        self._is_down = self._has_bye = False
        self._scope = trio.CancelScope()
        self._unanswered = set[int]()

    def __repr__(self) -> str:
        return f"<session with {self._peer:x}>"

    @property
    def peer(self) -> ProcId:
        """See `Session.peer`."""
        return self._peer

    @property
    def is_connected(self) -> bool:
        """See `Session.is_connected`."""
        return self._machine.is_connected

    # ---- connections -----------------------------------------------------------------------------------------

    def attach(self, connection: HostConnection) -> None:
        """See `Session.attach`."""
        self._drop_link()
        link = _Link(connection)
        if self._is_down:
            link.cut()
            link.tls.free()
            return
        self._link = link
        self._connections += 1
        self._machine.connect()
        self._relay.nursery.start_soon(self._serve, link)

    def drop_connection(self) -> None:
        """See `Session.drop_connection`."""
        if self._link is not None:
            self._link.cut()

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._machine.disconnect()
            link.cut()

    @trio.lowlevel.enable_ki_protection
    async def _serve(self, link: _Link) -> None:
        """Serve one connection to its end."""
        reason = "it was dropped"
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send, link)
                    reason = await self._receive(link)
                    nursery.cancel_scope.cancel()
        finally:
            link.cut()
            link.tls.free()
        if self._link is link:
            self._drop_link()
            if self._has_bye:
                self._part()
            elif not self._is_down:
                self._relay.on_event(SessionInterrupted(self, reason))

    async def _receive(self, link: _Link) -> str:
        """Receive until the connection ends; return why."""
        try:
            self._take_in(link.first)
            self._decrypt(link)
            while not link.is_over:
                data = await link.sock.recv(_READ_BYTES)
                if not data:
                    return "the peer has closed it"
                link.wire_in += data
                self._decrypt(link)
        except (OSError, trio.ClosedResourceError) as error:
            return str(error)
        except ProtocolError as error:
            self._end(SessionEnding.PROTOCOL, str(error))
        return link.problem

    def _decrypt(self, link: _Link) -> None:
        while link.wire_in and not link.scope.cancel_called:
            step = link.tls.step(bytes(link.wire_in))
            del link.wire_in[: step.wire_taken]
            link.wire_out += step.wire
            self._take_in(step.plain)
            if link.tls.state is not State.OPEN:
                link.is_over = True
                failure = link.tls.failure
                link.problem = "the peer has closed it" if failure is None else str(failure)
                return
            if not (step.wire_taken or step.wire or step.plain):
                break
        self._wake()

    async def _send(self, link: _Link) -> None:
        with suppress(OSError, trio.ClosedResourceError):  # the receiver hears of it
            while self._link is link:  # what a new connection is to say first is not for the one before
                plain = self._machine.take(_READ_BYTES)
                for end in self._ends.values():
                    end.look()
                while plain:
                    step = link.tls.step(b"", plain)
                    plain = plain[step.plain_taken :]
                    link.wire_out += step.wire
                if link.wire_out:
                    wire = bytes(link.wire_out)
                    link.wire_out.clear()
                    await send_everything(link.sock, wire)
                elif self._has_bye:
                    self._part()
                    return
                else:
                    self._has_work = trio.Event()
                    await self._has_work.wait()

    def _wake(self) -> None:
        self._has_work.set()

    @trio.lowlevel.enable_ki_protection
    async def tick(self) -> None:
        """Let time pass, as Trio's loop has it: what it stood still does not count."""
        with self._scope:
            while not self._is_down:
                await trio.sleep(_TICK_SECONDS)
                ending = self._machine.tick(_TICK_SECONDS)
                if ending is not None:
                    self._end(ending, "nothing was heard" if ending is SessionEnding.LEASE else "it was closed here")
                self._wake()

    # ---- what has come ---------------------------------------------------------------------------------------

    def _take_in(self, plain: bytes) -> None:
        for news in self._machine.receive(plain) if plain else ():
            match news:
                case ChannelData(channel, data):
                    self._end_of(channel).put(data)
                case ChannelClosed(channel):
                    self._end_of(channel).put(b"")
                case ChannelReset(channel):
                    end = self._ends.get(channel)
                    if end is not None:
                        end.cut()
                case ChannelOpened(channel, purpose):
                    self._unanswered.add(channel)
                    self._end_of(channel)
                    self._relay.on_event(OpenedChannel(self, channel, purpose))
                case Resumed():
                    self._relay.on_event(SessionResumed(self))
                case Bye():
                    self._has_bye = True
            if self._is_down:
                return
        if self._machine.is_parted:
            self._end(SessionEnding.CLOSED, "it was closed here")

    def _part(self) -> None:
        """End the session as the peer wants it, once it has been told that its word has come."""
        self._end(SessionEnding.BYE, "the peer has ended the session")

    def _end(self, ending: SessionEnding, reason: str) -> None:
        if self._is_down:
            return
        self._shut()
        self._relay.on_event(SessionDown(self, ending, reason))

    def _shut(self) -> None:
        self._is_down = True
        for end in list(self._ends.values()):
            end.cut()
        self._drop_link()
        self._scope.cancel(reason="the session is over")

    # ---- channels --------------------------------------------------------------------------------------------

    def _end_of(self, channel: int) -> _End:
        end = self._ends.get(channel)
        if end is None:
            end = self._ends[channel] = _End(channel)
        return end

    def join(self, channel: int, sock: socket.socket) -> None:
        """Carry bytes between a socket, which is taken over, and a channel."""
        sock.setblocking(False)
        self._relay.nursery.start_soon(self._carry, self._end_of(channel), trio.socket.from_stdlib_socket(sock))

    def open_channel(self, sock: socket.socket, purpose: bytes) -> int:
        """See `Session.open_channel`."""
        channel = self._machine.open(purpose)
        if self._is_down:
            sock.close()
        else:
            self.join(channel, sock)
            self._wake()
        return channel

    def accept_channel(self, channel: int, sock: socket.socket) -> None:
        """See `Session.accept_channel`."""
        if self._is_down or channel not in self._unanswered:
            sock.close()
            return
        self._unanswered.discard(channel)
        self.join(channel, sock)

    def refuse_channel(self, channel: int) -> None:
        """See `Session.refuse_channel`."""
        self._unanswered.discard(channel)
        self._machine.reset(channel)
        self._ends.pop(channel, None)
        self._wake()

    @trio.lowlevel.enable_ki_protection
    async def _carry(self, end: _End, sock: trio.socket.SocketType) -> None:
        """Carry bytes of one channel until both directions have ended."""
        with end.scope, sock:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_socket, end, sock)
                nursery.start_soon(self._write_socket, end, sock)
        self._ends.pop(end.channel, None)
        if end.channel != CONTROL and not self._is_down:
            self._relay.on_event(ChannelEnded(self, end.channel))

    async def _read_socket(self, end: _End, sock: trio.socket.SocketType) -> None:
        machine = self._machine
        with suppress(OSError):  # its process has gone with bytes unread; what it wrote before has come
            while True:
                room = machine.room(end.channel)
                if room == 0:
                    end.has_room = trio.Event()
                    await end.has_room.wait()
                    continue
                data = await sock.recv(room)
                if not data or not machine.is_open(end.channel) or machine.is_saying_bye:
                    break  # what is read behind the close of the session is for nothing
                machine.give(end.channel, data)
                self._wake()
        machine.finish(end.channel)
        self._wake()

    async def _write_socket(self, end: _End, sock: trio.socket.SocketType) -> None:
        is_broken = False
        while data := await end.get():
            if not is_broken:
                try:
                    await send_everything(sock, data)
                except OSError:  # its process is gone: the rest is for nothing
                    is_broken = True
            self._machine.consumed(end.channel, len(data))
            self._wake()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Session.close`."""
        self._machine.bye()
        self._wake()

    def abort(self) -> None:
        """See `Session.abort`."""
        if not self._is_down:
            self._shut()

    def statistics(self) -> Statistics:
        """See `Session.statistics`."""
        machine = self._machine
        return Statistics(
            self._connections,
            machine.frames_sent,
            machine.frames_received,
            machine.bytes_sent,
            machine.bytes_received,
            machine.resent,
            machine.duplicates,
            machine.unacknowledged,
            machine.channels,
        )


class _Link:
    """One connection of a session."""

    def __init__(self, connection: HostConnection) -> None:
        connection.sock.setblocking(False)
        self.sock = trio.socket.from_stdlib_socket(connection.sock)
        self.tls: TLSSession = connection.tls
        self.wire_in = bytearray(connection.wire)
        self.wire_out = bytearray()
        self.first = connection.plain
        self.scope = trio.CancelScope()
        self.is_over = False
        self.problem = "it was dropped"

    def cut(self) -> None:
        """End it at once; its task forgets the TLS session."""
        self.scope.cancel(reason="the connection is given up")
        self.sock.close()


class _End:
    """The local end of one channel.

    Attributes:
        has_room: Set when more may be read from the socket.
        scope: Of the tasks that carry bytes.
    """

    def __init__(self, channel: int) -> None:
        self.channel = channel
        self.has_room = trio.Event()
        self.scope = trio.CancelScope()
        self._inbox: trio.MemorySendChannel[bytes]
        self._outlet: trio.MemoryReceiveChannel[bytes]
        self._inbox, self._outlet = trio.open_memory_channel[bytes](limits.HOST_WINDOW_BYTES + 1)

    def put(self, data: bytes) -> None:
        """Take bytes for the socket; b"" for the end. Bounded by the window of the channel."""
        self._inbox.send_nowait(data)

    async def get(self) -> bytes:
        """Wait for what was put."""
        return await self._outlet.receive()

    def look(self) -> None:
        """Let the reader of the socket look for room."""
        self.has_room.set()

    def cut(self) -> None:
        """End both directions at once."""
        self.scope.cancel(reason="the channel is gone")
