"""Buffers between hosts that no carrier connects: by messages, through the sessions of the hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from tests.conformance.publishing import Publisher, Reader
from tests.conformance.vault import Reader as VaultReader
from tests.conformance.vault import Vault, pattern
from tests.patience import HANG_SECONDS

from trimesh import Isolate, LinkLost, ProcDied, RDMABuffer, limits

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

SIZE = 3 * limits.LINKED_PIECE_BYTES + 5


@attrs.frozen
class Ends:
    """An owner of memory on one host, and a reader on another one."""

    vault: Any
    reader: Any
    handle: RDMABuffer


@asynccontextmanager
async def two_hosts(**options: Any) -> AsyncGenerator[tuple[Any, Ends]]:
    """Run two hosts that share no memory."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2, apart=True) as hosts,
            hosts.spawn_procs({"gpus": 1}, **options) as procs,
            procs.spawn("vaults", Vault, SIZE, allocated=True) as vaults,
            procs.spawn("readers", VaultReader) as readers,
        ):
            vault = vaults.slice(hosts=0, gpus=0)
            yield procs, Ends(vault, readers.slice(hosts=1, gpus=0), await vault.handle.call_one())


@pytest.mark.daily
async def test_transfers_are_those_of_any_carrier():
    """H9, N4: reads, writes, parts, atomic operations of several at one time; a mapping is refused in words."""
    async with two_hosts() as (_, ends):
        reader, handle = ends.reader, ends.handle
        assert await reader.backend.call_one(handle) == "link"
        assert await reader.read.call_one(handle) == pattern(SIZE)
        assert await reader.read.call_one(handle[5:9]) == pattern(SIZE)[5:9]
        await reader.write.call_one(handle, pattern(SIZE, 1))
        assert await ends.vault.look.call_one(0, SIZE) == pattern(SIZE, 1)
        assert bytes(await _read(handle)) == pattern(SIZE, 1)
        await ends.vault.put.call_one(0, bytes(8))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.count.call_one, handle, 20)
            for _ in range(20):
                await handle.fetch_add(1)
        assert await ends.vault.look.call_one(0, 8) == (40).to_bytes(8, "little")
        with pytest.raises(LinkLost, match="cannot be reached"):
            async with handle.map():
                pass


async def _read(handle: RDMABuffer) -> bytearray:
    found = bytearray(handle.nbytes)
    await handle.read_into(found)
    return found


async def test_publications_work():
    """H9, N4: versions, and their pins."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2, apart=True) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("publishers", Publisher) as publishers,
            procs.spawn("followers", Reader) as followers,
        ):
            publisher = publishers.slice(hosts=0, gpus=0)
            published = await publisher.handle.call_one()
            await publisher.publish.call_one(1, 5)
            assert await followers.slice(hosts=1, gpus=0).follow.call_one(published, 5)


async def test_wrong_handles_and_ends_are_told_apart():
    """N4: a wrong secret, a buffer that was revoked, an owner that has died; none hangs, none gives bytes."""
    async with two_hosts(supervision=Isolate()) as (procs, ends):
        with pytest.raises(PermissionError, match="secret"):
            await _read(_with_other_secret(ends.handle))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ends.reader.read_for_ever.call_one, ends.handle)
                await ends.reader.wait.call_one("has read")
                scope.cancel()
        assert await ends.reader.read.call_one(ends.handle) == pattern(SIZE)
        await ends.vault.revoke.call_one()
        with pytest.raises(trio.ClosedResourceError, match="revoked"):
            await ends.reader.read.call_one(ends.handle)
        await procs.kill([{"hosts": 0, "gpus": 0}])
        with pytest.raises(ProcDied) as met:
            await ends.reader.read.call_one(ends.handle)
        assert met.value.signal == signal.SIGKILL


def _with_other_secret(handle: RDMABuffer) -> RDMABuffer:
    make, (home, (place, generation, secret, *grant), *rest) = handle.__reduce__()
    assert len(secret) == 16
    made = make(home, (place, generation, os.urandom(16), *grant), *rest)
    assert isinstance(made, RDMABuffer)
    return made
