"""An actor that has memory of a device which no machine has: what is granted is the ticket, as for any device."""

from __future__ import annotations

import trio

from trimesh import Actor, RDMABuffer, endpoint
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.services.bulk import Registration
from trimesh._transport.interface import Right
from trimesh._wire.memory import memory_at
from trimesh.rdma.buffers.buffer import buffer_by
from trimesh.rdma.memory.device import DeviceMemory
from trimesh.rdma.memory.device_transfer import post_ticket
from trimesh.rdma.memory.handle import Handle, Ticket

SPACE = "cuda:00000000-0000-0000-0000-000000000000"
"""A device that no machine has."""

SIZE = 1 << 20
BOTH = Right.READ | Right.WRITE


def post() -> tuple[Registration, RDMABuffer]:
    """Grant memory of that device: its ticket, which is all that is looked at before the device is."""
    bulk = current_proc().bulk
    memory = DeviceMemory(0, SIZE, None, None, Ticket(SPACE, 1, bytes(64), 0, SIZE, bytes(64)))
    registration = bulk.register(post_ticket(bulk, memory), BOTH)
    return registration, buffer_by(Handle(registration.granted(BOTH), 1 << 40, 0, SIZE, BOTH, SPACE))


class Owner(Actor):
    """Has memory of that device."""

    def __init__(self) -> None:
        self.registration, self.buffer = post()

    @endpoint
    async def handle(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    async def readonly(self) -> RDMABuffer:
        whole = self.buffer.handle
        granted = self.registration.granted(Right.READ)
        return buffer_by(Handle(granted, whole.address, 0, SIZE, Right.READ, SPACE))

    @endpoint
    async def lay(self, data: bytes) -> None:
        """Lay something else where the ticket was."""
        memory_at(self.registration.span.address, len(data), None)[:] = data

    @endpoint
    async def revoke(self) -> float:
        before = trio.current_time()
        self.registration.revoke()
        await self.registration.is_over.wait()
        return trio.current_time() - before
