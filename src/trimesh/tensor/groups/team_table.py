"""`TeamTable`: what the ranks of one team tell each other to make process groups, at the team's first rank. Pure.

    set [key] [value]; get [key]; wait [key, ...]; check [key, ...]; delete [key]; count
    add [key] number; swap [key] [expected, desired]         as `torch.distributed.Store` has them

    join [group] [place, number, members...]    take part in an operation in a new generation: answers the generation
    leave [] [error] [place, number]            take no part in an operation
    why [group] [place, number, members...]     fails if one of them has left the operation

When a group breaks in operation `m`, each rank asks why: if one has left at `m`, `m` has failed, at every rank, with
what that one said. Otherwise it was broken before, or by itself: all join again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.tensor.groups.departures import Departures
from trimesh.tensor.groups.meeting import Leave, Meeting


@attrs.frozen
class Found:
    """The answer to a question.

    Attributes:
        number: As the verb says.
        values: As the verb says.
        failure: Why there is none.
    """

    number: int = 0
    values: Sequence[bytes] = ()
    failure: Leave | None = None


Take = Callable[[Found], None]
"""Takes the answer to a question, now or later."""


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
        """Answer a question.

        Raises:
            ProtocolError: It is none.
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
        """Forget what is waited for."""
        self._waiters = [waiter for waiter in self._waiters if waiter.asker != asker]

    def lose(self, why: Leave) -> None:
        """Fail what waits, and all that will be asked."""
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
                raise ProtocolError(f"a store has no question {verb!r} of {keys!r}, {len(values)} values, {numbers!r}")

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
        """Forget the keys of a generation that is being replaced."""
        old = [key for key in self._values if key.startswith(f"{group}/{generation}/")]
        for key in old:
            del self._values[key]

    def _leave(self, place: int, number: int, error: Any) -> None:
        why = self._departures.add(place, number, error)
        for group, meeting in self._meetings.items():
            meeting.left(number, why)
            if place in meeting.places and number == meeting.made_for:  # those that make it wait for keys in vain
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
        raise ProtocolError(f"only a number can be added to, got {value[:40]!r}") from error
