"""State of a pool for probes and scrapers, as an ASGI application without dependencies."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import attrs
import trio

from trimesh.service.pool.pool import Pool, PoolStatistics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

Answer = tuple[int, str, str]
"""Status, media type and text."""

_OUTCOMES: Final = ("succeeded", "failed", "cancelled", "refused")
_STATES: Final = ("running", "reading", "queued", "arriving")
_TEXT: Final = "text/plain; charset=utf-8"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"


def health_app(pool: Pool[Any]) -> Application:
    """Return an ASGI application with the state of a pool, to be mounted or served: `app.mount("/pool", ...)`.

    | path | answer |
    |---|---|
    | `/live` | 200 while the block of the pool is open, then 503 |
    | `/ready` | 200 if the pool can serve; 503 with the reason while it is paused or no replica is up |
    | `/statistics` | `pool.statistics()` as JSON |
    | `/metrics` | the same in the text format of Prometheus |

    Args:
        pool: A pool that this process opened, in Trio, asyncio or by `trimesh.blocking.service`.

    Raises:
        TypeError: It is no pool.
        RuntimeError: Another process opened it.

    Blocking: a request waits for nothing; it costs some 100 us.
    """
    inner: Any = getattr(pool, "_inner", pool)  # of a blocking pool
    if not isinstance(inner, Pool):
        raise TypeError(f"health_app takes a pool, as `async with open_pool(...)` yields it, got {pool!r}")
    engine = inner._owned()  # noqa: SLF001 - of handles

    def answer(path: str) -> Answer:
        try:
            statistics = None if engine.is_closed else pool.statistics()
        except (RuntimeError, trio.RunFinishedError):  # its program is ending
            statistics = None
        if statistics is None:
            return 503, _TEXT, "the pool is closed\n"
        match path:
            case "/live":
                return 200, _TEXT, "live\n"
            case "/ready":
                reason = _why_not_ready(statistics)
                return (503, _TEXT, f"{reason}\n") if reason else (200, _TEXT, "ready\n")
            case "/statistics":
                return 200, _JSON, json.dumps(attrs.asdict(statistics))
            case _:
                return 200, _METRICS, "".join(f"{line}\n" for line in _metrics(engine.mesh.name, statistics))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _respond(scope, send, answer)
        elif scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "websocket.close", "code": 1000})

    return app


async def _respond(scope: Scope, send: Send, answer: Callable[[str], Answer]) -> None:
    path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
    if path not in ("/live", "/ready", "/statistics", "/metrics"):
        status, kind, text = 404, _TEXT, "paths are /live, /ready, /statistics and /metrics\n"
    elif scope["method"] not in ("GET", "HEAD"):
        status, kind, text = 405, _TEXT, "methods are GET and HEAD\n"
    else:
        status, kind, text = answer(path)
    body = text.encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    if status == 405:
        headers.append((b"allow", b"GET, HEAD"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _why_not_ready(statistics: PoolStatistics) -> str:
    if statistics.is_paused:
        return "the pool is paused"
    if not any(one.is_up and not one.is_drained for one in statistics.replicas):
        return "no replica is up"
    return ""


def _metrics(name: str, statistics: PoolStatistics) -> Iterator[str]:
    def family(metric: str, kind: str, text: str, values: Mapping[str, float | None]) -> Iterator[str]:
        yield f"# HELP trimesh_pool_{metric} {text}"
        yield f"# TYPE trimesh_pool_{metric} {kind}"
        for labels, value in values.items():
            if value is not None:
                yield f"trimesh_pool_{metric}{{{pool}{labels}}} {value:.17g}"

    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    pool = f'pool="{escaped}"'
    found: Any = statistics
    replicas = statistics.replicas
    outcomes = {f',outcome="{one}"': float(getattr(found, one)) for one in _OUTCOMES}
    states = {f',state="{one}"': float(getattr(found, one)) for one in _STATES}
    up = sum(one.is_up and not one.is_drained for one in replicas)
    yield from family("requests_total", "counter", "Requests that have ended.", outcomes)
    yield from family("open_requests", "gauge", "Requests under way.", states)
    yield from family("retries_total", "counter", "Requests that were sent again.", {"": statistics.retried})
    yield from family("hedges_total", "counter", "Requests that a second replica ran.", {"": statistics.hedged})
    yield from family("limited_total", "counter", "Requests that waited for the rate.", {"": statistics.limited})
    yield from family("queued_bytes", "gauge", "Estimated bytes of queued arguments.", {"": statistics.queued_bytes})
    quantiles = {',quantile="0.5"': statistics.p50, ',quantile="0.95"': statistics.p95}
    yield from family("latency_seconds", "gauge", "Latency of the last requests, with their queueing.", quantiles)
    yield from family("paused", "gauge", "1 while the pool is paused.", {"": float(statistics.is_paused)})
    yield from family("replicas_up", "gauge", "Replicas that serve.", {"": float(up)})
    running = {f',replica="{one.index}"': float(one.running) for one in replicas}
    yield from family("replica_requests", "gauge", "Requests that a replica runs.", running)
    ended = {f',replica="{one.index}"': float(one.ended) for one in replicas}
    yield from family("replica_ended_total", "counter", "Requests that have ended at a replica.", ended)
