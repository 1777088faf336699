"""Makes faults of links and of resources happen between real processes, by the table of the native library.

Each direction of each link is a fault of its own, which happens at the receiver. What has happened stands in the table;
it is looked at when the test looks, and at the end: a fault is noted once for each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, overload

import attrs

from trimesh._transport.native.fault_table import FaultTable
from trimesh.ids import ProcId
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.plan import Planned
from trimesh.testing.plans.vocabulary import Direction, Fired, LinkFault, Partition, Place, ResourceFault

Heal = Callable[[], None]

OnFired = Callable[[Planned, float, str, str], None]
"""Called with the fault, how many seconds ago it has happened, the site, and where."""

JITTERED_LINKS_MAX: Final = 512
"""Directions of links whose messages are late by jitter: half of the rows of the table, so that faults have theirs."""

LINK: Final = "link"
RESOURCES: Final = "resources"


@attrs.frozen(eq=False)
class LiveLog(Sequence[Fired]):
    """The fixture `fault_log`: what has happened until it is looked at.

    Attributes:
        log: What has been noted.
        look: Notes what has happened since.
    """

    log: list[Fired]
    look: Callable[[], None]

    def __len__(self) -> int:
        self.look()
        return len(self.log)

    @overload
    def __getitem__(self, index: int) -> Fired: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Fired]: ...
    def __getitem__(self, index: int | slice) -> Fired | Sequence[Fired]:
        self.look()
        return self.log[index]


@attrs.frozen
class _Watched:
    """A row of the table that has not been seen to happen."""

    planned: Planned
    site: str
    where: str


@attrs.define(eq=False)
class RealLinks:
    """The faults of one test.

    Attributes:
        table: Where they are planned.
        own: The process of the test.
        seed: Of what happens by chance.
        on_fired: Told of what has happened.
    """

    table: FaultTable
    own: ProcId
    seed: int
    on_fired: OnFired
    _watched: dict[int, _Watched] = attrs.field(factory=dict[int, _Watched])

    def disturb(self, planned: Planned, fault: LinkFault) -> Heal:
        """Begin a fault of links; return what ends it."""
        draw = stream(self.seed, "link", planned.index)
        where = f"{fault.a.text} - {fault.b.text}"
        rows: list[int] = []
        for source, target in self._pairs(fault.a.places, fault.b.places, fault.direction):
            row = self.table.disturb(fault.kind, source, target, fault.amount, draw.getrandbits(64))
            self._watched[row] = _Watched(planned, LINK, where)
            rows.append(row)
        return lambda: self._heal(rows)

    def jitter(self, places: Sequence[Place], seconds: float) -> None:
        """Make each message between these places late by up to so much, as the seed says, until the test ends."""
        draw = stream(self.seed, "jitter", "links")
        pairs = islice(self._pairs(places, places, "both"), JITTERED_LINKS_MAX)
        for source, target in pairs:
            self.table.disturb("reorder", source, target, seconds, draw.getrandbits(64))

    def partition(self, fault: Partition) -> Heal:
        """Let nothing pass; return what lets it pass again."""
        pairs = self._pairs(fault.a.places, fault.b.places, fault.direction)
        rows = [self.table.disturb("hold", source, target) for source, target in pairs]
        return lambda: self._heal(rows)

    def refuse(self, planned: Planned, fault: ResourceFault) -> Heal:
        """Refuse memory or descriptors; return what ends it."""
        rows: list[int] = []
        for place in fault.where.places:
            row = self.table.refuse(fault.error, self._id_of(place), fault.nth, fault.times)
            self._watched[row] = _Watched(planned, RESOURCES, fault.where.text)
            rows.append(row)
        return lambda: self._heal(rows)

    def _heal(self, rows: list[int]) -> None:
        for row in rows:
            self.table.heal(row)
        self.harvest()
        for row in rows:
            self._watched.pop(row, None)
        rows.clear()  # their numbers may be those of others from now on

    def harvest(self) -> None:
        """Note what has happened since the last look."""
        found = [(ago, row) for row in self._watched if (ago := self.table.ago_of(row)) is not None]
        for ago, row in sorted(found, reverse=True):
            watched = self._watched.pop(row)
            self.on_fired(watched.planned, ago, watched.site, watched.where)

    def _id_of(self, place: Place) -> ProcId:
        return self.own if place is None else ProcId(place[1])

    def _pairs(self, a: Iterable[Place], b: Iterable[Place], direction: Direction) -> Iterator[tuple[ProcId, ProcId]]:
        """Yield who sends to whom over the links that are meant, each once."""
        seen: set[tuple[ProcId, ProcId]] = set()
        ends = [(self._id_of(one), self._id_of(other)) for one in a for other in b]
        for one, other in ends:
            forth, back = [(one, other)], [(other, one)]
            wanted = forth if direction == "a_to_b" else back if direction == "b_to_a" else forth + back
            for pair in wanted:
                if pair[0] != pair[1] and pair not in seen:
                    seen.add(pair)
                    yield pair
