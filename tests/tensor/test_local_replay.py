"""Replays that ranks have learnt run without the rules, and leave what the rules would leave."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra")


import trimesh  # noqa: E402 - after the skip
from trimesh import this_host  # noqa: E402
from trimesh.tensor import ParallelPlan  # noqa: E402

nn: Any = torch.nn

from tests.tensor.counting import count_rules, rules_run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.real]

PRELOAD = ("torch", "torch.distributed.tensor")
CALLS = 7
"""Three that are recorded, one that runs by the rules and is learnt, then those that run by what was learnt."""


def of_kind(traffic: Any, name: str) -> int:
    return sum(one.count for one in traffic if one.name == name)


async def fetched(tensors: Any) -> list[Any]:
    return list(await trimesh.fetch([one.detach() for one in tensors]))


@trimesh.remote
def doubled(t: Any) -> Any:
    return t * 2


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 12), nn.Dropout(0.3)

    def forward(self, text: Any) -> Any:
        hidden = self.norm(self.embed(text))
        return self.down(self.dropout(nn.functional.silu(self.up(hidden))))


def make_step(net: Any, optimizer: Any) -> Any:
    """Return a step that does not zero its gradients in the end: the next one starts with them."""

    def step(text: Any) -> Any:
        loss = nn.functional.cross_entropy(net(text).flatten(0, 1), text.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        for one in net.parameters():
            one.grad.mul_(0.5)
        return loss, norm

    return step


@pytest.mark.daily
async def test_learnt_steps_equal_those_that_are_called_and_run_no_rules() -> None:
    torch.manual_seed(0)
    first = Net()
    second = copy.deepcopy(first)
    text = torch.randint(0, 12, (4, 6))
    async with this_host().spawn_procs({"a": 2}, preload=PRELOAD, setup=count_rules) as procs:
        nets = [trimesh.module_to_mesh(one, procs, ParallelPlan.data("a")) for one in (first, second)]
        plain, step = (make_step(one, torch.optim.AdamW(one.parameters(), lr=0.1, fused=True)) for one in nets)
        step = trimesh.compile(step)
        there = trimesh.distribute(text, procs, ["a", None])
        whole = trimesh.replicate(text, procs)
        ran: list[list[int]] = []
        sums: list[int] = []
        times: list[list[int]] = []
        for number in range(CALLS):
            results = []
            for one in (plain, step):
                trimesh.manual_seed(number, procs)
                before = await trimesh.tensor.traffic(procs)
                await rules_run(procs)
                with procs.activate(global_tensors=True):
                    results.append(one(there))
                after = await trimesh.tensor.traffic(procs)
                sums.append(after.sent("a") - before.sent("a"))
                times.append([of_kind(one, "allreduce_coalesced") for one in (before, after)])
                ran.append(await rules_run(procs))
            for mine, theirs in zip(await fetched(results[0]), await fetched(results[1]), strict=True):
                assert torch.equal(mine, theirs), number
            assert sums[-1] == sums[-2] > 0
        assert [new - old for old, new in times[-2:]] == [1, 1], "all gradients are added up at once"
        assert min(ran[0]) > 0
        assert ran[-1] == [0, 0]
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(await trimesh.fetch(one.detach()), await trimesh.fetch(other.detach()))
            assert torch.equal(await trimesh.fetch(one.grad), await trimesh.fetch(other.grad))
        # What lies otherwise is computed, too, and learnt anew.
        for _ in range(2):
            with procs.activate(global_tensors=True):
                trimesh.manual_seed(1, procs)
                expected = plain(whole)[0].item()
                trimesh.manual_seed(1, procs)
                assert step(whole)[0].item() == expected


async def test_what_fails_in_a_learnt_replay_leaves_what_the_rules_would_leave() -> None:
    def pick(table: Any, index: Any, kept: Any) -> Any:
        kept += 1
        twice = doubled(table)
        chosen = twice.index_select(0, index)
        table += 1
        return chosen, table * 3, twice.sum(0)

    async with this_host().spawn_procs({"a": 2}, preload=PRELOAD, setup=count_rules) as procs:
        good, bad = (trimesh.replicate(torch.tensor(one), procs) for one in ([1, 2], [1, 99]))
        tables = [trimesh.distribute(torch.arange(8.0).reshape(4, 2), procs, [None, "a"]) for _ in range(2)]
        kept = [trimesh.distribute(torch.zeros(4), procs, ["a"]) for _ in range(2)]
        replayed = trimesh.compile(pick)
        for number in range(CALLS):
            index = bad if number == CALLS - 2 else good
            results = [one(table, index, at) for one, table, at in zip((pick, replayed), tables, kept, strict=True)]
            if index is bad:
                for chosen, more, total in results:
                    with pytest.RaisesGroup(IndexError):
                        await trimesh.fetch(chosen)
                    expected = 3 * (torch.arange(8.0).reshape(4, 2) + number + 1)
                    assert torch.equal(await trimesh.fetch(more), expected)
                    assert torch.equal(await trimesh.fetch(total), 2 * (expected / 3 - 1).sum(0))
                continue
            for mine, theirs in zip(await fetched(results[0]), await fetched(results[1]), strict=True):
                assert torch.equal(mine, theirs), number
        assert torch.equal(await trimesh.fetch(kept[1]), torch.full([4], float(CALLS)))


async def test_learnt_sequence_is_not_for_inputs_that_lie_otherwise() -> None:
    """Other strides, one tensor twice, two of one memory, other data, a poisoned input: as without what was learnt."""

    def step(x: Any, y: Any, chosen: Any) -> Any:
        total = x @ y
        x.mul_(2.0)  # shows whether `y` has the same memory
        return total, x - y, y.index_select(0, chosen)

    def given(way: str, x: Any, y: Any) -> tuple[Any, Any]:
        return {"strides": (x.t(), y), "twice": (x, x), "one memory": (x, x.t())}.get(way, (x, y))

    async with this_host().spawn_procs({"a": 2}, preload=PRELOAD) as procs:
        bad = trimesh.replicate(torch.tensor([0, 1, 2, 99]), procs)
        others = ("strides", "twice", "one memory", "poison", "index")
        for number, way in enumerate([*["plain"] * CALLS, *others, "plain"]):
            plain = [torch.arange(16.0).reshape(4, 4) + number + one for one in (0, 1)]
            x, y = (trimesh.replicate(one, procs) for one in plain)
            chosen = torch.tensor([1, number % 4, 0, 2])
            expected: list[Any] = list(step(*given(way, *plain), chosen))
            if way == "poison":
                x, expected[:2] = x.index_select(0, bad), [None, None]
            elif way == "index":
                expected[2] = None
            there = bad if way == "index" else trimesh.replicate(chosen, procs)
            for one, right in zip(step(*given(way, x, y), there), expected, strict=True):
                if right is None:
                    with pytest.RaisesGroup(IndexError):
                        await trimesh.fetch(one)
                else:
                    assert torch.equal(await trimesh.fetch(one), right), (number, way)


@pytest.mark.daily
async def test_sequence_goes_on_by_the_rules_from_a_result_of_another_size() -> None:
    def step(x: Any) -> Any:
        total = x.sum(0)  # parts of a sum
        first = total.split(1, 1)[0]
        first.copy_(first.detach() * 2)
        return torch.unique_consecutive(first.detach().round()), total

    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        for number in range(CALLS):
            torch.manual_seed(number)
            x = torch.randn(2, 3, 4, 6)
            there = step(trimesh.distribute(x, procs, ["dp", None, None, None]))
            for mine, theirs in zip(step(x.clone()), await fetched(there), strict=True):
                torch.testing.assert_close(mine, theirs)


async def test_operators_of_learnt_replays_are_counted_once() -> None:
    def step(x: Any) -> Any:
        total = x.sum(0)
        first = total.split(1, 1)[0]
        first.copy_(first.detach() * 2)
        return torch.unique_consecutive(first.detach().round())  # runs as it is

    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        x = torch.randn(2, 3, 4, 6)
        operators: list[int] = []
        for _ in range(CALLS):
            there = step(trimesh.distribute(x, procs, ["dp", None, None, None]))
            torch.testing.assert_close(await trimesh.fetch(there), step(x.clone()))
            operators.append((await trimesh.tensor.fallbacks(procs)).operators)
        assert len({now - before for before, now in pairwise(operators)}) == 1


async def test_views_that_are_made_again_see_writes_and_stay_apart() -> None:
    def step(x: Any, bias: Any) -> Any:
        first = x.t() @ bias  # a view, made again below
        x.detach().mul_(2.0)
        second = x.t() @ bias + x.detach().t().sum()
        mine, same = x.t(), x.t()
        mine.add_(1.0)
        return first, second, mine, same

    async with this_host().spawn_procs({"a": 2}, preload=PRELOAD) as procs:
        compiled = trimesh.compile(step)
        for _ in range(CALLS):
            x, bias = torch.arange(12.0).reshape(4, 3), torch.arange(4.0)
            there = [trimesh.distribute(x, procs, ["a", None]), trimesh.distribute(bias, procs, ["a"])]
            found = compiled(*there)
            assert found[2] is not found[3]
            for one, other in zip(await fetched(found), step(x, bias), strict=True):
                torch.testing.assert_close(one, other)
        assert compiled.is_recorded
