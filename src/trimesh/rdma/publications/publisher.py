"""Publisher: the owner's side of a publication, which chooses the slot of each version and notifies readers.

PU-1 Versions are published one after the other. A slot is written to only while no version is in it, and one is
     taken out only if no reader has it pinned (BO-1).
PU-2 The cells of a reader whose process counts as ended are ignored; if it still lives, it detects that (BO-3). Readers
     take their rows themselves (BO-4). The publisher finds them when it publishes, and connects to new ones, because
     only a link reports the end of a process.
PU-3 A version that was taken out counts until its memory is reused: if the next step fails or is cancelled, a reader
     may still have it pinned, and the next `publish` checks again.

PS-1 A closed publication is dropped on both sides at once; later requests are answered "closed". Nothing is kept of a
     publication whose process has ended.
"""

from __future__ import annotations

import contextvars
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimesh import limits
from trimesh._runtime.actors import find_cell
from trimesh._runtime.peers import Parcel, Peer
from trimesh._wire import messages
from trimesh._wire.observed import PinRow, PublicationRow
from trimesh.errors import place_name
from trimesh.ids import ProcId
from trimesh.plain_numbers import plain_whole
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.local import allocate
from trimesh.rdma.publications import board
from trimesh.rdma.publications.board import layout_of
from trimesh.rdma.publications.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimesh._runtime.actors import Cell
    from trimesh._runtime.life import Proc
    from trimesh._runtime.services import Granted


_log = logging.getLogger("trimesh")


