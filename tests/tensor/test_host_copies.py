"""Tensors that the backend cannot reach take part in collectives as copies on the host (NCCL wants a device a rank)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import trimesh
from trimesh import CollectiveFailed, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.torch]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take tensors of the host for such ones."""
    from trimesh.tensor.groups import group as host_copies

    monkeypatch.setattr(host_copies, "DEVICES", {"cpu"})


@pytest.mark.usefixtures("devices")
def test_copies_take_part_and_what_is_given_comes_back() -> None:
    from trimesh.tensor.groups.group import on_host

    waited: list[bool] = []
    work = SimpleNamespace(wait=lambda: waited.append(True))
    outputs, given, option = [[torch.zeros(2)], torch.zeros(3)], torch.ones(2), object()

    def call(lists: Any, one: Any, other: Any) -> Any:
        assert one is not given
        assert other is option
        assert lists[0][0] is not outputs[0][0]
        lists[0][0] += one
        lists[1] += 7
        one += 100
        return work

    on_host(call, [outputs, given, option], {}, gives=True).wait()
    assert waited == [True]  # whoever waits twice for what was sent waits for something else that is sent
    assert [outputs[0][0].tolist(), outputs[1].tolist()] == [[1, 1], [7, 7, 7]]
    assert given.tolist() == [1, 1]
    on_host(call, [outputs, given], {"other": option}, gives=False).wait()
    assert outputs[1].tolist() == [7, 7, 7]
    assert on_host(lambda options: None, [option], {}, gives=True) is None


def test_a_device_that_waits_for_one_that_has_left_is_given_up() -> None:
    from trimesh.tensor.groups.group import Group

    looks: list[bool] = []

    def cause() -> None:
        looks.append(True)
        if len(looks) == 2:
            raise CollectiveFailed("rank 1 of the group took no part")

    with pytest.raises(CollectiveFailed, match="rank 1"):
        Group._watch(SimpleNamespace(_check_cause=cause), SimpleNamespace(is_completed=lambda: False))
    done = iter([False, False, True])
    Group._watch(SimpleNamespace(_check_cause=cause), SimpleNamespace(is_completed=lambda: next(done)))
    assert len(looks) == 2


def _reach_nothing(t: torch.Tensor) -> torch.Tensor:
    from trimesh.tensor.groups import group as host_copies

    host_copies.DEVICES.add("cpu")
    return t


@trimesh.remote(propagate=lambda t, _: t)
def sent_around(t: torch.Tensor, group: Any) -> torch.Tensor:
    """Give to the next rank."""
    import torch.distributed as dist

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    come = torch.empty_like(t)
    if rank:
        dist.recv(come, group=group, group_src=rank - 1)
        dist.send(t, group=group, group_dst=(rank + 1) % size)
    else:
        dist.send(t, group=group, group_dst=1)
        dist.recv(come, group=group, group_src=size - 1)
    names: list[Any] = [None] * size
    dist.all_gather_object(names, rank, group=group)
    assert names == list(range(size))
    dist.barrier(group=group)
    return come


@pytest.mark.real
async def test_collectives_of_ranks_that_share_a_device() -> None:
    preload = ("torch", "torch.distributed.tensor")
    async with this_host().spawn_procs({"gpus": 3}, preload=preload) as procs:
        rank = procs.rank_tensor("gpus")
        trimesh.remote(_reach_nothing)(rank)
        assert rank.reduce("gpus").item() == 3
        assert rank.float().reduce("gpus", "avg").item() == 1
        assert rank.reduce("gpus", "stack").tolist() == [0, 1, 2]
        with procs.activate():
            three = torch.arange(3) + 10 * rank
        assert (await trimesh.fetch_shard(three.reduce("gpus", scatter=True), gpus=1)).item() == 33
        swapped = three.reduce("gpus", "stack", scatter=True)
        assert (await trimesh.fetch_shard(swapped, gpus=2)).tolist() == [2, 12, 22]
        group = procs.process_group("gpus")
        assert [one.item() for one in (await trimesh.fetch(sent_around(rank, group))).values()] == [2, 0, 1]
        a = torch.arange(36.0).reshape(6, 6)
        cut = trimesh.distribute(a, procs, ["gpus", None])
        assert torch.equal(await trimesh.fetch(cut.T @ cut), a.T @ a)
        assert torch.equal(await trimesh.fetch(trimesh.redistribute(cut, [None, "gpus"]) + 1), a + 1)
