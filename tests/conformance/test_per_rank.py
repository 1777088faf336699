"""Arguments that each member gets its own of, and streams of one chosen member."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
from tests.conformance.meshes import Backend, attempt, member
from tests.conformance.probe import Probe

import trimesh
from trimesh import MeshErrorGroup, Retry, ShapeError, endpoint, leaves
from trimesh._runtime.life.current import current_proc


class Taker(Probe):
    @endpoint(idempotent=True)
    async def take(self, value: int, *, scale: int = 1, known: str = "") -> tuple[int, int, str]:
        self.notes.add(value)
        return trimesh.current_rank(), value * scale, known

    @endpoint
    async def total(self, values: np.ndarray) -> float:
        return float(values.sum())

    @endpoint
    async def fail_once(self, value: int) -> int:
        raise ValueError(str(value))

    @endpoint(idempotent=True)
    async def fail_first(self, value: int) -> int:
        self.notes.add(value)
        if self.notes.log.count(value) == 1:
            raise ConnectionError
        return value

    @endpoint
    async def count(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number


async def test_each_member_gets_its_own(backend: Backend):
    """API 3: by position and by keyword, beside what all get; through every verb that calls members."""
    async with backend.procs({"gpus": 3}) as procs:
        takers = await procs.spawn("takers", Taker)
        wanted = [(0, 10, "x"), (1, 20, "x"), (2, 30, "x")]
        own = trimesh.per_rank([10, 20, 30])
        assert [*(await takers.take.call(own, known="x")).values()] == wanted
        settled = await takers.take.call_settled(own, known="x")
        assert [one.unwrap() for one in settled.values()] == wanted
        retried = takers.take.options(retry=Retry(1))
        assert [*(await retried.call(own, known="x")).values()] == wanted
        async with takers.take.stream(own, known="x") as results:
            assert sorted([value async for _, value in results]) == wanted
        by_name = await takers.take.call(1, scale=trimesh.per_rank(lambda point: point["gpus"]), known="y")
        assert [*by_name.values()] == [(0, 0, "y"), (1, 1, "y"), (2, 2, "y")]
        rank, value, _ = await takers.take.choose(own)
        assert value == 10 * (rank + 1)
        assert await takers.slice(gpus=2).take.call_one(trimesh.per_rank([7])) == (2, 7, "")

        await takers.take.broadcast(trimesh.per_rank([100, 200, 300]))
        takers.take.broadcast_nowait(trimesh.per_rank([101, 201, 301]))
        await takers.note.call("after those")
        logs = (await takers.seen.call()).values()
        assert [log[-3:-1] for log in logs] == [[100, 101], [200, 201], [300, 301]]


async def test_values_are_given_by_point(backend: Backend):
    """API 3: those of the view that is called: what a call of the same view has returned, or a mapping."""
    async with backend.procs({"gpus": 4}) as procs:
        takers = await procs.spawn("takers", Taker)
        view = takers.slice(gpus=slice(1, 4)).exclude([{"gpus": 1}])
        ranks = await view.rank.call()
        assert [*(await view.take.call(trimesh.per_rank(ranks))).values()] == [(1, 1, ""), (3, 3, "")]
        by_point = {point: 10 * point["gpus"] for point in view.points()}
        assert [*(await view.take.call(trimesh.per_rank(by_point))).values()] == [(1, 0, ""), (3, 20, "")]


async def test_large_values_go_to_their_member_alone(backend: Backend):
    """API 3: arrays, through segments and in parts."""
    async with backend.procs({"gpus": 3}) as procs:
        takers = await procs.spawn("takers", Taker)
        shards = [np.full(1 << 18, number, np.float64) for number in range(3)]
        totals = await takers.total.call(trimesh.per_rank(shards))
        assert [*totals.values()] == [0.0, float(1 << 18), float(2 << 18)]


async def test_what_does_not_fit_is_refused_before_anything_is_sent(backend: Backend):
    """API 3: with the members that there are, and what came."""
    async with backend.procs({"gpus": 2}) as procs:
        takers = await procs.spawn("takers", Taker)
        sent = current_proc().peer(member(takers, 0).proc_id).calls_sent
        with pytest.raises(ShapeError, match=r"each of the 2 members of takers.*, got 3"):
            await takers.take.call(trimesh.per_rank([1, 2, 3]))
        with pytest.raises(ShapeError, match=r"\[gpus=0\], \[gpus=1\]; got \[gpus=0\]"):
            await takers.take.call(trimesh.per_rank({next(iter(takers.points())): 1}))
        with pytest.raises(ShapeError, match=r"as mesh\.points"):
            await takers.take.call(trimesh.per_rank({0: 1, 1: 2}))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got 5"):
            trimesh.per_rank(5)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="got 'text'"):
            trimesh.per_rank("text")
        with pytest.raises(TypeError):
            await takers.take.call([trimesh.per_rank([1, 2])])  # type: ignore[list-item]
        unsendable: Any = trimesh.per_rank([1, threading.Lock()])
        with pytest.raises(TypeError) as caught:
            await takers.take.call(unsendable)
        assert "[gpus=1]" in caught.value.__notes__[-1]
        assert current_proc().peer(member(takers, 0).proc_id).calls_sent == sent


async def test_retry_sends_each_member_its_own_again(backend: Backend):
    """C6."""
    async with backend.procs({"gpus": 2}) as procs:
        takers = await procs.spawn("takers", Taker)
        again = takers.fail_first.options(retry=Retry(1, on=(ConnectionError,)))
        assert [*(await again.call(trimesh.per_rank([5, 6]))).values()] == [5, 6]
        with pytest.raises(MeshErrorGroup) as caught:
            await takers.fail_once.call(trimesh.per_rank([5, 6]))
        found = {trimesh.origin(leaf).point["gpus"]: str(leaf) for leaf in leaves(caught.value)}
        assert found.items() <= {0: "5", 1: "6"}.items()


async def test_stream_of_one_chosen_member(backend: Backend):
    """API 3: the one that `choose` would take; the points are those of the view."""
    async with backend.procs({"gpus": 3}) as procs, trio.open_nursery() as nursery:
        takers = await procs.spawn("takers", Taker)
        held = [attempt(nursery, takers.slice(gpus=rank).hold_many.call_one) for rank in (0, 2)]
        for rank in (0, 2):
            await takers.slice(gpus=rank).wait.call_one("hold")
        async with takers.count.options(choose=True).stream(3) as results:
            assert [(dict(point), value) async for point, value in results] == [({"gpus": 1}, n) for n in range(3)]
        for call in held:
            call.cancel()
        with pytest.raises(TypeError, match=r"choose of takers\.take means nothing for call"):
            await takers.take.options(choose=True).call(1)
        with pytest.raises(ValueError, match="empty"):
            async with takers.exclude([*takers.points()]).count.options(choose=True).stream(1):
                pass
