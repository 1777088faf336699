"""The publications that one process has, and those that it reads.

PS-1 A publication that is closed is forgotten on both sides at once: who asks for it is told that it is closed. Nothing
     is kept of one whose process has ended.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import attrs

from trimesh._runtime.peers import Parcel, Peer
from trimesh._wire import messages
from trimesh.ids import ProcId
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.publications.publisher import Publisher
from trimesh.rdma.publications.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimesh._runtime.life import Proc
    from trimesh._wire.observed import PublicationRow


@attrs.define(eq=False)
class Publications:
    """All of one process.

    Attributes:
        proc: The process.
    """

    proc: Proc
    _publishers: dict[int, Publisher] = attrs.field(factory=dict[int, Publisher])
    _readings: dict[tuple[ProcId, int], Reading] = attrs.field(factory=dict[tuple[ProcId, int], Reading])
    _numbers: Iterator[int] = attrs.field(factory=lambda: count(1))

    def __attrs_post_init__(self) -> None:
        routes = self.proc.routes
        routes[messages.Subscribe] = self._subscribe
        routes[messages.Published] = self._published
        routes[messages.Unpinned] = self._unpinned
        self.proc.on_gone.append(self._gone)
        self.proc.bulk.publications.append(self.rows)

    def open(self, slots: int) -> Publisher:
        """Begin a publication of this process."""
        number = next(self._numbers)
        made = self._publishers[number] = Publisher(self.proc, number, slots, partial(self._publishers.pop, number))
        return made

    def reading(self, number: int, board: RDMABuffer) -> Reading:
        """Return what this process knows of a publication, by its number in its own process and its board."""
        key = ProcId(board.handle.granted.home.epoch), number
        found = self._readings.get(key)
        if found is None:
            found = Reading(self.proc, number, board, partial(self._readings.pop, key, None))
            if self.proc.death_of(found.owner) is None:  # PS-1
                self._readings[key] = found
        return found

    def left(self) -> list[Publisher | Reading]:
        """Return the publications of this process that are open, and what it knows of those of others."""
        return [*self._publishers.values(), *self._readings.values()]

    def rows(self) -> list[PublicationRow]:
        """Return what there is to say of the publications of this process."""
        return [publisher.row() for publisher in list(self._publishers.values())]

    # ---- messages --------------------------------------------------------------------------------------------

    def _subscribe(self, peer: Peer, message: messages.Subscribe, _: list[memoryview]) -> None:
        publisher = self._publishers.get(message.publication)
        if publisher is not None:
            publisher.subscribe(peer)
        else:
            peer.send(Parcel(messages.encode(messages.Published(message.publication, 0, is_closed=True))))

    def _published(self, peer: Peer, message: messages.Published, _: list[memoryview]) -> None:
        reading = self._readings.get((peer.proc_id, message.publication))
        if reading is not None:
            reading.wake()
            if message.is_closed:
                reading.forget()

    def _unpinned(self, _: Peer, message: messages.Unpinned, __: list[memoryview]) -> None:
        publisher = self._publishers.get(message.publication)
        if publisher is not None:
            publisher.unpinned()

    def _gone(self, peer: Peer) -> None:
        for publisher in self._publishers.values():
            publisher.gone(peer)
        for (owner, _), reading in list(self._readings.items()):
            if owner == peer.proc_id:
                reading.wake()
                reading.forget()


def publications_of(proc: Proc) -> Publications:
    found = proc.above.get(Publications)
    if found is None:
        found = proc.above[Publications] = Publications(proc)
    assert isinstance(found, Publications)
    return found
