"""A reader whose publisher counts it as ended, though it lives: it gets nothing that is torn, and disturbs nobody."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import trio
from tests.conformance.meshes import attempt, member
from tests.conformance.publishing import LARGE, PINNING_TRANSFERS, SMALL, Publisher, Reader, is_torn, steps_of

from trimesh import LinkLost, endpoint
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh.ids import ProcId
from trimesh.rdma import VersionGone
from trimesh.testing import simulate

HELD_SECONDS = 600
"""Of virtual time, for which one transfer is held back: the rest of the test takes place meanwhile."""


class Forgetful(Publisher):
    """A publisher that loses the link to a process, and so counts it as ended."""

    @endpoint
    async def forget(self, proc_id: int) -> None:
        proc = current_proc()
        proc.declare_gone(proc.peer(ProcId(proc_id)), ProcDeath("a cable was cut", LinkLost))


class Peruser(Reader):
    """A reader that reads one tensor by a handle of its own."""

    @endpoint
    async def peruse(self, published: Any, version: int) -> int:
        """Return the version, negated if what was read is torn."""
        async with published.pin(version) as snapshot:
            self.has_pinned.set()
            await self.leave.wait()
            found = bytearray(snapshot.entries["a"].nbytes)
            await snapshot.buffer("a").read_into(found)
        return -version if is_torn({"a": found}, version) else version


async def forget(mesh: Any, publisher: Any, fault_log: Any) -> None:
    """Have the reader forgotten as soon as its transfer is held back, and the memory that it looks at used again."""
    with trio.fail_after(20):
        while not any(fired.site == "transfer" for fired in fault_log):  # noqa: ASYNC110 - the log has no event; time is virtual
            await trio.sleep(0.01)
    await publisher.forget.call_one(member(mesh, 1).proc_id)


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, 2], ids=["first tensor", "last tensor"])
@simulate(seeds=10)
async def test_copy_that_ends_after_the_reader_was_forgotten_is_no_result(mesh, faults, fault_log, nth):
    """N4, BO-3: the memory that it copies from holds another version by then."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Forgetful, 2, LARGE)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    weights = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    async with trio.open_nursery() as nursery:
        holding = attempt(nursery, reader.hold.call_one, weights, 1)
        await reader.pinned.call_one()
        async with faults.partition({"gpus": 0}, {"gpus": 1}):  # it hears nothing of that
            faults.transfer({"gpus": 1}, nth=nth).delays(HELD_SECONDS)
            await reader.let_go.call_one()
            await forget(mesh, publisher, fault_log)
            await publisher.publish.call_one(2, 6)

            with pytest.raises(LinkLost, match="version 1 is not pinned any more"):
                await holding.result()


@simulate(seeds=10)
async def test_small_version_is_whole_also_when_the_reader_was_forgotten(mesh, faults):
    """RE-6: all of it was copied while it was pinned."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Forgetful, 2, SMALL)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    weights = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    async with trio.open_nursery() as nursery:
        holding = attempt(nursery, reader.hold.call_one, weights, 1)
        await reader.pinned.call_one()
        async with faults.partition({"gpus": 0}, {"gpus": 1}):
            await publisher.forget.call_one(member(mesh, 1).proc_id)
            await publisher.publish.call_one(2, 6)
            await reader.let_go.call_one()
            assert await holding.result() == 1


@simulate(seeds=10)
async def test_block_whose_parts_were_read_after_the_reader_was_forgotten_fails(mesh, faults, fault_log):
    """N4, BO-3: handles on parts know nothing of pins, so the block is where it shows."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Forgetful)
    reader = await mesh.slice(gpus=1).spawn("reader", Peruser)
    weights = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    async with trio.open_nursery() as nursery:
        perusing = attempt(nursery, reader.peruse.call_one, weights, 1)
        await reader.pinned.call_one()
        async with faults.partition({"gpus": 0}, {"gpus": 1}):
            faults.transfer({"gpus": 1}).delays(HELD_SECONDS)
            await reader.let_go.call_one()
            await forget(mesh, publisher, fault_log)
            await publisher.publish.call_one(2, 6)

            with pytest.raises(LinkLost):
                await perusing.result()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nth"), steps_of(PINNING_TRANSFERS))
@simulate(seeds=5)
async def test_forgotten_reader_reads_nothing_torn(mesh, faults, fault_log, size, nth):
    """N4, BO-3, BO-4: its row counts no more; by another, for which it asks nobody, it pins what is still there."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Forgetful, 3, size)
    forgotten = await mesh.slice(gpus=1).spawn("forgotten", Reader)
    weights = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    assert await forgotten.wait_newer.call_one(weights, 0) == 1  # it has subscribed
    async with trio.open_nursery() as nursery, faults.partition({"gpus": 0}, {"gpus": 1}):
        faults.transfer({"gpus": 1}, nth=nth).delays(HELD_SECONDS)
        await forgotten.let_go.call_one()
        pinning = attempt(nursery, forgotten.hold.call_one, weights, 1)
        await forget(mesh, publisher, fault_log)
        await publisher.publish.call_one(2, 6)

        with suppress(LinkLost, VersionGone):
            assert await pinning.result() == 1
    assert await publisher.publish.call_one(7, 12) == 12


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nth"), steps_of(PINNING_TRANSFERS))
@simulate(seeds=5, per_host={"gpus": 3})
async def test_forgotten_reader_takes_no_pin_away(mesh, faults, fault_log, size, nth):
    """N4, BO-3: its row is another one's now, who has pinned the same version; both write to the same cell."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Forgetful, 3, size)
    forgotten = await mesh.slice(gpus=1).spawn("forgotten", Reader)
    other = await mesh.slice(gpus=2).spawn("other", Reader)
    weights = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    assert await forgotten.wait_newer.call_one(weights, 0) == 1  # it has subscribed
    async with trio.open_nursery() as nursery, faults.partition({"gpus": 0}, {"gpus": 1}):
        faults.transfer({"gpus": 1}, nth=nth).delays(HELD_SECONDS)
        await forgotten.let_go.call_one()
        pinning = attempt(nursery, forgotten.hold.call_one, weights, 1)
        await forget(mesh, publisher, fault_log)
        holding = attempt(nursery, other.hold.call_one, weights, 1)
        await other.pinned.call_one()
        await publisher.publish.call_one(2, 6)

        with pytest.raises((LinkLost, VersionGone)):
            await pinning.result()
        await publisher.publish.call_one(7, 12)
        await other.let_go.call_one()
        assert await holding.result() == 1
    assert await publisher.publish.call_one(13, 16) == 16
