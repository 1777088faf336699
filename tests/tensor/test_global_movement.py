"""Global tensors move to other ranks, of the same mesh and of others: values, layouts, gradients, errors."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

import trio  # noqa: E402 - after the skip
from tests.patience import HANG_SECONDS  # noqa: E402
from tests.tensor.test_bulk import PRELOAD, SIZE, nothing_lent  # noqa: E402

import trimesh  # noqa: E402
from trimesh import Isolate, ProcDied, ShapeError, this_host  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]


@pytest.mark.daily
async def test_parts_go_to_who_needs_them() -> None:
    async with (
        this_host().spawn_procs({"dp": 2, "tp": 2}, preload=PRELOAD) as source,
        this_host().spawn_procs({"tp": 3}, name="other", preload=PRELOAD) as other,
    ):
        large = torch.arange(SIZE[0] * SIZE[1], dtype=torch.float32).reshape(SIZE)
        targets: list[tuple[Any, list[Any]]] = [
            (other, [("dp", None), ("tp", "tp")]),
            (other.slice(tp=1), []),
            (source, [("dp", "dp"), ("tp", "tp")]),
            (source.slice(dp=1), [("dp", None), ("tp", "tp")]),
            (source.rename(dp="tp", tp="dp"), [("dp", "dp"), ("tp", "tp")]),
        ]
        for whole in (large, large[:5, :3].contiguous(), large[:0].contiguous()):
            for cuts in (None, ["dp", None], [None, "tp"], ["tp", "dp"], [("dp", "tp"), None]):
                made = trimesh.distribute(whole, source, cuts)
                for target, labels in targets:
                    moved = made.to_mesh(target)
                    assert (await trimesh.fetch(moved)).equal(whole), (whole.shape, cuts, target)
                    lies = await trimesh.placements(moved)
                    assert not lies.partial
                    if cuts == ["dp", None]:
                        assert lies == [dict(labels).get("dp"), None]
        made = trimesh.distribute(large, source, ["dp", None])
        moved = made.remainder(7).sum(0).to_mesh(other)  # of which the ranks have parts of a sum
        assert (await trimesh.fetch(moved)).equal(large.remainder(7).sum(0))

        made = trimesh.replicate(large[:4], source)
        moved = made.to_mesh(other)
        made.zero_()  # what was sent is a copy
        assert (await trimesh.fetch(moved + 0)).equal(large[:4])
        with pytest.raises(ShapeError, match="every rank"):
            made.to_mesh(source.exclude([{"dp": 0, "tp": 1}]))
        await nothing_lent(source)
        await nothing_lent(other)


async def test_gradients_of_global_tensors_move_back() -> None:
    async with (
        this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as first,
        this_host().spawn_procs({"dp": 2, "tp": 2}, name="second", preload=PRELOAD) as second,
    ):
        x, w, v = torch.randn(6, 4), torch.randn(4, 8), torch.randn(8, 2)
        local = [one.clone().requires_grad_() for one in (w, v)]
        ((x @ local[0]).tanh() @ local[1]).square().mean().backward()

        there = trimesh.distribute(x, first, ["dp", None])
        w1 = trimesh.distribute(w, first, [None, "dp"]).requires_grad_()
        v1 = trimesh.distribute(v, second, ["tp", None]).requires_grad_()
        hidden = (there @ w1).tanh()
        (hidden.to_mesh(second) @ v1).square().mean().backward()
        torch.testing.assert_close(await trimesh.fetch(w1.grad), local[0].grad)
        torch.testing.assert_close(await trimesh.fetch(v1.grad), local[1].grad)

        moved = w1.to_mesh(second)
        (moved * trimesh.distribute(w, second, [None, "tp"])).sum().backward(inputs=[w1])
        torch.testing.assert_close(await trimesh.fetch(w1.grad), local[0].grad + w)
        assert await trimesh.placements(w1.grad) == [None, "dp"]

        for view in (second.slice(dp=0), second.slice(tp=0), second.slice(tp=1), second.slice(dp=1, tp=1)):
            leaf = trimesh.distribute(w, second, ["dp", None]).requires_grad_()
            leaf.to_mesh(view).sum().backward()  # the gradient is whole on each rank of the view, who take turns
            assert (await trimesh.fetch(leaf.grad)).equal(torch.ones_like(w)), view


async def test_what_has_failed_here_has_failed_there() -> None:
    async with (
        this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as first,
        this_host().spawn_procs({"dp": 2}, name="second", preload=PRELOAD) as second,
    ):
        good = trimesh.distribute(torch.ones(SIZE), first, ["dp", None])
        bad = good[:3, 0][trimesh.replicate(torch.tensor([7]), first)]  # no such element: known to the ranks alone
        with pytest.raises(trimesh.MeshErrorGroup) as caught:
            await trimesh.fetch(bad.to_mesh(second) + 1)
        for error in trimesh.leaves(caught.value):
            assert isinstance(error, IndexError)
            assert any("test_global_movement.py" in note for note in error.__notes__)
        assert (await trimesh.fetch(good.to_mesh(second))).equal(torch.ones(SIZE))
        await nothing_lent(first)


async def test_death_of_a_source_of_parts_is_told() -> None:
    async with (
        this_host().spawn_procs({"dp": 2}, preload=PRELOAD, supervision=Isolate()) as first,
        this_host().spawn_procs({"dp": 2}, name="second", preload=PRELOAD) as second,
    ):
        good = trimesh.distribute(torch.ones(SIZE), first, ["dp", None])
        with first.activate():
            pid = (await trimesh.call_on_shard_and_fetch("os.getpid")).item(dp=1)
        os.kill(pid, signal.SIGSTOP)
        moved = good.to_mesh(second)
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(HANG_SECONDS), pytest.RaisesGroup(ProcDied):
            await trimesh.fetch(moved)
        assert (await trimesh.fetch(trimesh.distribute(torch.ones(SIZE), second, ["dp", None]))).equal(torch.ones(SIZE))
        await nothing_lent(second)
