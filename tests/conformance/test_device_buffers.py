"""Buffers on a device are revoked, and end with their owner, as others do (rule N4): what is granted is the ticket."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from tests.conformance.device_vault import BOTH, SIZE, SPACE, Owner, post
from tests.conformance.meshes import Backend, SimBackend, only_sim

from trimesh import Isolate, LinkLost, ProcDied, limits
from trimesh._runtime.life.current import current_proc
from trimesh._transport.interface import Right
from trimesh.rdma.buffers.buffer import buffer_by
from trimesh.rdma.memory.handle import Handle


async def test_revoked_buffer_of_a_device(backend: Backend):
    """N4: who was refused before is not waited for."""
    async with backend.procs({"gpus": 1}) as procs:
        owner = await procs.spawn("owner", Owner)
        handle = await owner.handle.call_one()
        with pytest.raises(LinkLost, match="CUDA device of owner"):
            await handle.read_into(bytearray(SIZE))
        assert await owner.revoke.call_one() < limits.REVOKE_SECONDS
        for use in (handle.read_into(bytearray(SIZE)), handle.write_from(bytes(SIZE))):
            with pytest.raises(trio.ClosedResourceError, match="revoked"):
                await use


async def test_killed_owner_of_device_memory(backend: Backend):
    """N4: its death is found as that of any owner."""
    async with backend.procs({"gpus": 1}, supervision=Isolate()) as procs:
        handle = await (await procs.spawn("owner", Owner)).handle.call_one()
        backend.kill(procs, 0)
        with pytest.raises(ProcDied):
            while True:
                with suppress(LinkLost):  # it has not died yet
                    await handle.read_into(bytearray(SIZE))


async def test_buffer_of_a_device_ends_with_its_actor(backend: Backend):
    """N4"""
    async with backend.procs({"gpus": 1}) as procs:
        async with procs.spawn("owner", Owner) as owner:
            handle = await owner.handle.call_one()
        with pytest.raises(trio.ClosedResourceError, match="actor"):
            await handle.read_into(bytearray(SIZE))


async def test_write_needs_the_right(backend: Backend):
    """N4: the ledger says so, whatever the handle does."""
    async with backend.procs({"gpus": 1}) as procs:
        readonly = (await (await procs.spawn("owner", Owner)).readonly.call_one()).handle
        forged = buffer_by(Handle(readonly.granted, readonly.address, 0, SIZE, BOTH, SPACE))
        with pytest.raises(PermissionError, match="no such buffer"):
            await forged.write_from(bytes(SIZE))


@only_sim
async def test_ticket_that_is_looked_at_keeps_the_memory(backend: SimBackend):
    """N4: who copies holds a claim; while it does, and after that if it does too long, nothing is used again."""
    async with backend.procs({"gpus": 1}):
        bulk = current_proc().bulk
        registration, buffer = post()
        place = registration.span.address
        view = await bulk.view(registration.granted(Right.READ), 0, limits.CUDA_TICKET_BYTES, writable=False)
        before = trio.current_time()
        registration.revoke()
        await registration.is_over.wait()
        assert trio.current_time() - before >= limits.REVOKE_SECONDS
        del registration
        assert post()[0].span.address != place
        with pytest.raises(trio.ClosedResourceError):
            await buffer.read_into(bytearray(SIZE))
        del view
        assert post()[0].span.address != place
