r"""Agent of a host: the root of the spawners there, in place of a controller on another host.

    controller --session--> HostAgent --broker sockets--> spawners --> workers

It relays requests of the controller, with the context of this host, and records of the spawners. It decides nothing.

Spawners of one host: the one that exists from the start, and one for each set of modules to preload.

    agent -- HostSpawners -- spawner            -- forks --> processes without `preload`
                          \- spawner, torch      -- forks --> processes that begin with torch

A question about a process goes to all spawners, and at most one knows it. A spawner's question about a process of
another spawner is answered here, and goes to the controller only if the process is not on this host.

HW-1 A module is imported once for all processes of the host that preload the same set, as on one host.
HW-2 The loss of any spawner is the loss of the host: the state of processes below it is unknown from then on.
"""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trimesh._runtime.hosts.casts import HostCasts
from trimesh._runtime.hosts.neighbours import Neighbours
from trimesh._runtime.hosts.remote_host import SessionPipe, context_here
from trimesh._runtime.recording import read_actors
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.client import SpawnerClient, SpawnerLostError, first_answer
from trimesh._runtime.spawner.socket import Received, close_all
from trimesh._runtime.spawner.spawner_process import FarRoot, SpawnerProcess, open_far_root
from trimesh._runtime.system.cpu_binding import host_name
from trimesh._runtime.system.exits import STOPPED, cpu_seconds_of, memory_of, process_state
from trimesh._runtime.system.records import (
    AgentReady,
    Arriving,
    ConnectedDirect,
    Listening,
    Parted,
    Tunnel,
    WorkerConfig,
)
from trimesh._wire import observed
from trimesh.errors import LimitExceeded, ProtocolError, SpawnError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.system.machine import MachineReader

_Question = wire.Launch | wire.Connect | wire.ExitOf | wire.Flush


