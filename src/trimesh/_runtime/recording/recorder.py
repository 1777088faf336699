"""The flight record of this process: a mapped file, which the kernel keeps however the process ends.

    a slot takes a call --> one row (`CallRecorder.began`) --> outcome and end, five bytes (`CallRecorder.ended`)
    events, looks at the own tables, errors --> the log (`FlightRecorder.note`)

RW-1 Nothing here waits, makes a system call, or raises, once the file is open: its pages were reserved.
RW-2 One thread writes: that of the Trio loop.
RW-3 A forked child writes into memory of its own.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from trimesh import limits
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._wire import flight
from trimesh._wire.flight import CANCELLED, RAISED

assert (flight.ROW_BYTES, flight.OUTCOME, flight.RETURNED) == (48, 27, 1), "what closures have as numbers"
_GENERATION: Final = flight.HALF
_CLOSING: Final = struct.Struct("<d")
_USED: Final = struct.Struct("<Q")


class RecordedPeer(Protocol):
    """Who has sent a call; see `Peer`."""

    @property
    def proc_id(self) -> int:
        """Its incarnation."""
        ...


class RecordedEndpoint(Protocol):
    """What is called; see `EndpointSpec`."""

    @property
    def name(self) -> str:
        """Of the endpoint."""
        ...


class RecordedCall(Protocol):
    """A call that a slot has taken; see `IncomingCall`."""

    received_at: float
    call_id: int
    cancelled_by: str | None
    error_text: str

    @property
    def peer(self) -> RecordedPeer:
        """Who has sent it."""
        ...

    @property
    def spec(self) -> RecordedEndpoint:
        """The endpoint."""
        ...


class FlightRecorder:
    """The record of this process.

    Args:
        path: Of the file, which must not be there.
        head: Whose it is.
        now: Returns the Trio time, as that at which calls have come.

    Attributes:
        path: Of the file.
        now: Returns the Trio time.
        count: Calls so far.
        rows: Their rows.

    Raises:
        OSError: The file cannot be made, or there is no room for it.
        ValueError: The head is too large.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_errors",
        "_errors_since",
        "_generation",
        "_half",
        "_halves",
        "_map",
        "_names",
        "_used",
        "_view",
        "count",
        "now",
        "path",
        "rows",
        "rows_max",
    )

    def __init__(self, path: Path, head: flight.FlightHead, now: Callable[[], float]) -> None:
        self.path = path
        self.now: Final = now
        self.rows_max: Final = limits.RECORD_ROWS
        self._half: Final = limits.RECORD_HALF_BYTES
        names = limits.RECORD_NAMES_BYTES
        page = flight.first_page(head, self.rows_max, names, self._half)
        size = flight.file_bytes(self.rows_max, names, self._half)
        self._map = _map_new(path, size)
        self._view = memoryview(self._map)
        self._view[: len(page)] = page
        at = flight.PAGE_BYTES + names
        self.rows = self._view[at : at + self.rows_max * flight.ROW_BYTES]
        at += self.rows.nbytes
        self._halves = [self._view[at : at + self._half], self._view[at + self._half : at + 2 * self._half]]
        self.count = 0
        self._used = 0
        self._names = 0
        self._generation = 0
        self._at = 0
        self._errors = 0
        self._errors_since = 0.0
        self._turn()
        _open.add(self)

    def of_actor(self, mesh: str, point: dict[str, int]) -> CallRecorder:
        """Return what records the calls of one actor."""
        return CallRecorder(self, mesh, point)

    def define(self, name: flight.CallName) -> int:
        """Return the number of a name among the names; one that says so when there is no room for more."""
        data = flight.named(name)
        if not data or self._used + len(data) > limits.RECORD_NAMES_BYTES:
            return flight.NO_NAME
        at = flight.PAGE_BYTES + self._used
        self._view[at : at + len(data)] = data
        self._used += len(data)
        _USED.pack_into(self._view, flight.NAMES_USED, self._used)
        self._names += 1
        return self._names - 1

    def note(self, record: flight.Record) -> None:
        """Write a record into the log; one that is larger than half of it is left out."""
        data = flight.framed(flight.encode(record))
        room = self._half - flight.RECORD.size
        if flight.HALF.size + len(data) > room:
            return
        if self._at + len(data) > room:
            self._turn()
        half, at = self._halves[self._generation % 2], self._at
        end = at + len(data)
        half[end : end + flight.RECORD.size] = b"\0" * flight.RECORD.size
        # Its bytes before its size: until that is there, the half ends here.
        half[at + flight.RECORD.size : end] = data[flight.RECORD.size :]
        half[at : at + flight.RECORD.size] = data[: flight.RECORD.size]
        self._at = end

    def _turn(self) -> None:
        """Go on in the other half."""
        self._generation += 1
        half = self._halves[self._generation % 2]
        self._at = flight.HALF.size
        half[: self._at] = b"\0" * self._at
        half[self._at : self._at + flight.RECORD.size] = b"\0" * flight.RECORD.size
        _GENERATION.pack_into(half, 0, self._generation)

    def raised(self, number: int, text: str) -> None:
        """Keep the text of the error of a call, unless there were many in this second."""
        now = time.time()
        if abs(now - self._errors_since) > 1:
            self._errors, self._errors_since = 0, now
        self._errors += 1
        if self._errors <= limits.RECORD_ERRORS_PER_SECOND:
            self.note(flight.RaisedError(at=now, number=number, text=text[: limits.OBSERVED_TEXT_CHARS]))

    def end(self) -> None:
        """Say that the process ends in good order, and write nothing any more. Idempotent."""
        if self in _open:
            _CLOSING.pack_into(self._view, flight.ENDED_AT, time.time())
            self.forget()

    def forget(self) -> None:
        """Write into memory of this process alone from now on."""
        _open.discard(self)
        views = [self.rows, *self._halves, self._view]
        self._view = memoryview(bytearray(flight.PAGE_BYTES + limits.RECORD_NAMES_BYTES))
        self.rows = memoryview(bytearray(self.rows.nbytes))
        self._halves = [memoryview(bytearray(self._half)) for _ in range(2)]
        for view in views:
            view.release()
        with suppress(BufferError):
            self._map.close()


