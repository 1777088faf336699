"""Who may see the page, and who may act there: between the server and the page.

GU-1 The name that a browser has asked for is one of this machine, or one that was allowed: else a site of another
     owner has turned its own name to this address (DNS rebinding). The port may differ, as `ssh -L` has its own.
GU-2 What another site has a browser do is refused: by the origin that the browser tells, and by what it says of sites.
GU-3 A token in the address works once, and is exchanged for a cookie that no script sees, and no other site sends.
GU-4 An act needs the header token of its session besides, which a form or a link cannot send; and an origin.
GU-5 Every answer forbids the browser what the page does not need.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OF_THIS_MACHINE: Final = ("127.0.0.1", "localhost", "[::1]")
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_SESSIONS_MAX: Final = 32
"""Browsers that were let in; the oldest has to come with a new token."""

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
"""A redirect would not do: after a link on another site, the browser would not send the cookie along with it.

It names an icon, or the browser might ask for /favicon.ico before it has left for the page."""


class PageDoor:
    """Tokens and sessions.

    Attributes:
        token: Of the next browser.
    """

    def __init__(self, on_used: Callable[[], None] | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        self._on_used = on_used
        self._sessions = OrderedDict[str, str]()

    def enter(self, token: str) -> str | None:
        """Return the cookie of a new session, for a token that was not used yet (GU-3)."""
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
    """The page behind it answers only those who may see it.

    Args:
        page: The page.
        door: Tokens and sessions.
        prefix: Of all its paths: "" or "/a/b".
        hosts: Names besides those of this machine under which a proxy makes it available.
        port: Of the server, for the name of the cookie.
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
        """Return what is answered in place of the page; None if the page may answer. Notes the session in the scope."""
        asked = HTTPConnection(scope)
        path: str = scope["path"]
        host = _only(asked, "host")
        if (name := _name_of(host)) is None or name not in self._hosts:
            return _refused(f"the page is not available under this name: {_shown(host)} (--allow-host allows one)", 421)
        if path == self._prefix and self._prefix:
            return Response(status_code=307, headers={"location": f"{self._prefix}/"})
        if not path.startswith(f"{self._prefix}/"):
            return _refused(f"all paths of the page begin with {self._prefix}/", 404)
        is_root = path == f"{self._prefix}/"
        if scope["method"] not in ("GET", "POST"):
            return _refused("the page knows GET and POST", 405)
        if not _is_same_origin(asked, host, is_act=scope["method"] == "POST", is_root=is_root):
            return _refused("another site may not use the page", 403)
        if is_root and scope["method"] == "GET" and (tokens := parse_qs(scope["query_string"].decode()).get("token")):
            return self._entered(tokens[0], asked)
        cookie = self._cookie_of(asked)
        act_token = None if cookie is None else self._door.act_token(cookie)
        if act_token is None:
            return _refused("open the address that trimesh dashboard has printed: a token in it works once", 401)
        if scope["method"] == "POST":
            token = _only(asked, ACT_HEADER)
            if not hmac.compare_digest(token.encode(), act_token.encode()):
                return _refused("an act needs the token of its session", 403)
            if _only(asked, "content-type").partition(";")[0].strip() != "application/json":
                return _refused("an act is told as application/json", 415)
        scope.setdefault("state", {})["act_token"] = act_token
        return None

    def _entered(self, token: str, asked: HTTPConnection) -> Response:
        cookie = self._door.enter(token)
        if cookie is None:
            known = self._cookie_of(asked)
            if known is None or self._door.act_token(known) is None:
                return _refused(
                    "this token has been used, or was never one; trimesh dashboard has printed the next", 401
                )
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
    """Answer that there is nothing to start or to stop."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _only(asked: HTTPConnection, name: str) -> str:
    """Return a header that is there once; else an empty text."""
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
