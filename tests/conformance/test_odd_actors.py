"""Actors of odd classes, and odd arguments of theirs (M1, V2; rules C5, C7)."""

from __future__ import annotations

import abc
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

import pytest
import trio
from tests.conformance.meshes import Backend

import trimesh
from trimesh import Actor, endpoint

T = TypeVar("T")


class Policy(Actor, abc.ABC):
    """Lacks an endpoint."""

    @endpoint
    @abc.abstractmethod
    async def act(self) -> int: ...


class Plain(Actor):
    """Lacks one, without a metaclass that would say so."""

    @endpoint
    @abc.abstractmethod
    async def act(self) -> int: ...


class Box(Actor, Generic[T]):
    """Has parameters for type checkers."""

    def __init__(self, value: T) -> None:
        self.value = value

    @endpoint
    async def get(self) -> T:
        return self.value


class Proxy(Actor):
    """Answers any name."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: name

    @endpoint
    async def one(self) -> int:
        return 1


class Worker(Actor):
    """Takes arguments of any name."""

    @endpoint
    async def f(self, /, **options: object) -> dict[str, object]:
        return options

    @endpoint
    async def items(self, /, **options: object) -> AsyncIterator[object]:
        yield options

    @endpoint
    async def same(self, item: int) -> int:
        return item


@pytest.mark.parametrize("cls", [Policy, Plain])
async def test_abstract_actor_is_refused(backend: Backend, cls: type[Actor]):
    """M1: with the endpoints that it lacks, and before anything is sent."""
    async with backend.procs({"gpus": 1}) as procs:
        with pytest.raises(TypeError, match=r"is abstract, it lacks act: spawn a subclass"):
            await procs.spawn("policy", cls)


async def test_class_with_parameters_is_spawned(backend: Backend):
    """M1: `Box[int]` is `Box`, with its own type arguments for type checkers."""
    async with backend.procs({"gpus": 1}) as procs:
        box: Any = await procs.spawn("box", Box[int], 3)
        assert await box.get.call_one() == 3
        assert "of Box>" in repr(box)
        named: Any = await procs.get_or_spawn("named", Box[int], 4)
        assert await named.get.call_one() == await (await procs.get_or_spawn("named", Box[str], "a")).get.call_one()
        with pytest.raises(TypeError, match=r"missing a required argument: 'value'"):
            procs.spawn("box", Box[int])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def test_actor_that_answers_any_name_is_spawned(backend: Backend):
    """M1: hooks are those of its class."""
    async with backend.procs({"gpus": 1}) as procs:
        proxy = await procs.spawn("proxy", Proxy)
        assert await proxy.one.call_one() == 1


async def test_arguments_may_have_any_name(backend: Backend):
    """C5: those of our own parameters, too, by each verb."""
    named: Any = {"self": 1, "function": 2, "name": 3, "mesh": 4, "instance": 5, "nursery": 6}
    async with backend.procs({"gpus": 1}) as procs:
        worker = await procs.spawn("worker", Worker)
        for verb in (worker.f.call_one, worker.f.choose):
            assert await verb(**named) == named
        assert list((await worker.f.call(**named)).values()) == [named]
        assert await worker.f.call_one.start(**named) == named
        async with trio.open_nursery() as nursery:
            started = worker.f.call_one.start_in(nursery, **named)
        assert await started == named
        await worker.f.broadcast(**named)
        worker.f.broadcast_nowait(**named)
        async with worker.items.stream(**named) as items:
            assert [item async for _, item in items] == [named]


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_generator_of_a_map_that_is_left_early_is_closed(backend: Backend, kind: str):
    """C7: when its block is left, though nobody collects cycles."""
    closed: list[str] = []

    def plain() -> Iterator[int]:
        try:
            yield from range(1_000_000)
        finally:
            closed.append("plain")

    async def asynchronous() -> AsyncIterator[int]:
        try:
            for number in range(1_000_000):
                yield number
        finally:
            closed.append("async")

    gc.disable()
    try:
        async with backend.procs({"gpus": 1}) as procs:
            worker = await procs.spawn("worker", Worker)
            items: Any = plain() if kind == "plain" else asynchronous()
            async with worker.same.map(items) as results:
                async for index, _ in results:
                    if index == 5:
                        break
            assert closed == [kind]
    finally:
        gc.enable()


async def test_error_of_a_generator_that_is_closed_is_raised(backend: Backend):
    """C7: as what it raises before."""

    def plain() -> Iterator[int]:
        try:
            yield from range(1_000_000)
        finally:
            raise KeyError("closing")

    async with backend.procs({"gpus": 1}) as procs:
        worker = await procs.spawn("worker", Worker)
        with pytest.raises(ExceptionGroup) as caught:
            async with worker.same.map(plain()) as results:
                async for index, _ in results:
                    if index == 5:
                        break
        assert [str(leaf) for leaf in trimesh.leaves(caught.value)] == ["'closing'"]


async def test_second_mesh_of_a_name_is_logged(backend: Backend, caplog: pytest.LogCaptureFixture):
    """M1: texts and tables show names."""
    async with backend.procs({"gpus": 2}) as procs:
        async with procs.spawn("worker", Worker):
            pass
        await procs.slice(gpus=0).spawn("worker", Worker)
        await procs.slice(gpus=1).spawn("worker", Worker)
        assert not caplog.records
        await procs.spawn("worker", Worker)
        assert "two meshes of actors named 'worker' live in the same processes" in caplog.text


async def test_variables_that_are_no_text_are_refused(backend: Backend):
    """O2: by name, before a process is started."""
    with pytest.raises(TypeError, match=r"got SIZE=1: write 'SIZE': '1'"):
        backend.procs({"gpus": 1}, env={"SIZE": 1})
    with pytest.raises(ExceptionGroup) as caught:
        async with backend.procs({"gpus": 1}, env=lambda _: {"A=B": "1"}):
            pass
    assert "names without '='" in str(next(iter(trimesh.leaves(caught.value))))


async def test_preload_of_one_name_is_refused(backend: Backend):
    """O2: its letters are no modules."""
    with pytest.raises(TypeError, match=r"write preload=\('json',\)"):
        backend.procs({"gpus": 1}, preload="json")
