"""HTTP routes of the dashboard and the guard in front of them.

GU-1 The host name of a request belongs to this machine or was allowed: otherwise another site may have pointed its own
     name at this address (DNS rebinding). The port may differ, as `ssh -L` has its own.
GU-2 Cross-site requests are refused, by the `Origin` and `Sec-Fetch-Site` headers of the browser.
GU-3 A token in the address works once. It is exchanged for a cookie that scripts cannot read and other sites cannot
     send.
GU-4 An action also needs an origin and the header token of its session, which a form or a link cannot send.
GU-5 Every response denies the browser the features that the page does not need.
"""

from __future__ import annotations

import gzip
import hmac
import json
import logging
import re
import secrets
import signal
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import aclosing
from functools import partial
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import parse_qs

import trio
from anycorn import Config, serve  # pyright: ignore[reportUnknownVariableType] - one of its kinds of application
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimesh import limits
from trimesh._runtime.tasks import open_heard_signals
from trimesh.cli.dashboard.board import SeenRun
from trimesh.cli.dashboard.detail import detail, page_json
from trimesh.cli.dashboard.feed import PageFeed, ShownRun
from trimesh.cli.dashboard.hosts import host_table
from trimesh.cli.dashboard.runs import OpenRun, OpenRuns
from trimesh.cli.dashboard.timeline import latencies_of, one_call, places, task_stream, trace
from trimesh.cli.logs import log_groups
from trimesh.errors import ConnectError
from trimesh.observe import ProcRow, RunSnapshot, shared_stacks

_STATIC: Final = Path(__file__).parent / "static"

_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def make_site(runs: OpenRuns) -> Starlette:
    """Return the page of some runs, without its guard. The parameter `run` of a request names one of them."""
    pages = _Pages(runs)
    files = _files()
    return Starlette(
        routes=[
            Route("/", partial(_static, files), name="page"),
            Route("/static/{name:path}", partial(_static, files)),
            Route("/api/session", pages.session),
            Route("/api/runs", pages.runs),
            Route("/api/stream", pages.stream),
            Route("/api/detail", pages.detail),
            Route("/api/stacks", pages.stacks),
            Route("/api/logs", pages.logs),
            Route("/api/hosts", pages.hosts),
            Route("/api/places", pages.places),
            Route("/api/tasks", pages.tasks),
            Route("/api/latencies", pages.latencies),
            Route("/api/call", pages.call),
            Route("/api/trace", pages.trace),
            Route("/api/curves", pages.curves),
            Route("/api/kill", partial(pages.act, "kill"), methods=["POST"]),
            Route("/api/cancel", partial(pages.act, "cancel"), methods=["POST"]),
        ],
        exception_handlers={ValueError: _wrong, ConnectError: _silent},
    )


def _files() -> dict[str, tuple[bytes, bytes, str]]:
    """Return the files of the page, also compressed, with their types; no request names a path on disk."""
    found = dict[str, tuple[bytes, bytes, str]]()
    for path in _STATIC.rglob("*"):
        if path.suffix in _TYPES:
            data = path.read_bytes()
            found[str(path.relative_to(_STATIC))] = data, gzip.compress(data), _TYPES[path.suffix]
    return found


