"""A lane without a device."""

from __future__ import annotations

import attrs

from trimesh._transport.interface import Span
from trimesh.rdma.memory.device import PLACES
from trimesh.rdma.memory.local import address_of

PIECE = 10


@attrs.define
class SlowLane:
    """A lane between pieces of host memory whose copies are made when they have been looked at a few times."""

    memory: bytearray
    is_feed: bool
    looks: int = 3
    piece: int = PIECE
    places: list[bytearray] = attrs.field(init=False)
    pending: dict[int, tuple[int, int, int]] = attrs.field(factory=dict[int, tuple[int, int, int]])
    most: int = 0
    is_kept: bool = False
    failure: RuntimeError | None = None

    def __attrs_post_init__(self) -> None:
        self.places = [bytearray(self.piece) for _ in range(PLACES)]

    @property
    def spans(self) -> list[Span]:
        """Where the places are."""
        return [Span(address_of(memoryview(place)), len(place), place) for place in self.places]

    def begin(self, place: int, start: int, stop: int) -> None:
        assert place not in self.pending, "ST-1"
        self.pending[place] = (self.looks, start, stop)
        self.most = max(self.most, len(self.pending))

    def is_done(self, place: int) -> bool:
        if self.failure is not None:
            raise self.failure
        if place not in self.pending:
            return True
        looks, start, stop = self.pending[place]
        if looks:
            self.pending[place] = (looks - 1, start, stop)
            return False
        del self.pending[place]
        if self.is_feed:
            self.memory[start:stop] = self.places[place][: stop - start]
        else:
            self.places[place][: stop - start] = self.memory[start:stop]
        return True

    def keep(self) -> None:
        self.is_kept = True
