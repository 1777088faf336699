"""The state of a pool over ASGI."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.service.test_pool import Generator, both, until

import trimesh
import trimesh.blocking as tb
from trimesh import Isolate
from trimesh.blocking import service as blocking
from trimesh.service import Rate, health_app, open_pool
from trimesh.testing import simulate


async def get(app: Any, path: str, method: str = "GET", root: str = "") -> tuple[int, str]:
    transport = httpx.ASGITransport(app, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://pool") as client:
        answer = await client.request(method, root + path)
    return answer.status_code, answer.text


@both
@simulate(seeds=2, per_host={"replica": 2}, supervision=Isolate())
async def test_state_of_a_pool_is_told_to_probes(mesh, faults):
    """Y22: and which part is missing."""
    generators = await mesh.spawn('gen"erators', Generator)
    async with open_pool(generators, along="replica", rate=Rate(1_000)) as pool:
        app = health_app(pool)
        assert await get(app, "/live") == (200, "live\n")
        assert await get(app, "/ready") == (200, "ready\n")
        assert await get(app, "/ready", root="/mounted") == (200, "ready\n")
        assert await get(app, "/ready", "HEAD") == (200, "")
        assert (await get(app, "/ready", "POST"))[0] == 405
        assert (await get(app, "/other"))[0] == 404
        await pool.generate("x")
        with pytest.raises(ValueError, match="bad"):
            await pool.generate("bad")
        status, text = await get(app, "/statistics")
        found = json.loads(text)
        assert (status, found["succeeded"], found["failed"], len(found["replicas"])) == (200, 1, 1, 2)
        async with pool.paused("keep"):
            assert await get(app, "/ready") == (503, "the pool is paused\n")
            assert (await get(app, "/live"))[0] == 200
        metrics = {one.name: one for one in parse((await get(app, "/metrics"))[1])}
        ended = {
            one.labels["outcome"]: one.value
            for one in metrics["trimesh_pool_requests"].samples
            if "outcome" in one.labels
        }
        assert ended == {"succeeded": 1, "failed": 1, "cancelled": 0, "refused": 0}
        assert {one.labels["pool"] for one in metrics["trimesh_pool_replicas_up"].samples} == {'gen"erators'}
        assert metrics["trimesh_pool_latency_seconds"].samples
        faults.kill(mesh)
        await until(lambda: not generators.alive())
        with pytest.raises(trimesh.ProcDied):
            await pool.generate("x")
        with pytest.raises(trimesh.ProcDied):
            await pool.generate("x")
        assert await get(app, "/ready") == (503, "no replica is up\n")
        assert (await get(app, "/live"))[0] == 200
    assert await get(app, "/live") == (503, "the pool is closed\n")


@simulate(seeds=1, per_host={"gpus": 1})
async def test_health_app_refuses_what_is_no_pool_of_this_process(mesh):
    generators = await mesh.spawn("generators", Generator)
    with pytest.raises(TypeError, match="health_app takes a pool"):
        health_app(generators)
    async with open_pool(generators) as pool:
        with pytest.raises(RuntimeError, match="in the process that opened"):
            health_app(pickle.loads(pickle.dumps(pool)))


async def lifespan(app: Any) -> list[str]:
    """Run the lifespan protocol as servers do."""
    sent: list[str] = []
    wanted = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        return {"type": next(wanted)}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    await app({"type": "websocket"}, receive, send)
    return sent


@simulate(seeds=1, per_host={"gpus": 1})
async def test_health_app_can_be_served_alone(mesh):
    async with open_pool(await mesh.spawn("generators", Generator)) as pool:
        sent = await lifespan(health_app(pool))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


@pytest.mark.real
def test_pools_of_asyncio_and_of_scripts_tell_their_state():
    """Y22, K04, K06."""

    async def main() -> None:
        async with (
            trimesh.aio.spawn_procs({"gpus": 1}) as procs,
            open_pool(await procs.spawn("generators", Generator)) as pool,
        ):
            assert await get(health_app(pool), "/ready") == (200, "ready\n")

    asyncio.run(main())
    with tb.spawn_procs({"gpus": 1}) as procs, blocking.open_pool(procs.spawn("generators", Generator)) as pool:
        app = health_app(pool)
        assert asyncio.run(get(app, "/ready")) == (200, "ready\n")
        assert trio.run(get, app, "/statistics")[0] in (200, 503)
