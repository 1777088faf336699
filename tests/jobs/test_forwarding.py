"""Ports of this machine that lead to a host."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

from trimesh import HostLost, MeshErrorGroup, leaves, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


Handler = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def service(handler: Handler) -> AsyncGenerator[int, None]:
    """Serve connections at a port of this machine, which is that of every local host, too."""
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, handler, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def echo(stream: trio.SocketStream) -> None:
    """Send back what comes, and end when it ends."""
    with suppress(trio.BrokenResourceError):
        async for data in stream:
            await stream.send_all(data)
        await stream.send_eof()


async def read_all(stream: trio.SocketStream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


@contextmanager
def dead_port() -> Generator[int, None, None]:
    """Have a port at which nothing listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@pytest.mark.parametrize("pickle", ["on", "off"])
async def test_bytes_go_both_ways_and_each_way_ends_by_itself(pickle: Any) -> None:
    """H16: many connections at a time; a half that is closed leaves the other open."""
    with trio.fail_after(HANG_SECONDS):
        async with service(echo) as port, jobs.LocalJob(2, pickle=pickle) as hosts:
            async with hosts.slice(hosts=1).forward(remote=port) as forwarded:
                assert forwarded.address == f"127.0.0.1:{forwarded.port}"

                async def talk(number: int) -> None:
                    data = bytes([number]) * (200_000 + number)
                    stream = await trio.open_tcp_stream("127.0.0.1", forwarded.port)
                    async with stream, trio.open_nursery() as nursery:

                        async def send() -> None:
                            await stream.send_all(data)
                            await stream.send_eof()

                        nursery.start_soon(send)
                        assert await read_all(stream) == data

                async with trio.open_nursery() as nursery:
                    for number in range(20):
                        nursery.start_soon(talk, number)
                assert not forwarded.failures
            with pytest.raises(OSError, match="connect"):
                await trio.open_tcp_stream("127.0.0.1", forwarded.port)


async def test_reader_that_stops_holds_the_sender_and_no_other_connection() -> None:
    """H16: what is under way is bounded."""
    sent = 0
    is_held = trio.Event()

    async def flood(stream: trio.SocketStream) -> None:
        nonlocal sent
        if await stream.receive_some(1) == b"e":
            await echo(stream)
            return
        while True:
            with trio.move_on_after(1) as scope:
                await stream.send_all(bytes(65_536))
                sent += 65_536
            if scope.cancelled_caught and sent:  # however short that is: it fails only if the bytes do not stop
                is_held.set()
                await trio.sleep_forever()

    with trio.fail_after(HANG_SECONDS):
        async with (
            service(flood) as port,
            jobs.LocalJob(1) as hosts,
            hosts.forward(remote=port) as forwarded,
            await trio.open_tcp_stream("127.0.0.1", forwarded.port) as stopped,
        ):
            await stopped.send_all(b"f")
            await is_held.wait()
            assert 0 < sent < 64 << 20
            async with await trio.open_tcp_stream("127.0.0.1", forwarded.port) as other:
                await other.send_all(b"ehello")
                await other.send_eof()
                assert await read_all(other) == b"hello"


async def test_connection_that_is_reset_is_reset_on_the_other_side() -> None:
    """H16: not ended as if it were whole; nor is one where no service listens, which is said."""

    async def cut(stream: trio.SocketStream) -> None:
        await stream.send_all(b"half of an answ")
        await stream.receive_some(1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()

    with trio.fail_after(HANG_SECONDS):
        async with service(cut) as port, jobs.LocalJob(1) as hosts:
            async with (
                hosts.forward(remote=f"localhost:{port}") as forwarded,
                await trio.open_tcp_stream("127.0.0.1", forwarded.port) as stream,
            ):
                assert await stream.receive_some(15)
                await stream.send_all(b"x")
                with pytest.raises(trio.BrokenResourceError):
                    await read_all(stream)
            with dead_port() as dead:
                async with hosts.forward(remote=dead) as forwarded:
                    async with await trio.open_tcp_stream("127.0.0.1", forwarded.port) as stream:
                        with pytest.raises(trio.BrokenResourceError):
                            await read_all(stream)
                    assert "on " in forwarded.failures[0]


@pytest.mark.daily
async def test_left_block_resets_what_is_open() -> None:
    """H16: nothing listens or stays after it, and what the body raises comes through."""
    with trio.fail_after(HANG_SECONDS):
        async with service(echo) as port, jobs.LocalJob(1) as hosts:
            with pytest.raises(MeshErrorGroup) as caught:
                async with hosts.forward(remote=port) as forwarded:
                    stream = await trio.open_tcp_stream("127.0.0.1", forwarded.port)
                    await stream.send_all(b"x")
                    assert await stream.receive_some(1) == b"x"
                    raise ZeroDivisionError
            assert [type(leaf) for leaf in leaves(caught.value)] == [ZeroDivisionError]
            async with stream:
                with pytest.raises(trio.BrokenResourceError):
                    await read_all(stream)


async def test_lost_host_ends_the_block_of_its_port() -> None:
    """H16, H4: the body is cancelled; one `HostLost`."""
    with trio.fail_after(HANG_SECONDS):
        async with service(echo) as port, jobs.LocalJob(1) as hosts:
            spawners = list[int]()
            read = "cut -d ' ' -f 4 /proc/$PPID/stat"
            await hosts.run(["sh", "-c", read], output=lambda line: spawners.append(int(line.text)))
            with pytest.raises(MeshErrorGroup) as caught:
                async with hosts.forward(remote=port):
                    os.kill(parent_of(spawners[0]), signal.SIGKILL)
                    await trio.sleep_forever()
            assert {type(leaf) for leaf in leaves(caught.value)} == {HostLost}


async def test_ports_that_are_none_are_refused() -> None:
    """H16: in words, before anything listens."""
    host: Any = this_host()
    for wrong, kind, words in [
        ({"remote": 0}, ValueError, "from 1 to 65535"),
        ({"remote": "nothing"}, ValueError, "name:port"),
        ({"remote": 80, "local": -1}, ValueError, "from 0"),
        ({"remote": None}, TypeError, "must be a whole number"),
    ]:
        with pytest.raises(kind, match=words):
            async with host.forward(**wrong):
                pass
    async with jobs.LocalJob(2) as hosts:
        with pytest.raises(ValueError, match="one host"):
            async with hosts.forward(remote=80):
                pass