class CallRecorder:
    """Records the calls of one actor.

    Args:
        file: The record of the process.
        mesh: Of the actor; empty for one of the runtime.
        point: Its coordinates.

    Attributes:
        began: Write that a slot has taken a call; return its number.
        ended: Write how the call of a number has ended, however it has.
    """

    __slots__ = ("began", "ended")

    def __init__(self, file: FlightRecorder, mesh: str, point: dict[str, int]) -> None:
        self.began = _begins(file, lambda endpoint: flight.CallName(mesh, point, endpoint))
        self.ended = _ends(file)


# On the way of every call: closures take half the time of methods, and numbers instead of names the last tenth.


def _begins(file: FlightRecorder, name_of: Callable[[str], flight.CallName]) -> Callable[[RecordedCall], int]:
    pack, mask, names, now = flight.ROW.pack_into, file.rows_max - 1, dict[str, int](), file.now

    def began(call: RecordedCall) -> int:
        file.count = number = file.count + 1
        endpoint = call.spec.name
        try:
            name = names[endpoint]
        except KeyError:
            name = names[endpoint] = file.define(name_of(endpoint))
        at = (number & mask) * 48  # ROW_BYTES
        came_at = call.received_at
        pack(file.rows, at, came_at, call.peer.proc_id, call.call_id, name, 0.0, now() - came_at, number)
        return number

    return began


def _ends(file: FlightRecorder) -> Callable[[int, RecordedCall], None]:
    pack, mask, now = flight.END.pack_into, file.rows_max - 1, file.now

    def ended(number: int, call: RecordedCall) -> None:
        if file.count - number > mask:
            return  # its row is that of another call now
        outcome = 1  # RETURNED
        if call.error_text:
            outcome = RAISED
            file.raised(number, call.error_text)
        elif call.cancelled_by is not None:
            outcome = CANCELLED
        pack(file.rows, (number & mask) * 48 + 27, outcome, now() - call.received_at)  # ROW_BYTES, OUTCOME

    return ended


def _map_new(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Reserved, not merely long: a page that cannot be had when it is written to would end the process.
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


_open: ForgottenInChildren[FlightRecorder] = ForgottenInChildren()
