"""Requests to the page's server as a client of any kind would make them, one a connection."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import trio

from trimesh.cli.dashboard.feed import RunSource
from trimesh.cli.dashboard.site import PageServer


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    text: str


@asynccontextmanager
async def serving(source: object, **options: Any) -> AsyncGenerator[PageServer]:
    """Serve the page of a run, or of what stands for one."""
    async with trio.open_nursery() as nursery:
        server = PageServer(cast("RunSource", source), **options)
        nursery.start_soon(server.run)
        yield server
        nursery.cancel_scope.cancel()


async def ask(server: PageServer, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    """Return the answer to one request; `host` is that of the address if none is given, `_` in names is `-`."""

    def request() -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in {"host": f"127.0.0.1:{server.port}", **headers}.items():
                connection.putheader(name.replace("_", "-"), value)
            if body:
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            text = (
                "" if answer.getheader("content-type", "").startswith("text/event-stream") else answer.read().decode()
            )
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)
        finally:
            connection.close()

    return await trio.to_thread.run_sync(request)


async def entered(server: PageServer, prefix: str = "", **headers: str) -> str:
    """Return the cookie of a browser that has come with the token."""
    answer = await ask(server, f"{prefix}/?token={server.door.token}", **headers)
    assert answer.status == 200, answer
    found = re.match(r"(trimesh-[0-9]+=[^;]+);", answer.headers["set-cookie"])
    assert found is not None
    return found[1]


async def page_headers(server: PageServer, cookie: str) -> dict[str, str]:
    """Return what the page says when it has something done."""
    token = json.loads((await ask(server, "/api/session", cookie=cookie)).text)["act"]
    return {
        "cookie": cookie,
        "origin": f"http://127.0.0.1:{server.port}",
        "content_type": "application/json",
        "x_trimesh_token": token,
    }


async def act(server: PageServer, what: str, target: str, cookie: str, **headers: str) -> Answer:
    """Have something done, as the page does it; headers replace its own, and an empty one is left out."""
    usual = await page_headers(server, cookie)
    sent = {name: value for name, value in {**usual, **headers}.items() if value}
    return await ask(server, f"/api/{what}", "POST", json.dumps({"target": target}).encode(), **sent)
