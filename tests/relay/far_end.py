"""A host of its own: dials, dials again whenever its connection is lost, and echoes what comes on channels.

far_end.py PORT     credentials come on standard input
"""

from __future__ import annotations

import base64
import json
import socket
import sys
from contextlib import suppress

import trio

from trimesh._native.tls import TLSContext, TLSHello
from trimesh._transport.relay import OpenedChannel, SessionDown, SessionEvent, SessionInterrupted, open_relay
from trimesh.errors import LinkLost
from trimesh.ids import ProcId
from trimesh.jobs.connections import SecureSocket

DIALLER, DIALLED = ProcId(2), ProcId(1)


async def main(port: int) -> None:
    order = {key: base64.b64decode(text) for key, text in json.loads(sys.stdin.readline()).items()}
    context = TLSContext(chain=order["chain"], key=order["key"], authority=order["authority"])
    hello = TLSHello(DIALLER, order["mesh"], versions=("0", "0", ""))
    lost = trio.Event()
    is_over = trio.Event()

    def take(event: SessionEvent) -> None:
        if isinstance(event, OpenedChannel):
            near, far = socket.socketpair()
            session.accept_channel(event.channel, far)
            nursery.start_soon(echo, trio.SocketStream(trio.socket.from_stdlib_socket(near)))
        elif isinstance(event, SessionInterrupted):
            lost.set()
        elif isinstance(event, SessionDown):
            print(event.ending.value, event.reason, flush=True)
            is_over.set()

    async with open_relay(take) as relay, trio.open_nursery() as nursery:
        near, far = socket.socketpair()
        session = relay.open_session(far, peer=DIALLED, is_dialler=True, lease_seconds=20, session_id=77)
        nursery.start_soon(end_with, is_over, nursery.cancel_scope)
        with near:
            while True:
                secure = await dial(context, hello, port)
                lost = trio.Event()
                session.attach(secure.hand_over())
                await lost.wait()


async def dial(context: TLSContext, hello: TLSHello, port: int) -> SecureSocket:
    """Dial until it works."""
    while True:
        with suppress(OSError, LinkLost):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            secure = SecureSocket(stream.socket, context.open(hello, is_server=False))
            try:
                await secure.shake_hands()
            except LinkLost:
                secure.close()
                raise
            return secure
        await trio.lowlevel.checkpoint()


async def echo(stream: trio.SocketStream) -> None:
    """Send back what comes."""
    with suppress(trio.BrokenResourceError):
        async with stream:
            async for data in stream:
                await stream.send_all(data)
            await stream.send_eof()


async def end_with(event: trio.Event, scope: trio.CancelScope) -> None:
    """Cancel a scope when something has happened."""
    await event.wait()
    scope.cancel()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
