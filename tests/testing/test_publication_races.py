"""Races of a publisher and its readers, made wide by transfers that are late."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from tests.conformance.meshes import attempt
from tests.conformance.publishing import FIRST_TRANSFERS, LARGE, SMALL, Publisher, Reader, is_torn, steps_of, version_of

from trimesh import Isolate, LinkLost, ProcDied, limits, observe, this_host
from trimesh.rdma import Published, VersionGone
from trimesh.rdma.publications.published import finish
from trimesh.testing import simulate

UNPINNED_TRANSFERS = {size: count + 1 for size, count in FIRST_TRANSFERS.items()}
"""Of a version that is read for the first time: the last one gives its pin back."""


@simulate(seeds=2)
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


@simulate(seeds=2)
@pytest.mark.parametrize("late", range(1, 5))
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


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nth"), steps_of(UNPINNED_TRANSFERS))
@simulate(seeds=1)
async def test_slots_that_are_used_anew_between_two_steps_of_a_reader(mesh, faults, fault_log, size, nth):
    """BO-1, BO-2: whatever it has seen before, it gets a version that was there, whole, and at last the latest."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher, 3, size)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    faults.transfer({"gpus": 1}, nth=nth).delays(10)
    async with trio.open_nursery() as nursery:
        following = attempt(nursery, reader.follow.call_one, handle, 6)
        await _has_fired(fault_log)
        await publisher.publish.call_one(2, 6)
        seen = await following.result()
    assert (min(seen) > 0, seen[-1]) == (True, 6)
    assert await publisher.publish.call_one(7, 12) == 12


@pytest.mark.parametrize("growth", [0, SMALL])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@simulate(seeds=2)
async def test_reader_that_hears_no_news_gets_the_latest_version(mesh, faults, size, growth):
    """RE-6: its pin is tried by what the board said last: of a slot that has another version, or other memory, now."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher, 2, size)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    assert await reader.follow.call_one(handle, 1) == [1]
    async with faults.partition({"gpus": 0}, {"gpus": 1}):
        for number in range(3, 12, 2):
            await publisher.publish.call_one(number - 1, number, size=size + growth * number)
            assert await reader.try_pin.call_one(handle, number) == str(number)
            assert await reader.latest.call_one(handle) == number
            assert await reader.try_pin.call_one(handle, number - 1) in (str(number - 1), VersionGone.__name__)


@simulate(seeds=2)
async def test_transfers_are_made_for_what_is_not_known(mesh, faults, fault_log):
    """RE-6: three for a version that was seen, one more before it if there were news; one for a pin that is shared."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher, 3)
    handle: Published = await publisher.handle.call_one()
    faults.transfer("controller", times=1000).delays(1e-6)

    @asynccontextmanager
    async def pinned(version: int | None, transfers: int) -> AsyncGenerator[int]:
        before = len(fault_log)
        async with handle.pin(version) as snapshot:
            assert len(fault_log) - before == transfers
            yield snapshot.version
            await snapshot.check()  # it is pinned as long as one task uses it

    async def first() -> int:
        async with handle.pin() as snapshot:
            return snapshot.version

    async with trio.open_nursery() as nursery:
        waiting = attempt(nursery, first)
        await trio.sleep(1)
        await publisher.publish.call_one(1)
        assert await waiting.result() == 1
    for version in (None, 1):
        async with pinned(version, 3):
            pass
    await publisher.publish.call_one(2)
    await trio.sleep(1)  # the news have come
    async with pinned(None, 4) as latest:
        assert latest == 2
        async with pinned(2, 1):
            await publisher.publish.call_one(3)
            await trio.sleep(1)
            async with pinned(2, 1), pinned(3, 4):
                pass
    async with pinned(2, 3):
        pass