@attrs.define(eq=False)
class Publisher:
    """One publication, in the process that publishes.

    Attributes:
        proc: The process.
        number: Number of the publication in that process.
        count: Number of slots.
        forget: Called when it is closed.
        latest: The latest version, or 0.
        is_closed: True if there will be no other version and memory is released.
        is_last: True if there will be no other version.
        board: Memory that readers poll.
    """

    proc: Proc
    number: int
    count: int
    forget: Callable[[], object]
    latest: int = 0
    is_closed: bool = False
    is_last: bool = False
    board: RDMABuffer = attrs.field(init=False)
    _words: memoryview = attrs.field(init=False)
    _rooms: list[RDMABuffer | None] = attrs.field(init=False)
    _versions: list[int] = attrs.field(init=False)
    """Version in each slot, also while the board does not show it (PU-3)."""
    _latest_slot: int = -1
    _readers: dict[ProcId, int] = attrs.field(factory=dict[ProcId, int])
    """Rows of the readers that were found on the board."""
    _leases: list[int] = attrs.field(init=False)
    """Lease of each row."""
    _unpinned: trio.Event = attrs.field(factory=trio.Event)
    _is_waiting: bool = False
    _met_at: dict[int, float] = attrs.field(factory=dict[int, float])
    """Versions that a `publish` found pinned, with the time when it first did."""
    _unread: int = 0
    """Number of versions published since a reader last released one; `_unread_at`: when the first of them was."""
    _unread_at: float = 0.0
    _lock: trio.Lock = attrs.field(factory=trio.Lock)
    _context: contextvars.Context = attrs.field(factory=contextvars.copy_context)
    """Context of the actor that made the publication: its grants end with that actor, whichever task publishes."""
    _cell: Cell | None = attrs.field(factory=find_cell)

    def __attrs_post_init__(self) -> None:
        self._rooms = [None] * self.count
        self._versions = [0] * self.count
        self._words = allocate(board.BOARD_BYTES)
        self._leases = board.new_board(self._words)
        board.write_header(self._words, 0, board.BoardState.OPEN, self.number)
        self.board = RDMABuffer(self._words)
        if self._cell is not None:
            self._cell.on_end[self.close] = None

    # ---- versions --------------------------------------------------------------------------------------------

    async def publish(self, tensors: Mapping[str, Any], version: int | None = None) -> int:
        """Copy tensors into a slot that is not read, and make them the latest version; see `Published.publish`.

        Args:
            tensors: The tensors.
            version: Its number, above the latest; None for the next. Given if other processes publish parts of it.
        """
        has_adapter = bool(self.board.handle.granted.grant.exported)
        layout = layout_of(tensors, limits.EXPORT_BYTES_MAX if has_adapter else 0)
        async with self._lock:
            self._check_open()
            number = self.latest + 1 if version is None else plain_whole(version)
            if not self.latest < number <= board.VERSION_MAX:
                raise ValueError(f"a version must be above the latest, {self.latest}, got {number}")
            index = await self._empty_slot()
            room = await self._room(index, layout.nbytes)
            granted = room.readonly().handle.granted
            head = layout.head + granted.grant.exported
            await room[: len(head)].write_from(head)
            for name, entry in layout.entries.items():
                await room[entry.offset : entry.offset + entry.nbytes].write_from(tensors[name])
            self._check_open()
            sizes = (layout.nbytes, len(layout.head), len(granted.grant.exported))
            slot = board.Slot(number, granted.grant, granted.block, *sizes)
            board.write_slot(self._words, index, slot)
            await self._swap(index, 0, number)
            self.latest, self._latest_slot, self._versions[index] = number, index, number
            if not self._unread:
                self._unread_at = self.proc.now()
            self._unread += 1
            board.write_header(self._words, number, board.BoardState.OPEN, self.number)
        self._meet()
        self._tell()
        return number

    async def _empty_slot(self) -> int:
        """Take out the oldest version that is not pinned; wait until there is one."""
        is_said = False
        while True:
            unpinned = self._unpinned  # read before the cells: a reader sets it after it leaves a cell
            shown = board.read_head(self._words).slots
            for index in sorted(range(self.count), key=lambda index: self._versions[index]):
                version = self._versions[index]
                if index == self._latest_slot:
                    continue
                if shown[index].version:
                    await self._swap(index, version, 0)
                if version not in board.pinned(self._words, index, self._leases):
                    self._versions[index] = 0
                    self._met_at.pop(version, None)
                    return index
                self._met_at.setdefault(version, self.proc.now())
                await self._swap(index, 0, version)  # BO-1
            self._meet()  # a reader that pinned a version may have ended
            self._is_waiting = True
            try:
                with trio.move_on_after(math.inf if is_said else limits.PUBLISH_LOG_SECONDS) as scope:
                    await unpinned.wait()
                if scope.cancelled_caught:
                    is_said = True
                    self._log_pins()
            finally:
                self._is_waiting = False
            self._check_open()

    def _log_pins(self) -> None:
        pins = self._pins()
        pinned = ", ".join(map(str, sorted({pin.version for pin in pins})))
        _log.warning(
            "publish has waited %g s for a free slot: readers have the versions %s pinned, and of %d slots one is kept "
            "for the latest version; leave pin() blocks sooner, or raise slots= (retain= of a ShardPublisher); "
            "`trimesh ps` names the readers",
            limits.PUBLISH_LOG_SECONDS,
            pinned,
            self.count,
        )

    async def _room(self, index: int, nbytes: int) -> RDMABuffer:
        """Return memory for a version in an empty slot."""
        room = self._rooms[index]
        if room is None or room.nbytes < nbytes:
            if room is not None:
                self._rooms[index] = None
                await room.aclose()
                self._check_open()
            room = self._rooms[index] = self._context.run(RDMABuffer, allocate(nbytes))
        return room

    async def _swap(self, index: int, old: int, new: int) -> None:
        """Change the version of a slot, in one order with the writes of readers to cells (BO-1)."""
        was = await self.board.compare_and_swap(old, new, board.offset_of_slot(index))
        assert was == old, f"only the publisher writes the versions, found {was} where {old} was"
        self._check_open()

    # ---- readers ---------------------------------------------------------------------------------------------

    def subscribe(self, peer: Peer) -> None:
        """Send the latest version's number to a reader, and later ones as they appear."""
        self._meet()
        peer.send(self._news())
        self.unpinned()  # the reader may have cleared a cell before it had a link

    def _meet(self) -> None:
        """Read the rows of the board; connect to readers that are new (PU-2)."""
        for row, reader in enumerate(board.readers_of(self._words[board.HEAD_BYTES :])):
            if reader in (0, board.NO_READER) or reader in self._readers:
                continue
            peer = self.proc.peer(ProcId(reader))
            self._readers[peer.proc_id] = row
            if peer.death is not None:
                self.gone(peer)
            elif self.proc.is_stranger(peer):
                self.proc.serve(self._connect, peer)

    async def _connect(self, peer: Peer) -> None:
        assert self.proc.family is not None, "a process that is reached by others has a family"
        await self.proc.family.connect([peer])

    def unpinned(self) -> None:
        """Handle a reader's release of a cell."""
        self._unread = 0
        self._unpinned.set()
        self._unpinned = trio.Event()

    def gone(self, peer: Peer) -> None:
        """Handle the end of a process (PU-2)."""
        reader = self._readers.pop(peer.proc_id, None)
        if reader is None or self.is_closed:
            return
        self._leases[reader] += 1
        board.take_back(self._words, reader, self._leases[reader])
        self.unpinned()

    def _tell(self) -> None:
        self.proc.cast([self.proc.peer(reader) for reader in self._readers], self._news())

    def _news(self) -> Parcel:
        return Parcel(messages.encode(messages.Published(self.number, self.latest, self.is_closed)))

    def row(self) -> PublicationRow:
        """Return its row of the status table; may be called from any thread."""
        pins, now = self._pins(), self.proc.now()
        spec = None if self._cell is None else self._cell.spec
        return PublicationRow(
            proc=f"{self.proc.proc_id:x}",
            number=self.number,
            member="" if spec is None else place_name(spec.name, spec.point),
            latest=self.latest,
            slots=self.count,
            pinned=tuple(sorted({pin.version for pin in pins})),
            nbytes=sum(room.nbytes for room in list(self._rooms) if room is not None),
            readers=tuple(f"{reader:x}" for reader in list(self._readers)),
            is_waiting=self._is_waiting,
            pins=tuple(pins),
            unread=0 if pins else self._unread,
            unread_seconds=now - self._unread_at if self._unread and not pins else 0.0,
        )

    def _pins(self) -> list[PinRow]:
        words, now = self._words, self.proc.now()
        if not words:
            return []
        met_at = dict(self._met_at)
        found = [pin for index in range(self.count) for pin in board.pins(words, index, self._leases).items()]
        return [
            PinRow(proc=f"{reader:x}", version=version, seconds=now - met_at.get(version, now))
            for reader, version in sorted(found, key=lambda pin: (pin[1], pin[0]))
        ]

    # ---- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Mark the latest version as the last; existing versions can be read and pinned until `close`."""
        if not self.is_closed:
            self.is_last = True
            board.write_header(self._words, self.latest, board.BoardState.LAST, self.number)
            self._tell()

    def close(self) -> None:
        """Mark the publication as closed; pinned versions stay readable until `aclose`. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.forget()
        if self._cell is not None:
            self._cell.on_end.pop(self.close, None)
        board.write_header(self._words, self.latest, board.BoardState.CLOSED, self.number)
        self._words = memoryview(b"")  # readers may read the board for a while; this process no longer does
        self._tell()
        self.unpinned()

    async def aclose(self) -> None:
        """Close it and release its memory; wait for readers as `RDMABuffer.aclose` does."""
        self.close()
        async with trio.open_nursery() as nursery:
            for buffer in (self.board, *self._rooms):
                if buffer is not None:
                    nursery.start_soon(buffer.aclose)

    def _check_open(self) -> None:
        if self.is_closed or self.is_last:
            raise trio.ClosedResourceError("this publication was closed, by aclose() or because its actor has ended")


# ---- publications that a process owns, and those that it reads -------------------------------------------------------


@attrs.define(eq=False)
class Publications:
    """All publications that one process owns or reads.

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

    def reading(self, number: int, board: Granted) -> Reading:
        """Return this process's reader of a publication, by the owner's number for it and its board."""
        key = ProcId(board.home.epoch), number
        found = self._readings.get(key)
        if found is None:
            found = Reading(self.proc, number, board, partial(self._readings.pop, key, None))
            if self.proc.death_of(found.owner) is None:  # PS-1
                self._readings[key] = found
        return found

    def left(self) -> list[Publisher | Reading]:
        """Return the open publications of this process, and its readers of other processes' publications."""
        return [*self._publishers.values(), *self._readings.values()]

    def rows(self) -> list[PublicationRow]:
        """Return the status rows of the publications of this process."""
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
