"""Torch's own compiler and distributed tensors in functions on the ranks; what of that is refused at the controller."""

from __future__ import annotations

from typing import Any

import pytest

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.timeout(300)]  # dynamo is imported beside other load

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing


def hidden(x: Any, w: Any) -> Any:
    return nn.functional.gelu(x @ w).sum(1)


@trimesh.remote(propagate=hidden)
def compiled_hidden(x: Any, w: Any) -> Any:
    return torch.compile(hidden, backend="aot_eager", fullgraph=True)(x, w)


@trimesh.remote(propagate=lambda x, _: (x, torch.empty(3)))
def doubled_and_summed(x: Any, group: Any) -> tuple[Any, Any]:
    """Look at the tensors of the ranks as one `DTensor`, on their memory."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("gpus",))
    rows = DTensor.from_local(x, mesh, [Shard(0)])
    rows.mul_(2)
    local = rows.to_local()
    assert local.data_ptr() == x.data_ptr()
    return local, rows.sum(0).full_tensor()


@pytest.mark.stress  # dynamo alone takes seconds to import, here and there
async def test_the_compiler_of_torch_is_for_functions_on_ranks_and_not_for_modules_on_a_mesh() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        with procs.activate():
            x, w = torch.linspace(0, 1, 12).reshape(4, 3), torch.eye(3)
        here, there = w.clone().requires_grad_(), torch.eye(3, requires_grad=True)
        plain = torch.linspace(0, 1, 12).reshape(4, 3)
        found, expected = compiled_hidden(x, here), hidden(plain, there)
        found.sum().backward()
        expected.sum().backward()
        assert torch.allclose(await trimesh.fetch_shard(found, gpus=1), expected)
        assert torch.allclose(await trimesh.fetch_shard(here.grad, gpus=0), there.grad)

        whole = nn.Linear(3, 3)
        whole.compile(backend="eager")
        for module in (whole, nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"))):
            with pytest.raises(TypeError, match="cannot move onto a mesh, got one: compile what runs on the ranks"):
                trimesh.module_to_mesh(module, procs)
            assert type(next(module.parameters())) is nn.Parameter

        rows = trimesh.distribute(torch.eye(4), procs, ["gpus", None])
        moved = trimesh.module_to_mesh(nn.Linear(4, 3), procs)
        compiled = torch.compile(hidden, backend="eager")
        of_both = torch.compile(lambda here: here + x.sum(), backend="eager")
        reduced = torch.compile(lambda t: t.reduce("gpus"), backend="eager")
        for refused in (
            lambda: compiled(x, w),
            lambda: compiled(rows, rows),
            lambda: of_both(torch.ones(3)),
            lambda: reduced(x),
            lambda: torch.compile(moved, backend="eager")(rows),
        ):
            with pytest.raises(
                TypeError, match="cannot compile operations on tensors of a mesh, got some in a compiled"
            ):
                refused()
        kept_out = torch.compiler.disable(lambda: hidden(x, w))
        around = torch.compile(lambda: [kept_out()], backend="eager")
        assert torch.allclose(await trimesh.fetch_shard(around()[0], gpus=0), hidden(plain, torch.eye(3)))


async def test_functions_on_ranks_make_distributed_tensors_of_the_memory_of_theirs() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        with procs.activate():
            x = torch.linspace(0, 1, 12).reshape(4, 3)
        back, total = doubled_and_summed(x, procs.process_group("gpus"))
        plain = torch.linspace(0, 2, 12).reshape(4, 3)
        assert torch.allclose(await trimesh.fetch_shard(total, gpus=0), 2 * plain.sum(0))
        assert torch.allclose(await trimesh.fetch_shard(x, gpus=0), plain)  # written through the DTensor
        back.add_(1)  # and what came back is the same memory
        assert torch.allclose(await trimesh.fetch_shard(x, gpus=1), plain + 1)