@simulate(seeds=2)
async def test_latest_version_is_not_taken_for_that_which_another_task_has_pinned(mesh, faults):
    """RE-6: a pin is shared only after a look at the board."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    async with trio.open_nursery() as nursery:
        holding = attempt(nursery, reader.hold.call_one, handle)
        await reader.pinned.call_one()
        async with faults.partition({"gpus": 0}, {"gpus": 1}):
            await publisher.publish.call_one(2)
            assert await reader.latest.call_one(handle) == 2
        await reader.let_go.call_one()
        assert await holding.result() == 1


@simulate(seeds=2)
async def test_version_is_pinned_again_when_it_has_been_let_go(mesh, faults):
    """RE-2: one task is still about to clear the cell that another one wants to write."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    handle: Published = await publisher.handle.call_one()
    await publisher.publish.call_one(1)

    async def pin(seconds: float) -> None:
        async with handle.pin(1):
            await trio.sleep(seconds)

    await pin(0)  # it has its row
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pin, 5)
        await trio.sleep(1)
        faults.transfer("controller", nth=1).delays(limits.UNPIN_SECONDS / 2)
        await trio.sleep(4.1)
        nursery.start_soon(pin, 5)
        await trio.sleep(1)
        publishing = attempt(nursery, publisher.publish.call_one, 2, 3)
        await trio.sleep(1)
        assert not publishing.over.is_set(), "the version is pinned again"
        assert await publishing.result() == 3


@simulate(seeds=2)
@pytest.mark.parametrize("late", [2, 3])
async def test_publisher_hears_of_a_pin_that_was_cancelled_half_made(mesh, faults, late):
    """RE-2: its cell was written, and the publisher waits for it."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    handle: Published = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    async with handle.pin(1):
        pass
    faults.transfer("controller", nth=late).delays(10)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(2):
            publishing = attempt(nursery, publisher.publish.call_one, 2, 3)
            async with handle.pin(1):
                raise AssertionError("it is late")
        assert not publishing.over.is_set()
        with trio.fail_after(5):
            assert await publishing.result() == 3


@simulate(seeds=2)
async def test_pin_is_shared_of_a_version_that_is_still_the_latest(mesh, faults):
    """RE-6: the news come while it looks whether the pin holds."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    handle: Published = await publisher.handle.call_one()
    await publisher.publish.call_one(1)

    async def latest() -> int:
        async with handle.pin() as snapshot:
            return snapshot.version

    async with handle.pin(1), trio.open_nursery() as nursery:
        faults.transfer("controller", nth=2).delays(10)
        sharing = attempt(nursery, latest)
        await trio.sleep(1)
        await publisher.publish.call_one(2)
        assert await sharing.result() == 2


