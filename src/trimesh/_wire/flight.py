"""Flight record: a file in which a process records its calls and events, to be read after its death.

    one page: fixed fields, head | names | rows of calls, a ring | log: two halves of records, written in turn

A killed process may leave anything half-written, and any program that may write into the folder may corrupt it:

FL-1 The number of a row is written last: a half-written row looks like the one that it replaces, so the oldest row of a
     full ring is left out. So is everything after a torn record of a half. An end identifies the row it belongs to.
FL-2 Reading any bytes raises `ProtocolError` or returns their contents.
FL-3 The newer half of the log, and the older one until it is reused, can be read: at least half of the capacity.
"""

# Annotations are not texts here: msgspec would compile each of them in every new process.

import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from trimesh import limits
from trimesh._wire import observed
from trimesh._wire.memory import Buffer
from trimesh.errors import ProtocolError, place_name

VERSION: Final = 3
MAGIC: Final = b"trimesh flight\0\0"

FIXED: Final = struct.Struct("<16sIIIII4xdQ")
"""Magic, version, rows, bytes of names, bytes of a half, bytes of the head; Unix time of an orderly end, or 0.0; bytes
of names that are used."""

ENDED_AT: Final = 40
NAMES_USED: Final = 48
PAGE_BYTES: Final = 4096

ROW: Final = struct.Struct("<ddQQQQ")
"""Part of a row written when a slot takes a call: Trio time of the call's arrival, time of the record's clock, calling
process, its number for the call, name, number from 1."""

END: Final = struct.Struct("<dQ")
"""Part of a row after that, written when a call ends: time of the record's clock, not before that in `ROW`; and for a
call that has not returned its number and outcome, packed by `not_returned`. Leftovers of the replaced row match neither
for the new call."""

ROW_BYTES: Final = 64
"""Size of both parts: one cache line, so that a call writes to only one."""

RUNNING, RETURNED, RAISED, CANCELLED = range(4)
NO_NAME: Final = 0xFFFFFF

HALF: Final = struct.Struct("<Q")
"""The first bytes of a half: its generation, from 1."""

RECORD: Final = struct.Struct("<II")
"""Before a record: bytes and CRC-32. No bytes end the half."""

_NAME: Final = struct.Struct("<H")
_WHOLE_ROW: Final = struct.Struct(ROW.format + END.format[1:])

assert _WHOLE_ROW.size == ROW_BYTES, "a row consists of its two parts"


class FlightHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a record: its process and clocks.

    Attributes:
        proc: The process, with its name, mesh, coordinates, pid, host and parent.
        job: The run, in the record of the controller; None for any other process.
        started_at: Unix time at which the record was begun.
        trio_at: Trio time at that moment.
        clock_at: Time at that moment of the clock that times calls.
        ticks: Start time of the process, in ticks since the boot: a reused pid has other ticks.
        boot: Identity of the boot.
    """

    proc: observed.ProcRow
    job: observed.JobRow | None = None
    started_at: float = 0.0
    trio_at: float = 0.0
    clock_at: float = 0.0
    ticks: int = 0
    boot: str = ""


class CallName(msgspec.Struct, frozen=True, array_like=True):
    """Name of a called endpoint of one actor."""

    mesh: str
    point: dict[str, int]
    endpoint: str


class SeenView(msgspec.Struct, frozen=True, kw_only=True, tag="view"):
    """Periodic report of the process on itself.

    Attributes:
        at: Unix time.
        trio_at: Trio time at that moment.
        every: Seconds until the next report.
        view: The tables: the oldest calls, and few of the rest.
    """

    at: float
    trio_at: float
    every: float
    view: observed.ProcView


class SeenEvent(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """Something that happened to a member that the process owns.

    Attributes:
        stack: Of a process that is stalled.
    """

    event: observed.EventRow
    stack: str = ""


class RaisedError(msgspec.Struct, frozen=True, kw_only=True, tag="raised"):
    """A call has raised an error, which its caller gets.

    Attributes:
        at: Unix time.
        number: Number of the call in the process.
        text: Class and text of the error.
        line: Line of the program that raised it: `File "train.py", line 12 in step`; empty if unknown.
    """

    at: float
    number: int
    text: str
    line: str = ""


class LeftBlock(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """The outermost block of a controller was left.

    Attributes:
        at: Unix time.
        error: The error that it was left by; empty for none.
        line: As in `RaisedError`.
    """

    at: float
    error: str = ""
    line: str = ""


Record = SeenView | SeenEvent | RaisedError | LeftBlock
_RECORD: Final[Any] = Record

_T = TypeVar("_T")

encode = msgspec.msgpack.Encoder().encode


class FlightCall(msgspec.Struct, frozen=True):
    """One call that a slot of an actor has taken.

    Attributes:
        number: Counts the calls of the process, from 1.
        at: Unix time of its arrival.
        caller: The calling process.
        call: Its number for the call; 0 for a broadcast.
        name: The called endpoint; None if no longer known.
        outcome: RUNNING, RETURNED, RAISED or CANCELLED.
        waited: Seconds from its arrival until a slot took it.
        lasted: Seconds from its arrival to its end; 0.0 while it runs.
    """

    number: int
    at: float
    caller: int
    call: int
    name: CallName | None
    outcome: int
    waited: float = 0.0
    lasted: float = 0.0


class Flight(msgspec.Struct, frozen=True):
    """Contents of one flight record.

    Attributes:
        ended_at: Unix time of its orderly end; 0.0 if there was none.
        calls: The newest calls, oldest first.
        records: Other records, oldest first.
    """

    head: FlightHead
    ended_at: float
    calls: tuple[FlightCall, ...]
    records: tuple[Record, ...]

    def last_view(self) -> observed.ProcView | None:
        """Return the last report of the process on itself."""
        return next((one.view for one in reversed(self.records) if isinstance(one, SeenView)), None)

    def actors(self) -> tuple[observed.ActorRow, ...]:
        """Return the actors of the last report, and those called since: calls are recorded at once."""
        seen = self.last_view()
        rows = {} if seen is None else {actor.name: msgspec.structs.replace(actor, running=0) for actor in seen.actors}
        for call in self.calls:
            if call.name is None or not call.name.mesh:
                continue
            name = place_name(call.name.mesh, call.name.point)
            row = rows.get(name) or observed.ActorRow(
                proc=self.head.proc.id, name=name, mesh=call.name.mesh, point=call.name.point, state="serving"
            )
            rows[name] = msgspec.structs.replace(row, running=row.running + (call.outcome == RUNNING))
        return tuple(rows.values())


def file_bytes(rows: int, names: int, half: int) -> int:
    """Return the size of a file."""
    return PAGE_BYTES + names + rows * ROW_BYTES + 2 * half


def first_page(head: FlightHead, rows: int, names: int, half: int) -> bytes:
    """Return the beginning of a file.

    Raises:
        ValueError: The head is too large.
    """
    data = encode(head)
    if FIXED.size + len(data) > PAGE_BYTES:
        raise ValueError(f"a flight record's head has at most {PAGE_BYTES - FIXED.size} bytes, got {len(data)}")
    return FIXED.pack(MAGIC, VERSION, rows, names, half, len(data), 0.0, 0) + data


def not_returned(number: int, outcome: int) -> int:
    """Pack number and outcome of a call that ended by RAISED or CANCELLED."""
    return number << 2 | outcome


def framed(data: bytes) -> bytes:
    """Return a record in the form of the log."""
    return RECORD.pack(len(data), zlib.crc32(data)) + data


def named(name: CallName) -> bytes:
    """Return a name in the form of the file; empty if it is too long for that."""
    data = encode(name)
    return _NAME.pack(len(data)) + data if len(data) <= 0xFFFF else b""


def read_head(data: Buffer) -> tuple[FlightHead, float]:
    """Return head and Unix time of the orderly end, 0.0 without one, of the record whose first page is `data`.

    Raises:
        ProtocolError: It is not a flight record.
    """
    fixed, head = _checked(memoryview(data))
    return head, fixed[3]


def read_flight(data: Buffer) -> Flight:
    """Parse the contents of a flight record file.

    Raises:
        ProtocolError: It is not a flight record.
    """
    view = memoryview(data)
    (rows, names, half, ended_at, used), head = _checked(view)
    if len(view) < file_bytes(rows, names, half):
        raise ProtocolError(f"a flight record of {file_bytes(rows, names, half)} bytes is cut off at {len(view)}")
    known = list(_names(view[PAGE_BYTES : PAGE_BYTES + min(used, names)]))
    at = PAGE_BYTES + names
    found = list(_calls(view[at : at + rows * ROW_BYTES], known, head))
    at += rows * ROW_BYTES
    halves = [view[at : at + half], view[at + half : at + 2 * half]]
    records = [one for part in sorted(halves, key=_generation) if _generation(part) for one in _records(part)]
    calls = tuple(sorted(found, key=lambda call: call.number))
    return Flight(head, ended_at, calls, tuple(records))


def _checked(view: memoryview) -> tuple[tuple[int, int, int, float, int], FlightHead]:
    if len(view) < PAGE_BYTES:
        raise ProtocolError(f"a flight record has at least {PAGE_BYTES} bytes, got {len(view)}")
    magic, version, rows, names, half, size, ended_at, used = FIXED.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"a flight record must be of version {VERSION}, got {bytes(magic)!r} and {version}")
    if size > PAGE_BYTES - FIXED.size or file_bytes(rows, names, half) > limits.RECORD_FILE_BYTES_MAX:
        raise ProtocolError(f"a flight record has at most {limits.RECORD_FILE_BYTES_MAX} bytes")
    head = _decoded(view[FIXED.size : FIXED.size + size], FlightHead)
    if not all(abs(one) < _TIME_MAX for one in (head.started_at, head.trio_at, head.clock_at)):
        raise ProtocolError(f"the clocks of a flight record must be below {_TIME_MAX:g} s, got {head.started_at}")
    return (rows, names, half, ended_at if 0 < ended_at < _TIME_MAX else 0.0, used), head


_TIME_MAX: Final = 1e15
"""Beyond any clock, in seconds; NaN is not below it, either."""


def _decoded(data: Buffer, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a flight record must consist of valid tables: {error}") from error


def _names(area: memoryview) -> Iterator[CallName]:
    at = 0
    while at + _NAME.size <= len(area):
        [size] = _NAME.unpack_from(area, at)
        at += _NAME.size
        if not size or at + size > len(area):
            return
        try:
            yield _decoded(area[at : at + size], CallName)
        except ProtocolError:
            return
        at += size


def _calls(area: memoryview, names: list[CallName], head: FlightHead) -> Iterator[FlightCall]:
    rows = len(area) // ROW_BYTES
    found: list[tuple[float, float, int, int, int, int, float, int]] = list(_WHOLE_ROW.iter_unpack(area))
    newest = max((row[5] for at, row in enumerate(found) if row[5] % rows == at), default=0)
    unix_offset, trio_offset = head.started_at - head.trio_at, head.trio_at - head.clock_at
    for place, (came_at, began_at, caller, call, name, number, ended_at, end) in enumerate(found):
        if not number or number % rows != place or number <= newest - rows + 1:
            continue
        if not abs(came_at) < _TIME_MAX or not abs(began_at) < _TIME_MAX:
            continue
        outcome, waited, lasted = RUNNING, max(0.0, began_at + trio_offset - came_at), 0.0
        if began_at <= ended_at < _TIME_MAX:
            outcome = end & 3 if end >> 2 == number else RETURNED
            lasted = waited + ended_at - began_at if outcome else 0.0
        known = names[name] if name < len(names) else None
        yield FlightCall(number, came_at + unix_offset, caller, call, known, outcome, waited, lasted)


def _generation(half: memoryview) -> int:
    return int(HALF.unpack_from(half)[0]) if len(half) >= HALF.size else 0


def _records(half: memoryview) -> Iterator[Record]:
    at = HALF.size
    while at + RECORD.size <= len(half):
        size, checksum = RECORD.unpack_from(half, at)
        at += RECORD.size
        if not size or at + size > len(half) or zlib.crc32(half[at : at + size]) != checksum:
            return
        try:
            yield _decoded(half[at : at + size], _RECORD)
        except ProtocolError:
            return
        at += size
