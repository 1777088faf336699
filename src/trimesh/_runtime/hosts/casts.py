"""Cast channel between a controller and the agent of a host, and feeds between agents; memory of the bodies.

    controller -> agent   u8 kind, 7 zeros, u64 number, u64 size, u64 agent
                          1 = KEEP: `size` bytes follow; keep them
                          2 = LET_GO: no process of the host needs them any more, and no other host
                          3 = FED: keep `size` bytes, which `agent` feeds
                          4 = FEED: feed `agent` the bytes of the next KEEP or FED; the number is the other host's
    agent -> controller   u64 number, u64 agent, then the place of the bytes for processes of the host; zeros if it
                          cannot keep them. One answer to each KEEP and FED; with an agent: that one could not be fed
    agent -> agent        the bytes, on a channel whose purpose holds the number
                  <-      one zero, when all bytes have arrived

Numbers of KEEP and FED grow. The agent keeps at most `limits.HOST_CAST_BYTES` bytes and `limits.HOST_CASTS_MAX` casts
at a time. Bodies enter a host once, into memory that its processes map:

    channel of casts, or another agent --> CastStore --> processes of the host map it, by this process's descriptor
                                                     --> agents of other hosts are fed from it, as it arrives

HK-1 Kept memory is bounded, whatever the controller requests.
HK-2 Released memory stays for as long as a process has mapped it, and is freed with the last view of it.
HK-3 A host that receives bodies slowly delays no other one: each is fed from memory.
HK-4 The feeding agent reports each feed that fails, for any reason but a lack of its own memory, which its answer to
     KEEP or FED reports.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import trio

from trimesh import limits
from trimesh._transport.messages.casts import CastBody, HostCaster
from trimesh._transport.messages.incoming import SEALS, WHERE, memory_name
from trimesh._transport.relay import receive_exactly, send_everything
from trimesh.errors import LimitExceeded, ProtocolError
from trimesh.ids import ID_MAX, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.hosts.neighbours import Neighbours


REQUEST: Final = struct.Struct("<BxxxxxxxQQQ")
ANSWER: Final = struct.Struct(f"<QQ{WHERE.size}s")
NOWHERE: Final = bytes(WHERE.size)
"""Answer if the bytes cannot be kept."""


class CastRequest(IntEnum):
    """Kind of a controller's request."""

    KEEP = 1
    LET_GO = 2
    FED = 3
    FEED = 4


_SIZED: Final = (CastRequest.KEEP, CastRequest.FED)
_WITH_AGENT: Final = (CastRequest.FED, CastRequest.FEED)


def read_request(data: bytes) -> tuple[CastRequest, int, int, int]:
    """Return kind, number, size and agent of a request.

    Raises:
        ProtocolError: It is not a request.
    """
    kind, number, size, agent = REQUEST.unpack(data)
    if kind not in tuple(CastRequest) or data[1:8] != bytes(7):
        raise ProtocolError(f"a request about casts must begin with kind 1 to 4, then zeros, got {data[:8].hex()}")
    kind = CastRequest(kind)
    if (size == 0) is (kind in _SIZED) or size > limits.HOST_CAST_BYTES:
        raise ProtocolError(
            f"KEEP and FED must have a size up to {limits.HOST_CAST_BYTES}, others 0, got {size} for {kind.name}"
        )
    if (agent == 0) is (kind in _WITH_AGENT) or agent > ID_MAX:
        raise ProtocolError(f"FED and FEED must name an agent, others 0, got {agent} for {kind.name}")
    return kind, number, size, agent


# ---- controller's side of the cast channel to one host: bodies there, answers back -----------------------------------

# The channel is opened with the first cast. When it ends, for any reason, casts to this host go in chunks.


