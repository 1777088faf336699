"""Client of the spawner, under Trio: requests with answers, notices, loss of the connection.

`Siblings`, the spawners of one controller, query each other. Each spawner knows its own workers only, so a worker's
question about any other process takes this way, over existing connections:

    worker --Connect--> spawner --ForeignConnect--> controller --Connect--> every other spawner
           <-Connected- target's spawner makes the socket pair; its worker gets `Incoming`; the other end comes back

Between two hosts of one job that end goes from agent to agent instead (`system/records`), and the controller says so.

It needs the controller's Trio loop: while that is busy, only new links between workers of different spawners wait.

Invariants
    SS-1  Every question gets one answer, unless its spawner ends first; if no spawner knows the process, the answer is
          the one a spawner gives about a process that it never had.
    SS-2  The end of a process is known for as long as the controller has a block, also after its own spawner's end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from itertools import count
from typing import Final, Protocol

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.socket import Received, close_all
from trimesh._runtime.spawner.workers import ExitHistory, kill_marked
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.output import OutputPrinter
from trimesh._runtime.system.records import AgentReady, Arriving, ConnectedDirect, Listening, Parted, Relayed, Tunnel
from trimesh.config import current
from trimesh.errors import ProtocolError, SpawnError, TrimeshError


class SpawnerLostError(TrimeshError):
    """The spawner has ended, or broke its protocol; each pending request raises this."""


class RecordPipe(Protocol):
    """Carries whole records with descriptors, both ways; see `BrokerSocket`, whose methods raise the same errors."""

    @property
    def queued(self) -> int:
        """Records that wait for room."""
        ...

    def put(self, record: wire.AnyRecord, fds: Sequence[int] = ()) -> None:
        """Queue a record; owns `fds`."""

    def flush(self) -> bool:
        """Send queued records while there is room; return whether the queue is empty."""
        ...

    def receive(self) -> Received | None:
        """Return the next record, None when there is none yet."""
        ...

    async def wait_readable(self) -> None:
        """Wait until there is something to receive, or the end."""

    async def wait_writable(self) -> None:
        """Wait until there may be room to send."""

    def close(self) -> None: ...


class _Answer:
    __slots__ = ("event", "on_answer", "received")

    def __init__(self, on_answer: Callable[[Received], None] | None) -> None:
        self.on_answer = on_answer
        self.event = trio.Event()
        self.received: Received | None = None


class SpawnerClient:
    """Sends requests and receives records; `run` is its task.

    Args:
        broker: The connection; owned.
        on_notice: Called for each record that is not an answer, with descriptors that it then owns. Must not raise.
        whom: Name of the other end, for error texts.
        on_lost: Called once, when the connection has ended for any reason, before pending requests raise.

    Attributes:
        lost: Why the connection has ended, else None.
        ended: Set after `on_lost`.
    """

    def __init__(
        self,
        broker: RecordPipe,
        *,
        on_notice: Callable[[Received], None],
        on_lost: Callable[[], None],
        whom: str = "the spawner",
    ) -> None:
        self.lost: str | None = None
        self.ended = trio.Event()
        self._broker = broker
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._whom = whom
        self._numbers = count(1)
        self._answers: dict[int, _Answer] = {}
        self._scope = trio.CancelScope(shield=True)
        self._has_queued = trio.Event()
        self._last_words: str | None = None

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Serve until the connection ends, or `stop`; shielded, for requests of a block that is being cancelled."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read()
                nursery.cancel_scope.cancel()
        if self.lost is None:  # stopped on request: no process is left to answer
            self._wake("the block of the spawner has been left")

    async def wait_ready(self, ready: trio.Event, doing: str) -> None:
        """Wait until workers can be forked: `ready` is set then, and when the spawner is lost.

        Raises:
            SpawnError: The spawner is lost, or takes too long; `doing` names its step in the text.
        """
        with trio.move_on_after(current().spawn_seconds) as scope:
            await ready.wait()
        if scope.cancelled_caught:
            raise SpawnError(
                f"the spawner took more than the setting spawn_seconds ({current().spawn_seconds:g} s) to {doing}"
            )
        if self.lost is not None:
            raise SpawnError(f"cannot start the spawner: {self.lost} (its standard error may say why)")

    def stop(self) -> None:
        """End `run`; pending requests raise `SpawnerLostError`."""
        self._scope.cancel()

    def forget(self) -> None:
        """In a forked child: close our copy of the connection."""
        self.lost = "this process is a fork of the one that owns the spawner"
        self._broker.close()

    def post(self, record: wire.AnyRequest, fds: tuple[int, ...] = ()) -> None:
        """Send a record that has no answer; never blocks. Dropped silently when the spawner is lost. Owns `fds`.

        Raises:
            LimitExceeded: It is too large.
            OSError: There is no descriptor or memory to send it with.
        """
        if self.lost is not None:
            close_all(fds)
            return
        self._broker.put(record, fds)
        if self._broker.queued == 1:
            self._flush()

    async def ask(
        self, make: Callable[[int], wire.AnyRequest], on_answer: Callable[[Received], None] | None = None
    ) -> Received:
        """Send a request and wait for its answer.

        Args:
            make: Returns the request, given its number.
            on_answer: Called when the answer comes, in the client's task, even if the caller has been cancelled
                meanwhile; it owns the descriptors. Without it they are the caller's, and closed if it was cancelled.

        Raises:
            SpawnerLostError: There is no spawner, or it ended first.
            LimitExceeded: The request is too large.
            OSError: There is no descriptor or memory to send it with.

        Blocking: checkpoint.
        """
        if self.lost is not None:
            await trio.lowlevel.checkpoint()
            raise SpawnerLostError(self.lost)
        number = next(self._numbers)
        answer = _Answer(on_answer or None)
        self.post(make(number))
        self._answers[number] = answer
        try:
            await answer.event.wait()
        except BaseException:
            answer.on_answer = on_answer or _close_fds
            if answer.received is not None and on_answer is None:
                close_all(answer.received.fds)
            raise
        if answer.received is None:
            raise SpawnerLostError(self.lost)
        return answer.received

    # ---- in and out --------------------------------------------------------------------------------------

    async def _read(self) -> None:
        reason = f"{self._whom} has ended"
        try:
            while True:
                received = self._broker.receive()
                if received is None:
                    await self._broker.wait_readable()
                else:
                    self._dispatch(received)
        except EOFError:
            pass
        except OSError as error:
            reason = f"the connection to {self._whom} broke: {error}"
        except ProtocolError as error:
            reason = str(error)
        self._lose(self._last_words or reason)

    @trio.lowlevel.enable_ki_protection
    async def _write(self) -> None:
        while True:
            await self._has_queued.wait()
            self._has_queued = trio.Event()
            while self._broker.queued and self.lost is None:
                await self._broker.wait_writable()
                self._flush()

    def _flush(self) -> None:
        try:
            if not self._broker.flush():
                self._has_queued.set()
        except OSError:
            # The other end is gone. Records that it sent before may still be unread, so `_read` detects the end.
            return

    def _dispatch(self, received: Received) -> None:
        record = received.record
        match record:
            case wire.Fatal():
                self._last_words = record.text
            case (
                wire.Launched()
                | wire.LaunchFailed()
                | wire.Connected()
                | ConnectedDirect()
                | wire.ConnectFailed()
                | wire.ExitKnown()
                | wire.Flushed()
                | wire.StateKnown()
                | wire.MachineKnown()
            ):
                self._answer(record.request, received)
            case (
                wire.Ready()
                | AgentReady()
                | wire.Incoming()
                | wire.Exited()
                | wire.Output()
                | wire.ForeignConnect()
                | wire.ForeignExitOf()
                | Listening()
                | Tunnel()
                | Relayed()
                | Parted()
                | wire.Leaving()
            ):
                self._on_notice(received)
            case _:
                close_all(received.fds)
                raise ProtocolError(f"{self._whom} must send answers and notices, got {type(record).__name__}")

    def _answer(self, number: int, received: Received) -> None:
        answer = self._answers.pop(number, None)
        if answer is None:
            close_all(received.fds)
            raise ProtocolError(f"{self._whom} must answer pending requests only, got an answer to request {number}")
        answer.received = received
        if answer.on_answer is not None:
            answer.on_answer(received)
        answer.event.set()

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self._on_lost()
        self._wake(reason)

    def _wake(self, reason: str) -> None:
        self.lost = reason
        self.ended.set()
        for answer in self._answers.values():
            answer.event.set()
        self._answers.clear()


def _close_fds(received: Received) -> None:
    close_all(received.fds)


# ---- spawners of one controller, and their questions about each other's processes ------------------------------------

Question = wire.ForeignConnect | wire.ForeignExitOf

_NOWHERE: Final = wire.ConnectFailed(1, "it has ended, or never existed", is_gone=True)
_SILENT: Final = wire.ConnectFailed(1, f"its spawner did not answer for {limits.FOREIGN_CONNECT_SECONDS:g} s")


_SWEEP_SECONDS: Final = 0.01


async def kill_rest(root_id: int, spared: Callable[[], Collection[int]] = tuple) -> None:
    """Kill leftover processes of a spawner, by the mark of its family; processes below `spared` are left alone.

    Blocking: until none is left, for at most `limits.KILL_SECONDS`. Once is not enough: a process that is just
    executing another program cannot be recognised yet, and one that is just being forked is not seen.
    """
    with trio.move_on_after(limits.KILL_SECONDS):
        while kill_marked(root_id, spared()):  # noqa: ASYNC110 - processes of others set no event
            await trio.sleep(_SWEEP_SECONDS)


class FarPlace(msgspec.Struct, frozen=True, eq=False):
    """Address of a spawner on another host.

    Attributes:
        agent: Incarnation of its agent.
        realm: Authority behind the agent's certificate; agents of one realm may connect to each other.
    """

    agent: int
    realm: object


class Siblings:
    """The spawners of one controller.

    Attributes:
        exits: Exits of processes of all spawners, including those that have ended.
        printer: Shows their output.
    """

    def __init__(self) -> None:
        self.exits = ExitHistory()
        self.printer = OutputPrinter()
        self._clients: dict[SpawnerClient, int] = {}
        self._far: dict[SpawnerClient, FarPlace] = {}
        self._stopping: set[SpawnerClient] = set()

    def add(self, client: SpawnerClient, pid: int) -> None:
        self._clients[client] = pid

    def add_far(self, client: SpawnerClient, place: FarPlace) -> None:
        """Add the spawners of another host, represented by its agent."""
        self._clients[client] = 0
        self._far[client] = place

    def stopping(self, client: SpawnerClient) -> None:
        """Note that a spawner is asked to stop: it gets no more questions, but its records count."""
        self._stopping.add(client)

    def remove(self, client: SpawnerClient) -> None:
        self._clients.pop(client)
        self._stopping.discard(client)
        self._far.pop(client, None)

    @trio.lowlevel.enable_ki_protection
    async def kill_rest(self, client: SpawnerClient, root_id: int) -> None:
        """Kill leftover processes of a spawner; those below another one are left alone. See `kill_rest`."""
        await kill_rest(root_id, lambda: self._pids_but(client))

    def _pids_but(self, client: SpawnerClient) -> list[int]:
        return [pid for other, pid in self._clients.items() if other is not client]

    @trio.lowlevel.enable_ki_protection
    async def answer(self, asking: SpawnerClient, question: Question) -> None:
        """Answer the question of one spawner by querying the others.

        Blocking: checkpoint. About a connection at most `limits.FOREIGN_CONNECT_SECONDS`; about an end until then.
        """
        others = [client for client in self._clients if client is not asking]
        fds: tuple[int, ...] = ()
        if isinstance(question, wire.ForeignConnect):
            record, fds = await self._connect(others, question, self._far.get(asking))
        else:
            record = wire.ExitKnown(question.request, await self._exit_of(others, question.proc_id))
        if asking in self._stopping:
            close_all(fds)
        else:
            asking.post(record, fds)

    async def _connect(
        self, others: list[SpawnerClient], question: wire.ForeignConnect, asking: FarPlace | None
    ) -> tuple[wire.Answer | Arriving, tuple[int, ...]]:
        async def ask(client: SpawnerClient) -> Received | None:
            if client in self._stopping:
                return None
            received = await client.ask(lambda request: self._connect_of(client, request, question, asking))
            failed = received.record
            if isinstance(failed, ConnectedDirect):
                return msgspec.structs.replace(received, record=self._arriving(client, question))
            return None if isinstance(failed, wire.ConnectFailed) and failed.is_gone and not failed.exit else received

        received, record = None, _NOWHERE
        known = self.exits.get(question.target)
        if known is None:
            with trio.move_on_after(limits.FOREIGN_CONNECT_SECONDS) as scope:
                received = await first_answer(ask, others)
            if scope.cancelled_caught:
                record = _SILENT
            known = self.exits.get(question.target)
        if received is None:
            return msgspec.structs.replace(record, request=question.request, exit=known), ()
        if isinstance(received.record, Arriving):
            return received.record, ()
        if isinstance(received.record, wire.ConnectFailed):
            return msgspec.structs.replace(received.record, request=question.request), ()
        if not received.fds:
            return wire.ConnectFailed(question.request, "the controller has no descriptor left"), ()
        is_far_pair = isinstance(received.record, wire.Connected) and received.record.is_far
        return wire.Connected(question.request, is_far_pair), received.fds

    def _connect_of(
        self, client: SpawnerClient, request: int, question: wire.ForeignConnect, asking: FarPlace | None
    ) -> wire.Connect:
        its = self._far.get(client)
        if asking is None or its is None or asking.realm is not its.realm:
            is_far = asking is not None or its is not None
            return wire.Connect(request, question.target, question.source, is_far)
        return wire.Connect(
            request, question.target, question.source, is_far=True, agent=asking.agent, answers=question.request
        )

    def _arriving(self, client: SpawnerClient, question: wire.ForeignConnect) -> wire.AnyRequest:
        its = self._far.get(client)
        if its is None or client.lost is not None:  # the requesting agent may know already that it is gone
            return msgspec.structs.replace(_NOWHERE, request=question.request)
        return Arriving(question.request, its.agent)

    async def _exit_of(self, others: list[SpawnerClient], proc_id: int) -> ExitReport | None:
        async def ask(client: SpawnerClient) -> Received | None:
            if client in self._stopping:
                await client.ended.wait()
                return None
            received = await client.ask(lambda request: wire.ExitOf(request, proc_id))
            return received if isinstance(received.record, wire.ExitKnown) and received.record.exit else None

        known = self.exits.get(proc_id)
        if known is None:
            received = await first_answer(ask, others)
            if received is not None and isinstance(received.record, wire.ExitKnown):
                return received.record.exit
        return known or self.exits.get(proc_id)


async def first_answer(
    ask: Callable[[SpawnerClient], Awaitable[Received | None]], clients: Sequence[SpawnerClient]
) -> Received | None:
    """Query all at once and return the first positive answer; at most one spawner knows a process.

    Blocking: until then, or until all have answered. When cancelled, received descriptors are closed.
    """
    found = list[Received]()

    async def run(client: SpawnerClient) -> None:
        with suppress(SpawnerLostError, OSError):
            received = await ask(client)
            if received is not None:
                found.append(received)
                nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(run, client)
    except BaseException:
        for received in found:
            close_all(received.fds)
        raise
    for received in found[1:]:
        close_all(received.fds)
    return found[0] if found else None
