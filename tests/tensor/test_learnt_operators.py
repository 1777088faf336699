"""Operators that ranks have learnt run without the rules, and make what the rules would make."""

from __future__ import annotations

from typing import Any

import pytest

import trimesh
from trimesh import this_host

torch: Any = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.counting import count_rules, rules_run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.real]

WHOLE = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()


def _still(tensor: Any, number: float) -> Any:
    """Nothing of this moves a part to another rank, or makes a view that is a copy."""
    view = tensor.t().unsqueeze(0)
    copy = tensor.clone().mul_(number)
    return view * number + view, torch.stack([copy, tensor], 2).sigmoid(), copy.view(4, 2, 3).add_(1)


def _moved(tensor: Any, number: float) -> Any:
    copy = tensor + 0.0
    row = copy[1]  # its rank has it, or each has all of it
    copy.mul_(number)
    row.add_(1.0)
    return tensor.sum() + number, tensor.sum() * number, tensor.sum().view(1).expand(3) - number, copy, row * number


@pytest.mark.daily
async def test_operators_run_as_learnt_whatever_the_layout_and_the_numbers() -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        with procs.activate():
            await trimesh.call_on_shard_and_fetch(count_rules)
        tensors = [trimesh.distribute(WHOLE, procs, layout) for layout in (["dp", None], [None, "dp"])]
        ran: list[int] = []
        for case in (_still, _moved):
            for number in (0.5, -3.0):
                found = await trimesh.fetch([case(tensor, number) for tensor in tensors])
                for one in found:
                    torch.testing.assert_close(one, list(case(WHOLE, number)))
                ran += set(await rules_run(procs))
        assert ran[0] > 10
        assert ran[1] == 0


async def test_learnt_operator_that_fails_poisons_what_it_was_to_make_and_nothing_else() -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        table = trimesh.distribute(WHOLE, procs, [None, None])
        rows = [torch.tensor(row) for row in ([0, 1], [3, 2], [4, 0], [1, 1])]
        found = [torch.embedding(table, trimesh.distribute(row, procs, ["dp"])) for row in rows]
        with pytest.raises((trimesh.MeshErrorGroup, IndexError)):
            await trimesh.fetch(found[2] * 2)
        for row, one in zip(rows, found, strict=True):
            if 4 not in row:
                assert torch.equal(await trimesh.fetch(one * 2), WHOLE[row] * 2)
