"""The server of the page: one socket on the loopback address, by anycorn on Trio."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

import trio
from anycorn import Config, serve  # pyright: ignore[reportUnknownVariableType] - one of its kinds of application

from trimesh import limits
from trimesh._runtime.tasks import open_heard_signals
from trimesh.cli.dashboard.feed import PageFeed
from trimesh.cli.dashboard.guard import Guard, PageDoor
from trimesh.cli.dashboard.site import make_site
from trimesh.cli.dashboard.source import RunSource

ADDRESS = "127.0.0.1"


class PageServer:
    """The page of one run.

    Args:
        source: The run.
        port: To listen at; 0 for a free one.
        prefix: Of all paths: "" or "/a/b".
        hosts: Names besides those of this machine.
        every: Seconds between two looks.
        on_used: Called when a token was used; `address` is that of the next browser.

    Attributes:
        port: At which it listens.
    """

    def __init__(
        self,
        source: RunSource,
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
        self.feed = PageFeed(source, every)
        self._app: Any = Guard(make_site(self.feed, source), self.door, prefix=prefix, hosts=hosts, port=self.port)

    @property
    def address(self) -> str:
        """Of the page, with the token of the next browser."""
        return f"http://{ADDRESS}:{self.port}{self._prefix}/?token={self.door.token}"

    async def run_until_signal(self) -> None:
        """Serve until Ctrl-C, or SIGTERM: by an event, as the server goes on when its task is interrupted."""
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
            nursery.start_soon(self.feed.run)
            await serve(self._app, config, shutdown_trigger=trio.sleep_forever, mode="asgi")


def checked_prefix(prefix: str) -> str:
    """Return a prefix of paths as the server has it: "" or "/a/b".

    Raises:
        ValueError: It has characters that a path cannot have as they are.
    """
    found = "/" + prefix.strip("/") if prefix.strip("/") else ""
    if not all(char.isascii() and (char.isalnum() or char in "/-._~") for char in found) or "//" in found:
        raise ValueError(f"--prefix must be a path of letters, digits and -._~, got {prefix!r}")
    return found
