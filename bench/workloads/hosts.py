"""Bytes between two hosts, beside asyncio's streams with ssl, both over TLS on the loopback; then meshes over hosts.

Both ends of a session are in one process, so the echo of asyncio takes no turn of another process, and Python's share
is the same. The hosts of meshes are agents on this machine (`host_meshes`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.scale import Metric, Samples, Scale
from bench.workloads.host_meshes import calls, idle, joins, killed_agents, openssl_alone, partitions

if TYPE_CHECKING:
    import trio

METRICS = [
    Metric("host_echo", "100 B to another host and back", "us", quantiles=(0.5, 0.99)),
    Metric("host_bulk", "bytes to another host", "MiB/s", is_rate=True),
    Metric("ssl_echo", "100 B by asyncio and ssl and back", "us", quantiles=(0.5, 0.99)),
    Metric("ssl_bulk", "bytes by asyncio and ssl", "MiB/s", is_rate=True),
    Metric("openssl_bulk", "bytes by OpenSSL alone in one thread, both ends", "MiB/s", is_rate=True),
    Metric("host_call", "call_one to another host", "us", quantiles=(0.5, 0.99)),
    Metric("host_call_pinned", "the same, all on one core", "us", quantiles=(0.5, 0.99)),
    Metric("one_host_call_pinned", "call_one on one host, on one core", "us", quantiles=(0.5, 0.99)),
    Metric("hosts_entered", "a job of 16 hosts until they are ready", "s"),
    Metric("hosts_called", "a job of 16 hosts until each has answered a call", "s"),
    Metric("agent_killed", "SIGKILL of an agent to the waiter's exception", "ms", quantiles=(0.5, 1.0)),
    Metric("host_cut_off", "partition to the waiter's HostLost", "s", quantiles=(0.5, 1.0), goals=(4, 4)),
    Metric("isolated_gone", "partition to the end of the isolated process", "s", quantiles=(0.5, 1.0), goals=(4, 4)),
    Metric("idle_program", "processor of the program of 64 idle hosts, in a second", "ms"),
    Metric("idle_host", "processor of one of 64 idle hosts, in a second", "ms"),
    Metric("idle_memory", "private memory of one of 64 idle hosts", "MiB"),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "it has no sessions between hosts that can be used by themselves")

SMALL = b"\1" * 100
PIECE = b"\1" * (1 << 18)


async def trimesh_side(scale: Scale) -> Samples:
    import trio

    found: Samples = {}
    await _session(scale, found)
    await trio.to_thread.run_sync(lambda: asyncio.run(_asyncio(scale, found)))
    for measure in (calls, joins, killed_agents, partitions, idle):
        await measure(scale, found)
    return found


async def _session(scale: Scale, found: Samples) -> None:
    import trio
    from tests.relay.ends import open_end, receive_exactly, trio_pair, wires

    from trimesh._transport.relay import OpenedChannel, SessionResumed

    with wires() as made:
        async with open_end("native", is_dialler=True) as near, open_end("native", is_dialler=False) as far:
            ours, theirs = made.connect()
            near.session.attach(ours)
            far.session.attach(theirs)
            await near.wait(SessionResumed)
            stream, end = trio_pair()
            near.session.open_channel(end, b"")
            other, end = trio_pair()
            far.session.accept_channel((await far.wait(OpenedChannel)).channel, end)
            async with stream, other, trio.open_nursery() as nursery:

                async def echo() -> None:
                    await other.send_all(await receive_exactly(other, len(SMALL)))

                found["host_echo"] = []
                for turn in range(scale.warm_up + scale.calls):
                    start = time.perf_counter()
                    nursery.start_soon(echo)
                    await stream.send_all(SMALL)
                    await receive_exactly(stream, len(SMALL))
                    if turn >= scale.warm_up:
                        found["host_echo"].append((time.perf_counter() - start) * 1e6)
                mebibytes = max(16, scale.link_mebibytes // 4)
                start = time.perf_counter()
                nursery.start_soon(_send_all, stream, mebibytes << 20)
                left = mebibytes << 20
                while left:
                    left -= len(await other.receive_some(1 << 18))
                found["host_bulk"] = [mebibytes / (time.perf_counter() - start)]


async def _send_all(stream: trio.SocketStream, size: int) -> None:
    for _ in range(size // len(PIECE)):
        await stream.send_all(PIECE)


async def _asyncio(scale: Scale, found: Samples) -> None:
    from trimesh.ids import ProcId
    from trimesh.jobs.identity import Authority

    credentials = Authority(time.time()).credentials(ProcId(1), time.time())
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with tempfile.TemporaryDirectory() as folder:
        chain, key = Path(folder) / "chain", Path(folder) / "key"
        chain.write_bytes(credentials.chain)
        key.write_bytes(credentials.key)
        server.load_cert_chain(chain, key)
    client.load_verify_locations(cadata=credentials.authority.decode())
    client.check_hostname = False
    mebibytes = max(16, scale.link_mebibytes // 4)
    found["openssl_bulk"] = [openssl_alone(mebibytes, server, client)]
    is_done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(scale.warm_up + scale.calls):
            writer.write(await reader.readexactly(len(SMALL)))
        left = mebibytes << 20
        while left:
            left -= len(await reader.read(1 << 18))
        is_done.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server, family=socket.AF_INET) as listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        found["ssl_echo"] = []
        for turn in range(scale.warm_up + scale.calls):
            start = time.perf_counter()
            writer.write(SMALL)
            await reader.readexactly(len(SMALL))
            if turn >= scale.warm_up:
                found["ssl_echo"].append((time.perf_counter() - start) * 1e6)
        start = time.perf_counter()
        for _ in range((mebibytes << 20) // len(PIECE)):
            writer.write(PIECE)
            await writer.drain()
        await is_done.wait()
        found["ssl_bulk"] = [mebibytes / (time.perf_counter() - start)]
        writer.close()
