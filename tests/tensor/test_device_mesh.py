"""Meshes for tensors by one constructor: what is run on them, and what is left when a rank dies."""

from __future__ import annotations

from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

import trimesh  # noqa: E402 - after the skip
from trimesh import DeviceMesh, DeviceMeshError, Isolate, ProcMesh, limits  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]


def scaled(t: Any, factor: float = 2.0) -> Any:
    """Go by value: it is no remote function."""
    return t * factor


@pytest.mark.daily
async def test_function_runs_on_each_rank_with_its_part() -> None:
    async with DeviceMesh({"dp": 2}) as mesh:
        assert type(mesh) is ProcMesh
        whole = torch.arange(8.0).reshape(4, 2)
        cut = trimesh.distribute(whole, mesh, sharding_spec={"dp": 0})
        made = mesh.run(scaled, cut, factor=3.0)
        assert torch.equal(await trimesh.fetch_shard(made, dp=1), whole[2:] * 3)
        assert torch.equal(await trimesh.fetch(made.to_global(["dp", None])), whole * 3)
        again = mesh.run(scaled, made)  # a tensor on each rank
        assert torch.equal(await trimesh.fetch_shard(again, dp=0), whole[:2] * 6)
        assert mesh.run("torch.ones", 3).sum().item() == 3  # without tensors: on this mesh
        with pytest.raises(TypeError, match="write one of them"):
            trimesh.distribute(whole, mesh, ["dp", None], sharding_spec={"dp": 0})


async def test_function_of_another_mesh_is_refused() -> None:
    async with DeviceMesh({"dp": 2}) as mesh:
        one = mesh.slice(dp=0)
        here = one.run(torch.ones, 3)
        assert len(await trimesh.fetch(mesh.run(torch.ones, 3))) == 2
        assert (await trimesh.fetch_shard(here)).tolist() == [1, 1, 1]
        with pytest.raises(TypeError, match=r"runs on .* got a tensor on"):
            mesh.run(scaled, here)


async def test_function_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is bounded, and the function that runs again is not encoded again."""
    from trimesh.tensor.ops import function, on_mesh

    numbered: list[str] = []
    number = function.RemoteFunction._number

    def counted(self: Any, team: Any) -> int:
        if team not in self._numbers:
            numbered.append(self.__name__)
        return number(self, team)

    monkeypatch.setattr(function.RemoteFunction, "_number", counted)
    async with DeviceMesh({"dp": 1}) as mesh:
        t = mesh.run(torch.ones, 3)
        for _ in range(3):
            t = mesh.run(scaled, t)
        assert t.sum().item() == 24
    assert numbered == ["ones", "scaled"]
    assert on_mesh._remote.cache_info().maxsize == limits.TENSOR_RUN_FUNCTIONS


async def test_healed_mesh_computes_again() -> None:
    """One `except` takes the bare error of an operation and the group of a block."""
    async with DeviceMesh({"dp": 2}, supervision=Isolate()) as mesh:
        whole = torch.arange(4.0)
        lost = trimesh.distribute(whole, mesh, sharding_spec=("dp",))
        await mesh.kill([{"dp": 1}])
        with pytest.raises(DeviceMeshError) as caught:
            (lost + 1).sum().item()
        assert trimesh.coords(caught.value) == [{"dp": 1}]
        await trimesh.heal(mesh)
        with pytest.raises(DeviceMeshError):
            await trimesh.fetch(lost + 1)
        assert trimesh.distribute(whole, mesh, sharding_spec=("dp",)).sum().item() == 6
    assert issubclass(trimesh.MeshErrorGroup, DeviceMeshError)


async def test_mesh_that_was_not_started_says_so() -> None:
    mesh = DeviceMesh({"dp": 1})
    with pytest.raises(AttributeError, match="has not been started"):
        mesh.activate()
    mesh = DeviceMesh({"dp": 1})  # of the other one an error has told
    with pytest.warns(RuntimeWarning, match=r"DeviceMesh\({'dp': 1}\), made at .*test_device_mesh"):
        del mesh
    with pytest.raises(RuntimeError, match="`async with this_host"):
        await DeviceMesh({"dp": 1})
    with pytest.raises(trimesh.ShapeError):
        DeviceMesh({"dp": -1})
    with trio.CancelScope() as scope:
        scope.cancel()
        async with DeviceMesh({"dp": 1}):
            raise AssertionError
    assert scope.cancelled_caught
