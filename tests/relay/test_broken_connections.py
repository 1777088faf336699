"""Sessions between two processes whose connections are reset at any byte (H3)."""

from __future__ import annotations

import base64
import json
import random
import socket
import struct
import subprocess
import sys
from array import array
from functools import partial
from pathlib import Path

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh._native import tls
from trimesh.errors import LinkLost

pytest.importorskip("cryptography")

from tests.relay.ends import DIALLED, DIALLER, End, Wires, open_end, trio_pair, wires

from trimesh._native.tls import TLSVerdict
from trimesh._transport.relay import SessionDown, SessionEnding
from trimesh.jobs.connections import SecureSocket

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

MESSAGES = 1_000_000
RESETS = 50


class Saboteur:
    """Passes bytes between who dials and a listener, and resets both connections after some.

    Attributes:
        resets: How many were made.
    """

    def __init__(self, inner: int, seed: int) -> None:
        self.resets = 0
        self._inner = inner
        self._random = random.Random(seed)

    async def serve(self, outer: trio.SocketStream) -> None:
        """Pass one connection on."""
        async with outer, await trio.open_tcp_stream("127.0.0.1", self._inner) as inner:
            left = [self._random.randrange(4_000, 160_000) if self.resets < RESETS else 1 << 40]
            async with trio.open_nursery() as nursery:
                for source, target in ((outer, inner), (inner, outer)):
                    nursery.start_soon(self._pass, source, target, left, nursery.cancel_scope)
            for one in (outer, inner):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _pass(
        self, source: trio.SocketStream, target: trio.SocketStream, left: list[int], scope: trio.CancelScope
    ) -> None:
        try:
            async for data in source:
                if len(data) >= left[0]:
                    await target.send_all(data[: left[0]])
                    self.resets += 1
                    break
                left[0] -= len(data)
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


def order_of(made: Wires) -> str:
    """Return what the far end reads."""
    its = made.credentials[DIALLER]
    order = {"chain": its.chain, "key": its.key, "authority": its.authority, "mesh": made.mesh}
    return json.dumps({key: base64.b64encode(value).decode() for key, value in order.items()}) + "\n"


async def exchange(end: End, count: int) -> array[int]:
    """Send so many numbers of 4 bytes, a message each, over a channel; return what comes back."""
    stream, far = trio_pair()
    end.session.open_channel(far, b"echo")

    async def send() -> None:
        for first in range(0, count, 1_000):  # one call for many: Python's share of the time is not what is tested
            await stream.send_all(array("I", range(first, min(first + 1_000, count))).tobytes())
        await stream.send_eof()

    got = bytearray()
    async with stream, trio.open_nursery() as nursery:
        nursery.start_soon(send)
        async for data in stream:
            got += data
    return array("I", bytes(got))


@pytest.mark.parametrize("kind", ["native", "trio"])
async def test_million_messages_cross_many_resets(kind: str) -> None:
    """H3."""
    count = MESSAGES if kind == "native" else MESSAGES // 10
    with wires() as made, trio.fail_after(HANG_SECONDS):
        async with open_end(kind, is_dialler=False) as end, trio.open_nursery() as nursery:

            async def admit(stream: trio.SocketStream) -> None:
                secure = SecureSocket(stream.socket, made.open(DIALLED))
                try:
                    await secure.shake_hands(decide=lambda _: TLSVerdict.ADMITTED)
                except LinkLost:
                    secure.close()
                    return
                end.session.attach(secure.hand_over())

            (inner,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            saboteur = Saboteur(inner.socket.getsockname()[1], seed=5)
            (outer,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, admit, [inner])
            nursery.start_soon(trio.serve_listeners, saboteur.serve, [outer])
            port = outer.socket.getsockname()[1]
            command = [sys.executable, str(Path(__file__).with_name("far_end.py")), str(port)]
            run = partial(trio.run_process, stdin=order_of(made).encode(), stdout=subprocess.PIPE)
            child: trio.Process = await nursery.start(run, command)
            got = await exchange(end, count)
            counted = end.session.statistics()
            end.session.close()
            assert (await end.wait(SessionDown)).ending is SessionEnding.CLOSED
            assert child.stdout is not None
            said = b"".join([part async for part in child.stdout])
            assert await child.wait() == 0
            nursery.cancel_scope.cancel()
    assert got == array("I", range(count))
    assert said.startswith(b"bye")
    assert counted.resent > 0
    assert saboteur.resets >= (RESETS if kind == "native" else 5)
