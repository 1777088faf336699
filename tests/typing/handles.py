"""What type checkers must see: this file is never run, `make check` gives it to mypy and pyright.

Lines that must be rejected carry the rule by which each checker does it; an ignore that is not needed is an error.
"""

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, assert_type

import trio

import trimesh
import trimesh.blocking as tb
from trimesh import (
    Actor,
    Backoff,
    Died,
    Endpoint,
    Extent,
    Isolate,
    Outcome,
    Point,
    ProcDied,
    ProcMesh,
    Reply,
    Restart,
    Retry,
    StartedCall,
    ValueMesh,
    endpoint,
    this_host,
    this_proc,
)
from trimesh.events import Event


class Counter(Actor):
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    @endpoint
    async def add(self, by: int = 1) -> int:
        here = trimesh.context(self)
        assert_type(await here.actors.add.call(1), ValueMesh[int])
        assert_type(here.procs, ProcMesh)
        assert_type(here.message_rank, Point)
        assert_type(here.caller, trimesh.Origin | None)
        assert_type(trimesh.context().actor, Any)
        self.value += by
        return self.value

    @endpoint
    def name_of(self, prefix: str) -> str:
        return f"{prefix}{self.value}"

    @endpoint(concurrency=4, group="io")
    async def load(self, path: str, *, retries: int = 0) -> bytes:
        return path.encode() * retries

    @endpoint(thread=True)
    def work(self) -> list[float]:
        return []

    @endpoint
    async def count(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number

    @endpoint(concurrency=2)
    async def letters(self, text: str) -> AsyncGenerator[str, None]:
        for letter in text:
            yield letter

    @endpoint
    async def both(self) -> None:
        assert_type(self.count(1), AsyncIterator[int])
        assert_type(self.letters("a"), AsyncGenerator[str, None])

    @endpoint
    async def twice(self) -> int:
        plain = assert_type(self.add(1), Coroutine[Any, Any, int])
        assert_type(self.name_of("x"), str)
        return await plain + await self.add(by=1)


async def handles(procs: ProcMesh) -> None:
    counters = await procs.spawn("counters", Counter, 10, step=2)
    assert_type(counters, Counter)
    handle: Endpoint[..., int] = counters.add
    assert_type(await handle.call(1), ValueMesh[int])
    assert_type(await counters.add.call(1), ValueMesh[int])
    assert_type(await counters.add.call_one(by=2), int)
    assert_type(await counters.add.choose(), int)
    assert_type(await counters.add.call_settled(1), ValueMesh[Outcome[int]])
    assert_type(await counters.add.broadcast(1), None)
    assert_type(counters.add.broadcast_nowait(1), None)
    assert_type(await counters.name_of.call_one("a"), str)
    assert_type(await counters.load.call_one("p", retries=3), bytes)
    assert_type(await counters.work.choose(), list[float])
    assert_type(counters.slice(gpus=0), Counter)
    assert_type(counters.exclude([{"gpus": 1}]).alive(), Counter)
    assert_type(counters.extent, Extent)
    assert_type((await counters.add.call(1)).item(gpus=2), int)
    outcome = (await counters.add.call_settled(1)).item(gpus=0)
    assert_type(outcome.unwrap(), int)


async def started(procs: ProcMesh, nursery: trio.Nursery) -> None:
    counters = await procs.spawn("counters", Counter, 10)
    later = counters.add.call.start(by=2)
    assert_type(later, StartedCall[ValueMesh[int]])
    assert_type(await later, ValueMesh[int])
    assert_type(later.done, bool)
    assert_type(await counters.name_of.call_one.start("a"), str)
    assert_type(counters.load.choose.start_in(nursery, "p", retries=3), StartedCall[bytes])
    assert_type(await counters.add.options(retry=Retry(2)).call_settled.start(1), ValueMesh[Outcome[int]])
    counters.add.call.start("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    counters.add.call.start_in(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class Batcher(Actor):
    @endpoint(reply="later")
    async def generate(self, reply: Reply[str], prompt: str, *, limit: int = 1) -> None:
        reply.send(prompt * limit)
        reply.send(limit)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        reply.fail(ValueError())
        assert_type(reply.is_over, bool)

    @endpoint(reply="later", concurrency=2)
    def count(self, reply: Reply[int]) -> None:
        reply.send(1)


async def replies(procs: ProcMesh) -> None:
    batchers = await procs.spawn("batchers", Batcher)
    assert_type(await batchers.generate.call("a", limit=2), ValueMesh[str])
    assert_type(await batchers.count.call_one(), int)
    await batchers.generate.call(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def reduced(procs: ProcMesh) -> None:
    counters = await procs.spawn("counters", Counter, 10)
    assert_type(await counters.add.call_reduced(operator.add)(1), int)
    assert_type(await counters.add.call_reduced(max, along="gpus", commutative=True)(by=1), ValueMesh[int])
    assert_type(counters.add.call_reduced(max).start(), StartedCall[int])
    assert_type(tb.face(counters).add.call_reduced(max)(1), int)
    await counters.add.call_reduced(max)("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def streams(procs: ProcMesh) -> None:
    counters = await procs.spawn("counters", Counter, 10)
    async with counters.count.stream(3) as numbers:
        async for point, number in numbers:
            assert_type(point, Point)
            assert_type(number, int)
    async with counters.letters.options(window=4, merge="collect").stream("text") as letters:
        assert_type([letter async for letter in letters], list[tuple[Point, str]])
    async with counters.add.stream(by=2) as sums:
        assert_type([value async for value in sums], list[tuple[Point, int]])
    async with counters.add.map([1, 2, 3], window=2) as results:
        async for index, result in results:
            assert_type(index, int)
            assert_type(result, int)
    assert_type(await counters.add.options(retry=Retry(2, on=(ValueError,))).call(1), ValueMesh[int])
    assert_type(await counters.add.options(retry=Retry(2)).choose(1), int)


async def rejected(procs: ProcMesh) -> None:
    counters = await procs.spawn("counters", Counter, 10)
    await counters.add.call("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await counters.add.call(1, 2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await counters.load.call("p", retry=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await counters.missing.call(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    counters.count.stream("three")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    counters.add.options(merge="first")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    counters.add.options(retries=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    procs.spawn("counters", Counter, "ten")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    procs.spawn("counters", Counter)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    text: str = await counters.add.call_one(1)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text)


async def blocks() -> None:
    async with this_host().spawn_procs({"gpus": 4}) as procs:
        assert_type(procs, ProcMesh)
        async with procs.spawn("counters", Counter, 1) as counters:
            assert_type(counters, Counter)
        async with this_proc().spawn("own", Counter, 1) as own:
            assert_type(own, Counter)
    async with this_host().warm(preload=("json",)) as host:
        assert_type(await host.spawn_procs({"gpus": 1}), ProcMesh)


async def supervision() -> None:
    policy = Restart("one_for_one", along="gpus", intensity=3, period=60, backoff=Backoff(0.1, cap=5), on=(ProcDied,))
    async with this_host().spawn_procs({"gpus": 4}, supervision=policy) as procs:
        counters = await procs.supervised(Isolate()).spawn("counters", Counter, 1)
        async with procs.events() as events, counters.events():
            async for event in events:
                assert_type(event, Event)
                if isinstance(event, Died):
                    assert_type(event.error, Exception | None)
                    await procs.replace([event.point])
    Restart("one_for_two")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Restart(when="sometimes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def errors(group: trimesh.MeshErrorGroup) -> None:
    assert_type(trimesh.coords(group), list[Point])
    for leaf in trimesh.leaves(group):
        assert_type(leaf, Exception)
        where = trimesh.origin(leaf)
        assert_type(where, trimesh.Origin | None)


async def from_asyncio() -> None:
    async with trimesh.aio.move_on_after(5) as limit:
        assert_type(limit.cancelled_caught, bool)
    async with trimesh.aio.fail_after(5), trimesh.aio.open_trio():
        async with trimesh.aio.spawn_procs({"gpus": 4}, grace=1.0) as procs:
            assert_type(procs, ProcMesh)
            counters = await procs.spawn("counters", Counter, 10)
            assert_type(await counters.add.call(1), ValueMesh[int])
        trimesh.aio.spawn_procs({"gpus": 4}, size=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def without_await() -> None:
    with tb.spawn_procs({"gpus": 4}, grace=1.0) as procs, tb.fail_after(5):
        assert_type(procs, tb.ProcMesh)
        counters = procs.spawn("counters", Counter, 10, step=2)
        assert_type(counters.add.call(1), ValueMesh[int])
        assert_type(counters.add.call_one(by=2), int)
        assert_type(counters.add.call_settled(1), ValueMesh[Outcome[int]])
        assert_type(counters.add.broadcast(1), None)
        assert_type(counters.add.call.submit(1), tb.CallFuture[ValueMesh[int]])
        assert_type(counters.name_of.choose.submit("a").result(timeout=5), str)
        assert_type(counters.add.options(retry=Retry(2)).choose(1), int)
        assert_type(counters.slice(gpus=0).add.call_one(), int)
        assert_type(counters.exclude([{"gpus": 1}]).alive().work.choose(), list[float])
        assert_type(counters.extent, Extent)
        assert_type(len(counters), int)
        with counters.count.stream(3) as numbers:
            for point, number in numbers:
                assert_type(point, Point)
                assert_type(number, int)
        with counters.add.map([1, 2], window=2) as results:
            assert_type(list(results), list[tuple[int, int]])
        with procs.spawning("others", Counter, 1) as others, others.events() as events:
            for event in events:
                assert_type(event, Event)
        counters.add.call("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        counters.missing.call(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        procs.spawn("counters", Counter, "ten")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        assert_type(procs.slice(gpus=0), tb.ProcMesh)
        assert_type(procs.resize(gpus=2), tb.ProcMesh)
        assert_type(procs.name, str)
        assert_type(tb.face(this_host()).run(["true"], check=True), ValueMesh[int])
        assert_type(tb.this_host().warm(preload=("json",)).open(), tb.HostMesh)
        with procs.on_failure(lambda _: True), procs.membership() as views:
            assert_type(next(views).extent, Extent)
        procs.kill([1])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
        procs.stop(2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        tb.spawn_procs({"gpus": 4}, size=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    kept = tb.spawn_procs({"gpus": 4}).open()
    assert_type(tb.face(this_proc()), tb.ProcMesh)
    assert_type(kept, tb.ProcMesh)
    kept.close()


async def per_rank(procs: ProcMesh) -> None:
    counters = await procs.spawn("counters", Counter, 1)
    assert_type(tb.face(counters).add.call(1), ValueMesh[int])
    by = await counters.add.call(trimesh.per_rank([1, 2]))
    assert_type(by, ValueMesh[int])
    await counters.add.call(trimesh.per_rank(by))
    await counters.add.broadcast(trimesh.per_rank(dict.fromkeys(counters.points(), 1)))
    await counters.add.call_settled(by=trimesh.per_rank(lambda point: point.rank))
    await counters.add.call(trimesh.per_rank(["one", "two"]))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    hasty = counters.add.options(abandon_after=0.5, choose=True)
    assert_type(await hasty.call(1), ValueMesh[int])
