"""Actors whose start fails, or never ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio
from tests.conformance.probe import SHIELD_SECONDS

import trimesh
from trimesh import Actor, endpoint


class SlowStart(Actor):
    """An actor whose set-up never ends by itself."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        try:
            await self.tell.note.call_one("entering")
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(SHIELD_SECONDS, shield=True):
                await self.tell.note.call_one("unwound")
        yield

    @endpoint
    async def never(self) -> None:
        await self.tell.note.call_one("served")


class PickyInit(Actor):
    """An actor that does not start on some ranks."""

    def __init__(self, ranks: list[int], error: BaseException) -> None:
        if trimesh.current_rank() in ranks:
            raise error

    @endpoint
    async def rank(self) -> int:
        return trimesh.current_rank()
