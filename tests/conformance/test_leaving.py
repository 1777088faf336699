"""Background work while blocks are left: what it sees of our own stopping is no failure, what it does itself is."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, kinds, only_sim
from tests.conformance.probe import Probe, Tidy

import trimesh
from trimesh import (
    Actor,
    Isolate,
    MeshErrorGroup,
    MeshStopped,
    Port,
    RemoteCancelled,
    current_point,
    endpoint,
    limits,
    this_proc,
)

SEEDS = 6

WORKS = ("call_one", "call", "stream", "map", "choose", "send", "remote receiver")
WAYS = ("normal", "exception", "cancel", "interrupt", "failure")


class Server(Actor):
    """What background work needs; it is stopped before, or after, that."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trimesh.open_channel(int, capacity=2) as (self.port, receiver), trio.open_nursery() as nursery:
            nursery.start_soon(self._receive, receiver)
            yield
            nursery.cancel_scope.cancel()

    async def _receive(self, receiver: Any) -> None:
        async for _ in receiver:
            pass

    @endpoint(concurrency=20)
    async def ask(self, number: int) -> int:
        await trio.sleep(0.01)
        return number

    @endpoint(concurrency=20)
    async def count(self) -> AsyncGenerator[int, None]:
        for number in range(10_000):
            yield number
            await trio.sleep(0.01)

    @endpoint
    async def open(self) -> Port[int]:
        return self.port


class Worker(Actor):
    """Works in the background for as long as it is left alone."""

    def __init__(self) -> None:
        self.begun = trio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as self.nursery:
            yield
            self.nursery.cancel_scope.cancel()

    @endpoint
    async def work(self, work: str, servers: Server) -> None:
        """Work in an endpoint, which a broadcast calls."""
        await self._work(work, servers)

    @endpoint(concurrency=2)
    async def start(self, work: str, servers: Server) -> None:
        """Work in a task of `lifespan`."""
        self.nursery.start_soon(self._work, work, servers)

    @endpoint
    async def fail_after_work(self, servers: Server, error: Exception) -> None:
        self.begun.set()
        try:
            await self._work("call_one", servers)
        finally:
            raise error

    @endpoint(group="watch")
    async def wait_begun(self) -> None:
        await self.begun.wait()

    @endpoint
    def point(self) -> int:
        return current_point()["gpus"]

    @endpoint
    async def own(self, work: str, servers: Server, pickle: str) -> None:
        """Work in the actors of a mesh of this actor's own."""
        self.nursery.start_soon(self._own, work, servers, pickle)

    async def _own(self, work: str, servers: Server, pickle: Any) -> None:
        async with trimesh.this_host().spawn_procs({"gpus": 2}, pickle=pickle) as procs:
            inner = await procs.spawn("inner", Worker)
            await inner.work.broadcast(work, servers)
            await trio.sleep_forever()

    async def _work(self, work: str, servers: Any) -> None:
        await WORK[work](servers)


async def _call_one(servers: Any) -> None:
    while True:
        await servers.slice(gpus=0).ask.call_one(1)


async def _call(servers: Any) -> None:
    while True:
        await servers.ask.call(1)


async def _choose(servers: Any) -> None:
    while True:
        await servers.ask.choose(1)


async def _stream(servers: Any) -> None:
    async with servers.count.stream() as results:
        async for _ in results:
            pass


async def _map(servers: Any) -> None:
    async with servers.ask.map(iter(range(100_000))) as results:
        async for _ in results:
            pass


async def _send(servers: Any) -> None:
    port = await servers.slice(gpus=0).open.call_one()
    while True:
        await port.send(1)
        await trio.sleep(0.01)


async def _wait_for_receiver(servers: Any) -> None:
    port = await servers.slice(gpus=1).open.call_one()
    while True:
        for _ in range(10):  # more than the channel holds
            await port.send(1)
        await trio.sleep(0.01)


WORK: dict[str, Callable[[Any], Awaitable[None]]] = {
    "call_one": _call_one,
    "call": _call,
    "stream": _stream,
    "map": _map,
    "choose": _choose,
    "send": _send,
    "remote receiver": _wait_for_receiver,
}