@simulate(seeds=1)
async def test_version_whose_memory_was_written_to_does_not_come_back(mesh, faults):
    """PU-3: a `publish` was cancelled there; then a reader that has heard nothing of that tries to pin the version."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    for _ in range(2):  # the second time it has subscribed
        assert await reader.try_pin.call_one(handle, 1) == "1"
        await trio.sleep(1)
    async with faults.partition({"gpus": 0}, {"gpus": 1}), trio.open_nursery() as nursery:
        await publisher.publish.call_one(2)
        faults.transfer({"gpus": 0}, nth=4).delays(10)  # its slot was emptied, layout and first tensor are written
        cancelled = attempt(nursery, publisher.publish.call_one, 3)
        await trio.sleep(1)
        cancelled.scope.cancel()
        await cancelled.over.wait()
        faults.transfer({"gpus": 1}, nth=3).delays(10)  # its cell was written, the version is copied
        holding = attempt(nursery, reader.hold.call_one, handle, 1)
        await trio.sleep(1)
        assert await publisher.publish.call_one(3) == 3
        await reader.let_go.call_one()
        with pytest.raises(VersionGone):
            await holding.result()


@simulate(seeds=1)
async def test_pin_that_was_left_without_a_link_is_seen_when_the_reader_subscribes(faults, fault_log, monkeypatch):
    """RE-4: no message of it could be sent."""
    monkeypatch.setattr(limits, "EXIT_REPORT_SECONDS", 1000.0)  # after which it would try again for a link
    async with _isolated(faults) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        faults.resources(procs.slice(gpus=1)).fails("EMFILE", times=2)
        holding = attempt(nursery, reader.hold.call_one, handle, 1)
        await reader.pinned.call_one()
        await publisher.publish.call_one(2)
        third = attempt(nursery, publisher.publish.call_one, 3)
        await trio.sleep(1.5 * limits.PUBLISH_LOG_SECONDS)  # it looks again when it logs, and then no more
        assert len(fault_log) == 2
        await reader.let_go.call_one()
        assert await holding.result() == 1
        assert await reader.wait_newer.call_one(handle, 1) == 2
        assert not third.over.is_set()
        assert await reader.wait_newer.call_one(handle, 2) == 3
        assert await third.result() == 3


@pytest.mark.parametrize("pins_late", [False, True])
@simulate(seeds=1)
async def test_publisher_connects_to_readers_to_learn_of_their_ends(faults, fault_log, pins_late):
    """PU-2: when it has published, and when it waits."""
    async with _isolated(faults) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        faults.resources(procs.slice(gpus=1)).fails("EMFILE")
        await publisher.publish.call_one(1, 1 + pins_late)
        holding = attempt(nursery, reader.hold.call_one, handle, 1)
        await reader.pinned.call_one()
        assert len(fault_log) == 1
        publishing = attempt(nursery, publisher.publish.call_one, 2 + pins_late)
        await trio.sleep(0.5)
        assert publishing.over.is_set() is not pins_late
        faults.kill(procs.slice(gpus=1))
        with pytest.raises(ProcDied):
            await holding.result()
        with trio.fail_after(10):
            await publishing.result()
        await trio.sleep(5)  # it learns of the death
        [row] = (await observe.snapshot()).publications
        assert row.pins == ()


@simulate(seeds=1)
async def test_publish_that_is_cancelled_while_it_frees_memory_leaves_none_that_is_closed(mesh):
    """PU-3: a reader still has the memory mapped, after its pin; the next version would fit."""
    async with Published() as weights:
        await weights.publish(version_of(1))
        async with weights.pin(1) as snapshot:
            part = snapshot.buffer("a")
        await weights.publish(version_of(2))
        async with part.map(), trio.open_nursery() as nursery:
            cancelled = attempt(nursery, weights.publish, version_of(3, LARGE))
            await trio.sleep(limits.REVOKE_SECONDS / 2)
            assert not cancelled.over.is_set()
            cancelled.scope.cancel()
        assert await weights.publish(version_of(3)) == 3
        async with weights.pin() as snapshot:
            assert not is_torn(await snapshot.read(), 3)


@pytest.mark.parametrize("ends_by", ["aclose", "finish"])
@pytest.mark.parametrize("late", range(6))
@simulate(seeds=1)
async def test_publication_that_ends_at_any_step_of_a_publish(mesh, faults, fault_log, late, ends_by):
    """N4: before the last step, the version is never there, and the latest stays; 0 is the wait for a reader."""
    weights = Published()
    await weights.publish(version_of(1))
    await weights.publish(version_of(2))
    async with AsyncExitStack() as pins, trio.open_nursery() as nursery:
        if late:
            faults.transfer("controller", nth=late).delays(10)
        else:
            await pins.enter_async_context(weights.pin(1))
        publishing = attempt(nursery, weights.publish, version_of(3, LARGE))
        await trio.sleep(2 * limits.PUBLISH_LOG_SECONDS)  # it looks again when it logs, and then no more
        assert len(fault_log) == (late > 0)
        if ends_by == "aclose":
            nursery.start_soon(weights.aclose)
        else:
            finish(weights)
        await trio.sleep(1)
        await pins.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await publishing.result()
    with pytest.raises(trio.ClosedResourceError, match="this publication was closed"):
        await weights.publish(version_of(4))
    if ends_by == "finish":
        async with weights.pin() as snapshot:
            assert not is_torn(await snapshot.read(), 2)
        with pytest.raises(trio.ClosedResourceError, match="version 2 was its last"):
            await weights.wait_newer(2)
    if late < 5:
        with pytest.raises(VersionGone if ends_by == "finish" else trio.ClosedResourceError):
            async with weights.pin(3):
                pass
    await weights.aclose()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nth"), steps_of(UNPINNED_TRANSFERS))
@simulate(seeds=1)
async def test_reader_that_is_killed_at_any_step_keeps_no_slot(faults, fault_log, size, nth):
    """PU-2: its row is taken back, whatever it has written there."""
    async with _isolated(faults) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher, 2, size)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        other = await procs.slice(gpus=2).spawn("other", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        faults.transfer(procs.slice(gpus=1), nth=nth).delays(600)
        following = attempt(nursery, reader.follow.call_one, handle, 1)
        await _has_fired(fault_log)
        faults.kill(procs.slice(gpus=1))

        with pytest.raises(ProcDied):
            await following.result()
        assert await publisher.publish.call_one(2, 6) == 6
        assert await other.follow.call_one(handle, 6) == [6]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nth"), steps_of(FIRST_TRANSFERS))
@simulate(seeds=1)
async def test_publisher_that_is_killed_between_two_steps_of_a_reader(faults, fault_log, size, nth):
    """BO-5: what was pinned by then is read to its end; what was not is the death of the publisher."""
    async with _isolated(faults) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher, 2, size)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        faults.transfer(procs.slice(gpus=1), nth=nth).delays(60)
        following = attempt(nursery, reader.follow.call_one, handle, 1)
        await _has_fired(fault_log)
        faults.kill(procs.slice(gpus=0))

        if nth > FIRST_TRANSFERS[SMALL]:
            assert await following.result() == [1]
        else:
            with pytest.raises(ProcDied):
                await following.result()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nth"), steps_of(FIRST_TRANSFERS))
@simulate(seeds=1, per_host={"gpus": 3})
async def test_reader_that_is_forgotten_at_any_step_takes_no_pin_away(mesh, faults, fault_log, size, nth):
    """BO-3, BO-4: its row is another one's by then, who has pinned the same version."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher, 3, size)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    other = await mesh.slice(gpus=2).spawn("other", Reader)
    handle = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    faults.transfer({"gpus": 1}, nth=nth).delays(10)
    async with trio.open_nursery() as nursery:
        await reader.let_go.call_one()
        pinning = attempt(nursery, reader.hold.call_one, handle, 1)
        await _has_fired(fault_log)
        await publisher.forget_readers.call_one()
        holding = attempt(nursery, other.hold.call_one, handle, 1)
        await other.pinned.call_one()
        await publisher.publish.call_one(2, 6)
        with suppress(LinkLost, VersionGone):
            assert await pinning.result() == 1
        await publisher.publish.call_one(7, 12)
        await other.let_go.call_one()
        assert await holding.result() == 1


@simulate(seeds=10)
async def test_look_that_is_old_takes_no_pin_of_another_task_away(mesh):
    """RE-1: the slot of the version that it names has a later one, which is pinned in the same process."""
    publisher = await mesh.slice(gpus=0).spawn("publisher", Publisher)
    handle: Published = await publisher.handle.call_one()
    await publisher.publish.call_one(1)
    async with handle.pin(1):
        reading = handle._reading()
        old = reading._head
    await publisher.publish.call_one(2, 3)
    async with handle.pin(3) as snapshot:
        reading._head = old
        with pytest.raises(VersionGone):
            async with handle.pin(1):
                pass
        await snapshot.check()


def _isolated(faults: Any) -> Any:
    return this_host().spawn_procs({"gpus": 3}, supervision=Isolate(), setup=faults.armed())


async def _has_fired(fault_log: Any) -> None:
    with trio.fail_after(20):
        while not len(fault_log):  # noqa: ASYNC110 - the log has no event; time is virtual
            await trio.sleep(0.01)
