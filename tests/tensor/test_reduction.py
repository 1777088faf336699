"""`reduce` along dimensions of a mesh: values beside plain torch, gradients, refusals."""

from __future__ import annotations

import pytest

import trimesh
from trimesh import ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.daily, pytest.mark.torch]

GPUS = 3

LOCAL = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "avg": lambda stacked: stacked.mean(0),
    "stack": lambda stacked: stacked,
}
"""What each reduction is of the ranks' tensors, stacked."""


async def test_each_reduction_is_what_torch_makes_of_all() -> None:
    async with this_host().spawn_procs({"gpus": GPUS}, preload=("torch",)) as procs:
        base = torch.linspace(-2, 3, 2 * GPUS * 4).reshape(GPUS, 2, 4)
        stacked = torch.stack([base * (rank + 1) for rank in range(GPUS)])
        with procs.activate():
            t = torch.linspace(-2, 3, 2 * GPUS * 4).reshape(GPUS, 2, 4) * (procs.rank_tensor("gpus") + 1)
        for reduction, local in LOCAL.items():
            found = (await trimesh.fetch(t.reduce("gpus", reduction))).values()
            assert len(found) == GPUS
            for one in found:
                torch.testing.assert_close(one, local(stacked))
            scattered = (await trimesh.fetch(t.reduce("gpus", reduction, scatter=True))).values()
            for rank, one in enumerate(scattered):
                expected = stacked[:, rank] if reduction == "stack" else local(stacked)[rank]
                torch.testing.assert_close(one, expected)

        strided = (await trimesh.fetch(t[:, :, ::2].transpose(0, 2).reduce("gpus", "stack"))).values()[1]
        torch.testing.assert_close(strided, stacked[:, :, :, ::2].transpose(1, 3))
        both = trimesh.reduce({"a": [t], "b": t * 2}, "gpus")
        torch.testing.assert_close((await trimesh.fetch_shard(both["b"], gpus=2)), stacked.sum(0) * 2)


async def test_whole_numbers_and_bits() -> None:
    async with this_host().spawn_procs({"gpus": GPUS}, preload=("torch",)) as procs:
        with procs.activate():
            rank = procs.rank_tensor("gpus")
            assert rank.dtype == torch.int64
            assert rank.size() == ()
        assert [one.item() for one in (await trimesh.fetch(rank)).values()] == [0, 1, 2]
        bits = rank + 5  # 101, 110, 111
        for reduction, expected in {"band": 4, "bor": 7, "bxor": 4, "sum": 18, "product": 210}.items():
            assert bits.reduce("gpus", reduction).item() == expected
        for dtype in (torch.int16, torch.int8, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float64):
            total = bits.to(dtype).reduce("gpus")
            assert total.dtype == dtype
            assert total.item() == 18
        assert (rank == 1).reduce("gpus", "max").item() is True
        assert (rank < 5).reduce("gpus", "min").item() is True
        assert (await trimesh.fetch_shard(torch.complex(rank.float(), rank.float()).reduce("gpus"), gpus=0)) == 3 + 3j


async def test_dimensions_and_views() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": GPUS}, preload=("torch",)) as procs:
        with procs.activate():
            number = procs.rank_tensor("hosts") * 10 + procs.rank_tensor("gpus")
        assert await _items(number) == [0, 1, 2, 10, 11, 12]
        assert await _items(number.reduce("gpus")) == [3, 3, 3, 33, 33, 33]
        assert await _items(number.reduce("hosts", "max")) == [10, 11, 12, 10, 11, 12]
        assert await _items(number.reduce(("hosts", "gpus"))) == [36] * 6
        assert await _items(number.reduce(("gpus", "hosts"), "max")) == [12] * 6

        part = procs.slice(hosts=1, gpus=slice(1, 3))
        assert await _items(part.rank_tensor("gpus")) == [0, 1]
        sliced = number.slice_mesh(hosts=1, gpus=slice(1, 3))
        assert await _items(sliced.reduce("gpus")) == [23, 23]
        flat = procs.flatten("all")
        assert await _items(flat.rank_tensor("all").reduce("all", "max")) == [5] * 6
        sparse = procs.exclude([{"hosts": 0, "gpus": 1}])
        found = (await trimesh.fetch(sparse.rank_tensor("gpus").reduce("gpus"))).values()
        assert [one.item() for one in found] == [2, 2, 3, 3, 3]
        with pytest.raises(ShapeError, match="every member"):
            sparse.rank_tensor("gpus").reduce("gpus", "stack")


