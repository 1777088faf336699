"""What fails on the ranks: it poisons what depends on it and nothing else, and says where it was issued."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import trimesh
from trimesh import MeshErrorGroup, ProcMesh, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.controller.team import call_kernel  # noqa: E402 - needs torch
from trimesh.tensor.session.opening import team_of  # noqa: E402

CPU = torch.device("cpu")

pytestmark = [pytest.mark.real, pytest.mark.torch]


def inverse(t: Any) -> Any:
    """Issue what may fail on the ranks only: shapes are right whatever the values are."""
    return torch.linalg.inv(t)  # the line of the error


LINE = f"{__file__}:{inverse.__code__.co_firstlineno + 2} in inverse"


@pytest.mark.daily
async def test_failures_on_the_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trimesh")
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        await check_error_has_line_coordinates_and_traceback(procs)
        await check_one_rank_fails(procs)
        await check_aliases_are_poisoned_together(procs)
        await check_target_of_what_was_not_run_is_poisoned(procs)
        assert caplog.records == []
        with procs.activate():
            inverse(torch.zeros(2, 2))
    [record] = caplog.records  # of what nobody has fetched, and of nothing else
    assert "1 operations on procs{'gpus': 2} have failed" in record.message
    assert f"issued at {LINE}" in record.message
    assert "singular" in record.message


async def check_error_has_line_coordinates_and_traceback(procs: ProcMesh) -> None:
    with procs.activate():
        healthy = torch.ones(2, 2)
        bad = inverse(torch.zeros(2, 2))
    dependent = (bad + healthy).sum()
    with pytest.raises(MeshErrorGroup) as caught:
        await trimesh.fetch(dependent)

    assert trimesh.coords(caught.value) == [{"gpus": 0}, {"gpus": 1}]
    for error in trimesh.leaves(caught.value):
        assert isinstance(error, torch.linalg.LinAlgError)
        assert f"issued at {LINE}" in error.__notes__
        assert "Traceback (most recent call last)" in str(error.__cause__)
        where = trimesh.origin(error)
        assert where is not None
        assert where.endpoint == "aten::_linalg_check_errors"
    assert [value.sum().item() for value in (await trimesh.fetch(healthy)).values()] == [4, 4]
    with pytest.raises(MeshErrorGroup, match="could not be computed"):
        dependent.item()


async def check_one_rank_fails(procs: ProcMesh) -> None:
    with procs.activate():
        inverted = inverse(own_place(procs) * torch.eye(2))
    with pytest.raises(MeshErrorGroup) as caught:
        await trimesh.fetch(inverted)
    assert trimesh.coords(caught.value) == [{"gpus": 0}]
    assert torch.equal(await trimesh.fetch_shard(inverted, gpus=1), torch.eye(2))


def own_place(procs: ProcMesh) -> Any:
    """Return 0 on the first rank and 1 on the second."""
    team = team_of(procs, "for tests:")
    [place] = call_kernel(team, "index", "gpus", outputs=[team.engine.shapes.meta((), (), torch.int64, CPU)])
    return place


async def check_target_of_what_was_not_run_is_poisoned(procs: ProcMesh) -> None:
    """What an operation in place would have written does not stay as it was, as if nothing had failed."""
    with procs.activate():
        bad = inverse(torch.zeros(2, 2))
        target = torch.ones(2, 2)
        other = torch.ones(2, 2)
    view = target[0]
    target.add_(bad)
    for poisoned in (target, view):
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.fetch(poisoned)
        assert all(isinstance(error, torch.linalg.LinAlgError) for error in trimesh.leaves(caught.value))
    assert (await trimesh.fetch_shard(other, gpus=0)).sum() == 4


async def check_aliases_are_poisoned_together(procs: ProcMesh) -> None:
    with procs.activate():
        base = torch.zeros(4, 4)
        other = torch.zeros(4, 4)
        view = base[0]
        wrong = torch.tensor([9])
    base.index_fill_(0, wrong, 1.0)  # an index that no rank has
    for poisoned in (base, view, view + 1):
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.fetch(poisoned)
        assert all(isinstance(error, IndexError) for error in trimesh.leaves(caught.value))
    assert (await trimesh.fetch_shard(other, gpus=0)).sum() == 0
