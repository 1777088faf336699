"""A cancel, a Ctrl-C or a death at every step of a channel's life: nothing is left, no task waits (T2, K03)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.meshes import SimBackend
from tests.conformance.sender import Sender, received, rest
from tests.conformance.sweep import Body, cancel, interrupt, kill_one, sweep

from trimesh import MeshStopped, ProcDied, SpawnError, open_channel


def life_of(capacity: int) -> Body:
    """Return a body in which a port goes to a worker, from there to another, and back."""

    async def body(backend: SimBackend) -> None:
        async with backend.procs() as procs, open_channel(tuple, capacity=capacity) as (port, receiver):
            senders = await procs.spawn("senders", Sender)
            one, two = (senders.slice(gpus=rank) for rank in range(2))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(senders.count.call, port, 3)
                await received(receiver, 6)
                await one.pass_on.call(two, port)
                ours = await two.give.call_one()
                await port.aclose()
                nursery.start_soon(ours.send, (0, 0))
                nursery.start_soon(two.send.call, 1, 2)
                await received(receiver, 3)
                await ours.aclose()
            await two.drop.call()
            assert await rest(receiver) == []

    return body


every_step = pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.stress)])


@every_step
@pytest.mark.parametrize("capacity", [0, 2])
def test_cancel_at_any_step_leaves_nothing(capacity: int, stride: int):
    assert sweep(life_of(capacity), cancel, stride=stride) > 100


@every_step
@pytest.mark.parametrize("capacity", [0, 2])
def test_interrupt_at_any_step_leaves_nothing(capacity: int, stride: int):
    assert sweep(life_of(capacity), interrupt, KeyboardInterrupt, stride=stride) > 100


@every_step
@pytest.mark.parametrize("capacity", [0, 2])
def test_death_at_any_step_is_told_and_leaves_nothing(capacity: int, stride: int):
    assert sweep(life_of(capacity), kill_one, ProcDied, SpawnError, MeshStopped, stride=stride) > 100