async def _items(tensor: torch.Tensor) -> list[int]:
    return [one.item() for one in (await trimesh.fetch(tensor)).values()]


async def test_gradient_is_that_of_the_sum_over_ranks() -> None:
    async with this_host().spawn_procs({"gpus": GPUS}, preload=("torch",)) as procs:
        for reduction, scatter in [(r, s) for r in ("sum", "avg", "stack") for s in (False, True)]:
            leaves = [torch.linspace(-1, rank + 1, GPUS * 2).reshape(GPUS, 2).requires_grad_() for rank in range(GPUS)]
            whole = LOCAL[reduction](torch.stack([leaf.square() for leaf in leaves]))
            total = torch.zeros(())
            for rank in range(GPUS):
                seen = whole if not scatter else whole[:, rank] if reduction == "stack" else whole[rank]
                total = total + (seen.sin() * (rank + 1)).sum()
            total.backward()

            with procs.activate():
                rank = procs.rank_tensor("gpus")
                step = (rank + 2) / (GPUS * 2 - 1)
                t = (torch.arange(GPUS * 2).reshape(GPUS, 2) * step - 1).requires_grad_()
            seen = (t.square()).reduce("gpus", reduction, scatter=scatter)
            (seen.sin() * (rank + 1)).sum().backward()
            found = (await trimesh.fetch(t.grad)).values()
            for one, leaf in zip(found, leaves, strict=True):
                torch.testing.assert_close(one, leaf.grad)

        with pytest.raises(TypeError, match=r"derivative.*detach"):
            t.reduce("gpus", "max")
        with pytest.raises(RuntimeError, match="in place"):
            t.reduce_("gpus")


async def test_in_place_and_refusals() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.ones(2, 2) * (procs.rank_tensor("gpus") + 1)
            view = t[0]
            weight = torch.ones(2, requires_grad=True)
        assert t.reduce_("gpus") is t
        assert view.sum().item() == 6
        t.reduce_("gpus", "stack", scatter=True)
        assert t.sum().item() == 12
        product = weight * t
        t.reduce_("gpus", "avg")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        with torch.no_grad():
            assert weight.reduce_("gpus").sum().item() == 4

        for wrong, error, text in [
            (lambda: t.reduce("hosts"), ShapeError, "dimensions of"),
            (lambda: t.reduce("gpus", "median"), ValueError, "one of sum"),
            (lambda: t.reduce(("gpus", "gpus")), ShapeError, "each dimension of the mesh once"),
            (lambda: t[0][0].reduce("gpus", scatter=True), ShapeError, "reshape"),
            (lambda: t.reduce("gpus", "band"), TypeError, "integers or booleans"),
            (lambda: t.to(torch.int64).reduce("gpus", "avg"), TypeError, "floating-point"),
            (lambda: t.reduce_("gpus", "stack"), ShapeError, "in place"),
            (lambda: trimesh.reduce(torch.ones(2), "gpus"), TypeError, "mesh"),
            (lambda: procs.rank_tensor("hosts"), ShapeError, "hosts"),
        ]:
            with pytest.raises(error, match=text):
                wrong()
        assert t.sum().item() == 12


