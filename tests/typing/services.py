"""What type checkers must see of services; this file is never run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, assert_type

import trimesh.aio
import trimesh.blocking as tb
from trimesh import Actor, Outcome, ProcMesh, endpoint
from trimesh.blocking import service as blocking
from trimesh.service import (
    Health,
    Pool,
    PoolStream,
    ReplayBuffer,
    Store,
    open_pool,
    open_replay,
    open_slots,
    open_store,
)


class Generator(Actor):
    @endpoint
    async def generate(self, prompt: str, *, tokens: int = 1) -> list[int]:
        return [len(prompt)] * tokens

    @endpoint
    async def tokens(self, prompt: str) -> AsyncGenerator[int, None]:
        yield len(prompt)

    @endpoint
    def ping(self) -> None: ...


async def pooled(procs: ProcMesh) -> None:
    generators = await procs.spawn("generators", Generator)
    async with open_pool(generators, health=Health(Generator.ping)) as pool:
        assert_type(pool, Pool[Generator])
        assert_type(await pool[Generator.generate]("a", tokens=2), list[int])
        await pool[Generator.generate](1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        found: Any = await pool.generate("a")
        assert found
        async with pool.session("s") as session:
            assert_type(await session[Generator.generate]("a"), list[int])
            assert_type(session.moved, bool)
        async with pool.map[Generator.generate](["a"]) as results:
            async for index, value in results:
                assert_type(index, int)
                assert_type(value, list[int])
        async with pool.stream[Generator.tokens]("a") as tokens:
            assert_type(tokens, PoolStream[int])
            async for token in tokens:
                assert_type(token, int)
        pool.stream[Generator.tokens](1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        async with pool.map_settled[Generator.generate](["a"]) as outcomes:
            async for _, outcome in outcomes:
                assert_type(outcome, Outcome[list[int]])
        async with pool.rolling() as replicas:
            async for replica in replicas:
                assert_type(replica, Generator)

        async def update(replica: Generator) -> None:
            await replica.generate.call("a")

        await pool.each(update)
        await pool.each(len)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def pooled_in_asyncio() -> None:
    async with trimesh.aio.open_trio(), trimesh.aio.spawn_procs({"replica": 2}) as procs:
        generators = await procs.spawn("generators", Generator)
        async with open_pool(generators, along="replica") as pool, pool.paused("keep"):
            assert_type(pool, Pool[Generator])
            assert_type(await pool[Generator.generate]("a", tokens=2), list[int])
            assert_type(await asyncio.create_task(pool[Generator.generate]("a")), list[int])
            await pool[Generator.generate](1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def stored(pool: Pool[Generator]) -> None:
    async with open_slots(batch=4, staleness=1) as slots, open_replay(capacity=10, slots=slots) as untyped:
        buffer: ReplayBuffer[list[int]] = untyped
        async with slots.lease(group=2) as lease:
            assert_type(lease.version, int)
            await buffer.add(await pool[Generator.generate]("p"), version=lease.version)
        assert_type(await buffer.take(1), list[list[int]])
        assert_type(await buffer.sample(1, by="group"), list[list[int]])
        async with buffer.taking(1) as batch:
            assert_type(batch, list[list[int]])


async def kept(procs: ProcMesh) -> None:
    async with open_store(procs, retain=2) as store:
        assert_type(store, Store)
        assert_type(await store.put("key", 1), int)
        assert_type(await store.keys(), list[str])
        assert_type(await store.wait_newer("key"), int)
        await store.put(1, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def pooled_in_a_script(procs: tb.ProcMesh) -> None:
    with blocking.open_pool(procs.spawn("generators", Generator)) as pool:
        assert_type(pool, blocking.Pool[Generator])
        assert_type(pool[Generator.generate]("a", tokens=2), list[int])
        assert_type(pool[Generator.generate].submit("a").result(), list[int])
        pool[Generator.generate](1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pool.map[Generator.generate](["a"]) as results:
            for index, value in results:
                assert_type(index, int)
                assert_type(value, list[int])
        with pool.stream[Generator.tokens]("a") as tokens:
            assert_type(next(tokens), int)
        with pool.map_settled[Generator.generate](["a"]) as outcomes:
            for _, outcome in outcomes:
                assert_type(outcome, Outcome[list[int]])
        with pool.rolling() as replicas:
            for replica in replicas:
                assert_type(replica, type[Generator])
        pool.each(lambda replica: replica.generate.call("a"))


def stored_in_a_script(buffer: blocking.ReplayBuffer[bytes], pool: blocking.Pool[Generator]) -> None:
    assert_type(buffer.take(1, max_age=2), list[bytes])
    assert_type(buffer.clear(reason="old"), int)
    buffer.add(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(pool.options(priority=1), blocking.Pool[Generator])
    assert_type(pool.cancel(group="a"), int)
    with blocking.open_slots(batch=4, staleness=1) as slots, slots.lease(group=2) as lease, pool.paused("wait"):
        assert_type(lease.version, int)
    with blocking.open_store(retain=2) as store:
        assert_type(store.keys(), list[str])
        store.put(1, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