class AgentEnd(msgspec.Struct, frozen=True):
    """End of an agent.

    Attributes:
        reason: Text for the user.
        is_failure: Whether no stop was requested: its lease has expired, or its spawner is lost.
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
        self._machine: MachineReader | None = None

    async def serve(self) -> AgentEnd:
        """Serve until the controller stops it or is lost, or a spawner is lost; return the reason."""
        end = AgentEnd("stopped by the controller")
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
                case wire.StateOf():
                    close_all(received.fds)
                    nursery.start_soon(self._tell_state, record)
                case wire.MachineOf(request=request):
                    close_all(received.fds)
                    nursery.start_soon(self._tell_machine, request)
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
                    raise ProtocolError(f"a controller must send requests, got {type(record).__name__}")

    async def _tell_state(self, question: wire.StateOf) -> None:
        actors = b""
        if question.record:
            found = await trio.to_thread.run_sync(read_actors, question.record, abandon_on_cancel=True)
            actors = observed.encode(found)
        pid = question.pid
        states = [process_state(one) for one in ([pid] if pid else self._spawners.pids())]
        state = next((one for one in states if one in STOPPED), states[0])
        self._send(wire.StateKnown(question.request, state, cpu_seconds_of(pid), memory_of(pid), actors))

    async def _tell_machine(self, request: int) -> None:
        from trimesh._runtime.system.machine import MachineReader  # noqa: PLC0415 - few runs are looked at

        self._machine = self._machine or MachineReader(os.environ.get("TRIMESH_NVML", ""))
        self._send(wire.MachineKnown(request, observed.encode(await self._machine.read())))

    @trio.lowlevel.enable_ki_protection
    async def _ask(self, question: _Question) -> None:
        """Query a spawner, and pass its answer on."""
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
            close_all(fds[:1])  # the pidfd, which is valid on this host only
            fds = fds[1:]
        if isinstance(answer, wire.Launched | wire.Connected) and len(fds) != 1:
            close_all(fds)
            self._fail(question, number, answer, "the agent has no descriptor left")
            return
        if isinstance(question, wire.Connect) and isinstance(answer, wire.Connected) and self._give(question, fds[0]):
            return
        assert isinstance(
            answer,
            wire.Launched | wire.LaunchFailed | wire.Connected | wire.ConnectFailed | wire.ExitKnown | wire.Flushed,
        )
        if refused := self._send(msgspec.structs.replace(answer, request=number), fds):
            self._fail(question, number, answer, refused)

    def _fail(self, question: _Question, number: int, answer: wire.AnyRecord, text: str) -> None:
        """Report that an answer cannot be passed on; the process that it is about, if it is new, is killed."""
        if isinstance(answer, wire.Launched) and isinstance(question, wire.Launch):
            self._spawners.post(wire.Signal(question.config.proc_id, signal.SIGKILL))
        self._send(_failure(question, number, text))

    def _give(self, question: wire.Connect, fd: int) -> bool:
        """Pass the end of a link to its agent, if there is a session with it; report that to the controller."""
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
        """Pass a record of the spawner on."""
        self._send(received.record, received.fds)

    def _send(self, record: wire.AnyRecord, fds: tuple[int, ...] = ()) -> str:
        """Send a record; return the limit that refuses it, or "". Where it had a socket, the other end sees an end."""
        try:
            self._pipe.put(record, fds)
            if not self._pipe.flush():
                self._has_queued.set()
        except LimitExceeded as error:
            return str(error)
        except OSError:  # `_read` detects the loss; the record would be lost with the session anyway
            pass
        return ""

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
        pipe: Session with the controller.
        controller: Process id of the controller.
        own: Process id of this process, which marks the processes here.
        host_id: Setting `host_id` of the processes here, unless their mesh sets one.
        spawner: The first spawner, if it was started before.
        neighbours: Agents of other hosts; with None all links to their hosts go through the controller.
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


# ---- spawners --------------------------------------------------------------------------------------------------------

Modules = tuple[str, ...]


class _Spawner:
    """One spawner; `root` is None until it is ready, and for ever if `failure` is set."""

    def __init__(self) -> None:
        self.settled = trio.Event()
        self.root: FarRoot | None = None
        self.failure = ""

    @property
    def client(self) -> SpawnerClient:
        """The connection to it, once it is ready."""
        assert self.root is not None
        return self.root.client


class HostSpawners:
    """All spawners of a host: one for processes without `preload`, one for each set of modules to preload.

    Args:
        controller: Root of the family.
        own: This process, which marks the processes here.
        on_notice: Called for each record of the spawners that is not answered here, with descriptors that it then owns;
            requests are numbered anew. Must not raise.
        nursery: Runs their tasks; its end ends the spawners.
        first: Process for `start` to use; None starts one then.

    Attributes:
        lost: Why a spawner is lost, else None.
        ended: Set once a spawner is lost.
    """

    def __init__(
        self,
        controller: ProcId,
        own: ProcId,
        on_notice: Callable[[Received], None],
        nursery: trio.Nursery,
        first: SpawnerProcess | None = None,
    ) -> None:
        self.lost: str | None = None
        self.ended = trio.Event()
        self._controller = controller
        self._own = own
        self._on_notice = on_notice
        self._nursery = nursery
        self._first = first
        self._spawners: dict[Modules, _Spawner] = {}
        self._launched: dict[int, SpawnerClient] = {}
        self._foreign: dict[int, tuple[SpawnerClient, int]] = {}
        self._numbers = count(1)
        self._outputs = deque[SpawnerClient]()

    # ---- one spawner -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the spawner of processes that preload nothing.

        Raises:
            SpawnError: It cannot be started.
        """
        await self._of(())

    async def _of(self, modules: Modules) -> SpawnerClient:
        spawner = self._spawners.get(modules)
        if spawner is None:
            spawner = self._spawners[modules] = _Spawner()
            self._nursery.start_soon(self._keep, modules, spawner)
        await spawner.settled.wait()
        if spawner.root is None:
            raise SpawnError(spawner.failure)
        return spawner.client

    async def _keep(self, modules: Modules, spawner: _Spawner) -> None:
        noticed = partial(self._noticed, spawner)
        first, self._first = self._first, None
        try:
            async with open_far_root(self._controller, self._own, noticed, modules, self.pids, first) as root:
                spawner.root = root
                spawner.settled.set()
                await root.client.ended.wait()
                self.lost = self.lost or root.client.lost or ""
                self.ended.set()
                await trio.sleep_forever()  # the agent itself ends now
        except SpawnError as error:
            spawner.failure = str(error)
            del self._spawners[modules]  # the next request tries again
        finally:
            spawner.settled.set()

    def pids(self) -> list[int]:
        return [one.root.pid for one in self._spawners.values() if one.root is not None]

    def _clients(self) -> list[SpawnerClient]:
        return [one.client for one in self._spawners.values() if one.root is not None]

    # ---- requests of the controller --------------------------------------------------------------------------

    async def ask(self, question: wire.Launch | wire.Connect | wire.ExitOf | wire.Flush) -> Received:
        """Query the spawner that can answer. The request number in the answer is not that of `question`.

        Raises:
            SpawnError: The spawner for that process could not be started.
            SpawnerLostError, LimitExceeded, OSError: See `SpawnerClient.ask`.
        """
        match question:
            case wire.Launch():
                client = await self._of(() if question.python else question.preload)
                self._launched[question.config.proc_id] = client
                return await _ask(client, question)
            case wire.Flush():
                async with trio.open_nursery() as nursery:
                    for client in self._clients():
                        nursery.start_soon(_ask, client, question)
                return Received(wire.Flushed(question.request), (), truncated=False)
            case wire.Connect() | wire.ExitOf():
                return await _ask_each(self._clients(), question) or _nowhere(question)

    def post(self, record: wire.Signal | wire.OutputTaken | wire.Answer, fds: tuple[int, ...] = ()) -> None:
        """Pass on a record that has no answer. Owns `fds`."""
        match record:
            case wire.Signal():
                known = self._launched.get(record.proc_id)
                for client in self._clients() if known is None else [known]:
                    client.post(record)
            case wire.OutputTaken():
                if self._outputs:
                    self._outputs.popleft().post(record)
            case _:
                asked = self._foreign.pop(record.request, None)
                if asked is None:
                    close_all(fds)
                else:
                    client, number = asked
                    client.post(msgspec.structs.replace(record, request=number), fds)

    # ---- records of spawners ---------------------------------------------------------------------------------

    def _noticed(self, spawner: _Spawner, received: Received) -> None:
        record = received.record
        if isinstance(record, wire.ForeignConnect | wire.ForeignExitOf):
            others = [client for client in self._clients() if client is not spawner.client]
            if others:
                self._nursery.start_soon(self._answer, spawner.client, record, others)
            else:
                self._ask_controller(spawner.client, record)
            return
        if isinstance(record, wire.Output):
            self._outputs.append(spawner.client)
        elif isinstance(record, wire.Exited):
            self._launched.pop(record.exit.proc_id, None)
        self._on_notice(received)

    @trio.lowlevel.enable_ki_protection
    async def _answer(
        self, asking: SpawnerClient, question: wire.ForeignConnect | wire.ForeignExitOf, others: list[SpawnerClient]
    ) -> None:
        """Answer the question of one spawner by querying the others, else the controller."""
        about: wire.Connect | wire.ExitOf
        if isinstance(question, wire.ForeignConnect):
            about = wire.Connect(1, question.target, question.source)
        else:
            about = wire.ExitOf(1, question.proc_id)
        received = await _ask_each(others, about)
        if received is None:
            self._ask_controller(asking, question)
            return
        answer: Any = received.record
        asking.post(msgspec.structs.replace(answer, request=question.request), received.fds)

    def _ask_controller(self, asking: SpawnerClient, question: wire.ForeignConnect | wire.ForeignExitOf) -> None:
        number = next(self._numbers)
        self._foreign[number] = asking, question.request
        self._on_notice(Received(msgspec.structs.replace(question, request=number), (), truncated=False))


async def _ask(client: SpawnerClient, question: Any) -> Received:
    return await client.ask(lambda request: msgspec.structs.replace(question, request=request))


async def _ask_each(clients: list[SpawnerClient], question: wire.Connect | wire.ExitOf) -> Received | None:
    """Return the answer of the spawner that knows the process, or None."""

    async def ask(client: SpawnerClient) -> Received | None:
        received = await _ask(client, question)
        match received.record:
            case wire.ConnectFailed(is_gone=True, exit=None) | wire.ExitKnown(exit=None):
                return None
            case _:
                return received

    return await first_answer(ask, clients)


def _nowhere(question: wire.Connect | wire.ExitOf) -> Received:
    if isinstance(question, wire.ExitOf):
        return Received(wire.ExitKnown(question.request, None), (), truncated=False)
    gone = wire.ConnectFailed(question.request, "it has ended, or never existed", is_gone=True)
    return Received(gone, (), truncated=False)
