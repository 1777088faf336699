"""Meshes over hosts that are agents on this machine: calls, joins, losses, and what idle ones cost."""

from __future__ import annotations

import os
import signal
import ssl
import time
from pathlib import Path

from bench.cores import on_one_core
from bench.processes import descendants, private_bytes
from bench.scale import Samples, Scale, timed_calls

SETTLE_SECONDS = 0.2
"""For a waiting call to arrive over there."""

TICKS = os.sysconf("SC_CLK_TCK")


async def calls(scale: Scale, found: Samples) -> None:
    """Call a process on another host, over TLS; and one of this host, all on one core."""
    from bench.workloads.trimesh_actors import Sleeper
    from trimesh import jobs, this_host

    async with jobs.LocalJob(1) as hosts, hosts.spawn_procs({}) as procs, procs.spawn("s", Sleeper) as one:
        found["host_call"] = await timed_calls(scale, one.pid.call_one)
        with on_one_core(os.getpid(), *descendants(os.getpid())):
            found["host_call_pinned"] = await timed_calls(scale, one.pid.call_one)
    async with this_host().spawn_procs({}) as procs, procs.spawn("s", Sleeper) as one:
        with on_one_core(os.getpid(), *descendants(os.getpid())):
            found["one_host_call_pinned"] = await timed_calls(scale, one.pid.call_one)


def openssl_alone(mebibytes: int, server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """Return the MiB in a second that OpenSSL encrypts and decrypts in one thread, without sockets."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=None)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    ready = 0
    while ready < 2:
        ready = 0
        for one in (near, far):
            try:
                one.do_handshake()
                ready += 1
            except ssl.SSLWantReadError:
                pass
    piece, into = b"\1" * (1 << 18), bytearray(1 << 18)
    start = time.perf_counter()
    for _ in range(mebibytes * 4):
        near.write(piece)
        left = len(piece)
        while left:
            left -= far.read(left, into)
    return mebibytes / (time.perf_counter() - start)


async def joins(scale: Scale, found: Samples) -> None:
    """Enter a job of many hosts, and call a process on each."""
    from bench.workloads.trimesh_actors import Sleeper
    from trimesh import jobs

    start = time.perf_counter()
    async with jobs.LocalJob(scale.hosts) as hosts:
        found["hosts_entered"] = [time.perf_counter() - start]
        async with hosts.spawn_procs({}) as procs, procs.spawn("s", Sleeper) as sleepers:
            await sleepers.pid.call()
            found["hosts_called"] = [time.perf_counter() - start]


async def killed_agents(scale: Scale, found: Samples) -> None:
    """Kill the agent of a host, and wait for the exception of a call there."""
    import trio

    from bench.workloads.trimesh_actors import Hanger
    from trimesh import HostLost, jobs

    found["agent_killed"] = []
    for _ in range(max(1, scale.kills // 4)):
        try:
            async with jobs.LocalJob(2) as hosts, hosts.spawn_procs({}) as procs, procs.spawn("h", Hanger) as hangers:
                victim = hangers.slice(hosts=1)
                agent = _parent(_parent(await victim.pid.call_one()))

                async def wait() -> None:
                    try:
                        await victim.sleep.call_one()  # noqa: B023 - ends in this turn
                    finally:
                        found["agent_killed"].append((time.perf_counter() - killed) * 1e3)  # noqa: B023

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait)
                    await trio.sleep(SETTLE_SECONDS)
                    killed = time.perf_counter()
                    os.kill(agent, signal.SIGKILL)
        except* HostLost:
            pass


async def partitions(scale: Scale, found: Samples) -> None:
    """Cut a host off, and wait for the exception of a call there; where there can be no networks, nothing."""
    import trio

    from bench.workloads.trimesh_actors import Hanger
    from trimesh import HostLost, Isolate
    from trimesh.testing import NetworkJob, open_host_network, why_no_networks

    if why_no_networks() is not None:
        return
    found["host_cut_off"], found["isolated_gone"] = [], []
    for _ in range(max(1, scale.kills // 8)):
        with open_host_network(3) as network:
            async with (
                NetworkJob(network) as hosts,
                hosts.spawn_procs({}, supervision=Isolate()) as procs,
                procs.spawn("h", Hanger) as hangers,
                trio.open_nursery() as nursery,
            ):
                victim = hangers.slice(hosts=1)
                worker = os.pidfd_open(await victim.pid.call_one())

                async def wait_gone() -> None:
                    await trio.lowlevel.wait_readable(worker)  # noqa: B023 - ends in this turn
                    found["isolated_gone"].append(time.perf_counter() - start)  # noqa: B023
                    os.close(worker)  # noqa: B023

                heal = network.cut([1, 2])
                start = time.perf_counter()
                nursery.start_soon(wait_gone)
                try:
                    await victim.sleep.call_one()
                except HostLost:
                    found["host_cut_off"].append(time.perf_counter() - start)
                heal()


async def idle(scale: Scale, found: Samples) -> None:
    """Have many hosts that do nothing."""
    import trio

    from trimesh import jobs

    async with jobs.LocalJob(scale.idle_hosts):
        there, seconds = descendants(os.getpid()), scale.idle_seconds
        found["idle_memory"] = [sum(map(private_bytes, there)) / scale.idle_hosts / 2**20]
        own, theirs = _processor_seconds(os.getpid()), sum(map(_processor_seconds, there))
        await trio.sleep(seconds)
        own = _processor_seconds(os.getpid()) - own
        theirs = sum(map(_processor_seconds, there)) - theirs
        found["idle_program"] = [own / seconds * 1e3]
        found["idle_host"] = [theirs / seconds / scale.idle_hosts * 1e3]


def _processor_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
