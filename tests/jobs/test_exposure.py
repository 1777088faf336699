"""What a mesh over hosts shows to others of its machine: ports and secrets (T1, T2 of the security tests)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

from trimesh import Actor, endpoint, limits, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs.identity import JoinToken, TokenLedger

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

LISTENING = "0A"
"""State of a TCP socket in /proc/net/tcp."""

Listening = Callable[[set[int]], list[str]]


def all_listening(pids: set[int]) -> list[str]:
    """Return the addresses and ports at which some processes listen for TCP, as the kernel writes them."""
    inodes = set[str]()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd))
            except FileNotFoundError:
                continue
    found = list[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in inodes:
                found.append(local)
    return found


@pytest.fixture
def listening() -> Listening:
    """`all_listening` without what this process listened at before the test: torch keeps some ports of other tests."""
    earlier = set(all_listening({os.getpid()}))
    return lambda pids: [one for one in all_listening(pids) if one not in earlier]


def port_in(addresses: list[str]) -> int:
    """Return the port of the only address."""
    (address,) = addresses
    return int(address.partition(":")[2], 16)


def shown_of(pids: set[int]) -> bytes:
    """Return the arguments and the environments of some processes."""
    return b"".join(Path(f"/proc/{pid}/{what}").read_bytes() for pid in pids for what in ("cmdline", "environ"))


class Look(Actor):
    """Tells who is above it."""

    @endpoint
    async def above(self) -> list[int]:
        spawner = os.getppid()
        return [os.getpid(), spawner, parent_of(spawner)]


async def above(look: Any) -> set[int]:
    return {pid for pids in await look.above.call() for pid in pids}


@pytest.mark.daily
async def test_nothing_listens_on_one_host(listening: Listening) -> None:
    """H1: neither the program, nor its spawner, nor a process of the mesh."""
    with trio.fail_after(HANG_SECONDS):
        async with this_host().spawn_procs({"gpus": 2}) as procs, procs.spawn("look", Look) as look:
            assert listening(await above(look) | {os.getpid()}) == []


async def test_only_the_program_listens_while_a_job_is_open_and_on_loopback(
    monkeypatch: pytest.MonkeyPatch, listening: Listening
) -> None:
    """H1: one port, at the address that the launcher names; agents and processes have none."""
    tokens = list[JoinToken]()
    issue = TokenLedger.issue

    def issued(self: TokenLedger, now: float) -> JoinToken:
        tokens.append(issue(self, now))
        return tokens[-1]

    monkeypatch.setattr(TokenLedger, "issue", issued)
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 2}) as procs,
            procs.spawn("look", Look) as look,
        ):
            others = await above(look) - {os.getpid()}
            assert len(others) == 8
            assert [one.partition(":")[0] for one in listening({os.getpid()})] == ["0100007F"]
            assert listening(others) == []
            shown = shown_of(others)
            assert len(tokens) == 2
            for token in tokens:
                encoded = token.text.partition(":")[2]
                for secret in (encoded.encode(), encoded[20:60].encode(), token.secret, token.secret.hex().encode()):
                    assert secret not in shown
    assert listening({os.getpid()}) == []


async def test_strangers_who_say_nothing_disturb_no_mesh_and_keep_no_host_out(listening: Listening) -> None:
    """JD-1: three times as many connections as may be half open; calls go on, and another host joins."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2, spares=1) as hosts,
            hosts.slice(hosts=0).spawn_procs({}) as procs,
            procs.spawn("look", Look) as look,
            AsyncExitStack() as strangers,
        ):
            port = port_in(listening({os.getpid()}))
            for _ in range(3 * limits.TLS_HALF_OPEN_MAX):
                stranger = await strangers.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
            await stranger.send_all(b"\x16")  # the beginning of a handshake
            assert len(await above(look)) == 3
            await hosts.replace({"hosts": 1})
            async with hosts.spawn_procs({}) as others, others.spawn("look", Look) as two:
                assert len(await above(two)) == 6


async def test_more_hosts_than_may_be_half_open_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """JD-1: they wait for each other."""
    monkeypatch.setattr(limits, "TLS_HALF_OPEN_MAX", 1)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(4) as hosts, hosts.spawn_procs({}) as procs, procs.spawn("look", Look) as look:
            assert len(await above(look)) == 12


@pytest.mark.stress
async def test_a_thousand_strangers_who_dribble_leave_calls_as_fast(
    capsys: pytest.CaptureFixture[str], listening: Listening
) -> None:
    """JD-1: 1,000 connections, each with a byte of a handshake a second; the figures are printed."""
    strangers = str(Path(__file__).with_name("dribbling.py"))
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(1) as hosts,
            hosts.spawn_procs({}) as procs,
            procs.spawn("look", Look) as look,
        ):
            port = port_in(listening({os.getpid()}))
            await latencies(look)
            before = await latencies(look)
            command = [sys.executable, strangers, str(port), "1000"]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = await trio.lowlevel.open_process(command, **pipes)
            assert process.stdin is not None
            assert process.stdout is not None
            async with process.stdout:
                assert await process.stdout.receive_some() == b"all are there\n"
                during = await latencies(look)
                await process.stdin.aclose()
                await process.wait()
    with capsys.disabled():
        for name, found in (("before", before), ("during", during)):
            print(f"\n{name}: p50 {found[500] * 1e6:.0f} us, p99 {found[990] * 1e6:.0f} us", end="")
    assert during[500] < 2 * before[500], "the half of all calls waits for no stranger"


async def latencies(look: Any) -> list[float]:
    """Return what a thousand calls took, in order of size, in seconds."""
    found = list[float]()
    for _ in range(1_000):
        began = trio.current_time()
        await look.above.call_one()
        found.append(trio.current_time() - began)
    return sorted(found)
