"""Races of a publisher and its readers, made wide by transfers that are late."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.meshes import attempt
from tests.conformance.publishing import Publisher, Reader

from trimesh.rdma import Published, VersionGone
from trimesh.testing import simulate


@simulate(seeds=5)
@pytest.mark.parametrize("late", range(1, 6))
async def test_pin_that_comes_while_a_version_is_taken_out_is_seen(mesh, faults, late):
    """BO-1: the publisher takes a version out, then looks who has it; a step in between takes as long as it likes."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    await publisher.publish.call_one(2)
    assert await reader.try_pin.call_one(handle, 1) == "1"
    faults.transfer({"gpus": 0}, nth=late, times=1).delays(10)
    async with trio.open_nursery() as nursery:
        third = attempt(nursery, publisher.publish.call_one, 3)
        await trio.sleep(5)
        holding = attempt(nursery, reader.hold.call_one, handle, 1)
        await trio.sleep(20)
        await reader.let_go.call_one()
        await third.result()
        await holding.over.wait()
        assert isinstance(holding.error, VersionGone) or holding.value == 1, "what was pinned has been written to"


@simulate(seeds=5)
@pytest.mark.parametrize("late", range(1, 6))
async def test_task_that_is_cancelled_while_it_shares_a_pin_lets_go(mesh, faults, late):
    """RE-1: also while the task that makes the pin is still at it."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    handle: Published = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    async with handle.pin(1):
        pass  # this process has its row
    faults.transfer("controller", nth=late).delays(10)
    async with trio.open_nursery() as nursery:

        async def pin() -> None:
            async with handle.pin(1):
                await trio.sleep(100)

        nursery.start_soon(pin)
        await trio.sleep(1)
        with trio.move_on_after(1):
            await pin()
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    with trio.fail_after(50):
        assert await publisher.publish.call_one(2, 6) == 6
