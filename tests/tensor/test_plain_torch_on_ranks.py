"""Torch's own compiler and distributed tensors in functions on the ranks; what of that is refused at the controller."""

from __future__ import annotations

import pickle
import re
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


def placed(kind: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds = {
        "whole": Replicate(),
        "parts": Partial(),
        "largest": Partial("max"),
        "strided": _StridedShard(0, split_factor=2),
    }
    return kinds.get(kind) or Shard(int(kind))


@trimesh.remote(propagate="inspect")
def pointers(*tensors: Any) -> Any:
    return [torch.tensor([getattr(one, "_local_tensor", one).data_ptr()]) for one in tensors]


@trimesh.remote(propagate="inspect")
def joined_and_apart(t: Any, mesh: Any, kind: str) -> Any:
    """Make a `DTensor` of the tensors of the ranks, and one of each again."""
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(t, mesh, [placed(kind)])
    return whole, whole.to_local()


@trimesh.remote(propagate="inspect")
def made_wrong(t: Any, group: Any, mesh: Any, kind: str) -> Any:
    """Make what is no global tensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    if kind == "other mesh":
        return DTensor.from_local(t, DeviceMesh.from_group(group, "cpu"), [placed("0")])
    if kind == "uneven":
        rows = t[: 1 + group.rank()]
        return DTensor.from_local(rows, mesh, [placed("0")], shape=torch.Size([3, 3]), stride=(3, 1))
    return DTensor.from_local(t, mesh, [placed(kind)])


@trimesh.remote
def scaled_and_squared(t: Any, factor: float) -> Any:
    return (t * factor).square()


@trimesh.remote(propagate=lambda t, _: t)
def tripled_in_place(t: Any, mesh: Any) -> Any:
    """Write to a `DTensor` by torch's own rules."""
    assert t.device_mesh is mesh
    assert mesh.mesh_dim_names == ("gpus",)
    assert t.sum().full_tensor() == 66  # by a collective
    return t.mul_(3)


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
            with pytest.raises(TypeError, match=r"cannot move onto a mesh, got .*: compile what runs on the ranks"):
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


async def test_global_tensors_are_distributed_tensors_in_functions_and_back_on_the_same_memory() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        plain, mesh = torch.arange(12.0).reshape(4, 3), procs.device_mesh()
        with procs.activate():
            own = torch.arange(12.0).reshape(4, 3) + procs.rank_tensor("gpus")
        wholes = {"0": torch.cat([plain, plain + 1]), "1": torch.cat([plain, plain + 1], 1), "parts": 2 * plain + 1}
        for kind in ("0", "1", "parts"):
            whole, part = joined_and_apart(own, mesh, kind)
            assert torch.equal(await trimesh.fetch(whole), wholes[kind])
            seen = [torch.stack(list(one.values())) for one in await trimesh.fetch(pointers(own, whole, part))]
            assert torch.equal(seen[0], seen[1])
            assert torch.equal(seen[0], seen[2])
        whole, _ = joined_and_apart(trimesh.replicate(plain, procs).local([None, None]), mesh, "whole")
        assert await trimesh.placements(whole * 1) == [None, None]

        x = trimesh.distribute(plain, procs, ["gpus", None])
        row = x[1]  # gathered, and a view all the same
        again = tripled_in_place(x, mesh)
        again.add_(1)
        for found in (x, again):
            assert torch.equal(await trimesh.fetch(found), 3 * plain + 1)
        assert torch.equal(await trimesh.fetch(row), 3 * plain[1] + 1)

        here, there = plain.clone().requires_grad_(), trimesh.distribute(plain, procs, [None, "gpus"]).requires_grad_()
        scaled_and_squared(there, 2.0).sum().backward()
        (here * 2.0).square().sum().backward()
        assert torch.equal(await trimesh.fetch(there.grad), here.grad)


async def test_distributed_tensors_that_are_no_global_ones_are_refused_in_words() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        mesh, group = procs.device_mesh(), procs.process_group("gpus")
        with procs.activate():
            own = torch.arange(12.0).reshape(4, 3)
        for kind, said in {
            "other mesh": "on the device mesh of the ranks.*`procs.device_mesh\\(\\)` as an argument",
            "uneven": r"cut as torch.chunk cuts, \[\d, 3\] of \[3, 3\] on this rank, got",
            "largest": r"sharded, replicated or partial .* got .*t.redistribute",
            "strided": r"sharded, replicated or partial .* got .*t.redistribute",
        }.items():
            with pytest.raises(trimesh.MeshErrorGroup) as caught:
                made_wrong(own, group, mesh, kind)
            assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [TypeError] * 2
            assert all(re.search(said, str(leaf)) for leaf in trimesh.leaves(caught.value))
        x = trimesh.distribute(torch.eye(4), procs, ["gpus", None])
        apart = trimesh.remote(scaled_and_squared.function, returns_global=False)(x, 1.0)
        with pytest.RaisesGroup(pytest.RaisesExc(TypeError, match="returned DTensor float32.*`returns_global`")):
            await trimesh.fetch(apart)
        with pytest.RaisesGroup(pytest.RaisesExc(TypeError, match=r"returned a DTensor: return t.full_tensor\(\)")):
            await trimesh.call_on_shard_and_fetch(scaled_and_squared, x, 1.0)
        with pytest.RaisesGroup(pytest.RaisesExc(TypeError, match=r"write device_mesh\(\) of the view")):
            await trimesh.call_on_shard_and_fetch(scaled_and_squared, own.slice_mesh(gpus=0), mesh)
        with pytest.raises(TypeError, match="can only be an argument of functions under"):
            pickle.dumps(mesh)