async def _static(files: dict[str, tuple[bytes, bytes, str]], request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in files:
        return PlainTextResponse("the page has no such file: open /\n", status_code=404)
    data, packed, kind = files[name]
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type=kind, headers={"content-encoding": "gzip", "vary": "accept-encoding"})
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
    """Handlers of the page's requests."""

    def __init__(self, runs: OpenRuns) -> None:
        self._runs = runs

    async def _run(self, request: Request) -> OpenRun:
        return await self._runs.get(request.query_params.get("run", ""))

    async def session(self, request: Request) -> Response:
        """Return the header token that actions need, and whether the command has named a run."""
        return _json({"act": request.state.act_token, "has_first": self._runs.has_first})

    async def runs(self, _: Request) -> Response:
        """Return the runs that can be shown."""
        return _json(await trio.to_thread.run_sync(self._runs.list.entries))

    async def stream(self, request: Request) -> Response:
        """Return boards as events, until the browser goes."""
        feed = (await self._run(request)).feed
        if feed.followers >= limits.PAGE_CLIENTS_MAX:
            most = f"limits.PAGE_CLIENTS_MAX ({limits.PAGE_CLIENTS_MAX})"
            return PlainTextResponse(f"at most {most} browsers can follow: close one\n", status_code=503)
        return _Events(feed)

    async def detail(self, request: Request) -> Response:
        """Return the details of a member."""
        seen = (await self._run(request)).feed.seen
        found = None if seen is None else detail(seen, request.query_params.get("name", ""))
        return _json({"error": "this member is gone"}) if found is None else _json(found)

    async def stacks(self, request: Request) -> Response:
        """Return stacks, equal ones once."""
        seen = (await self._run(request)).feed.seen
        found = shared_stacks(RunSnapshot(taken_at=0.0) if seen is None else seen.snapshot)
        return _json(found[: limits.PAGE_ROWS_MAX])

    async def logs(self, request: Request) -> Response:
        """Return output lines after a line number."""
        after = _whole(request, "after", 0, 2**53)
        rows = await trio.to_thread.run_sync((await self._run(request)).source.output, after)
        groups = log_groups(rows[-limits.PAGE_LINES_MAX :])
        lines = [{"row": row, "names": members[:4], "count": len(members)} for row, members in groups]
        return _json({"lines": lines, "newest": rows[-1].number if rows else after})

    async def curves(self, request: Request) -> Response:
        """Return the curves of the program's metrics."""
        curves = (await self._run(request)).feed.curves
        return _json({"curves": list(curves.shown()), "left_out": curves.left_out})

    async def hosts(self, request: Request) -> Response:
        """Return the hosts and their processes, sorted by a column."""
        query = request.query_params
        return _json(host_table(await self._seen(request), query.get("sort", "memory"), query.get("name", "")))

    async def places(self, request: Request) -> Response:
        """Return the rows of the time line."""
        return _json(places((await self._seen(request)).snapshot))

    async def tasks(self, request: Request) -> Response:
        """Return the time lines of the named processes, at most `limits.PAGE_TASK_PROCS`."""
        seen = (await self._seen(request)).snapshot
        return _json(await trio.to_thread.run_sync(task_stream, _procs(request, seen), *_period(request, seen)))

    async def latencies(self, request: Request) -> Response:
        """Return durations of calls by endpoint, of the named processes."""
        seen = (await self._seen(request)).snapshot
        return _json(await trio.to_thread.run_sync(latencies_of, _procs(request, seen), *_period(request, seen)))

    async def call(self, request: Request) -> Response:
        """Return one call of a process, by its number."""
        seen = (await self._seen(request)).snapshot
        proc = next((one for one in seen.procs if one.id == request.query_params.get("proc")), None)
        number = _whole(request, "number", 0, 2**53)
        found = None if proc is None else await trio.to_thread.run_sync(one_call, seen, proc, number)
        return _json(
            {"error": "the flight record of its process has overwritten this call"} if found is None else found
        )

    async def trace(self, request: Request) -> Response:
        """Return the time line of all processes as a file for Perfetto."""
        seen = (await self._seen(request)).snapshot
        since, seconds = _period(request, seen)
        if seen.job is None or not seen.job.record:
            raise ValueError("this run keeps no flight records: TRIMESH_RECORD must not be off")
        data = await trio.to_thread.run_sync(trace, seen.job.record, since, seconds)
        name = f"trimesh-{seen.job.pid}.json"
        return Response(data, headers={"content-disposition": f'attachment; filename="{name}"'})

    async def _seen(self, request: Request) -> SeenRun:
        seen = (await self._run(request)).feed.seen
        if seen is None:
            raise ValueError("there is no snapshot of the run yet")
        return seen

    async def act(self, what: Literal["kill", "cancel"], request: Request) -> Response:
        """Kill a process, or cancel a call."""
        target = await _target(request)
        source = (await self._run(request)).source
        await trio.to_thread.run_sync(source.kill if what == "kill" else source.cancel, target)
        return _json({})


def _procs(request: Request, seen: RunSnapshot) -> list[ProcRow]:
    procs = {proc.id: proc for proc in seen.procs}
    wanted = request.query_params.get("procs", "").split(",")[: limits.PAGE_TASK_PROCS]
    return [procs[one] for one in wanted if one in procs]


def _period(request: Request, seen: RunSnapshot) -> tuple[float, float]:
    """Return begin and length of the period of a time line, in seconds; without `until` it ends now."""
    seconds = min(_whole(request, "millis", 10_000, 2**53) / 1e3, limits.PAGE_TASK_SECONDS)
    until = _whole(request, "until", 0, 2**53) / 1e3
    return (until or seen.taken_at) - seconds, seconds


def _whole(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 17) or int(text) > most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}, got {text[:40]!r}")
    return int(text)


