"""Context variables whose values travel with calls (V3)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from contextvars import ContextVar
from typing import Any

import attrs
import pytest
import trio
from tests.conformance.meshes import Backend, params

import trimesh
from trimesh import Actor, MeshErrorGroup, Port, endpoint, limits
from trimesh._runtime.life.propagation import forget_all
from trimesh.service import open_pool

pytestmark = pytest.mark.daily("sim")


@attrs.frozen
class Request:
    tenant: str


TRACE: ContextVar[str] = ContextVar("test_propagation.trace")
SEED: ContextVar[int] = ContextVar("test_propagation.seed", default=1)
OTHER: ContextVar[str] = ContextVar("test_propagation.other")


def register() -> None:
    trimesh.propagate(TRACE, SEED)


@pytest.fixture(autouse=True)
def registered() -> Generator[None, None, None]:
    register()
    yield
    forget_all()


class Leaf(Actor):
    @endpoint
    async def seen(self) -> tuple[str, int, str]:
        return TRACE.get("none"), SEED.get(), OTHER.get("none")

    @endpoint
    def inline(self, number: int = 0) -> tuple[str, int]:
        return TRACE.get("none"), number

    @endpoint(thread=True)
    def in_thread(self) -> str:
        return TRACE.get("none")

    @endpoint
    async def several(self) -> AsyncIterator[str]:
        for _ in range(2):
            yield TRACE.get("none")

    @endpoint
    async def tell(self, port: Port[str]) -> None:
        await port.send(TRACE.get("none"))

    @endpoint
    async def change(self) -> None:
        TRACE.set("changed there")


class Middle(Actor):
    @endpoint
    async def ask(self, leaf: Leaf, trace: str = "") -> tuple[str, int, str]:
        if trace:
            TRACE.set(trace)
        return await leaf.seen.call_one()


async def test_values_travel_with_every_kind_of_call(backend: Backend) -> None:
    """V3: calls, streams, maps, broadcasts, started calls, functions and pools; not without a value."""
    async with backend.procs(setup=register) as procs:
        leaves = await procs.spawn("leaves", Leaf)
        one = leaves.slice(gpus=1)
        assert await one.seen.call_one() == ("none", 1, "none")
        TRACE.set("t1")
        OTHER.set("not registered")
        assert list((await leaves.seen.call()).values()) == [("t1", 1, "none")] * 2
        SEED.set(7)
        assert await leaves.seen.choose() == ("t1", 7, "none")
        async with leaves.several.stream() as items:
            assert [item async for _, item in items] == ["t1"] * 4
        async with leaves.inline.map(range(5)) as results:
            assert sorted([result async for _, result in results]) == [("t1", n) for n in range(5)]
        async with trimesh.open_channel(str, capacity=4) as (port, receiver):
            await leaves.tell.broadcast(port)
            assert [await receiver.receive(), await receiver.receive()] == ["t1", "t1"]
        started = one.seen.call_one.start()
        TRACE.set("t2")
        assert [await started, await one.seen.call_one()] == [("t1", 7, "none"), ("t2", 7, "none")]
        async with open_pool(leaves, along="gpus") as pool:
            assert await pool.seen() == ("t2", 7, "none")
        assert list((await procs.call(seen)).values()) == ["t2", "t2"]


async def seen() -> str:
    return TRACE.get()


async def test_values_go_on_through_nested_calls_and_do_not_come_back(backend: Backend) -> None:
    """V3: what an endpoint sets is for its own calls."""
    async with backend.procs(setup=register) as procs:
        leaves, middles = await procs.spawn("leaves", Leaf), await procs.spawn("middles", Middle)
        leaf, middle = leaves.slice(gpus=0), middles.slice(gpus=1)
        TRACE.set("t1")
        assert await middle.ask.call_one(leaf) == ("t1", 1, "none")
        assert await middle.ask.call_one(leaf, "inner") == ("inner", 1, "none")
        await leaf.change.call_one()
        assert [await leaf.seen.call_one(), TRACE.get()] == [("t1", 1, "none"), "t1"]

        async def call(trace: str) -> None:
            TRACE.set(trace)
            for _ in range(5):
                assert (await middle.ask.call_one(leaf))[0] == trace

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(call, f"task {number}")


async def test_values_are_small_and_can_be_sent(backend: Backend) -> None:
    """V3: refused at the caller; nothing is sent."""
    async with backend.procs(setup=register) as procs:
        leaves = await procs.spawn("leaves", Leaf)
        for value, text in (
            ("x" * limits.PROPAGATED_BYTES_MAX, r"at most limits\.PROPAGATED_BYTES_MAX \(4096\) bytes in all"),
            (bytearray(1 << 20), "without buffers"),
            ((n for n in ()), "the values of propagated context variables cannot be s"),
        ):
            wrong: Any = value
            token = TRACE.set(wrong)
            for verb in (leaves.seen.call, leaves.seen.choose, leaves.seen.broadcast):
                call: Any = verb
                with pytest.raises(TypeError, match=text):
                    await call()
            with pytest.raises(MeshErrorGroup) as caught:
                async with leaves.inline.map(range(2)) as results:
                    [_ async for _ in results]
            assert isinstance(caught.value.exceptions[0], TypeError)
            TRACE.reset(token)
        assert await leaves.slice(gpus=0).seen.call_one() == ("none", 1, "none")


@pytest.mark.parametrize("backend", params("sim-typed", "real-typed"), indirect=True)
async def test_values_travel_without_pickle_by_their_own_types(backend: Backend) -> None:
    """V3, V2: builtins, and what needs no annotation."""
    async with backend.procs(setup=register) as procs:
        leaf = (await procs.spawn("leaves", Leaf)).slice(gpus=0)
        TRACE.set("t1")
        assert await leaf.seen.call_one() == ("t1", 1, "none")
        TRACE.set(Request("a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"the values of propagated context variables cannot be sent: a Request"):
            await leaf.seen.call_one()


async def test_code_by_value_refers_to_registered_variables(backend: Backend) -> None:
    """V3: a script needs no module and no `setup`."""
    variable: ContextVar[str] = ContextVar("test_propagation.script", default="none")
    unknown: ContextVar[str] = ContextVar("test_propagation.unknown")
    trimesh.propagate(variable)
    async with backend.procs() as procs:

        async def get() -> str:
            return variable.get()

        async def get_unknown() -> str:
            return unknown.get()

        assert await procs.choose(get) == "none"
        variable.set("t1")
        assert list((await procs.call(get)).values()) == ["t1", "t1"]
        with pytest.raises(TypeError, match=r"write trimesh\.propagate\(\.\.\.\) first"):
            await procs.choose(get_unknown)


def test_registration_is_by_name() -> None:
    trimesh.propagate(TRACE, SEED)
    with pytest.raises(ValueError, match=r"by their names, got a second one of the name 'test_propagation\.trace'"):
        trimesh.propagate(ContextVar("test_propagation.trace"))
    with pytest.raises(TypeError, match=r"takes contextvars\.ContextVar objects, got 'trace'"):
        trimesh.propagate("trace")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
