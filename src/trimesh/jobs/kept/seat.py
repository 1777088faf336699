"""Where a kept host waits for programs: an actor that has an agent ready, and gives it the order of who attaches.

    keeper --its own session--> agent of the host --> seat --standard input--> agent for one program --> its processes

KT-1 An agent serves one program, and then ends with all that it has started. The next one is ready before it is asked
     for, also by a program that attaches as soon as the one before has left: it is started while that runs. It and its
     spawner have loaded their modules, and nothing of a program has ever been in them.
KT-2 The standard input of that agent is held here: with this process it ends, also when both are killed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from trimesh import limits
from trimesh._runtime.hosts import marked
from trimesh._runtime.system import host_name
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.errors import SpawnError
from trimesh.jobs.child_agent import ChildAgent, start_child
from trimesh.jobs.launcher import AgentOrder
from trimesh.jobs.local import agent_command
from trimesh.jobs.on_hosts.command_runner import host_environment


class Seat(Actor):
    """Has an agent ready on its host."""

    def __init__(self) -> None:
        self._ready: WaitingAgent | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Have an agent ready while this actor lives."""
        self._ready = await _start()
        try:
            yield
        finally:
            await self._end_ready()

    async def _end_ready(self) -> None:
        agent, self._ready = self._ready, None
        if agent is not None:
            await agent.stop()

    @endpoint
    async def serve(self, order: str) -> tuple[str, str, str]:
        """Give an order to the agent, and return how it has ended, see `AgentExit`: text, last words, reason.

        Cancelled, it ends the agent. Either way nothing that the agent has started is left, and another one is ready.

        Raises:
            SpawnError: No agent can be started here.
        """
        agent, self._ready = self._ready, None
        if agent is not None and agent.has_ended:  # the system was out of memory, say
            await agent.stop()
            agent = None
        if agent is None:
            agent = await _start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._prepare, limits.KEPT_PREPARE_SECONDS)
                await agent.tell(AgentOrder.parse(order.encode()))
                ended = await agent.wait()
                nursery.cancel_scope.cancel(reason="the program has left")
        finally:
            await agent.stop()
            with trio.CancelScope(shield=True):
                await self._prepare()
        return ended.text, ended.last_words, ended.reason

    async def _prepare(self, seconds: float = 0.0) -> None:
        """Have an agent ready, after so many seconds; where it cannot be had the next program is told."""
        await trio.sleep(seconds)
        with trio.CancelScope(shield=True):
            if self._ready is None:
                try:
                    self._ready = await _start()
                except SpawnError:
                    pass


class WaitingAgent(ChildAgent):
    """An agent that has been started and waits for its order."""

    async def end(self) -> None:
        """See `ChildAgent.end`: its standard input is closed, so it ends what it has started, and then itself."""
        await self.ended()


async def _start() -> WaitingAgent:
    # In the process group of this process, whose end kills the group: also an agent that a signal has stopped.
    command, host = agent_command("main_prepared"), host_name()
    return WaitingAgent(await start_child(command, host, marked(host_environment()), is_apart=False))
