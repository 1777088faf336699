"""Functions that run in processes without an actor class (M12)."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio
from tests.conformance.meshes import Backend, params

import trimesh
from trimesh import Actor, Isolate, MeshErrorGroup, ProcDied, current_rank, endpoint, this_proc

pytestmark = pytest.mark.daily("sim")


@attrs.define
class Text:
    words: list[str]


def count(text: str, plus: int = 0) -> int:
    return len(text.split()) + plus


async def rank_after(seconds: float) -> int:
    await trio.sleep(seconds)
    return current_rank()


def upper(text: Text) -> Text:
    assert type(text) is Text
    return Text([word.upper() for word in text.words])


def fail(number: int) -> int:
    if number == 3:
        raise KeyError(number)
    return number


async def items(count: int) -> AsyncIterator[str]:
    for number in range(count):
        await trio.lowlevel.checkpoint()
        yield "a " * number


RUNNING: list[int] = []
"""Ranks that run a function; simulated processes share it."""


async def note(_: int) -> tuple[int, int]:
    rank = current_rank()
    RUNNING.append(rank)
    at_once = RUNNING.count(rank)
    await trio.sleep(1)
    RUNNING.remove(rank)
    return rank, at_once


class Starter(Actor):
    @endpoint
    async def ranks(self) -> list[int]:
        return list((await trimesh.context().procs.call(rank_after, 0.0)).values())


@pytest.mark.by_value
async def test_function_runs_in_every_process_or_in_one(backend: Backend) -> None:
    """M12: async or plain, by name or by value, in a thread or not."""
    thread = not backend.is_sim  # threads have no virtual clock
    async with backend.procs() as procs:
        assert list((await procs.call(count, "a b", thread=thread)).values()) == [2, 2]
        assert (await procs.slice(gpus=1).call(rank_after, 0.0)).item() == 1
        assert await procs.choose(functools.partial(count, plus=3), "a", thread=thread) == 4
        assert await procs.choose(lambda: 5, thread=False) == 5
        both = set[int]()
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                both.add(await procs.choose(rank_after, 0.01))

            nursery.start_soon(run)
            nursery.start_soon(run)
        assert both == {0, 1}  # the one that runs fewer
    assert (await this_proc().call(count, "a b", thread=thread)).item() == 2


async def test_items_are_spread_over_processes(backend: Backend) -> None:
    """M12: each once; results as they arrive, with their index."""
    thread = not backend.is_sim
    async with backend.procs() as procs:
        async with procs.map(count, ["a", "b c", ""], thread=thread) as results:
            assert sorted([result async for result in results]) == [(0, 1), (1, 2), (2, 0)]
        async with procs.map(count, items(5), window=2, thread=thread) as results:
            assert sorted([result async for result in results]) == [(n, n) for n in range(5)]
        with pytest.raises(MeshErrorGroup) as caught:
            async with procs.map(fail, range(6), merge="collect", thread=thread) as results:
                assert sorted([value async for _, value in results]) == [0, 1, 2, 4, 5]
        [error] = caught.value.exceptions
        assert isinstance(error, KeyError)
        assert "raised for item 3 of fail.map()" in error.__notes__


@pytest.mark.parametrize("backend", params("sim"), indirect=True)
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_process_runs_so_many_functions_at_once(backend: Backend, concurrency: int) -> None:
    """M12: one, unless the map says more; a process gets the next item when it has finished one."""
    async with backend.procs() as procs:
        before = trio.current_time()
        async with procs.map(note, range(12), concurrency=concurrency) as results:
            found = [result async for _, result in results]
        assert trio.current_time() - before == pytest.approx(12 / 2 / concurrency, rel=0.3)
    ranks = [rank for rank, _ in found]
    assert (ranks.count(0), ranks.count(1), max(at_once for _, at_once in found)) == (6, 6, concurrency)


@pytest.mark.by_value
async def test_errors_and_cancels_are_those_of_calls(backend: Backend) -> None:
    """M12: the original exception with coordinates; a cancel reaches the function; nothing is sent that cannot run."""
    thread = not backend.is_sim
    async with backend.procs() as procs:
        with pytest.raises(KeyError) as bare:
            await procs.choose(fail, 3, thread=thread)
        assert trimesh.origin(bare.value).mesh == "functions"
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.call(fail, 3, thread=thread)
        assert trimesh.coords(caught.value)[0] in ({"gpus": 0}, {"gpus": 1})
        with trio.move_on_after(0.1) as scope:
            await procs.call(trio.sleep_forever)
        assert scope.cancelled_caught
        assert list((await procs.call(count, "still", thread=thread)).values()) == [1, 1]
        for refused, text in (
            (lambda: procs.call(5), "runs a function, got 5: write procs.call"),  # type: ignore[call-overload]
            (lambda: procs.call(count), r"count\(text.*\).*: missing a required argument: 'text'"),
            (lambda: procs.choose(items, 3), "must return its result, got the generator items: write an actor"),
            (lambda: procs.choose(lambda: items(3), thread=thread), "result of"),
        ):
            call: Any = refused
            with pytest.raises(TypeError, match=text):
                await call()
        for wrong, kind in (
            (lambda: procs.map(count, 3), TypeError),  # type: ignore[call-overload]
            (lambda: procs.map(count, [], concurrency=0), ValueError),
            (lambda: procs.map(count, [], window=0), ValueError),
        ):
            make: Any = wrong
            with pytest.raises(kind):
                make()


async def test_functions_run_on_the_present_members(backend: Backend) -> None:
    """M12: after a death, a replacement and a resize."""
    thread = not backend.is_sim
    async with backend.procs(supervision=Isolate()) as procs:
        await procs.kill([{"gpus": 0}])
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.call(count, "a", thread=thread)
        assert isinstance(next(trimesh.leaves(caught.value)), ProcDied)
        assert list((await procs.alive().call(rank_after, 0.0)).values()) == [1]  # a view of one, with its own actor
        await procs.replace([{"gpus": 0}])
        assert list((await procs.call(rank_after, 0.0)).values()) == [0, 1]
        for size in (3, 1):
            resized = await procs.resize(gpus=size)
            assert list((await resized.call(rank_after, 0.0)).values()) == list(range(size))
            async with resized.map(count, ["a"] * 4, thread=thread) as results:
                assert len([value async for _, value in results]) == 4


@pytest.mark.by_value
async def test_actors_run_functions_on_shared_processes(backend: Backend) -> None:
    """M12: by a reference of `shared=True`; other references refuse."""
    async with backend.procs(shared=True) as procs:
        starter = await procs.slice(gpus=0).spawn("starter", Starter)
        assert await starter.ranks.call_one() == [0, 1]
    async with backend.procs() as procs:
        starter = await procs.slice(gpus=0).spawn("starter", Starter)
        with pytest.raises(RuntimeError, match=r"calls spawn_procs\(\.\.\., shared=True\)"):
            await starter.ranks.call_one()


@pytest.mark.parametrize("backend", params("sim-typed", "real-typed"), indirect=True)
async def test_annotations_of_a_function_count_without_pickle(backend: Backend) -> None:
    """M12, V2: for its arguments, checked at the caller, and its result."""
    thread = not backend.is_sim
    async with backend.procs() as procs:
        assert list((await procs.call(upper, Text(["a"]), thread=thread)).values()) == [Text(["A"]), Text(["A"])]
        assert (await this_proc().call(count, "a b", thread=thread)).item() == 2
        async with procs.map(upper, [Text(["b"])], concurrency=2, thread=thread) as results:
            assert [result async for result in results] == [(0, Text(["B"]))]
        with pytest.raises(TypeError, match=r"argument 'text' of upper\(\) cannot be sent: expected exactly Text"):
            await procs.call(upper, "text")  # type: ignore[arg-type]
        for local in (lambda: 1, functools.partial(count, "a")):
            with pytest.raises(TypeError, match=r"must be importable by name with pickle='off'"):
                await procs.choose(local)


class Borrower(Actor):
    """Runs functions on processes that it gets as an argument."""

    @endpoint
    async def call(self, procs: trimesh.ProcMesh) -> list[int]:
        return list((await procs.call(rank_after, 0.0)).values())

    @endpoint
    async def map(self, procs: trimesh.ProcMesh) -> list[int]:
        async with procs.map(fail, [1]) as results:
            return [value async for _, value in results]


@pytest.mark.parametrize("backend", params("sim-typed", "real-typed"), indirect=True)
async def test_only_the_owner_runs_functions_without_pickle(backend: Backend) -> None:
    """M12, V2: a process lets its owner alone name functions; a reference says so before anything is sent."""
    async with backend.procs(shared=True) as procs:
        borrower = await procs.slice(gpus=0).spawn("borrower", Borrower)
        for verb in (borrower.call, borrower.map):
            with pytest.raises(RuntimeError, match=r"only the owner of procs runs functions there: write an actor"):
                await verb.call_one(procs)
