"""A whole mesh, simulated: the real runtime, and what `events()` says of it, with the virtual time.

spawn replica=2 gpus=2 under Restart(...)     a process mesh
actors ledgers                                an actor that counts, on each;  under Restart(...)   with its own policy
call ledgers                                  every member counts; what they say
starts-call ledgers 1                         the same of one of them, and nobody waits for its end
kill 1                                        the process of rank 1 dies by SIGKILL;  exit 1 code=0   it ends
crash ledgers 1                               the actor fails, with no caller to tell
wait 2                                        seconds pass;  replace 1   heal by hand
leave                                         the block is left, or has failed
"""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from tests.conformance.meshes import member
from tests.scenarios.script import Command, Scene
from tests.scenarios.supervision import VOCABULARY

from trimesh import Actor, Lagged, MeshErrorGroup, TrimeshError, endpoint, leaves, origin, this_host
from trimesh.errors import place_name
from trimesh.testing.simulated.host import SimChild, World, open_world


class Counter(Actor):
    """Counts, and fails where nobody waits."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def bump(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    async def crash(self) -> None:
        raise KeyError("crash")


class MeshScene(Scene):
    """One world, with one process mesh at a time."""

    def __init__(self) -> None:
        self.world: World
        self.nursery: trio.Nursery
        self.procs: Any = None
        self.named: dict[str, Any] = {}
        self.news: list[str] = []
        self.may_leave = trio.Event()

    @asynccontextmanager
    async def surroundings(self) -> AsyncGenerator[None, None]:
        async with open_world() as self.world, trio.open_nursery() as self.nursery:
            yield
            self.may_leave.set()

    # ---- set-up ----

    async def spawn(self, command: Command) -> list[str]:
        sizes, _, policy = command.text.partition(" under ")
        shape = {label: int(size) for label, _, size in (word.partition("=") for word in sizes.split())}
        self.may_leave = trio.Event()
        await self.nursery.start(self._hold, shape, eval(policy, VOCABULARY))
        return await self._settle()

    async def _hold(self, shape: dict[str, int], policy: Any, *, task_status: Any) -> None:
        try:
            async with this_host().spawn_procs(shape, supervision=policy) as self.procs:
                self.nursery.start_soon(self._read, self.procs)
                task_status.started()
                await self.may_leave.wait()
        except MeshErrorGroup as group:
            self.news += [f"the block raises {_shown(leaf)}" for leaf in leaves(group)]
        else:
            self.news.append("the block is left")

    async def _read(self, mesh: Any) -> None:
        async with mesh.events() as events:
            async for event in events:
                if isinstance(event, Lagged):
                    self.news.append(f"t={trio.current_time():.3g} {event}")
                    continue
                what = f"{type(event).__name__} {place_name(event.mesh, event.point)}, incarnation {event.incarnation}"
                self.news.append(f"t={trio.current_time():.3g} {what}")

    async def actors(self, command: Command) -> list[str]:
        (name,), (_, _, policy) = command.words[:1], command.text.partition(" under ")
        procs = self.procs.supervised(eval(policy, VOCABULARY)) if policy else self.procs
        self.named[name] = await procs.spawn(name, Counter)
        if policy:
            self.nursery.start_soon(self._read, self.named[name])
        return await self._settle()

    # ---- what happens ----

    async def call(self, command: Command) -> list[str]:
        mesh = self.named[command.words[0]]
        settled = await mesh.bump.call_settled()
        said = [_shown(outcome.error) if outcome.error else str(outcome.value) for outcome in settled.values()]
        return [*await self._settle(), f"t={trio.current_time():.3g} {', '.join(said)}"]

    async def starts_call(self, command: Command) -> list[str]:
        """Call one member, which may have to wait; what comes of it is told when it does."""
        name, rank = command.words[0], int(command.words[1])
        one = self.named[name].exclude([point for point in self.named[name].points() if point.rank != rank])

        async def run() -> None:
            try:
                said = str(await one.bump.call_one())
            except TrimeshError as error:
                said = _shown(error)
            self.news.append(f"t={trio.current_time():.3g} the call to {name} {rank} gives {said}")

        self.nursery.start_soon(run)
        return await self._settle()

    async def kill(self, command: Command) -> list[str]:
        return await self._end(command, lambda child: child.die(signum=signal.SIGKILL))

    async def exit(self, command: Command) -> list[str]:
        return await self._end(command, lambda child: child.die(code=int(command.options["code"])))

    async def _end(self, command: Command, how: Callable[[SimChild], None]) -> list[str]:
        for rank in command.numbers:
            how(self.world.children[member(self.procs, rank).proc_id])
        return await self._settle()

    async def crash(self, command: Command) -> list[str]:
        mesh, rank = self.named[command.words[0]], int(command.words[1])
        await mesh.exclude([point for point in mesh.points() if point.rank != rank]).crash.broadcast()
        return await self._settle()

    async def replace(self, command: Command) -> list[str]:
        await self.procs.replace([point for point in self.procs.points() if point.rank in command.numbers])
        return await self._settle()

    async def wait(self, command: Command) -> list[str]:
        await trio.sleep(float(command.words[0]))
        return await self._settle()

    def leave(self, _: Command) -> Awaitable[list[str]]:
        self.may_leave.set()
        return self._settle()

    async def _settle(self) -> list[str]:
        """Let everything happen that takes no time; return what has."""
        await trio.testing.wait_all_tasks_blocked()
        news, self.news = self.news, []
        return news


def _shown(error: BaseException) -> str:
    where = origin(error)
    name = "" if where is None or not where.point else f" {place_name(where.mesh, where.point)}"
    return f"{type(error).__name__}{name}"
