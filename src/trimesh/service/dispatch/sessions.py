"""Which replica a session is at; the least recently used ones are forgotten."""

from __future__ import annotations

from collections import OrderedDict

import attrs


@attrs.define
class SessionPlace:
    """Where a session is.

    Attributes:
        replica: Its replica, or None before the first request.
        moves: How often it had to go to another one.
    """

    replica: int | None = None
    moves: int = 0


class Sessions:
    """The places of sessions, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: OrderedDict[str, SessionPlace] = OrderedDict()
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> SessionPlace:
        """Return the place of a session, as the one that was used last."""
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = SessionPlace()
            if len(self._places) > self._capacity:
                self._places.popitem(last=False)
                self.forgotten += 1
        self._places.move_to_end(name)
        return place

    def settle(self, name: str, replica: int) -> SessionPlace:
        """Note where a session is now."""
        place = self.find(name)
        if place.replica != replica:
            place.moves += place.replica is not None
            place.replica = replica
        return place

    def end(self, name: str) -> None:
        """Forget a session."""
        self._places.pop(name, None)
