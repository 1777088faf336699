"""What torch makes on the way to an operation is put onto the ranks; what the user has made here is an error."""

from __future__ import annotations

import copy

import pytest

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

import torch.nn.functional as F  # noqa: E402, N812 - after the skip; as torch's own documents call it

pytestmark = [pytest.mark.real, pytest.mark.torch]


async def test_tensors_that_torch_makes_on_the_way_are_put_onto_the_ranks() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.arange(6.0).reshape(2, 3).requires_grad_()

        results = [torch.where(x > 2, x, 0.0), x[[0, 1], [1, 2]], x[:, [0, 2]], x.quantile(0.5), F.normalize(x)]
        with torch.inference_mode():
            results.append(torch.where(x > 2, x, 0.0))
        x.clamp(1, 4).square().sum().backward()

        found = [one.item(gpus=1) for one in await trimesh.fetch([*results, x.grad])]
    local = torch.arange(6.0).reshape(2, 3)
    zeroed = torch.where(local > 2, local, 0.0)
    expected = [zeroed, local[[0, 1], [1, 2]], local[:, [0, 2]], local.quantile(0.5), F.normalize(local), zeroed]
    local.requires_grad_().clamp(1, 4).square().sum().backward()  # at the bounds torch 2.14 gives no gradient
    for one, other in zip(found, [*expected, local.grad], strict=True):
        assert torch.allclose(one, other)


async def test_tensors_that_the_user_has_made_here_are_an_error_that_marks_them() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.ones(2, 3)
        local, weight, scalar = torch.ones(2, 3), torch.ones(4, 3), torch.tensor(2.0)
        mixtures = [
            lambda: x + local,
            lambda: local + x,
            lambda: x * torch.tensor(2.0),  # nobody but the interpreter's stack has it
            lambda: x == local,
            lambda: local < x,
            lambda: x @ weight.T,
            lambda: torch.where(x > 0, x, scalar),
            lambda: torch.stack([x, local]),
            lambda: x[torch.tensor([0])],
            lambda: F.linear(x, weight),  # takes the transpose
            lambda: F.linear(x, torch.ones(4, 3)),
            lambda: torch.nn.Linear(3, 4)(x),
            lambda: local.copy_(x),
        ]
        for mixture in mixtures:
            with pytest.raises(TypeError, match=r" -> .*<local tensor float32|<local tensor int64"):
                mixture()
        with pytest.raises(TypeError, match="unsupported operand"):
            x + "text"
        assert (x == None) is False  # noqa: E711 - as for any tensor


async def test_what_a_handle_cannot_show_is_refused_with_a_reason() -> None:
    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.ones(2, 3)

            with pytest.raises(TypeError, match="must be dense, got one that is sparse_coo"):
                x.to_sparse()
            with pytest.raises(TypeError, match="must not change the shape of a mesh tensor in place, got resize_"):
                x.resize_(3, 3)
            with pytest.raises(TypeError, match="the data of a mesh tensor must be a mesh tensor"):
                x.data = None
            with pytest.raises(RuntimeError, match=r"write t.detach\(\) first"):
                copy.deepcopy(x.requires_grad_() * 2)
