"""What a mesh over hosts shows to others of its machine: ports and secrets (T1, T2 of the security tests)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

from trimesh import Actor, endpoint, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs.identity import JoinToken, TokenLedger

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

LISTENING = "0A"
"""State of a TCP socket in /proc/net/tcp."""


def listening(pids: set[int]) -> list[str]:
    """Return the addresses at which some processes listen for TCP, as the kernel writes them."""
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
                found.append(local.partition(":")[0])
    return found


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


async def test_nothing_listens_on_one_host() -> None:
    """H1: neither the program, nor its spawner, nor a process of the mesh."""
    with trio.fail_after(HANG_SECONDS):
        async with this_host().spawn_procs({"gpus": 2}) as procs, procs.spawn("look", Look) as look:
            assert listening(await above(look) | {os.getpid()}) == []


async def test_only_the_program_listens_while_a_job_is_open_and_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert listening({os.getpid()}) == ["0100007F"]
            assert listening(others) == []
            shown = shown_of(others)
            assert len(tokens) == 2
            for token in tokens:
                encoded = token.text.partition(":")[2]
                for secret in (encoded.encode(), encoded[20:60].encode(), token.secret, token.secret.hex().encode()):
                    assert secret not in shown
    assert listening({os.getpid()}) == []
