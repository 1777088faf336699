"""A process's connection to the spawner, under Trio: requests with answers, notices, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import trio

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.socket import Received, close_all
from trimesh._runtime.system.records import AgentReady, ConnectedDirect, Listening, Parted, Relayed, Tunnel
from trimesh.errors import ProtocolError, SpawnError, TrimeshError


class SpawnerLostError(TrimeshError):
    """The spawner has ended, or broke its protocol; becomes the error of whoever asked for something."""


class RecordPipe(Protocol):
    """Carries whole records with descriptors, both ways; see `BrokerSocket`, whose methods raise the same."""

    @property
    def queued(self) -> int:
        """Records that wait for room."""
        ...

    def put(self, record: wire.AnyRecord, fds: Sequence[int] = ()) -> None:
        """Queue a record; owns `fds`."""

    def flush(self) -> bool:
        """Send what waits, as far as there is room; return whether nothing waits any more."""
        ...

    def receive(self) -> Received | None:
        """Return the next record, None when there is none yet."""
        ...

    async def wait_readable(self) -> None:
        """Wait until there is something to receive, or the end."""

    async def wait_writable(self) -> None:
        """Wait until there may be room."""

    def close(self) -> None: ...


class _Answer:
    __slots__ = ("event", "on_answer", "received")

    def __init__(self, on_answer: Callable[[Received], None] | None) -> None:
        self.on_answer = on_answer
        self.event = trio.Event()
        self.received: Received | None = None


class SpawnerClient:
    """Sends requests and receives what comes; `run` is its task.

    Args:
        broker: The connection; owned.
        on_notice: Called for each record that answers nothing, with descriptors that it then owns. Must not raise.
        whom: Who is at the other end, for people.
        on_lost: Called once, when the connection has ended for whatever reason, before any waiting request learns it.

    Attributes:
        lost: Why there is no connection any more, else None.
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
        if self.lost is None:  # told to stop: no process is left to answer
            self._wake("the block of the spawner has been left")

    async def wait_ready(self, ready: trio.Event, doing: str) -> None:
        """Wait until workers can be forked: `ready` is set then, and when the spawner is lost.

        Raises:
            SpawnError: They cannot; `doing` says what has taken too long.
        """
        with trio.move_on_after(limits.SPAWN_SECONDS) as scope:
            await ready.wait()
        if scope.cancelled_caught:
            raise SpawnError(f"the spawner took more than {limits.SPAWN_SECONDS} s to {doing}")
        if self.lost is not None:
            raise SpawnError(f"cannot start the spawner: {self.lost} (its standard error may say why)")

    def stop(self) -> None:
        """End `run`; whoever still waits for an answer is told that there is no spawner any more."""
        self._scope.cancel()

    def forget(self) -> None:
        """In a forked child: close our copy of the connection."""
        self.lost = "this process was forked from the one that had a spawner"
        self._broker.close()

    def post(self, record: wire.AnyRequest, fds: tuple[int, ...] = ()) -> None:
        """Send a record that has no answer; never blocks. Lost silently when the spawner is. Owns `fds`.

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
            make: Makes the request from its number.
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
            # It is gone. What it has said before may still be unread, so the reader finds the end.
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
                raise ProtocolError(f"the spawner sends notices, got {type(record).__name__}")

    def _answer(self, number: int, received: Received) -> None:
        answer = self._answers.pop(number, None)
        if answer is None:
            close_all(received.fds)
            raise ProtocolError(f"the spawner answers what was asked, got an answer to {number}")
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
