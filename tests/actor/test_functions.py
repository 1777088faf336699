"""Functions that run in processes: their types, in simulation, from scripts and from asyncio."""

from __future__ import annotations

import asyncio
import time
from typing import assert_type

import pytest
import trio

import trimesh.aio
import trimesh.blocking as tb
from trimesh import ProcMesh, ValueMesh
from trimesh.testing import simulate


def count(text: str) -> int:
    return len(text.split())


async def double(number: int) -> float:
    await trio.lowlevel.checkpoint()
    return number * 2.0


@simulate(seeds=5)
async def test_plain_functions_run_inline_in_a_simulation(mesh: ProcMesh) -> None:
    """M12: after a delay, as the bodies of threads do."""
    start = trio.current_time()
    assert list((await mesh.call(count, "a b")).values()) == [2, 2]
    async with mesh.map(count, ["a"] * 4, concurrency=2) as results:
        assert len([value async for _, value in results]) == 4
    assert trio.current_time() - start < 60


@simulate(seeds=1)
async def test_results_have_the_type_that_the_function_returns(mesh: ProcMesh) -> None:
    """M12: also of async functions."""
    assert_type(await mesh.call(count, "a"), ValueMesh[int])
    assert_type(await mesh.call(double, 2), ValueMesh[float])
    assert_type(await mesh.choose(count, "a"), int)
    assert_type(await mesh.choose(double, 2), float)
    async with mesh.map(double, [1, 2]) as results:
        async for index, value in results:
            assert_type(index, int)
            assert_type(value, float)
    with pytest.raises(TypeError, match="missing a required argument"):
        await mesh.call(count)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.real
def test_script_maps_and_submits_functions() -> None:
    """M12: as a process pool does."""
    with tb.spawn_procs({"workers": 2}) as procs:
        with procs.map(count, ["to be", "or not to be"]) as results:
            assert sorted(results) == [(0, 2), (1, 4)]
        assert procs.call(count, "a b").values() == (2, 2)
        assert procs.choose(count, "a") == 1
        futures = [procs.submit(double, number) for number in range(4)]
        assert [future.result(timeout=60) for future in futures] == [0, 2, 4, 6]
        stuck = procs.submit(trio.sleep_forever)
        while not stuck.running():
            time.sleep(0.001)
        assert stuck.cancel()
        assert procs.choose(count, "a") == 1


@pytest.mark.real
def test_asyncio_maps_functions() -> None:
    """M12: from any task of the loop."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"workers": 2}) as procs:
            async with procs.map(count, ["to be", "or not to be"]) as results:
                assert sorted([result async for result in results]) == [(0, 2), (1, 4)]
            found = await asyncio.gather(*(procs.choose(double, number) for number in range(4)))
            assert found == [0, 2, 4, 6]
            assert (await procs.call(count, "a b")).values() == (2, 2)

    asyncio.run(main())
