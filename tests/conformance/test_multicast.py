"""One source to many readers (N4, V1): into an endpoint of a mesh, or into buffers."""

from __future__ import annotations

import pytest
from tests.conformance.meshes import Backend, kinds
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern

import trimesh
from trimesh import RDMABuffer
from trimesh.rdma import multicast


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_every_member_gets_the_source(backend: Backend, size: int):
    """API 7: by its endpoint, whoever has the source; what comes is read-only."""
    async with backend.procs({"gpus": 3}) as procs:
        vault = await procs.slice(gpus=0).spawn("vault", Vault, size)
        readers = await procs.spawn("readers", Reader)
        handle = await vault.handle.call_one()
        for source in (handle, RDMABuffer(pattern(size), writable=False)):
            found = await multicast(source, into=readers.take)
            assert found is not None
            assert list(found.values()) == [(pattern(size), True)] * 3


@pytest.mark.daily("real")
async def test_buffers_are_written(backend: Backend):
    async with backend.procs({"gpus": 3}) as procs:
        vaults = await procs.spawn("vaults", Vault)
        handles = list((await vaults.handle.call()).values())
        await multicast(RDMABuffer(bytearray(pattern(SMALL, salt=1))), into=handles)
        assert set((await vaults.look.call(0, SMALL)).values()) == {pattern(SMALL, salt=1)}
        await handles[0].write_from(pattern(SMALL, salt=2))
        await multicast(handles[0], into=handles[1:])
        assert set((await vaults.look.call(0, SMALL)).values()) == {pattern(SMALL, salt=2)}


async def test_multicast_is_checked_before_anything_moves(backend: Backend):
    async with backend.procs({"gpus": 2}) as procs:
        vaults = await procs.spawn("vaults", Vault)
        one, other = (await vaults.handle.call()).values()
        source = RDMABuffer(bytearray(pattern(SMALL, salt=1)))
        for wrong in [one, other[1:]], [one, one]:
            with pytest.raises(ValueError, match=r"size|must not write memory"):
                await multicast(source, into=wrong)
        with pytest.raises(PermissionError):
            await multicast(source, into=[one, other.readonly()])
        with pytest.raises(TypeError, match="must be an endpoint"):
            await multicast(source, into=[one, b"x"])  # type: ignore[list-item]
        assert set((await vaults.look.call(0, SMALL)).values()) == {pattern(SMALL)}
        await multicast(source, into=[])


async def test_failures_of_a_multicast_come_together(backend: Backend):
    async with backend.procs({"gpus": 3}) as procs:
        vaults = await procs.spawn("vaults", Vault)
        handles = list((await vaults.handle.call()).values())
        await vaults.slice(gpus=slice(1, 3)).revoke.call()
        with pytest.raises(trimesh.MeshErrorGroup) as caught:
            await multicast(RDMABuffer(bytearray(pattern(SMALL, salt=1))), into=handles)
        assert [kind.__name__ for kind in kinds(caught.value)] == ["ClosedResourceError"] * 2
        assert await vaults.slice(gpus=0).look.call_one(0, SMALL) == pattern(SMALL, salt=1)