async def test_a_result_is_written_to_a_tensor_that_is_given() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=("torch",)) as procs:
        mine = procs.rank_tensor("gpus") + 1.0
        with procs.activate():
            out, stacked, weight = torch.zeros(()), torch.zeros(2), torch.zeros((), requires_grad=True)
        assert mine.reduce("gpus", out=out) is out
        assert trimesh.reduce([mine], "gpus", "stack", out=[stacked])[0] is stacked
        assert out.item() == 3
        assert stacked.tolist() == [1, 2]
        out.mul_(2)
        assert (out + mine.reduce((), "avg")).reduce("hosts", "max").reduce("gpus", "stack").tolist() == [7, 8]
        with pytest.raises(ShapeError, match="size of the result"):
            mine.reduce("gpus", out=stacked)
        with pytest.raises(TypeError, match=r"of dtype torch\.float32"):
            mine.reduce("gpus", out=out.double())
        with pytest.raises(TypeError, match="must be a tensor on each rank of"):
            mine.reduce("gpus", out=procs.slice(gpus=0).rank_tensor("hosts") * 1.0)
        with pytest.raises(RuntimeError, match="no gradient"):
            mine.reduce("gpus", out=weight)
        with pytest.raises(ValueError, match="same nesting"):
            trimesh.reduce([mine], "gpus", out=(out,))
        with pytest.raises(ShapeError, match="stack and scatter take one dimension"):
            mine.reduce((), "stack")
        with torch.no_grad():
            mine.reduce("gpus", "max", out=weight)
        assert weight.item() == 2


async def test_a_tensor_goes_to_all_along_one_dimension_and_its_gradient_comes_back() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=("torch",)) as procs:
        number = procs.rank_tensor("hosts") * 10 + procs.rank_tensor("gpus")  # 0 1 10 11
        found = await trimesh.fetch(trimesh.tensor.broadcast({"n": number, "even": number % 2 == 0}, "gpus", 1))
        assert [one.item() for one in found["n"].values()] == [1, 1, 11, 11]
        assert [one.item() for one in found["even"].values()] == [False] * 4
        last = await trimesh.fetch(trimesh.tensor.broadcast(number, "hosts", -1))
        assert [one.item() for one in last.values()] == [10, 11, 10, 11]
        weight = (number + 1.0).requires_grad_()
        (first,) = torch.autograd.grad(
            (trimesh.tensor.broadcast(weight, "gpus") ** 2 * (number + 1.0)).sum(), weight, create_graph=True
        )
        # 2 w (1 + 2) at the source of the first host, where w is 1; 2 w (11 + 12) at that of the second, with 11.
        assert [one.item() for one in (await trimesh.fetch(first.detach())).values()] == [6, 0, 506, 0]
        (second,) = torch.autograd.grad(first.sum(), weight)
        assert [one.item() for one in (await trimesh.fetch(second)).values()] == [6, 0, 46, 0]
        with pytest.raises(ShapeError, match="got 'x'"):
            trimesh.tensor.broadcast(number, "x")
        with pytest.raises(ShapeError, match="from one of 2 indices, got 2"):
            trimesh.tensor.broadcast(number, "gpus", 2)


async def test_a_rank_without_a_value_frees_those_that_a_broadcast_or_a_given_tensor_waits_for() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            out = torch.zeros(2, 2)
            singular = torch.eye(2) * procs.rank_tensor("gpus")
        bad = torch.linalg.inv(singular)  # fails on the first rank
        with pytest.raises(trimesh.MeshErrorGroup) as first:
            await trimesh.fetch(trimesh.tensor.broadcast(bad, "gpus"))
        bad.reduce("gpus", out=out)
        with pytest.raises(trimesh.MeshErrorGroup) as second:
            await trimesh.fetch(out)
        for one in (first, second):
            kinds = [type(error) for error in one.value.exceptions]
            assert kinds == [torch.linalg.LinAlgError, trimesh.CollectiveFailed]
        out.zero_()
        assert singular.reduce("gpus", out=out).sum().item() == 2
