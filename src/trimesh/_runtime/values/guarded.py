"""Things among the arguments of a call that not every actor may be sent, and that must be kept until it has ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet


class Guarded(ABC):
    """What a reducer attaches to a message for such a thing."""

    @abstractmethod
    def check(self, peers: AbstractSet[object], *, is_broadcast: bool) -> None:
        """Refuse a call, before anything of it is sent.

        Args:
            peers: The processes of the actors that are called, each a `Peer`.
            is_broadcast: Whether its end is told to no caller.

        Raises:
            TypeError: It cannot be sent there, or so.
        """
