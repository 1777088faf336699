"""Tensors move between ranks of one mesh and of two; gradients, errors and ends of processes go the same way."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.supervised import reading
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Died, Isolate, ProcDied, ShapeError, limits, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.rank.function_parts import Here  # noqa: E402 - imports torch
from trimesh.tensor.rank.moves import Moves  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.daily, pytest.mark.torch]

LARGE = 1 << 20
"""Elements that do not fit into a message."""


async def test_who_sends_waits_for_room_unless_the_schedule_bounds_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "TENSOR_MOVE_BYTES", 10)
    lender = SimpleNamespace(revoke=lambda: None, granted=lambda _: None)
    bulk = SimpleNamespace(take_block=lambda nbytes: memoryview(bytearray(nbytes)), register=lambda *_: lender)
    proc: Any = SimpleNamespace(on_gone=[], bulk=bulk)
    reader: Any = object()
    moves = Moves(proc)
    moves.lend((0, 1), await moves.stage(8), [reader])  # type: ignore[arg-type]
    at_once = await moves.stage(8, False)
    staged: list[memoryview] = []

    async def stage() -> None:
        staged.append(await moves.stage(8))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage)
        nursery.start_soon(stage)
        await trio.testing.wait_all_tasks_blocked()
        assert staged == []
        moves.unstage(at_once)
        await trio.testing.wait_all_tasks_blocked()
        assert staged == []  # the first is still to be read
        moves.take_back((0, 1))  # type: ignore[arg-type]
    assert len(staged) == 2


async def test_tensor_moves_rank_by_rank_and_from_one_to_all() -> None:
    async with this_host().spawn_procs({"gpus": 4}, preload=("torch",)) as procs:
        first, second = procs.slice(gpus=slice(0, 2)), procs.slice(gpus=slice(2, 4))
        with procs.activate():
            large = torch.arange(LARGE, dtype=torch.float64).reshape(2, -1).t()  # not contiguous
        half = large.slice_mesh(gpus=slice(0, 2))
        with first.activate():
            ones = torch.ones(2, 3)
            empty = torch.ones(0, 3)

        moved = (ones + 1).to_mesh(second)
        ones.zero_()  # what was sent is a copy
        assert (moved * 3).sum().item() == 36  # nothing else has been sent when this waits
        assert (await trimesh.fetch(empty.to_mesh(second))).values()[0].shape == (0, 3)
        expected = torch.arange(LARGE, dtype=torch.float64).reshape(2, -1).t()
        assert all(torch.equal(one, expected) for one in (await trimesh.fetch(half.to_mesh(second))).values())

        shifted = large[:3].slice_mesh(gpus=slice(0, 3)).to_mesh(procs.slice(gpus=slice(1, 4)))
        assert all(torch.equal(one, expected[:3]) for one in (await trimesh.fetch(shifted)).values())
        everywhere = moved.slice_mesh(gpus=1).to_mesh(procs)
        assert [one.tolist() for one in (await trimesh.fetch(everywhere)).values()] == [[[2.0] * 3] * 2] * 4


async def test_sliced_tensor_is_the_same_memory() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            whole = torch.zeros(2)
        part = whole.slice_mesh(hosts=1, gpus=0)
        part += 5
        assert part.sum().item() == 10
        values = await trimesh.fetch(whole)
        del part
        assert [one.tolist() for one in values.values()] == [[0, 0], [0, 0], [5, 5], [0, 0]]

        with pytest.raises(ShapeError, match="gpus"):
            whole.slice_mesh(gpus=7)
        with pytest.raises(ShapeError, match=r"rank by rank.*slice_mesh"):
            whole.to_mesh(procs.slice(hosts=0))
        with pytest.raises(TypeError, match="a mesh of processes"):
            whole.to_mesh("cuda")  # type: ignore[arg-type]
        assert (await trimesh.fetch(whole.to_mesh(procs.rename(gpus="tp")))).item(hosts=1, tp=0).tolist() == [5, 5]


async def test_gradients_move_back() -> None:
    async with this_host().spawn_procs({"gpus": 3}, preload=("torch",)) as procs:
        stages = [procs.slice(gpus=index) for index in range(3)]
        local = [torch.linspace(0.1, 0.9, 6).reshape(2, 3), torch.linspace(-1, 1, 12).reshape(3, 4)]
        with stages[0].activate():
            weight = torch.linspace(0.1, 0.9, 6).reshape(2, 3).requires_grad_()
        with stages[1].activate():
            other = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        (weight.sin().to_mesh(stages[1]) @ other).to_mesh(stages[2]).square().sum().backward()
        for one in local:
            one.requires_grad_()
        (local[0].sin() @ local[1]).square().sum().backward()
        torch.testing.assert_close(await trimesh.fetch_shard(weight.grad), local[0].grad)
        torch.testing.assert_close(await trimesh.fetch_shard(other.grad), local[1].grad)

        with procs.activate():
            shared = torch.full((2,), 3.0).requires_grad_()
        fanned = shared.slice_mesh(gpus=1).to_mesh(procs)  # each rank's square is differentiated there
        fanned.square().sum().backward()
        assert [one.tolist() for one in (await trimesh.fetch(shared.grad)).values()] == [[0, 0], [18, 18], [0, 0]]


async def test_tensor_moves_to_another_mesh_and_so_do_errors() -> None:
    async with (
        this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as trainers,
        this_host().spawn_procs({"gpus": 2}, name="generators", preload=("torch",)) as generators,
    ):
        with trainers.activate():
            weights = torch.ones(LARGE)
            spoiled = weights[:3][torch.tensor([7])]  # no such element: known to the ranks alone
        assert (weights * 2).to_mesh(generators).sum().item() == 2 * LARGE
        moved = spoiled.to_mesh(generators) + 1
        with pytest.raises(trimesh.MeshErrorGroup) as caught:
            await trimesh.fetch(moved)
        for error in trimesh.leaves(caught.value):
            assert isinstance(error, IndexError)
            assert trimesh.origin(error).mesh == "procs"  # type: ignore[union-attr]
            assert any("spoiled" in note or "test_movement.py" in note for note in error.__notes__)
        assert weights.to_mesh(generators).sum().item() == LARGE  # what did not depend on it lives on


async def test_death_of_the_source_reaches_who_waits_at_the_target() -> None:
    @trimesh.remote(propagate=lambda t: t)
    def last(t: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return t

    async with (
        this_host().spawn_procs({"gpus": 3}, preload=("torch",), supervision=Isolate()) as procs,
        reading(procs) as log,
    ):
        first, second = procs.slice(gpus=0), procs.slice(gpus=1)
        with procs.activate():
            lives = torch.ones(2)
        with first.activate():
            moved = last(torch.ones(LARGE)).to_mesh(second) + 1
        with trio.fail_after(HANG_SECONDS), pytest.RaisesGroup(ProcDied):
            await trimesh.fetch(moved)
        await log.wait(Died)  # the rank that told of it may have known before its owner
        rest = lives.slice_mesh(gpus=slice(1, 3))
        assert (rest + 1).sum().item() == 4
        with pytest.raises(ProcDied):
            lives.slice_mesh(gpus=0).to_mesh(second)


async def test_copies_go_when_they_have_been_read() -> None:
    def lent(rank: Any) -> int:
        return len(rank.outside.proc.bulk.registrations())

    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        first, second = procs.slice(gpus=0), procs.slice(gpus=1)
        with first.activate():
            large = torch.ones(LARGE, dtype=torch.float64)
        for _ in range(5 * limits.TENSOR_MOVE_BYTES // (4 * LARGE * 8)):  # more than may be kept at one time
            moved = large.to_mesh(second)
        assert moved.sum().item() == LARGE
        with trio.fail_after(HANG_SECONDS), first.activate():
            while await trimesh.call_on_shard_and_fetch(lent, Here(), shard={}):
                pass  # the word that the last has been taken comes by another link
