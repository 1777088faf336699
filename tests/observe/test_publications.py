"""What a snapshot has of publications: who publishes, which version, who reads, whether a publisher waits (Q3)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import aclosing

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, endpoint, limits, observe, rdma, this_host

pytestmark = pytest.mark.real


class Publisher(Actor):
    def __init__(self) -> None:
        self.weights = rdma.Published()

    @endpoint
    async def publish(self) -> rdma.Published:
        await self.weights.publish({"w": bytearray(b"x" * 100)})
        return self.weights


async def publications() -> tuple[observe.PublicationRow, ...]:
    return (await observe.snapshot(seconds=HANG_SECONDS)).publications


async def told(is_it: Callable[[observe.PublicationRow], bool]) -> observe.PublicationRow:
    """Return what is told of the one publication, as soon as it is as it should be."""
    async with aclosing(observe.watch(every=0.01)) as snapshots:
        async for seen in snapshots:
            for row in seen.publications:  # none where its process has not answered in time
                if is_it(row):
                    return row
    raise AssertionError("it goes on until it is left")


@pytest.mark.daily
async def test_publication_is_told_with_its_readers(monkeypatch: pytest.MonkeyPatch):
    """The latest version, who reads, who has pinned what; whose pin a `publish` waits for, also in the
    flight records; what has not been read.
    """
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.0)
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        assert [(one.latest, one.readers) for one in await publications()] == [(0, ())]
        weights = await publisher.publish.call_one()
        [row] = await publications()
        assert (row.member, row.latest, row.slots, row.pinned, row.is_waiting) == ("publisher", 1, 2, (), False)
        assert (row.unread, row.pins) == (1, ())
        assert row.nbytes >= 100
        async with weights.pin():
            [pin] = (await told(lambda one: bool(one.pins))).pins
            assert (pin.version, pin.seconds) == (1, 0.0)
            assert not observe.kept_versions(await observe.snapshot())
            await publisher.publish.call_one()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publisher.publish.call_one)
                row = await told(lambda one: one.is_waiting)
                assert (row.latest, row.pinned) == (2, (1,))
                seen = await observe.snapshot()
                assert seen.job is not None
                assert row.readers == (seen.job.id,)
                [kept] = observe.kept_versions(seen)
                assert (kept.holders, kept.publishers, kept.versions) == (("controller",), ("publisher",), (1,))
                assert (kept.kept, kept.slots, kept.is_waiting) == (1, 2, True)
                while (cause := observe.autopsy(pid=os.getpid()).cause).kind != "pinned":  # noqa: ASYNC110 - of a file
                    await trio.sleep(0.05)
                assert (cause.name, "version 1 of publisher pinned" in cause.text) == ("controller", True)
                nursery.cancel_scope.cancel()
        await told(lambda one: not one.is_waiting and not one.pinned and not one.unread)
        assert not observe.unread_versions(await observe.snapshot())
        for _ in range(3):
            await publisher.publish.call_one()
        [unread] = observe.unread_versions(await observe.snapshot())
        assert (unread.publishers, unread.count, unread.readers) == (("publisher",), 3, ("controller",))
