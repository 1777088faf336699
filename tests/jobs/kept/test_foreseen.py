"""What a program on kept hosts is told before they end, and another machine in the place of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.jobs.kept.keeping import Worker, kept_in
from tests.jobs.kept.queued import EndingJob
from tests.patience import HANG_SECONDS

from trimesh import HostLost, SpawnError, jobs, leaves, limits

pytest.importorskip("cryptography")

from trimesh._native import tls
from trimesh.config import reread
from trimesh.jobs.kept.kept_job import ForeseenEnd
from trimesh.jobs.local import LocalLauncher


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the state is."""
    with kept_in(tmp_path):
        yield tmp_path


@pytest.mark.daily
@pytest.mark.real
@pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])
async def test_program_is_told_before_its_hosts_end_and_gets_a_spare_one(folder: Path) -> None:
    """H20, H26, H27: as the program of the job itself would; the block is left while the hosts live."""
    path = folder / "limit"
    cleaned = list[int]()
    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("exp", EndingJob(1, spares=1, path=str(path)), lease=3600)
        try:
            with pytest.raises(BaseExceptionGroup) as caught:
                async with jobs.attach("exp") as hosts:
                    with pytest.raises(SpawnError, match="only the 1 that it was kept with"):
                        await hosts.grow(1)
                    [before] = hosts.names
                    await hosts.replace({"hosts": 0})
                    [after] = hosts.names
                    assert after != before
                    await hosts.replace({"hosts": 0})  # there is no other spare one: a new agent on that machine
                    assert hosts.names == (after,)
                    async with hosts.spawn_procs({}) as procs, procs.spawn("workers", Worker) as workers:
                        path.write_text("notice\n")
                        assert await hosts.wait_notice() == "the file says notice"
                        assert list(await workers.double.call(1)) == [2]
                        path.write_text(f"end for {reread().grace + limits.KEPT_LEAVE_SECONDS:g}\n")
                        try:
                            await trio.sleep_forever()
                        finally:
                            with trio.CancelScope(shield=True):
                                cleaned += await workers.double.call(2)
            [lost] = leaves(caught.value)
            assert isinstance(lost, HostLost)
            assert lost.reason == "time limit"
            assert "left while they live: the file says end" in str(lost)
            assert cleaned == [4]
        finally:
            await jobs.stop("exp")


class Lease:
    """A lease on a virtual clock, which can be extended."""

    def __init__(self, seconds: float) -> None:
        self.ends_at = trio.current_time() + seconds

    def left(self) -> float:
        return self.ends_at - trio.current_time()


async def never() -> str:
    await trio.sleep_forever()
    raise AssertionError


async def test_lease_is_told_before_it_ends(autojump_clock: trio.abc.Clock) -> None:
    """H23, H26: later if it is extended meanwhile; of a short one half is left."""
    begun, lease = trio.current_time(), Lease(600.0)
    foreseen = ForeseenEnd("exp", lease.left, LocalLauncher(1), never)

    async def extend() -> None:
        await trio.sleep(500)
        lease.ends_at += 1000

    async with trio.open_nursery() as nursery:
        nursery.start_soon(extend)
        assert await foreseen.wait_notice() == "the lease of the kept job exp ends in 60 s"
    assert trio.current_time() - begun == pytest.approx(1540.0)
    await foreseen.wait_end(grace=7.0)
    assert lease.left() == pytest.approx(7.0 + limits.KEPT_LEAVE_SECONDS)
    short = Lease(4.0)
    await ForeseenEnd("exp", short.left, LocalLauncher(1), never).wait_end(grace=7.0)
    assert short.left() == pytest.approx(2.0)


async def test_nearer_end_is_told(autojump_clock: trio.abc.Clock) -> None:
    """H26: that of the job, where the lease is longer."""
    lease = Lease(600.0)

    async def of_job() -> str:
        await trio.sleep(10)
        return "the Slurm job 7 reaches its time limit in 60 s"

    assert "Slurm job 7" in await ForeseenEnd("exp", lease.left, LocalLauncher(1), of_job).wait_notice()
