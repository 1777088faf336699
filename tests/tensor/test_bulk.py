"""Large tensors between the controller and the ranks: by memory that the other side reads."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Isolate, ProcDied, limits, this_host
from trimesh._runtime.life.current import current_proc

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.rank.function_parts import Here  # noqa: E402 - imports torch

pytestmark = [pytest.mark.real, pytest.mark.torch]

PRELOAD = ("torch", "torch.distributed.tensor")
SIZE = (1001, 517)
"""Of a tensor that is lent, and cannot be cut into equal parts."""

assert SIZE[0] * SIZE[1] * 4 > limits.TENSOR_LENT_BYTES_MIN


def _lent(rank: Any) -> int:
    return len(rank.outside.proc.bulk.registrations())


async def nothing_lent(procs: Any) -> None:
    """Wait until nobody has anything for others any more; the word that something was read may be on its way."""
    with trio.fail_after(HANG_SECONDS), procs.activate():
        while current_proc().bulk.registrations():
            await trio.lowlevel.checkpoint()
        while any((await trimesh.call_on_shard_and_fetch(_lent, Here())).values()):
            pass


async def test_large_tensors_come_and_go_as_they_are() -> None:
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=PRELOAD) as procs:
        whole = torch.arange(SIZE[0] * SIZE[1], dtype=torch.float32).reshape(SIZE)
        with procs.activate():
            each = torch.as_tensor(whole.tolist())
            mine = each + procs.rank_tensor("dp")
            found = await trimesh.fetch({"each": each, "mine": mine, "small": mine[0, :2]})  # a mesh is active
        assert all(one.equal(whole) for one in found["each"].values())
        assert found["mine"].item(dp=1, tp=0).equal(whole + 1)
        assert found["small"].item(dp=1, tp=1).tolist() == [1, 2]
        assert (await trimesh.fetch_shard(mine.t(), dp=1, tp=1)).equal((whole + 1).t())  # not contiguous there

        for cuts in (None, ["dp", None], [None, "tp"], ["tp", "dp"], [("dp", "tp"), None], [None, ("dp", "tp")]):
            made = trimesh.distribute(whole, procs, cuts)
            assert (await trimesh.fetch(made)).equal(whole), cuts
            part = await trimesh.fetch_shard(made * 2, dp=1, tp=0)
            assert part.equal((await trimesh.fetch_shard(made, dp=1, tp=0)) * 2)
            assert part.numel() < whole.numel() or cuts is None
        made = trimesh.distribute(whole, procs, ["dp", None])
        small = made.remainder(7)
        partial = small.t().contiguous() @ small  # a sum of which the ranks have parts
        assert (await trimesh.placements(partial)).partial
        assert (await trimesh.fetch(partial)).equal(whole.remainder(7).t() @ whole.remainder(7))
        assert made.tolist() == whole.tolist()  # without await
        await nothing_lent(procs)


@pytest.mark.daily
async def test_state_of_a_module_comes_and_is_loaded() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        net = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.Linear(700, 3))
        before = {name: value.clone() for name, value in net.state_dict().items()}
        model = trimesh.module_to_mesh(net, procs, {"0.weight": [None, "gpus"]})
        state = await trimesh.fetch(model.state_dict())
        assert all(state[name].equal(before[name]) for name in before)
        state["0.weight"] += 1  # it is of this process, and writable
        model.load_state_dict(state)
        assert (await trimesh.fetch(model[0].weight)).equal(before["0.weight"] + 1)
        assert await trimesh.placements(model[0].weight) == [None, "gpus"]
        await nothing_lent(procs)


async def test_what_was_put_is_a_copy_and_room_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSOR_MOVE_BYTES", 3 * SIZE[0] * SIZE[1] * 4)
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        whole = torch.zeros(SIZE)
        made = []
        for _ in range(12):
            whole += 1
            made.append(trimesh.replicate(whole, procs))
        assert sum((await trimesh.fetch([one[0, 0] for one in made])), torch.zeros(())) == 78
        await nothing_lent(procs)


async def test_cancelled_fetch_leaves_nothing() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        with procs.activate():
            each = torch.ones(SIZE)
        for deadline in (0, 1e-4, 1e-3, 1e-2):
            with trio.move_on_after(deadline):
                await trimesh.fetch(each)
        assert (await trimesh.fetch_shard(each, gpus=1)).sum() == SIZE[0] * SIZE[1]
        await nothing_lent(procs)


async def test_poison_is_told_and_what_was_lent_for_it_goes() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        whole = torch.ones(SIZE)
        model = trimesh.module_to_mesh(torch.nn.Linear(SIZE[1], SIZE[0], bias=False), procs)
        with torch.no_grad():
            model.weight[:, 0][trimesh.replicate(torch.tensor([SIZE[0]]), procs)] = 0  # no such row
        with procs.activate():
            spoiled = torch.ones(3)[torch.tensor([7])].expand(SIZE)  # no such element: known to the ranks alone
        with pytest.raises(trimesh.MeshErrorGroup) as caught:
            await trimesh.fetch(spoiled)
        assert all(isinstance(error, IndexError) for error in trimesh.leaves(caught.value))
        with pytest.raises(trimesh.MeshErrorGroup):
            await trimesh.fetch(model.weight)
        model.load_state_dict({"weight": whole})  # all of it is overwritten
        assert (await trimesh.fetch_shard(model.weight, gpus=1)).equal(whole)
        assert (await trimesh.fetch(trimesh.replicate(whole, procs))).equal(whole)
        await nothing_lent(procs)


async def test_death_of_a_rank_frees_what_was_lent_to_it() -> None:
    @trimesh.remote(propagate=lambda t: t)
    def last(t: Any) -> Any:
        if t.sum() > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return t

    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD, supervision=Isolate()) as procs:
        with procs.activate():
            each = last(torch.ones(SIZE) * procs.rank_tensor("gpus"))
        trimesh.replicate(torch.ones(SIZE), procs)  # the one that dies never reads it
        with trio.fail_after(HANG_SECONDS), pytest.raises(trimesh.MeshErrorGroup) as caught:
            await trimesh.fetch(each)
        assert any(isinstance(error, ProcDied) for error in trimesh.leaves(caught.value))
        await nothing_lent(procs.slice(gpus=0))


async def test_block_that_is_left_by_an_error_leaves_nothing_lent() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD):
        with pytest.raises(trimesh.MeshErrorGroup):
            async with this_host().spawn_procs({"gpus": 2}, name="inner", preload=PRELOAD) as procs:
                trimesh.replicate(torch.ones(SIZE), procs)
                raise RuntimeError("of the body")
        with trio.fail_after(HANG_SECONDS):
            while current_proc().bulk.registrations():
                await trio.lowlevel.checkpoint()


async def test_hosts_that_cannot_reach_each_others_memory_send_messages() -> None:
    def env(point: Any) -> dict[str, str]:
        return {"TRIMESH_HOST_ID": f"host-{point.rank}", "TRIMESH_RDMA": "shm,cma"}

    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD, env=env) as procs:
        whole = torch.arange(SIZE[0] * SIZE[1], dtype=torch.float32).reshape(SIZE)
        made = trimesh.distribute(whole, procs, [None, "gpus"])
        assert (await trimesh.fetch(made)).equal(whole)
        first, second = procs.slice(gpus=0), procs.slice(gpus=1)
        moved = trimesh.replicate(whole, first).local().to_mesh(second)
        assert (await trimesh.fetch_shard(moved)).equal(whole)
        await nothing_lent(procs)
