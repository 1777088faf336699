"""Where torch makes its tensors: what `activate()` decides, for whom and for how long (N1)."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import trimesh
from trimesh import MeshErrorGroup, ProcMesh, this_host
from trimesh.testing import simulate

torch = pytest.importorskip("torch", reason="torch is an extra")

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack  # noqa: E402

pytestmark = [pytest.mark.torch]


def home(t: Any) -> str:
    """Return where a tensor is: the name of its mesh, or "here"."""
    return repr(t).rpartition(" on ")[2].partition("{")[0] if type(t).__name__ == "MeshTensor" else "here"


@simulate(seeds=20, per_host={"gpus": 2})
async def test_tasks_have_their_own_activation(mesh: ProcMesh) -> None:
    """N1: two tasks with meshes of their own and one with ordinary torch, between whose steps the others run."""

    async def compute(name: str, procs: ProcMesh | None, start: int) -> None:
        total: Any = None
        for step in range(3):
            if procs is None:
                made = torch.full((2,), float(start + step))
            else:
                with procs.activate():
                    await trio.lowlevel.checkpoint()
                    made = torch.full((2,), float(start + step))
                    await trio.lowlevel.checkpoint()
            assert home(made) == name
            await trio.lowlevel.checkpoint()
            total = made if total is None else total + made
        expected = [3.0 * start + 3] * 2
        values = [total] if procs is None else list((await trimesh.fetch(total)).values())
        assert [value.tolist() for value in values] == [expected] * (1 if procs is None else 2)

    async with this_host().spawn_procs({"gpus": 2}, name="others") as others, trio.open_nursery() as nursery:
        nursery.start_soon(compute, mesh.name, mesh, 1)
        nursery.start_soon(compute, "others", others, 10)
        nursery.start_soon(compute, "here", None, 100)
    assert _get_current_dispatch_mode_stack() == []


class Counts(TorchDispatchMode):
    """Somebody else's mode: counts what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))


@simulate(seeds=5)
async def test_activations_nest_and_leave_other_modes_alone(mesh: ProcMesh) -> None:
    first = mesh.slice(gpus=0)
    with mesh.activate():
        assert repr(torch.ones(1)).endswith(f"on {mesh.name}{{'gpus': 2}}>")
        with first.activate():
            assert repr(torch.ones(1)).endswith(f"on {mesh.name}{{}}>")
        with pytest.raises(KeyError), first.activate():
            raise KeyError
        assert repr(torch.ones(1)).endswith(f"on {mesh.name}{{'gpus': 2}}>")
    assert home(torch.ones(1)) == "here"

    outer, inner, late = Counts(), Counts(), Counts()
    activation = mesh.activate()
    with outer:
        activation.__enter__()
        with inner:
            assert home(torch.ones(1)) == mesh.name
            late.__enter__()
            activation.__exit__(None, None, None)  # while the others are there
            assert home(torch.ones(1)) == "here"
            late.__exit__(None, None, None)
        torch.ones(1)
    assert home(torch.ones(1)) == "here"
    assert (outer.count, inner.count, late.count) == (3, 2, 1)
    outer.__enter__()
    activation.__enter__()
    outer.__exit__(None, None, None)  # the other way round
    assert home(torch.ones(1)) == mesh.name
    activation.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == []


@simulate(seeds=5)
async def test_children_inherit_what_is_active_when_they_start(mesh: ProcMesh) -> None:
    """N1: by the context variable."""

    async def child(expected: str) -> None:
        await trio.lowlevel.checkpoint()
        assert home(torch.ones(1)) == expected

    async with trio.open_nursery() as nursery:
        with mesh.activate():
            nursery.start_soon(child, mesh.name)
        nursery.start_soon(child, "here")


@simulate(seeds=10)
async def test_simulated_ranks(mesh: ProcMesh) -> None:
    """N2: what would wait without `await` says what to write."""
    with mesh.activate():
        t = torch.ones(3)
        drawn = torch.rand(3)
        bad = torch.linalg.inv(torch.zeros(2, 2))
    assert (await trimesh.fetch_shard(t + 1, gpus=1)).tolist() == [2, 2, 2]
    assert (await trimesh.fetch_shard(drawn)).equal(await trimesh.fetch_shard(drawn, gpus=0)), "the first rank's"
    one, other = (await trimesh.fetch(drawn)).values()
    assert not torch.equal(one, other), "each rank draws from a generator of its own"
    state = torch.get_rng_state()
    with mesh.activate():
        torch.rand(3)
    await trimesh.fetch(t)
    assert torch.equal(torch.get_rng_state(), state), "and not from this one"
    with pytest.raises(MeshErrorGroup) as caught:
        await trimesh.fetch(bad)
    assert trimesh.coords(caught.value) == [{"gpus": 0}, {"gpus": 1}]
    for waits in (t.sum().item, t.tolist, lambda: str(t), t.nonzero):
        with pytest.raises(RuntimeError, match=r"write `await trimesh\.fetch\(t\)`"):
            waits()
    with pytest.raises(MeshErrorGroup, match="could not be computed") as caught:
        await trimesh.fetch(trimesh.reduce(t, "gpus", "sum"))
    texts = [str(error) for error in trimesh.leaves(caught.value)]
    assert ["use processes" in text for text in texts] == [True, True], texts


@simulate(seeds=10, supervision=trimesh.Restart("one_for_one", intensity=1_000, period=60))
async def test_tensors_are_made_anew_after_a_simulated_death(mesh: ProcMesh, faults: Any) -> None:
    with mesh.activate():
        t = torch.ones(3)
    assert (await trimesh.fetch_shard(t, gpus=1)).tolist() == [1, 1, 1]
    faults.kill(mesh.slice(gpus=1))
    with pytest.raises((MeshErrorGroup, trimesh.ProcDied)):
        for _ in range(100):
            await trimesh.fetch(t + 1)
            await trio.sleep(0.1)
    await mesh.settled()
    with mesh.activate():
        again = torch.ones(3)
    assert (await trimesh.fetch_shard(again + 1, gpus=1)).tolist() == [2, 2, 2]


@simulate(seeds=1, per_host={"gpus": 2})
async def test_the_active_mesh_is_that_of_the_innermost_block(mesh: ProcMesh) -> None:
    """N1: also in a task that was started there, and after a block that failed."""
    first = mesh.slice(gpus=0)
    seen: list[ProcMesh | None] = []

    async def look() -> None:
        seen.append(trimesh.tensor.active_mesh())

    assert trimesh.tensor.active_mesh() is None
    with mesh.activate():
        with first.activate(), trimesh.tensor.no_mesh():
            assert trimesh.tensor.active_mesh() is None
        with pytest.raises(ZeroDivisionError), first.activate():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
            assert trimesh.tensor.active_mesh() is first
            raise ZeroDivisionError
        assert trimesh.tensor.active_mesh() is mesh
    assert seen == [first]
    assert trimesh.tensor.active_mesh() is None
