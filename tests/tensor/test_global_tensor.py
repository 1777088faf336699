"""Global tensors: made, laid out anew, computed with, brought back; all on one mesh, which takes seconds to start."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import trimesh
from trimesh import MeshErrorGroup, ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


async def test_global_tensors(caplog: pytest.LogCaptureFixture) -> None:
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        await check_a_tensor_comes_back_whatever_its_placements(procs)
        await check_parts_are_those_of_their_rank(procs)
        await check_operations_compute_what_they_compute_locally(procs)
        await check_partial_sums_are_told_and_added(procs)
        await check_redistributing_keeps_values_and_gradients(procs)
        await check_a_tensor_on_each_rank_becomes_global_and_back(procs)
        await check_operators_without_a_rule_get_whole_tensors(procs)
        await check_gradients_of_means_count_all_elements(procs)
        await check_convolutions_are_cut_by_batch(procs)
        await check_in_place_on_views_and_sums(procs)
        await check_what_does_not_fit_is_refused(procs, caplog)
        await check_trees_are_fetched_at_once(procs)
        await check_views_of_the_mesh_hold_global_tensors(procs)
        await check_random_numbers_do_not_depend_on_placements(procs)
        await check_one_rank_that_fails_fails_what_needs_it(procs)
        await check_a_check_without_results_fails_what_it_has_checked(procs)


async def equal(value: Any, expected: Any, *, atol: float = 1e-5) -> bool:
    return torch.allclose(await trimesh.fetch(value), expected, atol=atol, equal_nan=True)


async def check_a_tensor_comes_back_whatever_its_placements(procs: ProcMesh) -> None:
    for size in ((7, 5), (1, 3), (0, 4), (8, 4, 2), ()):
        tensor = torch.randn(size)
        for placements in ([None, None, None], ["dp", None, None], ["tp", "dp", None], [("dp", "tp"), None, None]):
            cut = placements[: len(size)]
            there = trimesh.distribute(tensor, procs, cut)
            assert there.size() == tensor.size()
            assert await trimesh.placements(there) == cut
            assert torch.equal(await trimesh.fetch(there), tensor)
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        tensor = torch.randn(4, 4).to(dtype)
        assert torch.equal(await trimesh.fetch(trimesh.replicate(tensor, procs)), tensor)
    strided = torch.randn(4, 6).T
    assert torch.equal(await trimesh.fetch(trimesh.distribute(strided, procs, ["dp", None])), strided)
    assert trimesh.distribute(torch.ones(2, requires_grad=True), procs, ["dp"]).requires_grad


async def check_parts_are_those_of_their_rank(procs: ProcMesh) -> None:
    tensor = torch.arange(7)
    cut = trimesh.distribute(tensor, procs, ["dp"])
    assert (await trimesh.fetch_shard(cut, dp=0, tp=1)).tolist() == [0, 1, 2, 3]
    assert (await trimesh.fetch_shard(cut, {"dp": 1, "tp": 0})).tolist() == [4, 5, 6]
    assert (await trimesh.fetch_shard(cut)).tolist() == (await trimesh.inspect(cut)).tolist() == [0, 1, 2, 3]
    with pytest.raises(ShapeError, match=r"needs an index of 'tp' \(size 2\), got .*'dp': 1"):
        await trimesh.fetch_shard(cut, dp=1)
    finer = trimesh.redistribute(cut, [("dp", "tp")])
    parts = [(await trimesh.fetch_shard(finer, point)).tolist() for point in procs.extent.points()]
    assert parts == [[0, 1], [2, 3], [4, 5], [6]]
    assert repr(cut) == "<global tensor int64[7] on procs{'dp': 2, 'tp': 2}>"


async def check_operations_compute_what_they_compute_locally(procs: ProcMesh) -> None:
    one, other = torch.randn(7, 6), torch.randn(6, 5)
    w = trimesh.distribute(one, procs, ["dp", "tp"])
    v = trimesh.distribute(other, procs, ["tp", None])
    assert await equal(w @ v, one @ other)
    assert await equal(w @ w.T, one @ one.T)
    assert await equal((w.softmax(1) + 1).log().mean(0), (one.softmax(1) + 1).log().mean(0))
    assert await equal(w.reshape(42)[3:9], one.reshape(42)[3:9])
    assert await equal(torch.cat([w, w * 2], 0).sort(0).values, torch.cat([one, one * 2], 0).sort(0).values)
    assert abs(w.sum().item() - one.sum().item()) < 1e-5
    assert bool((w == w.clone()).all())
    assert torch.equal(w, w.clone())
    assert not torch.equal(w, w + 1)


async def check_partial_sums_are_told_and_added(procs: ProcMesh) -> None:
    one = torch.randn(8, 6)
    w = trimesh.distribute(one, procs, [None, "tp"])
    total = w @ w.T
    assert await trimesh.placements(total) == trimesh.Placements([None, None], {"tp": "sum"})
    assert await equal(total, one @ one.T)
    assert torch.allclose(await trimesh.fetch_shard(total, dp=1, tp=1), one @ one.T, atol=1e-5)
    assert torch.allclose(await trimesh.fetch_shard(total.local(), dp=0, tp=1), one @ one.T, atol=1e-5)


async def check_redistributing_keeps_values_and_gradients(procs: ProcMesh) -> None:
    one = torch.randn(6, 4)
    w = trimesh.distribute(one, procs, ["dp", None]).requires_grad_()
    again = trimesh.redistribute(w, [None, "tp"])
    assert await trimesh.placements(again) == [None, "tp"]
    assert await equal(again.detach(), one)
    (again * again).sum().backward()
    assert w.grad is not None
    assert await trimesh.placements(w.grad) == ["dp", None]
    assert await equal(w.grad, 2 * one)
    same = trimesh.redistribute(w.detach(), ["dp", None])
    same.zero_()
    assert await equal(w.detach(), one)


async def check_a_tensor_on_each_rank_becomes_global_and_back(procs: ProcMesh) -> None:
    with procs.activate():
        own = torch.ones(2, 3)
    w = own.to_global(["dp", "tp"])
    assert w.size() == (4, 6)
    assert await equal(w, torch.ones(4, 6))
    one = torch.arange(8.0).reshape(4, 2)
    parts = await trimesh.fetch(trimesh.distribute(one, procs).local(["dp", None]))
    assert torch.equal(parts.item(dp=1, tp=0), one[2:])
    with pytest.raises(ShapeError, match=r"dimension 0 of \(7,\) cannot be cut into equal parts along 'dp', of size 2"):
        trimesh.distribute(torch.ones(7), procs).local(["dp"])
    with pytest.raises(TypeError, match="a tensor on each rank"):
        torch.add(w, own)
    with pytest.raises(TypeError, match="gradients do not pass"):
        trimesh.distribute(one.requires_grad_(), procs).local()


async def check_operators_without_a_rule_get_whole_tensors(procs: ProcMesh) -> None:
    one = torch.randn(6, 4)
    w = trimesh.distribute(one, procs, ["dp", None])
    assert await equal(torch.cdist(w, w), torch.cdist(one, one), atol=1e-3)
    assert await equal(torch.linalg.qr(w)[1].abs(), torch.linalg.qr(one)[1].abs())
    assert await equal(w.clone().fill_diagonal_(3.0), one.clone().fill_diagonal_(3.0))
    nowhere = w.index_select(0, trimesh.replicate(torch.tensor([99]), procs)) + 1
    with pytest.raises(MeshErrorGroup) as caught:
        await trimesh.fetch(nowhere)
    assert trimesh.coords(caught.value) == list(procs.extent.points())
    for error in trimesh.leaves(caught.value):
        assert isinstance(error, IndexError)
        assert trimesh.origin(error).endpoint == "aten::index_select"
    assert await equal(w, one)


async def check_gradients_of_means_count_all_elements(procs: ProcMesh) -> None:
    """Torch runs some of these on what a rank has as if that were all there is (2.13: `mse_loss_backward`)."""
    one, goal = torch.randn(10, 6), torch.randn(10, 6).sigmoid()  # equal parts along one label, unequal along both
    for placements in (["dp", None], [("dp", "tp"), None], [None, "tp"]):
        for loss in (
            torch.nn.functional.mse_loss,
            torch.nn.functional.smooth_l1_loss,
            torch.nn.functional.huber_loss,
            torch.nn.functional.soft_margin_loss,
            torch.nn.functional.binary_cross_entropy_with_logits,
            torch.nn.functional.l1_loss,
        ):
            local = one.clone().requires_grad_()
            there = trimesh.distribute(one, procs, placements).requires_grad_()
            expected = loss(local, goal)
            expected.backward()
            found = loss(there, trimesh.distribute(goal, procs, placements))
            found.backward()
            assert abs(found.item() - expected.item()) < 1e-5, loss
            assert await equal(there.grad, local.grad, atol=1e-7), loss


async def check_convolutions_are_cut_by_batch(procs: ProcMesh) -> None:
    one, weight = torch.randn(5, 4, 6, 6), torch.randn(6, 2, 3, 3)
    for cut in (["dp", None, None, None], [("dp", "tp"), None, None, None], ["tp", None, "dp", None]):
        local = [t.clone().requires_grad_() for t in (one, weight)]
        there = [trimesh.distribute(one, procs, cut), trimesh.distribute(weight, procs, ["tp", None, None, None])]
        for tensor in there:
            tensor.requires_grad_()
        expected = torch.nn.functional.conv2d(*local, padding=1, groups=2)
        found = torch.nn.functional.conv2d(*there, padding=1, groups=2)
        assert await equal(found.detach(), expected)
        (expected * expected).mean().backward()
        (found * found).mean().backward()
        for one_there, one_local in zip(there, local, strict=True):
            assert await equal(one_there.grad, one_local.grad)


async def check_in_place_on_views_and_sums(procs: ProcMesh) -> None:
    one = torch.randn(6, 4)
    w = trimesh.distribute(one, procs, ["dp", None])
    w[1:3].mul_(2)
    one[1:3].mul_(2)
    assert await equal(w, one)
    row, rows = w[2], w[1:4]  # torch gathers both
    inner = rows[1]
    rows.add_(1)
    one[1:4] += 1
    assert await equal(w, one)
    assert await equal(row, one[2])
    assert await equal(inner, one[2])
    inner.zero_()
    one[2] = 0
    assert await equal(w, one)
    assert await equal(rows, one[1:4])
    w.mul_(3)
    one *= 3
    assert await equal(rows + 0, one[1:4])
    w.unbind(0)[5].fill_(7)
    one[5] = 7
    assert await equal(w, one)
    total = w.T @ w  # partial along dp
    total += 1
    assert await equal(total, one.T @ one + 1)
    total = w.T @ w
    total.relu_()
    assert await equal(total, (one.T @ one).relu())


async def check_what_does_not_fit_is_refused(procs: ProcMesh, caplog: pytest.LogCaptureFixture) -> None:
    w = trimesh.distribute(torch.randn(4, 4), procs, ["dp", None])
    with pytest.raises(TypeError, match=r"write trimesh\.redistribute"):
        trimesh.distribute(w, procs, [None, None])
    with pytest.raises(TypeError, match=r"got ndarray: write torch\.as_tensor"):
        trimesh.distribute(torch.ones(2).numpy(), procs)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        w @ trimesh.distribute(torch.ones(3, 4), procs)
    assert not [one for one in caplog.records if "fake" in one.name and one.levelno >= logging.WARNING]
    with pytest.raises(TypeError, match="a tensor of this process"):
        torch.add(w, torch.ones(4, 4))
    with procs.activate():
        own = torch.ones(2)
    with pytest.raises(TypeError, match=r"write t\.to_global"):
        await trimesh.placements(own)
    with pytest.raises(TypeError, match="whose value is here already"):
        await trimesh.fetch(torch.ones(2))
    with pytest.raises(ShapeError, match="every rank of its mesh"):
        trimesh.replicate(torch.ones(2), procs.exclude([{"dp": 0, "tp": 0}]))
    with pytest.raises(TypeError, match="a mesh of processes, got None"):
        trimesh.replicate(torch.ones(2), None)


async def check_trees_are_fetched_at_once(procs: ProcMesh) -> None:
    with procs.activate():
        own = torch.ones(2)
    tree = {"a": trimesh.replicate(torch.arange(3), procs), "b": [own, 5, torch.zeros(1)], "c": ()}
    found = await trimesh.fetch(tree)
    assert found["a"].tolist() == [0, 1, 2]
    assert [value.tolist() for value in found["b"][0].values()] == [[1, 1]] * 4
    assert found["b"][1:] == [5, torch.zeros(1)]
    assert found["c"] == ()


async def check_views_of_the_mesh_hold_global_tensors(procs: ProcMesh) -> None:
    one = torch.randn(4, 4)
    row = trimesh.distribute(one, procs.slice(dp=1), ["tp", None])
    assert await equal(row @ row, one @ one)
    single = trimesh.distribute(one, procs.slice(dp=1, tp=0))
    assert await equal(single @ single, one @ one)
    flat = trimesh.distribute(one, procs.flatten("all"), ["all", None])
    assert (await trimesh.fetch_shard(flat, all=3)).tolist() == [one[3].tolist()]


async def check_random_numbers_do_not_depend_on_placements(procs: ProcMesh) -> None:
    """They are those of one generator of this process that has the same seed."""
    trimesh.manual_seed(5, procs)
    local = torch.Generator().manual_seed(5)
    one = torch.zeros(7, 6)
    layouts = ([None, None], ["dp", None], [("dp", "tp"), None], [None, "tp"], ["tp", "dp"])
    for there in [trimesh.distribute(one, procs, layout) for layout in layouts]:
        assert torch.equal(await trimesh.fetch(torch.rand_like(there)), one.clone().uniform_(generator=local))
        assert torch.equal(await trimesh.fetch(there.clone().normal_(1, 2)), one.clone().normal_(1, 2, generator=local))
        drawn = torch.randint_like(there, 3, 9)
        assert torch.equal(await trimesh.fetch(drawn), one.clone().random_(3, 9, generator=local))
        kept = torch.nn.functional.dropout(there + 1, 0.25)
        assert torch.equal(await trimesh.fetch(kept), one.clone().bernoulli_(0.75, generator=local).div_(0.75))
        picked = torch.multinomial(there + 1, 2)
        assert torch.equal(await trimesh.fetch(picked), torch.multinomial(one + 1, 2, generator=local))
    states = await trimesh.get_rng_state(procs)
    drawn = await trimesh.fetch(torch.rand_like(there))
    trimesh.set_rng_state(states, procs)
    assert torch.equal(await trimesh.fetch(torch.rand_like(there)), drawn)
    trimesh.set_rng_state(torch.get_rng_state(), procs)  # of the ranks' own generators only
    assert torch.equal(drawn, one.clone().uniform_(generator=local))
    total = there.T @ there  # partial
    kept = torch.nn.functional.dropout(total + 1, 0.5)
    assert torch.equal(await trimesh.fetch(kept), torch.empty(6, 6).bernoulli_(0.5, generator=local).div_(0.5))


async def check_one_rank_that_fails_fails_what_needs_it(procs: ProcMesh) -> None:
    """Nobody waits for a rank that has nothing to give, and what comes after that is right."""
    with procs.activate():
        own = torch.ones(2)
    bad = own.index_select(0, procs.rank_tensor("dp").reshape(1) * 9).to_global(["dp"])  # out of range where dp is 1
    one = torch.randn(2, 2)
    w = trimesh.distribute(one, procs, ["dp", None])
    for dependent in (bad, bad + w[:, 0], (bad * 2).sum()):
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.fetch(dependent)
        assert [type(error) for error in trimesh.leaves(caught.value)][:1] == [IndexError]
        assert await equal(w @ w.T, one @ one.T)


async def check_a_check_without_results_fails_what_it_has_checked(procs: ProcMesh) -> None:
    singular = trimesh.replicate(torch.zeros(3, 3), procs)
    for function in (torch.linalg.inv, torch.linalg.cholesky):
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.fetch(function(singular) + 1)
        assert all(isinstance(error, torch.linalg.LinAlgError) for error in trimesh.leaves(caught.value))
    assert (await trimesh.fetch(singular)).sum() == 0
