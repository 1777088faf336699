"""`TeamTable`: what the ranks of one team tell each other to make process groups, at the team's first rank. Pure.

set [key] [value]; get [key]; wait [key, ...]; check [key, ...]; delete [key]; count
add [key] number; swap [key] [expected, desired]         as `torch.distributed.Store` has them
join [group] [place, number, members...]                 see `Meeting`; answers the generation
leave [group, ...] [error] [place, number]
why [group] [place, number]                              fails with the cause; else 1 to make the group anew, or 0
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.tensor.meeting import Leave, Meeting


@attrs.frozen
class Found:
    """The answer to a question.

    Attributes:
        number, values: As the verb says.
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
            case ("get" | "wait", [_, *_], [], []):
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
            case (("join" | "leave" | "why"), _, _, [place, number, *places]):
                self._meet(verb, keys, values, place, number, places, take)
            case _:
                raise ProtocolError(f"a store has no question {verb!r} of {keys!r}, {len(values)} values, {numbers!r}")

    def gone(self, asker: Hashable) -> None:
        """Forget what somebody waits for."""
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

    def _meet(
        self,
        verb: str,
        groups: Sequence[str],
        values: Sequence[Any],
        place: int,
        number: int,
        places: Sequence[int],
        take: Take,
    ) -> None:
        match verb, groups, values:
            case "join", [group], [] if place in places:
                self._join(group, place, number, frozenset(places), take)
            case "leave", _, [error]:
                for group in groups:
                    self._leave(group, place, number, error)
                take(Found())
            case "why", [group], []:
                take(self._why(group, place, number))
            case _:
                raise ProtocolError(f"a meeting has no question {verb!r} of {groups!r} by {place} of {places!r}")

    def _join(self, group: str, place: int, number: int, places: frozenset[int], take: Take) -> None:
        meeting = self._meetings.get(group)
        if meeting is None:
            meeting = self._meetings[group] = Meeting()
        meeting.join(
            place, number, places, lambda generation: take(Found(generation)), lambda why: take(Found(failure=why))
        )

    def _leave(self, group: str, place: int, number: int, error: Any) -> None:
        meeting = self._meetings.get(group)
        if meeting is None:
            meeting = self._meetings[group] = Meeting()
        meeting.leave(place, number, error)
        # Those that are making this generation wait for keys that will not come.
        why = Leave(place, error)
        waiting = [waiter for waiter in self._waiters if any(key.startswith(f"{group}/") for key in waiter.keys)]
        self._waiters = [waiter for waiter in self._waiters if waiter not in waiting]
        for waiter in waiting:
            waiter.take(Found(failure=why))

    def _why(self, group: str, place: int, number: int) -> Found:
        meeting = self._meetings.get(group)
        if meeting is None:
            return Found()
        cause = meeting.cause(number)
        if cause is not None and cause.place != place:
            return Found(failure=cause)
        return Found(int(meeting.has_left_before(number)))


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ProtocolError(f"only a number can be added to, got {value[:40]!r}") from error
