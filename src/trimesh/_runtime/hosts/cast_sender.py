"""The controller's side of the channel of casts to one host: bodies there, answers back.

The channel is opened with the first cast. When it ends, for whatever reason, casts to this host go in chunks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import trio

from trimesh._runtime.hosts.cast_frames import ANSWER, NOWHERE, REQUEST, CastRequest
from trimesh._transport.messages.casts import CastBody, HostCaster
from trimesh._transport.relay import receive_exactly, send_everything
from trimesh.errors import LimitExceeded


class CastSender:
    """Carries the casts to one host.

    Args:
        open_channel: Joins a socket, which it takes over, to a new channel of casts.
        agent, circle: See `HostCaster`.

    Attributes:
        caster: Of the links to processes of the host.
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
                if caster.let_go:  # first, as it makes room over there
                    await send_everything(channel, REQUEST.pack(CastRequest.LET_GO, caster.let_go.popleft(), 0, 0))
                elif caster.bodies:
                    await self._send_bodies(channel, caster.bodies.popleft())
                else:
                    self._has_work = trio.Event()
                    await self._has_work.wait()
        scope.cancel()

    async def _send_bodies(self, channel: trio.socket.SocketType, body: CastBody) -> None:
        number, source = body.number, body.source  # it may be numbered anew while this waits
        for other in body.fed.copy():
            if other in body.fed:
                await send_everything(channel, REQUEST.pack(CastRequest.FEED, other.number, 0, other.owner.agent))
        if source is not None:
            await send_everything(channel, REQUEST.pack(CastRequest.FED, number, body.size, source.owner.agent))
            return
        await send_everything(channel, REQUEST.pack(CastRequest.KEEP, number, body.size, 0))
        for piece in body.pieces():
            await send_everything(channel, piece)