class Left:
    """A program of two meshes, left in some way.

    Attributes:
        shape: Whose block is inside of whose.
        is_server_first: Whether the servers are spawned first.
        how: What the workers do their work in.
    """

    def __init__(self, backend: Backend, shape: str, work: str, how: str, *, is_server_first: bool) -> None:
        self.backend = backend
        self.shape = shape
        self.work = work
        self.how = how
        self.is_server_first = is_server_first
        self.scope = trio.CancelScope()

    async def run(self, way: str, seconds: float = 0.1) -> None:
        async with AsyncExitStack() as stack:
            kinds = (Server, Worker) if self.is_server_first else (Worker, Server)
            meshes: dict[type, Any] = {}
            procs: Any = None
            for kind in kinds:
                if procs is None or self.shape != "one block":
                    procs = await stack.enter_async_context(self.backend.procs())
                name = kind.__name__.lower()
                if self.shape == "blocks of actors":
                    meshes[kind] = await stack.enter_async_context(procs.spawn(name, kind))
                else:
                    meshes[kind] = await procs.spawn(name, kind)
                if self.shape == "a nursery between":
                    nursery = await stack.enter_async_context(trio.open_nursery())
                    nursery.start_soon(trio.sleep, 0.05)
            await self.start(meshes[Worker], meshes[Server])
            await trio.sleep(seconds)
            await self.end(way, meshes[Worker], stack)

    async def start(self, workers: Any, servers: Any) -> None:
        if self.how == "broadcast":
            await workers.work.broadcast(self.work, servers)
        elif self.how == "lifespan":
            await workers.start.call(self.work, servers)
        else:
            await workers.own.broadcast(self.work, servers, self.backend.pickle)

    async def end(self, way: str, workers: Any, stack: AsyncExitStack) -> None:
        match way:
            case "exception":
                raise LookupError("of the body")
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel":
                self.scope.cancel()
                await trio.sleep_forever()
            case "failure":
                await workers.slice(gpus=1).start.broadcast("no such work", workers)
                await trio.sleep_forever()
            case _:
                pass

    async def check(self, way: str) -> None:
        """Run the program and leave it: nothing comes of it but what the program itself has done."""
        raised: BaseException | None = None
        with self.scope:
            try:
                await self.run(way)
            except BaseExceptionGroup as group:
                cancelled, raised = group.split(trio.Cancelled)
                if cancelled is not None:
                    raise cancelled from None
        wanted: dict[str, list[type[BaseException]]] = {
            "exception": [LookupError],
            "interrupt": [KeyboardInterrupt],
            "failure": [KeyError],
        }
        assert ([] if raised is None else kinds(raised)) == wanted.get(way, []), raised
        assert self.scope.cancelled_caught == (way == "cancel")


SHAPES = ("one block", "blocks side by side", "blocks of actors", "a nursery between")


