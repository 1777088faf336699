"""Real asyncio servers: one inside an actor, and one in front of a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
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
from trimesh import endpoint, this_host

pytestmark = pytest.mark.real


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
