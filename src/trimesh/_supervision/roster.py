"""Who is in an elastic mesh: numbered changes, and what a reader has not seen of them. Pure.

    epoch 0 --join(ranks)--> 1 --leave(ranks, why)--> 2 ...

RO-1 the epoch grows by one with each change, and with nothing else.
RO-2 a rank that has left is not named again before it has joined again: the first reason stays.
RO-3 what a reader missed is told at once: between two looks, each incarnation joins once at most and leaves once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class RosterChange(msgspec.Struct, frozen=True):
    """What has changed since a look.

    Attributes:
        epoch: Number of the present state.
        joined: Incarnation by rank of those that are new.
        left: (rank, incarnation, why) of those that are gone.
    """

    epoch: int
    joined: Mapping[int, int]
    left: tuple[tuple[int, int, Exception], ...]


class Roster:
    """The members of one mesh.

    Attributes:
        epoch: Number of the last change.
        present: Incarnation by rank.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.present: dict[int, int] = {}
        self._why: dict[int, Exception] = {}

    def join(self, members: Mapping[int, int]) -> bool:
        """Note that members serve; return whether that is news.

        Args:
            members: Incarnation by rank.
        """
        news = {rank: incarnation for rank, incarnation in members.items() if self.present.get(rank) != incarnation}
        self.present |= news
        self.epoch += bool(news)
        return bool(news)

    def leave(self, ranks: Iterable[int], why: Exception) -> bool:
        """Note that members do not serve any more; return whether that is news."""
        gone = [rank for rank in ranks if rank in self.present]
        for rank in gone:
            del self.present[rank]
            self._why[rank] = why
        self.epoch += bool(gone)
        return bool(gone)

    def since(self, seen: Mapping[int, int]) -> RosterChange:
        """Return what has changed for a reader.

        Args:
            seen: `present` as it was at the reader's last look.
        """
        joined = {rank: number for rank, number in sorted(self.present.items()) if seen.get(rank) != number}
        left = [(rank, number) for rank, number in sorted(seen.items()) if self.present.get(rank) != number]
        return RosterChange(self.epoch, joined, tuple((rank, number, self._why[rank]) for rank, number in left))
