"""An actor with memory of a device that adapters reach: memory of the host, which a stand-in of UCX takes for it."""

from __future__ import annotations

import warnings

import attrs
from tests.conformance.device_vault import BOTH, SPACE
from tests.conformance.vault import pattern

from trimesh import Actor, RDMABuffer, endpoint
from trimesh._runtime.life.current import current_proc
from trimesh._transport.interface import MemoryKind, Right, Span
from trimesh.rdma.buffers.buffer import buffer_by
from trimesh.rdma.memory.device import DeviceMemory
from trimesh.rdma.memory.device_transfer import register
from trimesh.rdma.memory.handle import Handle, Ticket
from trimesh.rdma.memory.local import address_of

SIZE = 300_000


@attrs.define
class Event:
    """Says whether a device has come to something."""

    is_set: bool = True
    has_failed: bool = False

    def query(self) -> bool:
        if self.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.is_set


class DeviceOwner(Actor):
    """Has memory that counts as a device's, and memory of its host."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.memory = bytearray(pattern(SIZE))
        self.event = Event(is_set=is_ready)
        self.host = RDMABuffer(bytearray(pattern(SIZE, 3)))
        address = address_of(memoryview(self.memory))
        device = DeviceMemory(address, SIZE, self.memory, self.event, Ticket(SPACE, 1, bytes(64), 0, SIZE, bytes(64)))
        span = Span(address, SIZE, self.memory, MemoryKind.CUDA)
        with warnings.catch_warnings(record=True) as self.said:
            warnings.simplefilter("always")
            self.registration, granted = register(current_proc().bulk, device, span, BOTH)
        self.buffer = buffer_by(Handle(granted, address, 0, SIZE, BOTH, SPACE))

    @endpoint
    async def handles(self) -> tuple[RDMABuffer, RDMABuffer]:
        """Return that of the device and that of the host."""
        return self.buffer, self.host

    @endpoint
    async def readonly(self) -> RDMABuffer:
        whole, granted = self.buffer.handle, self.registration.granted(Right.READ)
        return buffer_by(Handle(granted, whole.address, 0, SIZE, Right.READ, SPACE))

    @endpoint
    async def told(self) -> list[str]:
        """Return what it was warned of."""
        return [str(one.message) for one in self.said]

    @endpoint
    async def look(self) -> bytes:
        return bytes(self.memory)

    @endpoint
    async def let_be(self, *, failed: bool = False) -> None:
        """Have the device come to an end of its work."""
        self.event.is_set, self.event.has_failed = True, failed

    @endpoint
    async def revoke(self) -> None:
        self.registration.revoke()
        await self.registration.is_over.wait()
