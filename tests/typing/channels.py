"""What type checkers must see of channels; never run, as `handles.py`."""

from __future__ import annotations

from typing import Any, assert_type

import trio

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, Port, Receiver, endpoint


class Worker(Actor):
    @endpoint
    async def work(self, port: Port[int]) -> Port[int]:
        await port.send(1)
        await port.send("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        return port.clone()


async def channels(worker: Worker) -> None:
    async with trimesh.open_channel(int, capacity=64) as (port, receiver):
        assert_type(port, Port[int])
        assert_type(receiver, Receiver[int])
        assert_type(await receiver.receive(), int)
        assert_type(receiver.receive_nowait(), int)
        sending: trio.abc.SendChannel[int] = port
        receiving: trio.abc.ReceiveChannel[int] = receiver
        del sending, receiving
        assert_type(await worker.work.call_one(port), Port[int])
        async for item in receiver:
            assert_type(item, int)
    async with trimesh.open_channel(capacity=0) as (anything, any_receiver):
        assert_type(anything, Port[Any])
        assert_type(await any_receiver.receive(), Any)
    trimesh.open_channel(int)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def channels_of_a_script(buffer: tb.RDMABuffer) -> None:
    with tb.open_channel(int, capacity=64) as (port, receiver):
        assert_type(port.clone(), tb.Port[int])
        assert_type(port.capacity, int)
        assert_type(receiver.receive(), int)
        port.send("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        port.capacity = 1  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(buffer.fetch_add(1, offset=8), int)
    assert_type(buffer.readonly()[:8], tb.RDMABuffer)
    with buffer.map(writable=True) as view:
        assert_type(view, memoryview)
