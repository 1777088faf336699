"""The agent of a host: the root of the spawners there, in place of a controller on another host.

    controller --session--> HostAgent --broker sockets--> spawners --> workers

It hands on what the controller asks, with the context of this host, and what the spawners tell. It decides nothing.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from math import prod

import msgspec
import trio

from trimesh._runtime.hosts.cast_store import HostCasts
from trimesh._runtime.hosts.context import context_here
from trimesh._runtime.hosts.neighbours import Neighbours
from trimesh._runtime.hosts.session_pipe import SessionPipe
from trimesh._runtime.hosts.spawners import HostSpawners
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.client import SpawnerLostError
from trimesh._runtime.spawner.process import SpawnerProcess
from trimesh._runtime.spawner.socket import Received, close_all
from trimesh._runtime.system.exits import STOPPED, process_state
from trimesh._runtime.system.machine import host_name
from trimesh._runtime.system.records import (
    AgentReady,
    Arriving,
    ConnectedDirect,
    Listening,
    Parted,
    Tunnel,
    WorkerConfig,
)
from trimesh.errors import LimitExceeded, ProtocolError, SpawnError
from trimesh.ids import ProcId

_Question = wire.Launch | wire.Connect | wire.ExitOf | wire.Flush


class AgentEnd(msgspec.Struct, frozen=True):
    """How an agent has ended.

    Attributes:
        reason: For people.
        is_failure: Whether it was not told to end: its lease has ended, or its spawner is lost.
    """

    reason: str
    is_failure: bool = False


class HostAgent:
    """Serves one controller. Made by `open_agent`."""

    def __init__(
        self, spawners: HostSpawners, pipe: SessionPipe, host_id: str, neighbours: Neighbours | None = None
    ) -> None:
        self._spawners = spawners
        self._host_id = host_id
        self._neighbours = neighbours
        self._casts = HostCasts(neighbours)
        self._pipe = pipe
        self._has_queued = trio.Event()

    async def serve(self) -> AgentEnd:
        """Serve until the controller says stop, or is lost, or the spawner is; return why."""
        end = AgentEnd("the controller has said stop")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            nursery.start_soon(self._watch_spawners)
            if self._neighbours is not None:
                nursery.start_soon(self._neighbours.serve, self._send, self._spawners.post, self._casts.take_feed)
            try:
                await self._read(nursery)
            except OSError as error:
                end = AgentEnd(str(error), is_failure=not self._pipe.is_ended_in_order)
            except ProtocolError as error:
                end = AgentEnd(f"the controller broke the protocol: {error}", is_failure=True)
            nursery.cancel_scope.cancel()
        self._casts.close()
        return end

    async def _read(self, nursery: trio.Nursery) -> None:
        while True:
            received = self._pipe.receive()
            if received is None:
                await self._pipe.wait_readable()
                continue
            record = received.record
            match record:
                case wire.Launch() | wire.Connect() | wire.ExitOf() | wire.Flush():
                    close_all(received.fds)
                    nursery.start_soon(self._ask, record)
                case wire.StateOf(request=request, pid=pid):
                    close_all(received.fds)
                    states = [process_state(one) for one in ([pid] if pid else self._spawners.pids())]
                    self._send(wire.StateKnown(request, next((one for one in states if one in STOPPED), states[0])))
                case wire.Signal() | wire.OutputTaken():
                    close_all(received.fds)
                    self._spawners.post(record)
                case wire.Connected() | wire.ConnectFailed() | wire.ExitKnown():
                    self._spawners.post(record, received.fds)
                case wire.CastChannel() if len(received.fds) == 1:
                    nursery.start_soon(self._casts.serve, socket.socket(fileno=received.fds[0]))
                case Arriving() | Listening() | Tunnel() | Parted():
                    self._take_from_neighbours(received)
                case wire.Stop():
                    close_all(received.fds)
                    return
                case _:
                    close_all(received.fds)
                    raise ProtocolError(f"a controller sends requests, got {type(record).__name__}")

    @trio.lowlevel.enable_ki_protection
    async def _ask(self, question: _Question) -> None:
        """Ask the spawner, and hand its answer on."""
        number = question.request
        if isinstance(question, wire.Launch):
            context = context_here(question.context, are_several=prod(question.config.sizes) > 1)
            config = self._config_here(question.config)
            question = msgspec.structs.replace(question, context=context, config=config)
        try:
            received = await self._spawners.ask(question)
        except (SpawnError, SpawnerLostError, OSError, LimitExceeded) as error:
            self._send(_failure(question, number, str(error)))
            return
        answer, fds = received.record, received.fds
        if isinstance(answer, wire.Launched) and fds:
            close_all(fds[:1])  # the pidfd, which means something here only
            fds = fds[1:]
        if isinstance(answer, wire.Launched | wire.Connected) and len(fds) != 1:
            close_all(fds)
            if isinstance(answer, wire.Launched) and isinstance(question, wire.Launch):
                self._spawners.post(wire.Signal(question.config.proc_id, signal.SIGKILL))
            self._send(_failure(question, number, "the agent has no descriptor left"))
            return
        if isinstance(question, wire.Connect) and isinstance(answer, wire.Connected) and self._give(question, fds[0]):
            return
        assert isinstance(
            answer,
            wire.Launched | wire.LaunchFailed | wire.Connected | wire.ConnectFailed | wire.ExitKnown | wire.Flushed,
        )
        self._send(msgspec.structs.replace(answer, request=number), fds)

    def _give(self, question: wire.Connect, fd: int) -> bool:
        """Hand the end of a link to the agent that it is for, if there is a session with it; tell the controller."""
        if not question.agent or self._neighbours is None:
            return False
        try:
            if not self._neighbours.give(ProcId(question.agent), wire.Connected(question.answers, is_far=True), fd):
                return False
        except LimitExceeded as error:
            self._send(wire.ConnectFailed(question.request, str(error)))
        else:
            self._send(ConnectedDirect(question.request))
        return True

    def _take_from_neighbours(self, received: Received) -> None:
        if self._neighbours is not None:
            self._neighbours.take(received)
            return
        close_all(received.fds)
        if isinstance(received.record, Arriving):
            self._spawners.post(wire.ConnectFailed(received.record.request, "this agent has no sessions with others"))

    def _config_here(self, config: WorkerConfig) -> WorkerConfig:
        if not self._host_id or config.settings.host_id:
            return config
        settings = msgspec.structs.replace(config.settings, host_id=self._host_id)
        return msgspec.structs.replace(config, settings=settings)

    def noticed(self, received: Received) -> None:
        """Hand on what the spawner tells."""
        self._send(received.record, received.fds)

    def _send(self, record: wire.AnyRecord, fds: tuple[int, ...] = ()) -> None:
        try:
            self._pipe.put(record, fds)
            if not self._pipe.flush():
                self._has_queued.set()
        except (OSError, LimitExceeded):  # the reader hears of it; what cannot go is lost as its channel would be
            return

    async def _write(self) -> None:
        while True:
            await self._has_queued.wait()
            self._has_queued = trio.Event()
            while not self._flush():
                await self._pipe.wait_writable()

    def _flush(self) -> bool:
        try:
            return self._pipe.flush()
        except OSError:
            return True

    async def _watch_spawners(self) -> None:
        await self._spawners.ended.wait()
        reason = self._spawners.lost or ""
        self._send(wire.Fatal(reason))
        self._pipe.lose(f"the spawner of this host is lost: {reason}")


def _failure(question: _Question, number: int, text: str) -> wire.AnyRecord:
    match question:
        case wire.Launch():
            return wire.LaunchFailed(number, text)
        case wire.Connect():
            return wire.ConnectFailed(number, text)
        case wire.ExitOf():
            return wire.ExitKnown(number, None)
        case wire.Flush():
            return wire.Flushed(number)


@asynccontextmanager
async def open_agent(
    pipe: SessionPipe,
    *,
    controller: ProcId,
    own: ProcId,
    host_id: str = "",
    spawner: SpawnerProcess | None = None,
    neighbours: Neighbours | None = None,
) -> AsyncGenerator[HostAgent, None]:
    """Start the first spawner of this host for a controller; leaving kills and reaps everything below it.

    Args:
        pipe: To the controller.
        controller: Its incarnation.
        own: Of this process, which marks what runs here.
        host_id: Setting `host_id` of the processes here, unless their mesh has one.
        spawner: The first one, if it was started before.
        neighbours: Agents of other hosts; None: all links to them go through the controller.
    """
    waiting = list[Received]()
    agent: HostAgent | None = None

    def noticed(received: Received) -> None:
        if agent is None:
            waiting.append(received)
        else:
            agent.noticed(received)

    async with trio.open_nursery() as nursery:
        spawners = HostSpawners(controller, own, noticed, nursery, spawner)
        await spawners.start()
        agent = HostAgent(spawners, pipe, host_id, neighbours)
        ready = AgentReady(host_name(), os.getpid())
        agent.noticed(Received(ready, (), truncated=False))
        for received in waiting:
            agent.noticed(received)
        yield agent
        nursery.cancel_scope.cancel()
