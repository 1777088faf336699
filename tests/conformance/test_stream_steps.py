"""A cancel, a Ctrl-C or a death at the nth step of streams and maps: nothing is left, nothing is lost (S04, X3)."""

from __future__ import annotations

import pytest
from tests.conformance.meshes import Backend
from tests.conformance.producing import Producer, collect
from tests.conformance.sweep import Body, cancel, interrupt, kill_one, sweep
from tests.conformance.test_options import ERROR, TWICE, Flaky

from trimesh import MeshStopped, ProcDied, SpawnError


async def stream_to_the_end(backend: Backend) -> None:
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.count.options(window=2).stream(4) as results:
            assert await collect(results) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


async def leave_a_stream(backend: Backend) -> None:
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.endless.options(window=2).stream() as results, producers.rank.stream():
            await anext(results)


async def fail_in_a_stream(backend: Backend) -> None:
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        try:
            async with producers.fail_after.stream(1, ValueError("planned"), [1]) as results:
                await collect(results)
        except* ValueError:
            pass


async def map_items(backend: Backend) -> None:
    async with backend.procs() as procs:
        producers = await procs.spawn("producers", Producer)
        async with producers.note.map(range(5), window=3) as results:
            assert sorted([result async for result in results]) == [(number, number) for number in range(5)]


async def try_again(backend: Backend) -> None:
    async with backend.procs() as procs:
        flaky = await procs.spawn("flaky", Flaky)
        handle = flaky.fail.options(retry=TWICE)
        assert list((await handle.call({1: 1}, ERROR)).values()) == [0, 1]
        async with flaky.fail_where.options(retry=TWICE).map([[0], [1]]) as results:
            assert sorted([result async for result in results]) == [(0, 1), (1, 0)]


BODIES = [stream_to_the_end, leave_a_stream, fail_in_a_stream, map_items, try_again]

every_step = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.stress)])


@every_step
@pytest.mark.parametrize("body", BODIES)
def test_cancel_at_any_step_leaves_nothing(body: Body, stride: int):
    """S04, C01, C02."""
    assert sweep(body, cancel, stride=stride) > 10


@every_step
@pytest.mark.parametrize("body", BODIES)
def test_interrupt_at_any_step_leaves_nothing(body: Body, stride: int):
    """S04, Z02."""
    assert sweep(body, interrupt, KeyboardInterrupt, stride=stride) > 10


@every_step
@pytest.mark.parametrize("body", BODIES)
def test_death_at_any_step_is_told_and_leaves_nothing(body: Body, stride: int):
    """X3."""
    assert sweep(body, kill_one, ProcDied, SpawnError, MeshStopped, stride=stride) > 10


def test_death_at_any_step_of_items_that_are_tried_again_is_told():
    """X3, C6: also as the block is left by it while the error of an item arrives that would be tried again."""
    assert sweep(try_again, kill_one, ProcDied, SpawnError, MeshStopped, stride=1) > 10
