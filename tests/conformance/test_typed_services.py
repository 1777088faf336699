"""Pools, slots, replay buffers and stores with `pickle="off"` (Y6, V2)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import attrs
import msgspec
import pytest
import trio
from tests.conformance.meshes import Backend, params

from trimesh import Actor, ProtocolError, endpoint
from trimesh._wire.typed.codec import KIND, Reader, Writer
from trimesh.service import (
    Pool,
    PoolSession,
    ReplayBuffer,
    Slots,
    Store,
    open_pool,
    open_replay,
    open_slots,
    open_store,
)

numpy = pytest.importorskip("numpy")

pytestmark = pytest.mark.daily("sim-typed")
typed = pytest.mark.parametrize("backend", params("sim-typed", "real-typed"), indirect=True)


@attrs.frozen
class Prompt:
    text: str
    turns: list[int]


class Replica(Actor):
    @endpoint(concurrency=4)
    async def answer(self, prompt: Prompt) -> Prompt:
        return Prompt(prompt.text.upper(), [*prompt.turns, 1])

    @endpoint(concurrency=4)
    async def double(self, array: Any, words: list[str]) -> tuple[Any, list[str]]:
        if not words:
            raise ValueError("no words")
        return array * 2, words * 2

    @endpoint(concurrency=4)
    async def repeat(self, array: Any, times: int) -> AsyncGenerator[Any, None]:
        for number in range(times):
            yield array * number
        if times == 0:
            raise ValueError("no times")


class Roller(Actor):
    """Uses what it is handed."""

    def __init__(self, pool: Pool) -> None:  # type: ignore[type-arg]
        self.pool = pool

    @endpoint
    async def roll(self, pool: Pool, slots: Slots, buffer: ReplayBuffer) -> list[str]:  # type: ignore[type-arg]
        async with slots.lease(2) as lease, pool.session("s") as session, pool.paused("keep"):
            assert not session.moved
            await buffer.add({"version": lease.version}, version=lease.version, group="g")
        array, words = await self.pool.options(priority=1, group="red").double(numpy.arange(3), ["a"])
        async with buffer.taking(1) as batch:
            assert batch == [{"version": 0}]
        await buffer.add(array, version=0)
        with pytest.raises(ValueError, match="no words"):
            await pool.double(array, words=[])
        async with pool.stream.repeat(array, times=3) as arrays:
            assert [one.tolist() async for one in arrays] == [[0, 0, 0], [0, 2, 4], [0, 4, 8]]
        with pytest.raises(ValueError, match="no times"):
            async with pool.stream.repeat(array, 0) as arrays:
                await anext(arrays)
        return words  # type: ignore[no-any-return]

    @endpoint
    async def keep(self, store: Store) -> list[Any]:
        await store.put("small", [1, "two"])
        await store.put("large", {"a": numpy.arange(100_000)})
        return [await store.get("small"), (await store.get("large"))["a"][-1].item(), await store.keys()]

    @endpoint
    async def converse(self, session: PoolSession) -> bool:  # type: ignore[type-arg]
        await session.double(numpy.arange(1), ["a"])
        return session.moved

    @endpoint
    async def ask_record(self, pool: Pool) -> str:  # type: ignore[type-arg]
        try:
            await pool.answer(Prompt("no", []))
        except TypeError as error:
            return str(error)
        return "sent"


@typed
async def test_services_of_this_process_and_their_handles(backend: Backend) -> None:
    """Y6, V2: endpoints here take what their annotations say, from elsewhere builtin values and arrays."""
    async with backend.procs({"gpus": 2}) as procs:
        replicas = await procs.spawn("replicas", Replica)
        async with (
            open_pool(replicas) as pool,
            open_slots(batch=2, staleness=0) as slots,
            open_replay(capacity=9, slots=slots) as buffer,
        ):
            assert await pool.answer(Prompt("a", [0])) == Prompt("A", [0, 1])
            rollers = await procs.spawn("rollers", Roller, pool)
            roller = rollers.slice(gpus=0)
            assert await roller.roll.call_one(pool, slots, buffer) == ["a", "a"]
            assert (await buffer.take(1))[0].tolist() == [0, 2, 4]
            async with pool.session("t") as session:
                assert await roller.converse.call_one(session) is False
            assert "with pickle='off'" in await roller.ask_record.call_one(pool)
            with trio.fail_after(60):
                while slots.statistics().running:  # noqa: ASYNC110
                    await trio.sleep(0.01)


@typed
async def test_stores(backend: Backend) -> None:
    """Y6, V2: as all services."""
    async with backend.procs({"gpus": 2}) as procs, open_store(procs) as store:
        replicas = await procs.spawn("replicas", Replica)
        async with open_pool(replicas) as pool:
            users = await procs.spawn("users", Roller, pool)
            found = await users.slice(gpus=0).keep.call_one(store)
            assert found == [[1, "two"], 99_999, ["large", "small"]]


@typed
async def test_handles_that_do_not_fit_are_protocol_errors(backend: Backend) -> None:
    """V2: whatever a peer says."""
    async with backend.procs({"gpus": 1}) as procs:
        replicas = await procs.spawn("replicas", Replica)
        async with open_pool(replicas) as pool, open_slots(batch=1, staleness=0) as slots:
            for parts in (
                ["pool", False, None, "name", 0, 1.0, None, "wait", None],
                ["pool", False, replicas, "name", 0, 1.0, None, "wait", None],
                ["slots", replicas],
                ["replay buffer", pool],
                ["store", replicas],
            ):
                writer = Writer()
                forged = writer._ext(KIND, [writer._plain(part) for part in parts])
                with pytest.raises(ProtocolError):
                    Reader.of_message(writer.finish(msgspec.msgpack.encode(forged)).payload, ()).value()
            whole = Reader.of_message(Writer().finish(Writer().plain(slots)).payload, ()).value()
            assert isinstance(whole, Slots)
