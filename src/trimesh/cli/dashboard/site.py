"""The page and what it asks: paths, and what each answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import trio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trimesh import limits
from trimesh.cli.dashboard.detail import detail
from trimesh.cli.dashboard.encode import page_json
from trimesh.cli.dashboard.feed import PageFeed
from trimesh.cli.dashboard.source import RunSource
from trimesh.cli.dashboard.tasks import task_stream
from trimesh.cli.logs import log_groups
from trimesh.cli.text import clean
from trimesh.errors import ConnectError
from trimesh.observe import RunSnapshot, shared_stacks

_STATIC: Final = Path(__file__).parent / "static"

_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def make_site(feed: PageFeed, source: RunSource) -> Starlette:
    """Return the page of a run, without its guard."""
    pages = _Pages(feed, source)
    files = _files()
    return Starlette(
        routes=[
            Route("/", partial(_static, files), name="page"),
            Route("/static/{name:path}", partial(_static, files)),
            Route("/api/session", pages.session),
            Route("/api/stream", pages.stream),
            Route("/api/detail", pages.detail),
            Route("/api/stacks", pages.stacks),
            Route("/api/logs", pages.logs),
            Route("/api/tasks", pages.tasks),
            Route("/api/kill", partial(pages.act, source.kill), methods=["POST"]),
            Route("/api/cancel", partial(pages.act, source.cancel), methods=["POST"]),
        ],
        exception_handlers={ValueError: _wrong, ConnectError: _silent},
    )


def _files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page, and what each is; read once, so that no path of a request is one of the disk."""
    found = dict[str, tuple[bytes, str]]()
    for path in _STATIC.rglob("*"):
        if path.suffix in _TYPES:
            found[str(path.relative_to(_STATIC))] = path.read_bytes(), _TYPES[path.suffix]
    return found


async def _static(files: dict[str, tuple[bytes, str]], request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in files:
        return PlainTextResponse("the page has no such file\n", status_code=404)
    data, kind = files[name]
    return Response(data, media_type=kind)


async def _wrong(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=400)


async def _silent(_: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, status=502)


def _json(value: object, status: int = 200) -> Response:
    return Response(page_json(value), status, media_type="application/json")


class _Events(Response):
    """Boards as server-sent events, until the browser goes."""

    media_type = "text/event-stream"

    def __init__(self, feed: PageFeed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, receive, nursery.cancel_scope)
            async with aclosing(self._feed.follow()) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})

    @staticmethod
    async def _until_gone(receive: Receive, scope: trio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


class _Pages:
    """What the page asks for."""

    def __init__(self, feed: PageFeed, source: RunSource) -> None:
        self._feed = feed
        self._source = source

    async def session(self, request: Request) -> Response:
        """What acts need."""
        return _json({"act": request.state.act_token})

    async def stream(self, _: Request) -> Response:
        """Boards, until the browser goes."""
        if self._feed.followers >= limits.PAGE_CLIENTS_MAX:
            return PlainTextResponse(f"at most {limits.PAGE_CLIENTS_MAX} browsers can follow\n", status_code=503)
        return _Events(self._feed)

    async def detail(self, request: Request) -> Response:
        """All that is known of the member of a cell."""
        found = None
        if self._feed.seen is not None:
            found = detail(self._feed.seen, request.query_params.get("name", ""))
        return _json({"error": "it is not there any more"}) if found is None else _json(found)

    async def stacks(self, _: Request) -> Response:
        """Stacks, equal ones once."""
        seen = self._feed.seen
        found = shared_stacks(RunSnapshot(taken_at=0.0) if seen is None else seen.snapshot)
        return _json(found[: limits.PAGE_ROWS_MAX])

    async def logs(self, request: Request) -> Response:
        """Lines after a number."""
        after = _whole(request, "after", 0, 2**53)
        rows = await trio.to_thread.run_sync(self._source.output, after)
        groups = log_groups(rows[-limits.PAGE_LINES_MAX :])
        lines = [{"row": row, "names": members[:4], "count": len(members)} for row, members in groups]
        return _json({"lines": lines, "newest": rows[-1].number if rows else after})

    async def tasks(self, request: Request) -> Response:
        """When calls ran, of some processes of a mesh."""
        seen = self._feed.seen
        if seen is None:
            return _json({"error": "the run was not asked yet"}, 404)
        seconds = min(_whole(request, "seconds", 10, 3_600), limits.PAGE_TASK_SECONDS)
        first = _whole(request, "first", 0, 10**9)
        mesh = request.query_params.get("mesh", "")
        procs = [proc for proc in seen.snapshot.procs if proc.mesh and mesh in ("", clean(proc.mesh))]
        procs.sort(key=lambda proc: (proc.mesh, tuple(proc.point.values()), proc.incarnation))
        until = seen.snapshot.taken_at
        few = procs[first : first + limits.PAGE_TASK_PROCS]
        found = await trio.to_thread.run_sync(task_stream, few, until - seconds, seconds)
        return _json({"stream": found, "first": first, "count": len(procs)})

    async def act(self, act: Callable[[str], None], request: Request) -> Response:
        """Kill a process, or cancel a call."""
        target = await _target(request)
        await trio.to_thread.run_sync(act, target)
        return _json({})


def _whole(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 17) or int(text) > most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}, got {text[:40]!r}")
    return int(text)


async def _target(request: Request) -> str:
    """Return what is to be acted on.

    Raises:
        ValueError: The body is too large, or says no target.
    """
    data = b""
    try:
        async with aclosing(request.stream()) as parts:
            async for part in parts:
                data += part
                if len(data) > limits.PAGE_REQUEST_BYTES_MAX:
                    raise ValueError(f"an act has at most {limits.PAGE_REQUEST_BYTES_MAX} bytes")
    except ClientDisconnect:
        raise ValueError("the browser has gone") from None
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    target = cast("dict[str, Any]", body).get("target") if isinstance(body, dict) else None
    if not isinstance(target, str):
        raise ValueError('an act is told as {"target": "..."}')  # noqa: TRY004 - it is a value of the browser
    return target
