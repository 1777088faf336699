"""The stores of teams in one process: those that live here, and the way to those that live elsewhere.

A team's store lives in the process of its first rank, and the others have a link of their own to it: neither the
controller, whose Python may be busy, nor a port that must be chosen takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimesh._runtime.services import TENSORS
from trimesh.errors import CollectiveFailed, MeshError, Origin, ProtocolError, origin
from trimesh.ids import ProcId
from trimesh.tensor.groups.meeting import Leave
from trimesh.tensor.groups.team_table import Found, TeamTable
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.errors import PROCESS_ENDED

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc
    from trimesh._runtime.peers import Peer

Key = tuple[ProcId, int, int]
"""The controller, its engine, the team."""


@attrs.define(eq=False)
class _Asked:
    team: Key
    host: Peer
    answered: trio.Event = attrs.field(factory=trio.Event)
    answer: messages.Answer | None = None
    error: Exception | None = None


@attrs.define(eq=False)
class Stores:
    """All of one process.

    Attributes:
        proc: The process.
    """

    proc: Proc
    _tables: dict[Key, TeamTable] = attrs.field(factory=dict[Key, TeamTable])
    _asked: dict[int, _Asked] = attrs.field(factory=dict[int, _Asked])
    _lost: set[Key] = attrs.field(factory=set[Key])
    _numbers: Any = attrs.field(factory=lambda: count(1))

    # ---- the asker's side ------------------------------------------------------------------------------------

    async def ask(
        self,
        team: Key,
        host: ProcId,
        verb: str,
        keys: Sequence[str],
        values: Sequence[bytes],
        numbers: Sequence[int],
        error: tuple[BaseException, Origin] | None,
        seconds: float,
    ) -> messages.Answer:
        """Ask a team's store something and wait for the answer.

        Args:
            team: Which.
            host: The process where it is.
            verb: What is asked; see `TeamTable`.
            keys: What about.
            values: What about.
            numbers: What about.
            error: Goes along as the last of the values.
            seconds: How long to wait.

        Raises:
            CollectiveFailed: Another rank has failed, or a process of the team has ended.
            TimeoutError: There was no answer in time.
        """
        peer, family = self.proc.peer(host), self.proc.family
        assert family is not None, "a process that reaches others has a family"
        number = next(self._numbers)
        asked = self._asked[number] = _Asked(team, peer)
        try:
            with trio.move_on_after(seconds) as scope:
                await family.connect([peer])
                if team in self._lost or peer.link is None:
                    raise _team_lost()
                sent = list(values)
                if error is not None:
                    encoded = self.proc.values.encode_error(*error)
                    sent.append(encoded.payload)
                    peer.prepare(encoded.definitions, encoded.attachments)
                controller, engine, which = team
                message = messages.Ask(engine, controller, which, number, verb, list(keys), sent, list(numbers))
                self.proc.services.cast([peer], TENSORS, messages.encode(message))
                await asked.answered.wait()
            if scope.cancelled_caught:
                raise TimeoutError(f"no answer to {verb!r} of {', '.join(keys)} within {seconds:g} s")
        finally:
            del self._asked[number]
        if asked.error is not None:
            raise asked.error
        assert asked.answer is not None
        return asked.answer

    def leave(self, team: Key, host: ProcId, numbers: Sequence[int]) -> None:
        """Say that a rank has left an operation, for the reason of its last time, and wait for no answer."""
        controller, engine, which = team
        message = messages.Ask(engine, controller, which, 0, "leave", [], [b""], list(numbers))
        self.proc.services.cast([self.proc.peer(host)], TENSORS, messages.encode(message))

    def answered(self, peer: Peer, message: messages.Answer) -> None:
        asked = self._asked.get(message.ask)
        if asked is None:
            return  # it was waited for long enough
        if asked.host is not peer:
            raise ProtocolError(f"a store is answered for where it is, got answer {message.ask} of another process")
        if message.failed_place != messages.NO_RANK:
            asked.error = self._failure(message)
        asked.answer = message
        asked.answered.set()

    def _failure(self, message: messages.Answer) -> Exception:
        if message.failed_place == messages.ENDED:
            return _team_lost()
        cause = self.proc.values.decode_error(message.values[0]) if message.values else None
        error = CollectiveFailed(
            f"rank {message.failed_place} of the group took no part: "
            + ("it has gone on without the others" if cause is None else f"{type(cause).__name__}: {cause}")
        )
        error.__cause__ = cause
        return error

    def lose(self, team: Key) -> None:
        """Free whoever waits for the others of a team: one of them has ended."""
        self._lost.add(team)
        table = self._tables.pop(team, None)
        if table is not None:
            table.lose(Leave(messages.ENDED, None))
        for asked in self._asked.values():
            if asked.team == team and not asked.answered.is_set():
                asked.error = _team_lost()
                asked.answered.set()

    def gone(self, peer: Peer) -> None:
        """Forget a process that has ended."""
        for table in self._tables.values():
            table.gone(peer)
        for asked in self._asked.values():
            if asked.host is peer and not asked.answered.is_set():
                asked.error = _team_lost()
                asked.answered.set()
        for key in [key for key in self._tables if key[0] == peer.proc_id]:
            del self._tables[key]

    # ---- the store's side ------------------------------------------------------------------------------------

    def asked(self, peer: Peer, message: messages.Ask) -> None:
        """Answer a question, now or when it can be."""
        team = ProcId(message.controller), message.engine, message.team
        table = self._tables.get(team)
        if table is None:
            table = self._tables[team] = TeamTable()
            if team in self._lost:
                table.lose(Leave(messages.ENDED, None))
        values: list[Any] = list(message.values)
        if message.verb == "leave" and values:
            values[-1] = self.proc.values.decode_error(values[-1]) if values[-1] else None
        take = partial(self._answer, peer, message)
        table.ask(peer, message.verb, message.keys, values, message.numbers, take)

    def _answer(self, peer: Peer, question: messages.Ask, found: Found) -> None:
        failure = found.failure
        values = list(found.values)
        place = messages.NO_RANK
        if failure is not None:
            place = failure.place
            if failure.error is not None:
                where = origin(failure.error) or Origin(None, "")
                encoded = self.proc.values.encode_error(failure.error, where)
                values = [encoded.payload]
                peer.prepare(encoded.definitions, encoded.attachments)
        answer = messages.Answer(question.engine, question.ask, found.number, values, place)
        self.proc.services.cast([peer], TENSORS, messages.encode(answer))


def _team_lost() -> MeshError:
    return CollectiveFailed(PROCESS_ENDED)
