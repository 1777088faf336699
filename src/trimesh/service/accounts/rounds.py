"""Rounds of the members of a mesh that changes: who forms a group with whom, and when a group has ended.

    gathering --every member has joined--> formed --all have finished--> gathering
                                             |--a member is lost, new or has left--> gathering

MR-1 a round is formed of all members of one view, at one moment; each of them is in it once.
MR-2 a formed round ends once: when all of its members have finished, or with the reason of the first that cannot go on
     or of the view that has other members. No member of it waits for another one after that.
MR-3 who has joined stays joined until the round that it is in is formed: views may change meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trimesh.shape.point import place_name

Place = tuple[tuple[str, int], ...]
"""Coordinates of a member."""


class RoundMember:
    """One member that wants to be in the next round, or is in one.

    Attributes:
        place: Its coordinates.
        number: Of the round that it is in; 0 before.
        epoch: Of the view that this round was formed of.
        places: Those of the round, in the order of their ranks.
        is_over: Whether the round is over.
        why: Why it has ended; "" if all have finished.
    """

    __slots__ = ("epoch", "is_over", "number", "place", "places", "why")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.number = 0
        self.epoch = -1
        self.places: tuple[Place, ...] = ()
        self.is_over = False
        self.why = ""


class Rounds:
    """The rounds of one mesh.

    Attributes:
        epoch: Of the present view.
        number: Of the round that was formed last.
    """

    def __init__(self, least: int) -> None:
        """Begin without members.

        Args:
            least: Members that a round has at least.
        """
        self.epoch = -1
        self.number = 0
        self._least = least
        self._members: tuple[Place, ...] = ()
        self._waiting: dict[Place, RoundMember] = {}
        self._inside: dict[Place, RoundMember] = {}
        self._finished: set[Place] = set()

    def see(self, epoch: int, members: Sequence[Place], joined: Collection[Place], why: str) -> list[RoundMember]:
        """Take a view; return those whose round has changed.

        Args:
            epoch: Of the view.
            members: In the order of their ranks.
            joined: Those that the view before has not shown, or has shown by another incarnation.
            why: What has changed.
        """
        self.epoch = epoch
        has_changed = tuple(members) != self._members or any(place in self._inside for place in joined)
        self._members = tuple(members)
        ended = self._end(why) if has_changed else []
        return ended + self._form()

    def join(self, place: Place) -> tuple[RoundMember, list[RoundMember]]:
        """Let a member be in the next round; return it, and those whose round has changed.

        Raises:
            ValueError: It waits for one already, or is in one.
        """
        if place in self._waiting or place in self._inside:
            name = place_name("", dict(place))
            raise ValueError(f"a process is in one group at a time, and {name} is in one, or waits for it")
        joined = self._waiting[place] = RoundMember(place)
        return joined, self._form()

    def finish(self, joined: RoundMember) -> list[RoundMember]:
        """Note that a member is done, as the others will be; return those whose round has changed."""
        if self._inside.get(joined.place) is not joined:
            return []
        self._finished.add(joined.place)
        return self._end("") if len(self._finished) == len(self._inside) else []

    def leave(self, joined: RoundMember, why: str) -> list[RoundMember]:
        """Take a member out; return those whose round has changed."""
        if self._waiting.get(joined.place) is joined:
            del self._waiting[joined.place]
        if self._inside.get(joined.place) is joined:
            return self._end(why) + self._form()
        return []

    def _end(self, why: str) -> list[RoundMember]:
        ended = list(self._inside.values())
        for one in ended:
            one.is_over, one.why = True, why
        self._inside.clear()
        self._finished.clear()
        return ended

    def _form(self) -> list[RoundMember]:
        if (
            self._inside
            or len(self._members) < self._least
            or any(place not in self._waiting for place in self._members)
        ):
            return []
        self.number += 1
        for place in self._members:
            one = self._inside[place] = self._waiting.pop(place)
            one.number, one.epoch, one.places = self.number, self.epoch, self._members
        return list(self._inside.values())