class CastSender:
    """Carries the casts to one host.

    Args:
        open_channel: Joins a socket, which it then owns, to a new cast channel.
        agent, circle: See `HostCaster`.

    Attributes:
        caster: Shared by the links to processes of the host.
    """

    def __init__(self, open_channel: Callable[[socket.socket], None], agent: int = 0, circle: object = None) -> None:
        self.caster = HostCaster(self._wake, agent, circle)
        self._open_channel = open_channel
        self._has_work = trio.Event()

    def _wake(self) -> None:
        self._has_work.set()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Carry casts until the channel ends, or this is cancelled."""
        try:
            await self._has_work.wait()
            with suppress(OSError, LimitExceeded):
                ours, theirs = socket.socketpair()
                with trio.socket.from_stdlib_socket(ours) as channel:
                    self._open_channel(theirs)
                    await self._carry(channel)
        finally:
            self.caster.close()

    async def _carry(self, channel: trio.socket.SocketType) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, channel, nursery.cancel_scope)
            while (data := await receive_exactly(channel, ANSWER.size)) is not None:
                number, agent, where = ANSWER.unpack(data)
                if agent:
                    self.caster.could_not_feed(agent, number)
                else:
                    self.caster.answered(number, b"" if where == NOWHERE else where)
            nursery.cancel_scope.cancel()

    async def _send(self, channel: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        caster = self.caster
        with suppress(OSError):
            while True:
                if caster.let_go:  # first, as it frees room there
                    await send_everything(channel, REQUEST.pack(CastRequest.LET_GO, caster.let_go.popleft(), 0, 0))
                elif caster.bodies:
                    await self._send_bodies(channel, caster.bodies.popleft())
                else:
                    self._has_work = trio.Event()
                    await self._has_work.wait()
        scope.cancel()

    async def _send_bodies(self, channel: trio.socket.SocketType, body: CastBody) -> None:
        number, source = body.number, body.source  # it may be renumbered during the wait
        for other in body.fed.copy():
            if other in body.fed:
                await send_everything(channel, REQUEST.pack(CastRequest.FEED, other.number, 0, other.owner.agent))
        if source is not None:
            await send_everything(channel, REQUEST.pack(CastRequest.FED, number, body.size, source.owner.agent))
            return
        await send_everything(channel, REQUEST.pack(CastRequest.KEEP, number, body.size, 0))
        for piece in body.pieces():
            await send_everything(channel, piece)


# ---- cast store ------------------------------------------------------------------------------------------------------


class KeptCast:
    """Memory for the bodies of one cast, which the store owns.

    Attributes:
        size: Size of the bodies in bytes.
        fd: Descriptor of the memory; -1 if the system has none left. Written bytes are then dropped.
        written: Number of received bytes.
        is_broken: Whether the system has no memory or descriptor for them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.written = 0
        self.is_broken = False
        self._scopes = list[trio.CancelScope]()
        self._is_closed = False
        self._drawn = secrets.randbits(64)
        self._has_more = trio.Event()
        try:
            self.fd = os.memfd_create(memory_name(self._drawn), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            self.fd = -1
            self.is_broken = True

    def write(self, data: memoryview) -> None:
        """Append the next bytes; if the system has no memory for them, set `is_broken` and drop them."""
        self.written += data.nbytes
        while data and not (self.is_broken or self._is_closed):
            try:
                data = data[os.write(self.fd, data) :]
            except OSError:
                self.is_broken = True
                os.ftruncate(self.fd, 0)
        self._has_more.set()
        self._has_more = trio.Event()

    async def wait_more(self) -> None:
        """Wait until more bytes have arrived."""
        await self._has_more.wait()

    def open_scope(self) -> trio.CancelScope:
        """Return a scope for a task that fills it or feeds from it; `close` cancels the task."""
        scope = trio.CancelScope()
        self._scopes.append(scope)
        if self._is_closed:
            scope.cancel(reason="the cast was let go")
        return scope

    def where(self) -> bytes:
        """Seal it, and return its place for other processes, or `NOWHERE`."""
        if self.is_broken:
            return NOWHERE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        return WHERE.pack(os.getpid(), self.fd, self.size, self._drawn)

    def close(self) -> None:
        """End its tasks, and free the memory."""
        self._is_closed = True
        for scope in self._scopes:
            scope.cancel(reason="the cast was let go")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CastStore:
    """Cast bodies that the agent keeps for one controller. Closed by its owner.

    Attributes:
        kept: Number of kept bytes.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._casts: dict[int, KeptCast] = {}
        self._last = 0

    def open(self, number: int, size: int) -> KeptCast:
        """Begin to keep a body.

        Raises:
            ProtocolError: The number is not larger than all before, or there is no room.
        """
        if number <= self._last:
            raise ProtocolError(f"numbers of casts must grow, got {number} after {self._last}")
        if len(self._casts) == limits.HOST_CASTS_MAX or self.kept + size > limits.HOST_CAST_BYTES:
            raise ProtocolError(
                f"an agent keeps at most {limits.HOST_CASTS_MAX} casts and {limits.HOST_CAST_BYTES} bytes, got {size} "
                f"more bytes with {len(self._casts)} casts of {self.kept} bytes"
            )
        self._last = number
        one = self._casts[number] = KeptCast(size)
        self.kept += size
        return one

    def let_go(self, number: int) -> None:
        """Release a body.

        Raises:
            ProtocolError: It is not kept.
        """
        found = self._casts.pop(number, None)
        if found is None:
            raise ProtocolError(f"LET_GO must name a kept cast, got {number}")
        self.kept -= found.size
        found.close()

    def is_over(self, number: int) -> bool:
        """Return whether a cast that arrives with this number is no longer wanted."""
        return number <= self._last and number not in self._casts

    def close(self) -> None:
        """Release everything."""
        for number in list(self._casts):
            self.let_go(number)


class HostCasts:
    """Serves the cast channel of one controller, and feeds from other agents.

    Args:
        feeds: Sessions with other agents; None if there are none.
    """

    def __init__(self, feeds: Neighbours | None) -> None:
        self._feeds = feeds
        self._store = CastStore()
        self._answers: Callable[[bytes], None] = _drop
        self._awaited: dict[tuple[ProcId, int], trio.Event] = {}
        self._early: dict[tuple[ProcId, int], socket.socket] = {}
        self._is_serving = False
        self._is_over = False

    async def serve(self, sock: socket.socket) -> None:
        """Keep and feed bodies from the channel, until it ends or the controller breaks its rules; both close it.

        Args:
            sock: Owned from now on.
        """
        sock.setblocking(False)  # noqa: FBT003
        with trio.socket.from_stdlib_socket(sock) as channel:
            if self._is_serving:
                return  # a controller has only one channel
            self._is_serving = True
            try:
                async with trio.open_nursery() as nursery:
                    answers = _Answers(channel)
                    self._answers = answers.put
                    nursery.start_soon(answers.send)
                    with suppress(OSError, ProtocolError):  # the controller sends unkept bodies in chunks
                        await self._read(channel, answers, nursery)
                    nursery.cancel_scope.cancel(reason="the channel of casts is over")
            finally:
                self.close()

    def close(self) -> None:
        """Release everything, accept nothing more. Idempotent."""
        self._is_over = True
        self._answers = _drop
        self._store.close()
        for early in self._early.values():
            early.close()
        self._early.clear()

    async def _read(self, channel: trio.socket.SocketType, answers: _Answers, nursery: trio.Nursery) -> None:
        others = list[tuple[ProcId, int]]()  # to be fed with the next cast
        while (data := await receive_exactly(channel, REQUEST.size)) is not None:
            await answers.wait_room()
            kind, number, size, agent = read_request(data)
            if kind is CastRequest.LET_GO:
                self._store.let_go(number)
                continue
            if kind is CastRequest.FEED:
                if len(others) == limits.HOST_CASTS_MAX:
                    raise ProtocolError(f"a cast may be fed to at most {limits.HOST_CASTS_MAX} agents, got more")
                others.append((ProcId(agent), number))
                continue
            cast = self._store.open(number, size)
            for other in others:
                nursery.start_soon(self._feed, cast, *other)
            others.clear()
            if kind is CastRequest.KEEP:
                if not await _fill(cast, channel):
                    return
                self._answer(number, cast.where())
            else:
                nursery.start_soon(self._be_fed, cast, number, ProcId(agent))

    def _answer(self, number: int, where: bytes, agent: int = 0) -> None:
        self._answers(ANSWER.pack(number, agent, where))

    # ---- from another agent ----------------------------------------------------------------------------------

    def take_feed(self, peer: ProcId, number: int, sock: socket.socket) -> None:
        """Accept the channel by which another agent feeds a cast; the controller may announce it later.

        Args:
            number: Number of the cast here.
            sock: Owned from now on.
        """
        key = peer, number
        if (
            self._is_over
            or self._store.is_over(number)
            or key in self._early
            or len(self._early) == limits.HOST_CASTS_MAX
        ):
            sock.close()
            return
        self._early[key] = sock
        if key in self._awaited:
            self._awaited[key].set()

    async def _be_fed(self, cast: KeptCast, number: int, peer: ProcId) -> None:
        """Keep a body fed by another agent. On failure that agent reports it, and the controller sends LET_GO."""
        key, has_come = (peer, number), trio.Event()
        for early in [one for one in self._early if self._store.is_over(one[1])]:
            self._early.pop(early).close()
        self._awaited[key] = has_come
        try:
            with cast.open_scope():
                if self._feeds is not None:
                    await self._feeds.meet(peer)
                if key not in self._early:
                    await has_come.wait()
                sock = self._early.pop(key)
                sock.setblocking(False)  # noqa: FBT003
                with trio.socket.from_stdlib_socket(sock) as channel, suppress(OSError):
                    if await _fill(cast, channel):
                        self._answer(number, cast.where())
                        await channel.send(b"\0")
        finally:
            del self._awaited[key]

    # ---- to another agent ------------------------------------------------------------------------------------

    async def _feed(self, cast: KeptCast, peer: ProcId, number: int) -> None:
        """Feed another agent; report a failure to the controller."""
        with cast.open_scope():
            is_fed = False
            with suppress(OSError, LimitExceeded):
                is_fed = await self._try_to_feed(cast, peer, number)
            if not is_fed and not cast.is_broken:  # HK-4
                self._answer(number, NOWHERE, peer)

    async def _try_to_feed(self, cast: KeptCast, peer: ProcId, number: int) -> bool:
        feeds = self._feeds
        if feeds is None:
            return False
        is_met = False
        with trio.move_on_after(limits.HOST_CAST_FEED_SECONDS):
            is_met = await feeds.meet(peer)
        if not is_met:
            return False
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003
        with trio.socket.from_stdlib_socket(ours) as channel:
            fd = theirs.detach()
            if not feeds.open_feed(peer, number, fd):
                os.close(fd)
                return False
            await _pour(cast, channel)
            return not cast.is_broken and bool(await channel.recv(1))


async def _fill(cast: KeptCast, channel: trio.socket.SocketType) -> bool:
    """Receive the bytes of a cast; return whether all of them have arrived."""
    piece = memoryview(bytearray(min(cast.size, limits.HOST_CAST_READ_BYTES)))
    while cast.written < cast.size:
        n = await channel.recv_into(piece[: cast.size - cast.written])
        if not n:
            return False
        cast.write(piece[:n])
    return True


async def _pour(cast: KeptCast, channel: trio.socket.SocketType) -> None:
    """Send the bytes of a cast as they arrive.

    They are copied: bytes passed to a socket by `sendfile` cannot be sealed until they were read at the other end.
    """
    sent = 0
    piece = memoryview(bytearray(min(cast.size, limits.HOST_CAST_READ_BYTES)))
    while sent < cast.size and not cast.is_broken:
        if sent == cast.written:
            await cast.wait_more()
            continue
        n = os.preadv(cast.fd, [piece[: cast.written - sent]], sent)
        await send_everything(channel, piece[:n])
        sent += n


class _Answers:
    """Answers that wait for room in the channel: one for each kept cast, one for each feed."""

    def __init__(self, channel: trio.socket.SocketType) -> None:
        self._channel = channel
        self._waiting = bytearray()
        self._has_some = trio.Event()
        self._has_room = trio.Event()

    def put(self, answer: bytes) -> None:
        self._waiting += answer
        self._has_some.set()

    async def wait_room(self) -> None:
        """Wait until no more answers wait than casts can be kept: a peer that does not read is not read."""
        while len(self._waiting) > limits.HOST_CASTS_MAX * ANSWER.size:
            await self._has_room.wait()

    async def send(self) -> None:
        with suppress(OSError):  # the reader sees the end, too
            while True:
                await self._has_some.wait()
                self._has_some = trio.Event()
                data, self._waiting = bytes(self._waiting), bytearray()
                await send_everything(self._channel, data)
                self._has_room.set()
                self._has_room = trio.Event()


def _drop(answer: bytes) -> None:
    del answer
