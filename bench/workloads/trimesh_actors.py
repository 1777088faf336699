"""The actors of the workloads, for trimesh."""

from __future__ import annotations

import os

import trio

from trimesh import Actor, endpoint


class Echo(Actor):
    """Answers at once."""

    @endpoint
    async def echo(self, value: int) -> int:
        return value


class Sleeper(Actor):
    """Answers never."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()
