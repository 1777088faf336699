"""Remote functions: what they are given and return, how that is known before, how they fail and are differentiated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.daily, pytest.mark.torch]


@trimesh.remote
def scaled(t: Any, factor: float) -> Any:
    """Go by name: ranks import this module."""
    return t * factor


@trimesh.remote(propagate=lambda batch, **_: {"sum": torch.empty(()), "rows": [torch.Size([2, 3]), None]})
def summary(batch: dict[str, Any], *, names: list[str]) -> dict[str, Any]:
    """Take and return trees."""
    assert names == ["one", "two"]
    total = torch.tensor(float(sum(batch["rows"].flatten().tolist())))  # fake tensors cannot do this
    return {"sum": total, "rows": [batch["rows"].t().contiguous().t(), None]}


@trimesh.remote(propagate="inspect")
def positive(t: Any) -> Any:
    """Return as many as there are."""
    return t[t > 0]


async def test_function_runs_on_every_rank_with_its_tensors() -> None:
    local = 10.0

    @trimesh.remote
    def shifted(t: Any) -> Any:
        return t + local  # a function of a function goes by value, with what it closes over

    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            rows = torch.arange(6.0).reshape(2, 3)
            eye = trimesh.remote("torch.eye")(2)  # without tensors it runs where others are made
            seen: list[str] = []
            trimesh.remote(lambda t: seen.append(type(t).__name__) or t.clone())(rows)
            assert seen == ["FakeTensor"]
        assert shifted(scaled(rows, 2.0)).sum().item() == 90
        assert [one.tolist() for one in (await trimesh.fetch(eye)).values()] == [[[1, 0], [0, 1]]] * 2

        made: Any = summary({"rows": rows}, names=["one", "two"])
        assert made["sum"].item() == 15
        assert made["rows"][1] is None
        assert made["rows"][0].stride() == (3, 1)  # as was said here, whatever the function has made
        assert torch.equal(await trimesh.fetch_shard(made["rows"][0].view(6), gpus=1), torch.arange(6.0))

        assert positive(rows - 3).shape == (2,)
        assert (await trimesh.fetch_shard(positive(rows - 3), gpus=0)).tolist() == [1, 2]

        with procs.activate():
            pids = await trimesh.call_on_shard_and_fetch("os.getpid")
        assert len({os.getpid(), *pids.values()}) == 3
        found = await trimesh.call_on_shard_and_fetch(
            lambda t, name: (name, t.tolist()), rows[0], "it", shard={"gpus": 1}
        )
        assert found == ("it", [0, 1, 2])


async def test_cached_function_is_run_here_once_for_arguments_alike() -> None:
    runs: list[Any] = []

    def doubled(t: Any, times: int) -> Any:
        runs.append(tuple(t.shape))
        return t.repeat(times)

    cached = trimesh.remote(doubled, propagate="cached")
    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            one, two = torch.ones(2), torch.ones(3)
        shapes = [tuple(cached(*args).shape) for args in [(one, 2), (one, 2), (one, 3), (two, 2)]]
        assert shapes == [(4,), (4,), (6,), (6,)]
        assert runs == [(2,), (2,), (3,)]
        assert cached(one, 2).sum().item() == 4


async def test_gradient_goes_through_a_function_on_the_ranks() -> None:
    @trimesh.remote
    def pair(a: Any, b: Any) -> Any:
        return a * b.sin(), (a > 0).sum()

    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            a = torch.linspace(-1, 1, 4).requires_grad_()
            b = torch.linspace(1, 2, 4).requires_grad_()
            c = torch.ones(4)
        product, count = pair(a, b)
        assert count.item() == 2
        assert not count.requires_grad
        (product * product).sum().backward()
        pair(c, a.detach())  # nothing to differentiate: the ranks keep nothing
        local = [torch.linspace(-1, 1, 4).requires_grad_(), torch.linspace(1, 2, 4).requires_grad_()]
        (local[0] * local[1].sin()).square().sum().backward()
        for mine, theirs in zip((a, b), local, strict=True):
            torch.testing.assert_close(await trimesh.fetch_shard(mine.grad, gpus=1), theirs.grad)


async def test_failing_function_poisons_its_results_alone() -> None:
    @trimesh.remote(propagate=lambda t: t)
    def failing(t: Any) -> Any:
        raise KeyError("no such thing")

    @trimesh.remote(propagate=lambda t: torch.empty(7))
    def other_shape(t: Any) -> Any:
        return t

    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.ones(2)
        for function, kind, text in [(failing, KeyError, "no such thing"), (other_shape, TypeError, r"float32\[7\]")]:
            with pytest.RaisesGroup(pytest.RaisesExc(kind, match=text)) as caught:
                await trimesh.fetch(function(t) + 1)
            error = next(trimesh.leaves(caught.value))
            assert "Traceback" in str(error.__cause__)
            assert any("test_failing_function_poisons" in note for note in error.__notes__)
        with pytest.RaisesGroup(KeyError):
            await trimesh.call_on_shard_and_fetch(failing, t, shard={"gpus": 0})
        assert t.sum().item() == 2


async def test_wrong_calls_are_refused_before_anything_is_sent() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.ones(2)
        with pytest.raises(TypeError, match=r"(?s)scaled\(.* -> <local tensor float32\[2\]>"):
            scaled(t, torch.ones(2))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"(?s)scaled\(.* -> .*slice_mesh"):
            scaled(t, t.slice_mesh(gpus=0))
        with pytest.raises(TypeError, match=r"without data, which raised.*'inspect'"):
            trimesh.remote(lambda one: one.sum().item())(t)
        with pytest.raises(TypeError, match=r"must return tensors.*call_on_shard_and_fetch"):
            trimesh.remote(lambda _: 3)(t)
        with pytest.raises(RuntimeError, match=r"with mesh.activate\(\): scaled"):
            scaled(1, 2.0)
        with pytest.raises(ValueError, match="propagate must be"):
            trimesh.remote(len, propagate="sometimes")  # type: ignore[call-overload]
        assert scaled(t, 3.0).sum().item() == 6


async def test_functions_are_refused_where_nothing_is_pickled() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",), pickle="off") as procs:
        with procs.activate():
            t = torch.ones(2)
        with pytest.raises(TypeError, match=r"pickle='off'.*write endpoints"):
            scaled(t, 2.0)
        moved = t.slice_mesh(gpus=0).to_mesh(procs.slice(gpus=1))  # tensors move all the same
        assert moved.sum().item() == 2


async def test_ranks_begin_while_nothing_but_something_else_is_waited_for(tmp_path: Path) -> None:
    """What a turn of the loop has issued leaves with that turn, although the caller asks the ranks for nothing."""
    path = tmp_path / "begun"
    os.mkfifo(path)

    @trimesh.remote(propagate=lambda t: t)
    def begin(t: Any) -> Any:
        with path.open("wb") as begun:
            begun.write(b"!")
        return t

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.ones(2)
            assert t.sum().item() == 2
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                await trio.testing.wait_all_tasks_blocked()
                begin(t)
                with trio.fail_after(HANG_SECONDS):
                    await trio.lowlevel.wait_readable(reader)
            finally:
                os.close(reader)


async def test_a_function_that_returns_nothing_runs_in_order_with_operations() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.ones(3)

        @trimesh.remote(propagate=lambda *_: None)
        def doubled_by_its_rank(t: Any, group: Any) -> None:
            t.mul_(2 * (group.rank() + float(t.sum())))  # a value, which only ranks have

        assert doubled_by_its_rank(t, procs.process_group("gpus")) is None
        assert [one[0].item() for one in (await trimesh.fetch(t)).values()] == [6, 8]
