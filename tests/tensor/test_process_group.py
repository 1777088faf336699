"""Process groups of `torch.distributed` inside remote functions."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, CollectiveFailed, MeshErrorGroup, ShapeError, endpoint, limits, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


def _same(t: Any, *_: Any) -> Any:
    return t + 0


@trimesh.remote(propagate=_same)
def everything(t: torch.Tensor, group: Any) -> torch.Tensor:
    """Use what users of torch.distributed use."""
    import torch.distributed as dist

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    names: list[Any] = [None] * size
    dist.all_gather_object(names, f"rank {rank}", group=group)
    assert names == [f"rank {index}" for index in range(size)]
    total = t.clone()
    dist.all_reduce(total, group=group)
    lists = [torch.empty_like(t) for _ in range(size)]
    dist.all_gather(lists, t, group=group)
    assert torch.equal(sum(lists), total)
    parts = torch.empty(t.numel() // size)
    dist.reduce_scatter_tensor(parts, t, group=group)
    whole = torch.empty_like(t)
    dist.all_gather_into_tensor(whole, parts, group=group)
    assert torch.equal(whole, total)
    dist.broadcast(whole, group=group, group_src=size - 1)
    swapped = torch.empty_like(t)
    dist.all_to_all_single(swapped, t, group=group)
    dist.barrier(group=group)
    if rank == 0:
        dist.send(total + 1, group=group, group_dst=1)
    if rank == 1:
        dist.recv(swapped, group=group, group_src=0)
        assert torch.equal(swapped, total + 1)
    return total


@trimesh.remote(propagate=_same)
def fails_on(t: torch.Tensor, failing: int, group: Any) -> torch.Tensor:
    """Raise on one rank, while the others wait for it."""
    import torch.distributed as dist

    if dist.get_rank(group) == failing:
        raise LookupError("nothing to reduce")
    dist.all_reduce(t, group=group)
    return t


class Clashing(Actor):
    """Uses torch.distributed by itself."""

    @endpoint
    async def initialise(self) -> None:
        """Make a default group."""
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @endpoint
    async def take(self, group: Any) -> str:
        """Take a group, which is refused before it comes here."""
        return type(group).__name__

    @endpoint
    async def destroy(self) -> None:
        """Destroy it."""
        import torch.distributed as dist

        dist.destroy_process_group()


@pytest.mark.daily
@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_remote_function_gets_a_process_group() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=("torch",), output="discard") as procs:
        with procs.activate():
            t = torch.arange(4.0) + procs.rank_tensor("hosts") * 10 + procs.rank_tensor("gpus")
        for label, expected in [("gpus", [1, 1, 21, 21]), ("hosts", [10, 12, 10, 12])]:
            total = everything(t, procs.process_group(label))
            assert [one[0].item() for one in (await trimesh.fetch(total)).values()] == expected
        all_of_them = everything(t, procs.process_group(["hosts", "gpus"]))
        assert (await trimesh.fetch_shard(all_of_them, hosts=0, gpus=0))[0].item() == 22
        with pytest.raises(ShapeError, match="dimensions of"):
            procs.process_group("racks")
        actors = await procs.spawn("actors", Clashing)
        with pytest.raises(TypeError, match=r"functions under @trimesh.remote, got .*rendezvous=True"):
            await actors.take.call(procs.process_group("gpus"))


async def test_failure_inside_a_function_frees_the_others() -> None:
    async with this_host().spawn_procs({"gpus": 3}, preload=("torch",)) as procs:
        group = procs.process_group("gpus")
        with procs.activate():
            t = torch.ones(3)
        for failing in (2, 0):
            bad = fails_on(t.clone(), failing, group)
            with pytest.raises(MeshErrorGroup) as caught:
                await trimesh.fetch(bad)
            first, *others = caught.value.exceptions
            assert isinstance(first, LookupError)
            assert [isinstance(other, CollectiveFailed) for other in others] == [True, True]
            dependent = fails_on(bad, 7, group)  # skipped everywhere
            assert fails_on(t.clone(), 7, group).sum().item() == 9
            assert t.reduce("gpus").sum().item() == 9
            with pytest.raises(MeshErrorGroup):
                await trimesh.fetch(dependent)


@trimesh.remote(propagate=_same)
def reduces_on_one(t: torch.Tensor, group: Any) -> torch.Tensor:
    """Call a collective that the other ranks do not call."""
    import torch.distributed as dist

    if dist.get_rank(group) == 0:
        dist.all_reduce(t, group=group)
    return t


class _Told(logging.Handler):
    """Learns of the first record that has a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.message = ""
        self.event = trio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging`."""
        if self.text in record.getMessage() and not self.message:
            self.message = record.getMessage()
            self.event.set()


async def test_leaving_names_a_collective_that_other_ranks_did_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSOR_DRAIN_SECONDS", 0.05)
    told = _Told("waits for its ranks")
    logging.getLogger("trimesh").addHandler(told)

    async def cancel_when_told() -> None:
        await told.event.wait()
        nursery.cancel_scope.cancel()

    try:
        with trio.fail_after(HANG_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_when_told)
                async with this_host().spawn_procs({"gpus": 2}, preload=("torch",), output="discard") as procs:
                    with procs.activate():
                        t = torch.ones(3)
                    reduces_on_one(t, procs.process_group("gpus"))
    finally:
        logging.getLogger("trimesh").removeHandler(told)
    assert "[gpus=0]" in told.message
    assert "in test_leaving_names_a_collective" in told.message


async def test_default_group_of_user_code_is_refused_in_words() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        actors = await procs.spawn("actors", Clashing)
        await actors.initialise.call()
        with procs.activate():
            t = torch.ones(3)
        assert t.reduce("gpus").sum().item() == 6  # which needs nothing of it
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.fetch(fails_on(t, 7, procs.process_group("gpus")))
        assert "init_process_group" in str(caught.value.exceptions[0])
        await actors.destroy.call()
        assert fails_on(t, 7, procs.process_group("gpus")).sum().item() == 6
