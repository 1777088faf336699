"""Spawns of one actor class that start another one (S2)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import pytest
import trio

import trimesh.blocking as tb
from trimesh import Actor, ProcMesh, context, endpoint, this_host, this_proc
from trimesh.testing import simulate, substitute

T = TypeVar("T")


class Engine(Actor):
    def __init__(self, model: str) -> None:
        raise AssertionError("needs a GPU")

    @endpoint(idempotent=True)
    async def generate(self, prompt: str, *, limit: int = 1) -> str:
        raise NotImplementedError

    @endpoint
    async def stream(self, prompt: str) -> AsyncIterator[str]:
        yield prompt


class FakeEngine(Actor):
    def __init__(self, model: str) -> None:
        self.model = model

    @endpoint(idempotent=True)
    def generate(self, prompt: str, **options: Any) -> str:
        return f"{self.model}: {prompt}"

    @endpoint
    async def stream(self, prompt: str) -> AsyncIterator[str]:
        for word in prompt.split():
            yield word


class Planner(Actor):
    @endpoint
    async def plan(self, prompt: str) -> list[str]:
        procs = context().procs
        async with procs.spawn("engines", Engine, "inner") as engines, this_proc().spawn("own", Engine, "own") as own:
            shared = await procs.get_or_spawn("shared", Engine, "shared")
            return [
                await engines.generate.choose(prompt),
                await own.generate.call_one(prompt),
                await shared.generate.call_one(prompt),
            ]


class Box(Actor, Generic[T]):
    @endpoint
    async def get(self) -> T:
        raise NotImplementedError


class FakeBox(Actor, Generic[T]):
    @endpoint
    async def get(self) -> int:
        return 3


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=5)
async def test_every_process_starts_the_substitute(substitute: Callable[[type[Actor], type[Actor]], None]) -> None:
    """S2: also actors that spawn; and nothing is substituted after the test."""
    substitute(Engine, FakeEngine)
    substitute(Box, FakeBox)
    async with this_host().spawn_procs({"gpus": 2}, shared=True, setup=trio.lowlevel.checkpoint) as procs:
        engines = await procs.spawn("engines", Engine, "outer")
        assert list((await engines.generate.call("hi", limit=3)).values()) == ["outer: hi"] * 2
        async with engines.slice(gpus=0).stream.stream("to be") as words:
            assert [word async for _, word in words] == ["to", "be"]
        planner = await procs.slice(gpus=0).spawn("planner", Planner)
        assert await planner.plan.call_one("hi") == ["inner: hi", "own: hi", "shared: hi"]
        box = await procs.spawn("box", Box[int])
        assert await box.get.choose() == 3


@simulate(seeds=1)
async def test_block_ends_and_nests(mesh: ProcMesh) -> None:
    """S2: the inner block wins; outside the class is itself."""

    class Other(FakeEngine):
        def generate(self, prompt: str, **options: Any) -> str:  # type: ignore[override]
            return "other"

        generate = endpoint(idempotent=True)(generate)  # type: ignore[assignment]

    with substitute(Engine, FakeEngine):
        with substitute(Engine, Other):
            assert await (await mesh.spawn("a", Engine, "a")).generate.choose("") == "other"
        assert await (await mesh.spawn("b", Engine, "b")).generate.choose("") == "b: "
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="needs a GPU"), allow_unwrapped=True):
        await mesh.slice(gpus=0).spawn("c", Engine, "c")


def test_substitute_must_fit() -> None:
    """S2: refused before anything is spawned."""

    class Empty(Actor):
        pass

    class Plain(FakeEngine):
        @endpoint
        async def stream(self, prompt: str) -> str:  # type: ignore[override]
            return prompt

    class Once(FakeEngine):
        @endpoint
        async def generate(self, prompt: str, **options: Any) -> str:  # type: ignore[override]
            return prompt

    class Fewer(FakeEngine):
        @endpoint(idempotent=True)
        async def generate(self, prompt: str) -> str:  # type: ignore[override]
            return prompt

    for fake, text in (
        (Empty, "got test_substitute_must_fit.<locals>.Empty without generate: add `@endpoint async def generate"),
        (Plain, "of the same kind, got .*Plain.stream, which must be an async generator"),
        (Once, "Once.generate must be idempotent, as that of Engine"),
        (Fewer, "must take the arguments of Engine.generate.*: got an unexpected keyword argument"),
        (int, "takes two actor classes, got <class 'int'>"),
    ):
        given: Any = fake
        with pytest.raises(TypeError, match=text), substitute(Engine, given):
            raise AssertionError


@pytest.mark.real
def test_scripts_spawn_substitutes() -> None:
    """S2: by trimesh.blocking, and by the processes that an actor starts from its own."""
    with substitute(Engine, FakeEngine), tb.spawn_procs({"gpus": 1}) as procs:
        assert procs.spawn("engines", Engine, "a").generate.call_one("b") == "a: b"


@pytest.mark.real
async def test_without_pickle_the_program_substitutes() -> None:
    """S2: for its own spawns; classes do not travel in `setup=` there."""
    with substitute(Engine, FakeEngine):
        async with this_host().spawn_procs({"gpus": 1}, pickle="off") as procs:
            engines = await procs.spawn("engines", Engine, "a")
            assert await engines.generate.call_one("b") == "a: b"