async def _target(request: Request) -> str:
    """Return the target of an action.

    Raises:
        ValueError: The body is too large, or names no target.
    """
    data = b""
    try:
        async with aclosing(request.stream()) as parts:
            async for part in parts:
                data += part
                if len(data) > limits.PAGE_REQUEST_BYTES_MAX:
                    raise ValueError(f"an action must have at most {limits.PAGE_REQUEST_BYTES_MAX} bytes, got more")
    except ClientDisconnect:
        raise ValueError("the browser has gone") from None
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    target = cast("dict[str, Any]", body).get("target") if isinstance(body, dict) else None
    if not isinstance(target, str):
        raise ValueError('an action must be {"target": "..."}')  # noqa: TRY004 - the value is from the browser
    return target


# ---- the server of the page: one socket on the loopback address, by anycorn on Trio ----------------------------------

ADDRESS = "127.0.0.1"


class PageServer:
    """The page of the runs of this user.

    Args:
        source: The run that it begins with; None for the list of runs.
        port: Port to listen at; 0 for a free one.
        prefix: Prefix of all paths: "" or "/a/b".
        hosts: Allowed host names besides those of this machine.
        every: Polling interval in seconds.
        on_used: Called when a token was used; then `address` is for the next browser.

    Attributes:
        port: Port at which it listens.
        door: Tokens and sessions.
        runs: The open runs.
    """

    def __init__(
        self,
        source: ShownRun | None,
        *,
        port: int = 0,
        prefix: str = "",
        hosts: Iterable[str] = (),
        every: float = limits.PAGE_SECONDS,
        on_used: Callable[[], None] | None = None,
    ) -> None:
        self._sock = socket.create_server((ADDRESS, port))
        self.port: int = self._sock.getsockname()[1]
        self._prefix = prefix
        self.door = PageDoor(on_used)
        self.runs = OpenRuns(source, every)
        self._app: Any = Guard(make_site(self.runs), self.door, prefix=prefix, hosts=hosts, port=self.port)

    @property
    def address(self) -> str:
        """Address of the page, with a token for the next browser."""
        return f"http://{ADDRESS}:{self.port}{self._prefix}/?token={self.door.token}"

    async def run_until_signal(self) -> None:
        """Serve until Ctrl-C or SIGTERM, caught as signals: the server would survive a KeyboardInterrupt."""
        async with trio.open_nursery() as nursery:
            with open_heard_signals(signal.SIGINT, signal.SIGTERM) as signals:
                nursery.start_soon(self.run)
                await anext(aiter(signals))
                nursery.cancel_scope.cancel()

    async def run(self) -> None:
        """Serve until cancelled."""
        config = Config()
        config.bind = [f"fd://{self._sock.detach()}"]  # the server closes it
        config.accesslog = None
        config.errorlog = logging.getLogger("trimesh.dashboard")
        config.graceful_timeout = 0.0
        config.include_server_header = False
        config.keep_alive_timeout = 60
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.runs.run)
            await serve(self._app, config, shutdown_trigger=trio.sleep_forever, mode="asgi")


def checked_prefix(prefix: str) -> str:
    """Return a prefix of paths in the server's form: "" or "/a/b".

    Raises:
        ValueError: It has characters that need escapes in a path.
    """
    found = "/" + prefix.strip("/") if prefix.strip("/") else ""
    if not all(char.isascii() and (char.isalnum() or char in "/-._~") for char in found) or "//" in found:
        raise ValueError(f"--prefix must be a path of letters, digits and -._~, got {prefix!r}")
    return found


# ---- access control, between the server and the page -----------------------------------------------------------------

_OF_THIS_MACHINE: Final = ("127.0.0.1", "localhost", "[::1]")
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_SESSIONS_MAX: Final = 32
"""Admitted browsers; beyond it, the oldest needs a new token."""

ACT_HEADER: Final = "x-trimesh-token"

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), usb=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

_ENTERED: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=./">
<link rel="icon" href="static/icon.svg"><title>trimesh</title><p><a href="./">The page</a></p></html>
"""
"""A page, not a redirect: after a link on another site, the browser would not send the cookie with the redirect.

It names an icon, or the browser might request /favicon.ico before it leaves for the page."""


class PageDoor:
    """Tokens and sessions.

    Attributes:
        token: Token for the next browser.
    """

    def __init__(self, on_used: Callable[[], None] | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        self._on_used = on_used
        self._sessions = OrderedDict[str, str]()

    def enter(self, token: str) -> str | None:
        """Return the cookie of a new session; None for a wrong or used token (GU-3)."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        self.token = secrets.token_urlsafe(32)
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = secrets.token_urlsafe(32)
        if len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        if self._on_used is not None:
            self._on_used()
        return cookie

    def act_token(self, cookie: str) -> str | None:
        """Return the header token of a session; None if there is no such session."""
        found = None
        for known, token in self._sessions.items():
            if hmac.compare_digest(known.encode(), cookie.encode()):
                found = token
        return found


