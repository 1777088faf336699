"""Context variables that travel with calls: from scripts and asyncio, to asyncio actors, beside a tracer."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextvars import ContextVar

import pytest

import trimesh.aio
import trimesh.blocking as tb
from trimesh import Actor, endpoint
from trimesh._runtime.life.propagation import forget_all
from trimesh.testing import simulate

TRACE: ContextVar[str] = ContextVar("test_propagation_outside.trace", default="none")


def register() -> None:
    trimesh.propagate(TRACE)


@pytest.fixture(autouse=True)
def registered() -> Generator[None, None, None]:
    register()
    yield
    forget_all()


class Leaf(Actor):
    @endpoint
    async def seen(self, number: int = 0) -> str:
        return TRACE.get()

    @endpoint(thread=True)
    def in_thread(self) -> str:
        return TRACE.get()


class Loop(trimesh.aio.Actor):
    @endpoint
    async def ask(self, leaf: Leaf) -> tuple[str, str]:
        return TRACE.get(), await asyncio.create_task(leaf.seen.call_one())


@pytest.mark.real
def test_scripts_and_threads_send_their_values() -> None:
    """V3: also by futures, and into the threads of endpoints."""
    with tb.spawn_procs({"gpus": 1}, setup=register) as procs:
        leaves = procs.spawn("leaves", Leaf)
        TRACE.set("script")
        assert leaves.seen.call_one() == "script"
        assert leaves.seen.call_one.submit().result(timeout=60) == "script"
        assert leaves.in_thread.call_one() == "script"


@pytest.mark.real
def test_asyncio_tasks_and_actors_send_their_values() -> None:
    """V3: each task has its own."""

    async def call(leaves: Leaf, trace: str) -> str:
        TRACE.set(trace)
        return await leaves.seen.choose()

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}, setup=register) as procs:
            leaves, loops = await procs.spawn("leaves", Leaf), await procs.spawn("loops", Loop)
            assert await asyncio.gather(*(call(leaves, str(n)) for n in range(4))) == ["0", "1", "2", "3"]
            TRACE.set("main")
            assert await loops.slice(gpus=0).ask.call_one(leaves.slice(gpus=1)) == ("main", "main")
            async with leaves.seen.map(range(3)) as results:
                assert [value async for _, value in results] == ["main"] * 3

    asyncio.run(main())


@simulate(seeds=5)
async def test_a_tracer_and_values_do_not_disturb_each_other(mesh: trimesh.ProcMesh) -> None:
    """V3: whichever is installed first."""
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider()
    tracer = provider.get_tracer("test")
    for first in ("tracer", "values"):
        forget_all()
        if first == "values":
            register()
        trimesh.telemetry.instrument(tracer_provider=provider)
        register()
        try:
            leaves = await mesh.spawn(first, Leaf)
            TRACE.set(first)
            with tracer.start_as_current_span("outer"):
                assert list((await leaves.seen.call()).values()) == [first] * 2
                async with leaves.seen.map(range(3)) as results:
                    assert [value async for _, value in results] == [first] * 3
        finally:
            trimesh.telemetry.uninstrument()
        assert list((await leaves.seen.call()).values()) == [first] * 2
