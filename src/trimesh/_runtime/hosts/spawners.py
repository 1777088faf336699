r"""The spawners of one host: the one that is there from the start, and one for each set of modules to preload.

    agent -- HostSpawners -- spawner            -- forks --> processes without `preload`
                          \- spawner, torch      -- forks --> processes that begin with torch

A question about a process goes to all, and at most one knows it. So what a spawner asks about a process of another one
is answered here, and goes to the controller only if it is not on this host.

HW-1 A module is imported once for all processes of the host that name the same set, as on one host.
HW-2 The loss of any of them is the loss of the host: what is below it is not known any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import msgspec
import trio

from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.client import SpawnerClient
from trimesh._runtime.spawner.far_root import FarRoot, open_far_root
from trimesh._runtime.spawner.process import SpawnerProcess
from trimesh._runtime.spawner.siblings import first_answer
from trimesh._runtime.spawner.socket import Received, close_all
from trimesh.errors import SpawnError
from trimesh.ids import ProcId

Modules = tuple[str, ...]


class _Spawner:
    """One of them; `root` is None until it is ready, and for ever if `failure` says why."""

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
    """All spawners of a host. `start` makes the first one.

    Args:
        controller: Who is the root of the family.
        own: This process, which marks what runs here.
        on_notice: Called for all that the spawners tell, but what is answered here, with descriptors that it then owns;
            requests have numbers of ours. Must not raise.
        nursery: Of their tasks; its end ends them.
        first: The one that `start` takes; None starts it then.

    Attributes:
        lost: Why one of them is lost, else None.
        ended: Set then.
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
                await trio.sleep_forever()  # it is the agent that ends now
        except SpawnError as error:
            spawner.failure = str(error)
            del self._spawners[modules]  # whoever asks next tries again
        finally:
            spawner.settled.set()

    def pids(self) -> list[int]:
        return [one.root.pid for one in self._spawners.values() if one.root is not None]

    def _clients(self) -> list[SpawnerClient]:
        return [one.client for one in self._spawners.values() if one.root is not None]

    # ---- what the controller asks ----------------------------------------------------------------------------

    async def ask(self, question: wire.Launch | wire.Connect | wire.ExitOf | wire.Flush) -> Received:
        """Ask the spawner that can answer; the number of the answer means nothing.

        Raises:
            SpawnError: There is no spawner to start that process.
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
        """Hand on what has no answer. Owns `fds`."""
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

    # ---- what spawners tell ----------------------------------------------------------------------------------

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
        """Answer the question of one spawner by asking the others, else the controller."""
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
    """Return the answer of whoever knows the process, or None."""

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
    gone = wire.ConnectFailed(question.request, "it has ended, or never was", is_gone=True)
    return Received(gone, (), truncated=False)
