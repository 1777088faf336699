"""Stores of teams, through which ranks make process groups: local ones, and clients of those in other processes.

A team's store is in the process of its first rank, and the other ranks have direct links to it. So it needs neither the
controller, whose Python may be busy, nor a port.

    ME-1  A generation is made of joins of all ranks for one operation.
    ME-2  A join that some rank will never match, because it has left or moved on, fails, so no rank waits in vain.

`TeamTable`: the store itself, at the team's first rank: keys, joins and departures. Pure.

    set [key] [value]; get [key]; wait [key, ...]; check [key, ...]; delete [key]; count
    add [key] number; swap [key] [expected, desired]         as `torch.distributed.Store` has them

    join [group] [place, number, members...]    take part in an operation in a new generation: answers the generation
    leave [] [error] [place, number]            take no part in an operation
    why [group] [place, number, members...]     fail if one of the members has left the operation

When a group breaks in operation `m`, each rank sends `why`. If a rank has left at `m`, `m` fails at every rank with
the error of that rank. Otherwise the group was broken before, or broke by itself: all join again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
import trio
from torch.distributed import distributed_c10d

from trimesh import limits
from trimesh._runtime.services import TENSORS
from trimesh.errors import CollectiveFailed, MeshError, Origin, ProtocolError, origin
from trimesh.ids import ProcId
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.messages import PROCESS_ENDED

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc
    from trimesh._runtime.peers import Peer
    from trimesh.tensor.protocol.messages import Answer


# `Meeting`: the rendezvous of the ranks of one process group. Pure.
#
# All ranks of a team execute the same operations, so an operation has the same number everywhere. For a collective in
# operation `m` a rank without a group *joins* with `m`. When all have joined with the same number, the next generation
# of the group is made (ME-1, ME-2).


@attrs.frozen
class Leave:
    """Departure of a rank that could not take part.

    Attributes:
        place: Place of the rank in the team.
        error: The reason; None if the rank has just moved on.
    """

    place: int
    error: Any


@attrs.frozen(eq=False)
class _Join:
    number: int
    made: Callable[[int], None]
    failed: Callable[[Leave], None]


@attrs.define(eq=False)
class Meeting:
    """The joins of one process group.

    Attributes:
        places: Places of its ranks in the team.
        generation: Latest generation of the group; 0 before the first.
        made_for: The operation that it was made for.
    """

    places: frozenset[int]
    generation: int = 0
    made_for: int = -1
    _joins: dict[int, _Join] = attrs.field(factory=dict[int, _Join])

    def join(self, place: int, number: int, made: Callable[[int], None], failed: Callable[[Leave], None]) -> None:
        """Join the next generation, for an operation; calls one of the functions, now or later.

        Args:
            place: Place of the rank. The caller has checked that no rank has left this operation or a later one.
            number: Number of the operation.
            made: Called with the generation when all have joined.
            failed: Called with the reason why it will not be made for this operation.
        """
        self._joins[place] = _Join(number, made, failed)
        latest = max(self._joins.values(), key=lambda join: join.number).number
        ahead = next(place for place, join in self._joins.items() if join.number == latest)
        self._fail(latest - 1, Leave(ahead, None))
        if self._joins.keys() == self.places:
            joins, self._joins = self._joins, {}
            self.generation += 1
            self.made_for = number
            for join in joins.values():
                join.made(self.generation)

    def left(self, number: int, why: Leave) -> None:
        """Handle the departure of one of the ranks at an operation."""
        if why.place in self.places:
            self._joins.pop(why.place, None)
            self._fail(number, why)

    def lose(self, why: Leave) -> None:
        """Fail all joins."""
        joins, self._joins = self._joins, {}
        for join in joins.values():
            join.failed(why)

    def _fail(self, number: int, why: Leave) -> None:
        """Fail the joins for operations up to one (ME-2)."""
        for place, join in list(self._joins.items()):
            if join.number <= number:
                del self._joins[place]
                join.failed(why)


# ---- `Departures`: the operations that ranks of a team have left. Pure -----------------------------------------------

# A rank that cannot contribute to operation `m` (its input is poisoned, or it failed) *leaves* it: it takes part in no
# collective of `m`, in any group.


@attrs.define(eq=False)
class Departures:
    """Recent departures, at the store of a team."""

    _leaves: dict[int, list[Leave]] = attrs.field(factory=dict[int, list[Leave]])
    _last: dict[int, tuple[int, Leave]] = attrs.field(factory=dict[int, "tuple[int, Leave]"])

    def add(self, place: int, number: int, error: Any) -> Leave:
        """Record that a rank has left an operation.

        Args:
            place: Place of the rank in the team.
            number: Number of the operation.
            error: The reason; None for the same as the last time.
        """
        _, before = self._last.get(place, (0, None))
        leave = Leave(place, before.error if error is None and before is not None else error)
        self._last[place] = number, leave
        self._leaves.setdefault(number, []).append(leave)
        if len(self._leaves) > limits.GROUP_LEAVES:
            del self._leaves[next(iter(self._leaves))]
        return leave

    def at(self, number: int, places: Collection[int], asker: int) -> Leave | None:
        """Return the first departure from an operation among some ranks other than `asker`."""
        for leave in self._leaves.get(number, ()):
            if leave.place in places and leave.place != asker:
                return leave
        return None

    def since(self, number: int, places: Collection[int], asker: int) -> Leave | None:
        """Return a departure from this operation or a later one among some ranks other than `asker`."""
        found = self.at(number, places, asker)
        if found is not None:
            return found
        for place, (last, leave) in self._last.items():
            if last > number and place in places and place != asker:
                return leave
        return None


# ---- team table ------------------------------------------------------------------------------------------------------

# `TeamTable`: keys, joins and departures of one team, at its first rank. Pure.


@attrs.frozen
class Found:
    """Answer to a query.

    Attributes:
        number: Result, by verb.
        values: Results, by verb.
        failure: The departure that has made the query fail, if any.
    """

    number: int = 0
    values: Sequence[bytes] = ()
    failure: Leave | None = None


Take = Callable[[Found], None]
"""Callback for the answer to a query, called now or later."""


@attrs.frozen(eq=False)
class _Waiter:
    asker: Hashable
    keys: Sequence[str]
    is_get: bool
    take: Take


@attrs.define(eq=False)
class TeamTable:
    """The keys and meetings of one team."""

    _values: dict[str, bytes] = attrs.field(factory=dict[str, bytes])
    _waiters: list[_Waiter] = attrs.field(factory=list[_Waiter])
    _meetings: dict[str, Meeting] = attrs.field(factory=dict[str, Meeting])
    _departures: Departures = attrs.field(factory=Departures)
    _lost: Leave | None = None

    def ask(
        self,
        asker: Hashable,
        verb: str,
        keys: Sequence[str],
        values: Sequence[Any],
        numbers: Sequence[int],
        take: Take,
    ) -> None:
        """Answer a query, now or later.

        Raises:
            ProtocolError: The query is malformed.
        """
        if self._lost is not None:
            take(Found(failure=self._lost))
            return
        match verb, keys, values, numbers:
            case "set", [key], [bytes(value)], []:
                self._put(key, value)
                take(Found())
            case (("get" | "wait"), [_, *_], [], []):
                self._wait(_Waiter(asker, keys, verb == "get", take))
            case "check", _, [], []:
                take(Found(int(all(key in self._values for key in keys))))
            case "delete", [key], [], []:
                take(Found(int(self._values.pop(key, None) is not None)))
            case "count", [], [], []:
                take(Found(len(self._values)))
            case "add", [key], [], [amount]:
                total = _number(self._values.get(key, b"0")) + amount
                self._put(key, str(total).encode())
                take(Found(total))
            case "swap", [key], [bytes(expected), bytes(desired)], []:
                take(Found(values=[self._swap(key, expected, desired)]))
            case _:
                self._meet(verb, keys, values, numbers, take)

    def gone(self, asker: Hashable) -> None:
        """Drop the waiting queries of an asker that has ended."""
        self._waiters = [waiter for waiter in self._waiters if waiter.asker != asker]

    def lose(self, why: Leave) -> None:
        """Fail all waiting queries, and all later ones."""
        self._lost = why
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.take(Found(failure=why))
        for meeting in self._meetings.values():
            meeting.lose(why)

    # ---- keys ------------------------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes) -> None:
        if key not in self._values and len(self._values) >= limits.GROUP_KEYS:
            raise ProtocolError(f"a store holds at most limits.GROUP_KEYS ({limits.GROUP_KEYS}) keys, got {key!r}")
        self._values[key] = value
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._wait(waiter)

    def _swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._put(key, desired)
            return desired
        return expected if found is None else found

    def _wait(self, waiter: _Waiter) -> None:
        if all(key in self._values for key in waiter.keys):
            waiter.take(Found(values=[self._values[key] for key in waiter.keys] if waiter.is_get else []))
        else:
            self._waiters.append(waiter)

    # ---- groups ----------------------------------------------------------------------------------------------

    def _meet(self, verb: str, keys: Sequence[str], values: Sequence[Any], numbers: Sequence[int], take: Take) -> None:
        match verb, keys, values, numbers:
            case "join", [group], [], [place, number, *places] if place in places:
                self._join(group, place, number, frozenset(places), take)
            case "leave", [], [error], [place, number]:
                self._leave(place, number, error)
                take(Found())
            case "why", [_], [], [place, number, *places]:
                take(Found(failure=self._departures.at(number, places, place)))
            case _:
                raise ProtocolError(f"a store has no query {verb!r} of {keys!r}, {len(values)} values, {numbers!r}")

    def _join(self, group: str, place: int, number: int, places: frozenset[int], take: Take) -> None:
        meeting = self._meetings.get(group)
        if meeting is None:
            meeting = self._meetings[group] = Meeting(places)
        why = self._departures.since(number, places, place)
        if why is not None:
            take(Found(failure=why))
            return
        self._forget_before(group, meeting.generation)
        meeting.join(place, number, lambda generation: take(Found(generation)), lambda why: take(Found(failure=why)))

    def _forget_before(self, group: str, generation: int) -> None:
        """Delete the keys of the generation that is being replaced."""
        old = [key for key in self._values if key.startswith(f"{group}/{generation}/")]
        for key in old:
            del self._values[key]

    def _leave(self, place: int, number: int, error: Any) -> None:
        why = self._departures.add(place, number, error)
        for group, meeting in self._meetings.items():
            meeting.left(number, why)
            if place in meeting.places and number == meeting.made_for:  # others, making the group, would wait for keys
                self._fail_waiters(f"{group}/", why)

    def _fail_waiters(self, prefix: str, why: Leave) -> None:
        waiting = [waiter for waiter in self._waiters if waiter.keys[0].startswith(prefix)]
        self._waiters = [waiter for waiter in self._waiters if waiter not in waiting]
        for waiter in waiting:
            waiter.take(Found(failure=why))


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ProtocolError(f"add needs a key with a number, got the value {value[:40]!r}") from error


# ---- stores ----------------------------------------------------------------------------------------------------------

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
    """Stores and store clients of one process.

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
        """Query a team's store and wait for the answer.

        Args:
            team: The team.
            host: The process of its store.
            verb: Name of the query; see `TeamTable`.
            keys: Arguments of the query.
            values: Arguments of the query.
            numbers: Arguments of the query.
            error: Sent as the last of the values.
            seconds: Time limit.

        Raises:
            CollectiveFailed: Another rank has failed, or a process of the team has ended.
            TimeoutError: No answer arrived within `seconds`.
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
        """Report that a rank has left an operation, for the same reason as last time, without waiting."""
        controller, engine, which = team
        message = messages.Ask(engine, controller, which, 0, "leave", [], [b""], list(numbers))
        self.proc.services.cast([self.proc.peer(host)], TENSORS, messages.encode(message))

    def answered(self, peer: Peer, message: messages.Answer) -> None:
        asked = self._asked.get(message.ask)
        if asked is None:
            return  # the query has timed out
        if asked.host is not peer:
            raise ProtocolError(f"an answer must come from the process of the store, got {message.ask} from another")
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
        """Fail the waits for other ranks of a team, as one of them has ended."""
        self._lost.add(team)
        table = self._tables.pop(team, None)
        if table is not None:
            table.lose(Leave(messages.ENDED, None))
        for asked in self._asked.values():
            if asked.team == team and not asked.answered.is_set():
                asked.error = _team_lost()
                asked.answered.set()

    def gone(self, peer: Peer) -> None:
        """Handle the end of a process."""
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
        """Handle a query: answer it now or later."""
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


# ---- `TeamStore`: the `torch.distributed.Store` of a team, over the links of its processes ---------------------------

_c10d: Any = distributed_c10d  # its stub lacks the stores


class TeamStore(_c10d.Store):  # type: ignore[misc]
    """Keys of one team as a torch store, for any thread but Trio's. Methods block until the store has answered.

    Args:
        ask: Queries the store; takes a verb, keys, values, numbers and `seconds`; see `TeamTable`.
    """

    def __init__(self, ask: Callable[..., Answer]) -> None:
        super().__init__()
        self._ask = ask
        self._seconds = limits.COLLECTIVE_SECONDS

    def set(self, key: str, value: Any) -> None:
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait until a key exists; return its value."""
        return self._ask("get", [key], seconds=self._seconds).values[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._ask("wait", list(keys), seconds=self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist now."""
        return bool(self._ask("check", list(keys)).number)

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key; return the sum."""
        return self._ask("add", [key], [], [amount]).number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value, or if neither exists; return the resulting value."""
        return self._ask("swap", [key], [_bytes(expected), _bytes(desired)]).values[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask("delete", [key]).number)

    deleteKey = delete_key  # noqa: N815 - what torch calls from C++

    def num_keys(self) -> int:
        return self._ask("count", []).number

    getNumKeys = num_keys  # noqa: N815 - what torch calls from C++

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of waits for keys."""
        self._seconds = timeout.total_seconds()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
