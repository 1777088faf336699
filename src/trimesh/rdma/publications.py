"""The publications that one process has, and those that it reads."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import attrs

from trimesh._runtime.peer import Peer
from trimesh._wire import messages
from trimesh.ids import ProcId
from trimesh.rdma.buffer import RDMABuffer
from trimesh.rdma.publisher import Publisher
from trimesh.rdma.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimesh._runtime.proc import Proc


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
        routes[messages.Subscribed] = self._subscribed
        routes[messages.Published] = self._published
        routes[messages.Unpinned] = self._unpinned
        self.proc.on_gone.append(self._gone)

    def open(self, slots: int) -> Publisher:
        """Begin a publication of this process."""
        number = next(self._numbers)
        made = self._publishers[number] = Publisher(self.proc, number, slots)
        return made

    def reading(self, number: int, board: RDMABuffer) -> Reading:
        """Return what this process knows of a publication, by its number in its own process and its board."""
        key = ProcId(board.handle.granted.home.epoch), number
        found = self._readings.get(key)
        if found is None:
            found = self._readings[key] = Reading(self.proc, number, board)
        return found

    # ---- messages --------------------------------------------------------------------------------------------

    def _subscribe(self, peer: Peer, message: messages.Subscribe, _: list[memoryview]) -> None:
        publisher = self._publishers.get(message.publication)
        if publisher is not None:
            publisher.subscribe(peer)

    def _subscribed(self, peer: Peer, message: messages.Subscribed, _: list[memoryview]) -> None:
        reading = self._readings.get((peer.proc_id, message.publication))
        if reading is not None:
            reading.subscribed(message.reader)

    def _published(self, peer: Peer, message: messages.Published, _: list[memoryview]) -> None:
        reading = self._readings.get((peer.proc_id, message.publication))
        if reading is not None:
            reading.wake()

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
                del self._readings[owner, reading.number]


def publications_of(proc: Proc) -> Publications:
    """Return the publications of a process."""
    found = proc.above.get(Publications)
    if found is None:
        found = proc.above[Publications] = Publications(proc)
    assert isinstance(found, Publications)
    return found