@only_sim
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.seeds(SEEDS)
async def test_consequences_of_leaving_are_no_failures(backend: SimBackend, seed: int, shape: str, way: str):
    """M3, C05: whatever background work does, whichever mesh was spawned first, wherever it lives."""
    chance = random.Random(f"leave {shape} {way} {seed}")
    backend.lag.data = chance.choice([0.0, 0.0003, 0.003])
    backend.lag.control = chance.choice([0.0, 0.0003, 0.003])
    work, how = chance.choice(WORKS), chance.choice(["broadcast", "broadcast", "lifespan", "own mesh"])
    is_server_first = chance.random() < 0.3
    is_ended = not is_server_first and (shape != "one block" or work not in ("send", "remote receiver"))
    if way == "normal" and not is_ended and how == "broadcast":
        how = "lifespan"  # an accepted message that nothing ends is waited for
    left = Left(backend, shape, work, how, is_server_first=is_server_first)
    await left.check(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", ["one block", "blocks side by side"])
async def test_background_calls_into_a_stopped_mesh_are_no_failures(backend: Backend, shape: str, way: str):
    """M3, C05: the callee was spawned last, so that it is stopped first."""
    await Left(backend, shape, "call_one", "broadcast", is_server_first=False).check(way)


async def test_lifespan_task_that_calls_a_stopped_mesh_is_no_failure(backend: Backend):
    """M3, C05."""
    await Left(backend, "one block", "call_one", "lifespan", is_server_first=False).check("normal")


@pytest.mark.parametrize("way", ["normal", "cancel"])
async def test_failure_that_follows_a_consequence_joins_the_group(backend: Backend, way: str):
    """E07, M3: what user code raises in its `finally` is a failure of its own."""
    with pytest.raises(MeshErrorGroup) as caught, trio.CancelScope() as scope:
        async with backend.procs() as outer, backend.procs({"gpus": 2}) as inner:
            workers = await outer.spawn("workers", Worker)
            servers = await inner.spawn("servers", Server)
            await workers.slice(gpus=0).fail_after_work.broadcast(servers, ValueError("of its own"))
            await servers.ask.call(1)
            if way == "cancel":
                await workers.slice(gpus=0).wait_begun.call_one()  # what has not begun would never run
                scope.cancel()
                await trio.sleep_forever()
    assert kinds(caught.value) == [ValueError]
    assert trimesh.coords(caught.value) == [{"gpus": 0}]


async def test_stopped_callee_fails_background_work_whose_block_goes_on(backend: Backend):
    """M3: the inner block is left, the outer one is not: its work has lost what it needs, and says so."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as outer:
            workers = await outer.spawn("workers", Worker)
            async with backend.procs() as inner:
                servers = await inner.spawn("servers", Server)
                await workers.slice(gpus=0).work.broadcast("call_one", servers)
                await servers.ask.call(1)
            await trio.sleep_forever()
    assert set(kinds(caught.value)) <= {MeshStopped, RemoteCancelled}


async def test_cancel_reaches_the_background_work_of_all_blocks_at_once(backend: Backend):
    """M3: that of the outer block need not wait until the inner one has cleaned up."""
    async with this_proc().spawn("observer", Probe) as observer:
        with trio.CancelScope() as scope:
            async with backend.procs({"gpus": 1}) as outer, backend.procs({"gpus": 1}) as inner:
                holder = await outer.spawn("holder", Told, observer)
                await inner.spawn("slow", Waiting, observer)
                await holder.hold.broadcast()
                await observer.wait.call_one("holding")
                scope.cancel()
        holding, *others, last = await observer.seen.call_one()
        assert (holding, sorted(others), last) == ("holding", ["cleaning 0", "unwound"], "clean 0")


class Waiting(Tidy):
    """Has cleaned up when the work of another block has unwound."""

    def __init__(self, observer: Probe) -> None:
        super().__init__(tell=observer)

    async def say(self, note: str) -> None:
        await super().say(note)
        await self.tell.wait.call_one("unwound")


class Told(Actor):
    """Tells an observer what becomes of its endpoint."""

    def __init__(self, observer: Probe) -> None:
        self.observer = observer

    @endpoint
    async def hold(self) -> None:
        await self.observer.note.call_one("holding")
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await self.observer.note.call_one("unwound")


async def test_shielded_calls_of_a_cancelled_body_are_served(backend: Backend):
    """M3: clean-up of the body may use the mesh, which is left after it."""
    with trio.CancelScope() as scope:
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            try:
                scope.cancel()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    values = await probes.rank.call()
    assert [*values.values()] == [0, 1]
    assert scope.cancelled_caught


async def test_cancelled_caller_elsewhere_hears_nothing_of_the_stop(backend: Backend):
    """C05, M3: a task beside the blocks, cancelled with them, waits for an endpoint whose callee is stopped first."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery, backend.procs() as outer, backend.procs() as inner:
            workers = await outer.spawn("workers", Worker)
            servers = await inner.spawn("servers", Server)
            nursery.start_soon(workers.work.call, "call_one", servers)
            await trio.sleep(0.1)  # whatever it has come to by then
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_isolated_background_work_goes_on_after_a_failure(backend: Backend):
    """P3: under `Isolate` the stop of a callee is an event, as any error of a broadcast; the actors live on."""
    async with backend.procs(supervision=Isolate()) as procs:
        workers = await procs.spawn("workers", Worker)
        async with backend.procs() as inner:
            servers = await inner.spawn("servers", Server)
            await workers.slice(gpus=0).work.broadcast("call_one", servers)
            await servers.ask.call(1)
        await trio.sleep(2 * limits.LEAVING_SECONDS)
        assert list((await workers.point.call()).values()) == [0, 1]


@only_sim
async def test_message_that_does_not_run_to_its_end_is_said(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """M3: it was accepted, and what it calls takes no more messages; a block that is cancelled promises nothing."""
    for is_cancelled in (True, False):
        caplog.clear()
        with trio.CancelScope() as scope:
            async with backend.procs() as procs:
                servers, workers = await procs.spawn("servers", Server), await procs.spawn("workers", Worker)
                await workers.slice(gpus=1).work.broadcast("call_one", servers)
                await trio.sleep(1)
                if is_cancelled:
                    scope.cancel()
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(lines) == (0 if is_cancelled else 1)
    assert lines[0].startswith("a message of procs did not run to its end: ")
