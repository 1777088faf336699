"""Real asyncio servers: one inside an actor, and one in front of a mesh."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections import Counter as Tally
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import trio
import uvicorn
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.aio.engines import Engine
from tests.aio.loops import Test
from tests.conformance.probe import Probe

import trimesh
from trimesh import Actor, Backoff, ProcDied, Restart, endpoint, this_host

pytestmark = pytest.mark.real

REQUESTS = 500
"""At once, each by a connection of its own."""


class Counter(trimesh.aio.Actor):
    """Serves HTTP for as long as it lives, and counts in another actor."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        app = web.Application()
        app.router.add_get("/square/{number}", self.square)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port: int = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()

    async def square(self, request: web.Request) -> web.Response:
        result = await self.engine.square.call_one(int(request.match_info["number"]))
        return web.json_response({"square": result})

    @endpoint
    async def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def get(url: str) -> object:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json()


def test_server_in_an_actor_calls_other_actors(run: Callable[[Test], None]) -> None:
    """Its handlers run in tasks of the server, which belong to no endpoint."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            engine = await procs.spawn("engine", Engine)
            async with procs.spawn("counter", Counter, engine) as counter:
                address = await counter.address.call_one()
                answers = await asyncio.gather(*(get(f"{address}/square/{number}") for number in range(8)))
                assert answers == [{"square": number * number} for number in range(8)]
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(f"{address}/square/1")

    run(main)


async def test_server_ends_with_a_trio_program():
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        engine = await procs.spawn("engine", Engine)
        counter = await procs.spawn("counter", Counter, engine)
        assert (await counter.address.call_one()).startswith("http://127.0.0.1:")


def test_service_in_front_of_a_mesh():
    """uvicorn has the loop; the mesh is opened in the lifespan of the application, and calls are made by requests."""
    answers: list[object] = []

    async def main() -> None:
        opened = asyncio.Event()

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
            async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
                app.state.probes = await procs.spawn("probes", Probe)
                opened.set()
                yield

        async def ranks(request: Request) -> JSONResponse:
            return JSONResponse((await request.app.state.probes.rank.call()).values())

        app = Starlette(routes=[Route("/ranks", ranks)], lifespan=lifespan)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
        serving = asyncio.create_task(server.serve())
        await opened.wait()
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        answers.extend(await asyncio.gather(*(get(f"http://127.0.0.1:{port}/ranks") for _ in range(4))))
        server.should_exit = True
        await serving

    asyncio.run(main())
    assert answers == [[0, 1]] * 4


# ---- many requests at once -------------------------------------------------------------------------------------------


class TrioReplica(Actor):
    """Answers at once, or at its gate."""

    def __init__(self) -> None:
        self.gate, self.all_held = trio.Event(), trio.Event()
        self.held = 0

    @endpoint(concurrency=REQUESTS)
    async def square(self, number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number * number

    @endpoint(concurrency=REQUESTS, group="held")
    async def hold(self, number: int) -> int:
        self.held += 1
        if self.held == REQUESTS // 2:
            self.all_held.set()
        await self.gate.wait()
        return number * number

    @endpoint(concurrency=4, group="watch")
    async def wait_held(self) -> int:
        """Wait for half of the requests; return the process id."""
        await self.all_held.wait()
        return os.getpid()

    @endpoint(concurrency=4, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()


class AsyncioReplica(trimesh.aio.Actor):
    """The same as a program of asyncio."""

    def __init__(self) -> None:
        self.gate, self.all_held = asyncio.Event(), asyncio.Event()
        self.held = 0

    @endpoint(concurrency=REQUESTS)
    async def square(self, number: int) -> int:
        await asyncio.sleep(0)
        return number * number

    @endpoint(concurrency=REQUESTS, group="held")
    async def hold(self, number: int) -> int:
        self.held += 1
        if self.held == REQUESTS // 2:
            self.all_held.set()
        await self.gate.wait()
        return number * number

    @endpoint(concurrency=4, group="watch")
    async def wait_held(self) -> int:
        await self.all_held.wait()
        return os.getpid()

    @endpoint(concurrency=4, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()


class Service:
    """Two replicas behind uvicorn, in the loop of the test.

    Attributes:
        procs, replicas: While the application is open.
    """

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self._opened = asyncio.Event()
        self.procs: Any = None
        self.replicas: Any = None
        routes = [Route("/{verb}/{number:int}", self._answer)]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="on", backlog=2 * REQUESTS)
        self._server = uvicorn.Server(config)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None, None]:
        policy = Restart("one_for_one", intensity=10, period=60, backoff=Backoff(0.01))
        async with trimesh.aio.spawn_procs({"gpus": 2}, supervision=policy) as self.procs:
            self.replicas = await self.procs.spawn("replicas", self._replica)
            self._opened.set()
            yield

    async def _answer(self, request: Request) -> JSONResponse:
        number = request.path_params["number"]
        try:
            found = await getattr(self.replicas, request.path_params["verb"]).choose(number)
        except ProcDied:
            return JSONResponse({"number": number}, status_code=503)
        return JSONResponse({"number": number, "square": found})

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        """Serve for as long as the block is open."""
        task = asyncio.create_task(self._server.serve())
        await self._opened.wait()
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        try:
            yield
        finally:
            self._server.should_exit = True
            await task

    async def ask(self, verb: str, numbers: range) -> Tally[int]:
        """Make all requests at once; return how often each status came, when each has answered for its own number."""

        async def one(session: aiohttp.ClientSession, number: int) -> int:
            async with session.get(f"http://127.0.0.1:{self._port}/{verb}/{number}") as response:
                body = await response.json()
                assert body["number"] == number
                assert response.status != 200 or body["square"] == number * number
                return response.status

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return Tally(await asyncio.gather(*(one(session, number) for number in numbers)))


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Allow this process both ends of each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * REQUESTS
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, possible), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("replica", [TrioReplica, AsyncioReplica])
def test_many_requests_at_once_each_get_their_answer(replica: Any) -> None:
    """K04, K05: 500 at once, twice, through one server to two replicas."""

    async def main() -> None:
        service = Service(replica)
        async with service.serving():
            for _ in range(2):
                assert await service.ask("square", range(REQUESTS)) == {200: REQUESTS}
            assert service.replicas.statistics().calls_unended == 0

    asyncio.run(main())


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("replica", [TrioReplica, AsyncioReplica])
def test_requests_of_a_killed_replica_fail_and_the_others_are_answered(replica: Any) -> None:
    """X3, R09, K04, K05: each of 500 requests has one outcome; the server goes on with the restarted replica."""

    async def main() -> None:
        service = Service(replica)
        async with service.serving():
            asking = asyncio.create_task(service.ask("hold", range(REQUESTS)))
            pids = await service.replicas.wait_held.call()
            os.kill(pids.item(gpus=1), signal.SIGKILL)
            await service.replicas.slice(gpus=0).open_gate.call_one()
            assert await asking == {200: REQUESTS // 2, 503: REQUESTS // 2}
            await service.procs.settled()
            assert await service.ask("square", range(REQUESTS)) == {200: REQUESTS}
            assert service.replicas.statistics().calls_unended == 0

    asyncio.run(main())