class Guard:
    """Middleware that passes only allowed requests to the page.

    Args:
        page: The page.
        door: Tokens and sessions.
        prefix: Prefix of all paths: "" or "/a/b".
        hosts: Host names besides those of this machine, under which a proxy serves the page.
        port: Port of the server, for the name of the cookie.
    """

    def __init__(
        self, page: ASGIApp, door: PageDoor, *, prefix: str = "", hosts: Iterable[str] = (), port: int = 0
    ) -> None:
        self._page = page
        self._door = door
        self._prefix = prefix
        self._hosts = {*_OF_THIS_MACHINE, *(host.lower() for host in hosts)}
        self._cookie = f"trimesh-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *(pair for pair in message.get("headers", ()) if pair[0].decode("latin-1") not in _HEADERS),
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        answer = self._refusal(scope)
        if answer is None:
            scope["path"] = scope["path"][len(self._prefix) :]
            await self._page(scope, receive, send_guarded)
        else:
            await answer(scope, receive, send_guarded)

    def _refusal(self, scope: MutableMapping[str, Any]) -> Response | None:
        """Return the response that refuses a request, or None if it is allowed. Stores the session in the scope."""
        asked = HTTPConnection(scope)
        path: str = scope["path"]
        host = _only(asked, "host")
        if (name := _name_of(host)) is None or name not in self._hosts:
            return _refused(f"the page is not available under this name, {_shown(host)}: allow it by --allow-host", 421)
        if path == self._prefix and self._prefix:
            return Response(status_code=307, headers={"location": f"{self._prefix}/"})
        if not path.startswith(f"{self._prefix}/"):
            return _refused(f"all paths of the page must begin with {self._prefix}/", 404)
        is_root = path == f"{self._prefix}/"
        if scope["method"] not in ("GET", "POST"):
            return _refused("the page takes GET and POST only", 405)
        if not _is_same_origin(asked, host, is_act=scope["method"] == "POST", is_root=is_root):
            return _refused("another site may not use the page", 403)
        if is_root and scope["method"] == "GET" and (tokens := parse_qs(scope["query_string"].decode()).get("token")):
            return self._entered(tokens[0], asked)
        cookie = self._cookie_of(asked)
        act_token = None if cookie is None else self._door.act_token(cookie)
        if act_token is None:
            return _refused("open the last address of trimesh dashboard: its token works once", 401)
        if scope["method"] == "POST":
            token = _only(asked, ACT_HEADER)
            if not hmac.compare_digest(token.encode(), act_token.encode()):
                return _refused("an action needs the token of its session: reload the page", 403)
            if _only(asked, "content-type").partition(";")[0].strip() != "application/json":
                return _refused("an action must be application/json", 415)
        scope.setdefault("state", {})["act_token"] = act_token
        return None

    def _entered(self, token: str, asked: HTTPConnection) -> Response:
        cookie = self._door.enter(token)
        if cookie is None:
            known = self._cookie_of(asked)
            if known is None or self._door.act_token(known) is None:
                return _refused("this token is wrong or used: open the last address of trimesh dashboard", 401)
            return HTMLResponse(_ENTERED)
        answer = HTMLResponse(_ENTERED)
        answer.set_cookie(self._cookie, cookie, path=f"{self._prefix}/", httponly=True, samesite="strict")
        return answer

    def _cookie_of(self, asked: HTTPConnection) -> str | None:
        try:
            found = SimpleCookie(_only(asked, "cookie")).get(self._cookie)
        except CookieError:
            return None
        return None if found is None else found.value


async def _live(receive: Receive, send: Send) -> None:
    """Confirm the lifespan messages of ASGI: there is nothing to start or stop."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _only(asked: HTTPConnection, name: str) -> str:
    """Return a header that occurs exactly once, otherwise ""."""
    found = asked.headers.getlist(name)
    return found[0] if len(found) == 1 else ""


def _name_of(host: str) -> str | None:
    match = _HOST.fullmatch(host)
    return None if match is None else match[1].lower()


def _is_same_origin(asked: HTTPConnection, host: str, *, is_act: bool, is_root: bool) -> bool:
    origins = asked.headers.getlist("origin")
    if origins and origins not in ([f"http://{host}"], [f"https://{host}"]):
        return False
    if is_act and not origins:
        return False
    site = _only(asked, "sec-fetch-site")
    if site in ("", "none", "same-origin"):
        return True
    is_visit = _only(asked, "sec-fetch-mode") == "navigate" and _only(asked, "sec-fetch-dest") == "document"
    return is_visit and is_root and not is_act  # a link to it: without a token it shows nothing


def _shown(host: str) -> str:
    return repr(host[:100])


def _refused(words: str, status: int) -> Response:
    return PlainTextResponse(f"{words}\n", status_code=status)
