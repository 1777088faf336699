"""An actor that does what a test asks for and writes down what happens to it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

import trimesh
from trimesh import Actor, endpoint

SHIELD_SECONDS = 30.0
"""An endpoint that is shielded stays no longer than this, lest a simulated process that was killed never unwinds."""


class Notes:
    """What happened in one process, in order; others wait for it."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self._news = trio.Event()

    def add(self, note: Any) -> None:
        self.log.append(note)
        self._news.set()
        self._news = trio.Event()

    async def wait(self, note: Any, count: int = 1) -> None:
        while self.log.count(note) < count:
            await self._news.wait()


class Probe(Actor):
    """Endpoints of the actor's one slot, a group of many slots, and a group that looks at both from outside."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.gate = trio.Event()

    # ---- from outside ----------------------------------------------------------------------------------------

    @endpoint(concurrency=100, group="watch")
    async def seen(self) -> list[Any]:
        return self.notes.log

    @endpoint(concurrency=100, group="watch")
    async def wait(self, note: Any, count: int = 1) -> None:
        """Return when something has been noted that often."""
        await self.notes.wait(note, count)

    @endpoint(concurrency=100, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint(concurrency=100, group="watch")
    async def pid(self) -> int:
        return os.getpid()

    # ---- the one slot ----------------------------------------------------------------------------------------

    @endpoint
    async def note(self, note: Any) -> Any:
        self.notes.add(note)
        return note

    @endpoint
    async def rank(self) -> int:
        return trimesh.current_rank()

    @endpoint
    async def fail(self, error: BaseException, ranks: Sequence[int] | None = None) -> int:
        """Raise on all, or some, ranks; return the rank on the others."""
        if ranks is None or trimesh.current_rank() in ranks:
            raise error
        return trimesh.current_rank()

    @endpoint
    async def hold(self, note: str = "hold") -> None:
        """Stay until cancelled."""
        self.notes.add(note)
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            self.notes.add((f"{note} cancelled", cancelled.reason, cancelled.source))
            self.notes.add(f"{note} cancelled")
            raise

    @endpoint
    async def wait_for_gate(self, note: str = "gate") -> str:
        self.notes.add(note)
        await self.gate.wait()
        self.notes.add(f"{note} passed")
        return note

    # ---- many slots ------------------------------------------------------------------------------------------

    @endpoint(concurrency=100)
    async def hold_many(self, note: str = "hold") -> None:
        await Probe.hold(self, note)

    @endpoint(concurrency=100)
    async def unwind(self, error: BaseException | None = None, seconds: float = 0.0, note: str = "unwind") -> None:
        """Stay until cancelled, then take some time, under a shield, and maybe fail."""
        self.notes.add(note)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
            self.notes.add(f"{note} over")
            if error is not None:
                raise error

    @endpoint(concurrency=100)
    async def fail_at_gate(self, error: BaseException, ranks: Sequence[int] | None = None) -> None:
        """Wait for the gate, past any cancel, then raise on some ranks."""
        self.notes.add("at the gate")
        with trio.move_on_after(SHIELD_SECONDS, shield=True):
            await self.gate.wait()
        if ranks is None or trimesh.current_rank() in ranks:
            raise error

    @endpoint(concurrency=100)
    async def relay(self, target: Any, name: str, verb: str, *args: Any) -> Any:
        """Call an endpoint of another mesh, by a handle that came as an argument."""
        self.notes.add(f"relay {name}")
        return await getattr(getattr(target, name), verb)(*args)


class Tidy(Probe):
    """A probe with a lifespan that takes `seconds` to clean up, and may fail at either end."""

    def __init__(
        self,
        seconds: float = 0.0,
        *,
        setup_error: BaseException | None = None,
        cleanup_error: BaseException | None = None,
        ranks: Sequence[int] | None = None,
        tell: Any = None,
    ) -> None:
        super().__init__()
        self.seconds = seconds
        self.setup_error = setup_error
        self.cleanup_error = cleanup_error
        self.ranks = ranks
        self.tell = tell

    async def say(self, note: str) -> None:
        """Tell a probe elsewhere, which outlives this actor."""
        if self.tell is not None:
            await self.tell.note.call_one(f"{note} {trimesh.current_rank()}")

    def is_meant(self) -> bool:
        return self.ranks is None or trimesh.current_rank() in self.ranks

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if self.setup_error is not None and self.is_meant():
            raise self.setup_error
        try:
            async with trio.open_nursery() as self.nursery:
                yield
                self.nursery.cancel_scope.cancel()
        finally:
            if self.is_meant():
                await self.say("cleaning")
                await trio.sleep(self.seconds)
                await self.say("clean")
                if self.cleanup_error is not None:
                    raise self.cleanup_error

    @endpoint
    async def start_failing(self, error: BaseException) -> None:
        """Start a background task that fails."""

        async def background() -> None:
            raise error

        self.nursery.start_soon(background)

    @endpoint
    async def cancel_itself(self) -> None:
        """Cancel the actor's own nursery, and so itself."""
        self.nursery.cancel_scope.cancel()
        await trio.sleep_forever()
