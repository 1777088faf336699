"""Output of workers (rule O7): cut into lines, bounded, and shown by the controller with coordinates.

    worker --pipe--> LineCutter --> OutputQueue --records--> OutputPrinter --> sys.stdout, sys.stderr
                     (one a stream)  (one a spawner)          (the controller)

The worker never waits: the spawner always reads, and drops lines, counting them, when the controller is slow.

Identical lines of many processes on other hosts are shown as one (rule H12).

    of the first `limits.OUTPUT_SAME_SHOWN` processes: shown at once; of more: counted --> "(x120 more) text"

SM-1 A line counts as the same within `limits.OUTPUT_SAME_SECONDS` of the first one like it, in one mesh and stream.
SM-2 Lines that one process repeats are shown each time, unless many processes write them.
SM-3 No line waits for a count: different lines are shown at once, before the counts of earlier lines.
"""

from __future__ import annotations

import contextvars
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

from trimesh import limits
from trimesh._runtime.system.records import OutputChunk

if TYPE_CHECKING:
    from trimesh._wire.observed import OutputRow


STDOUT: Final = 1
STDERR: Final = 2

_OF_FAULTS: Final = (b'  File "', b"Extension modules: ")
"""Beginnings of lines of `faulthandler`, of which those with frames of the runtime are hidden."""

MODES: Final = ("forward", "inherit", "discard")
"""Values of `output`, besides a path."""


class LineCutter:
    """Cuts a stream of bytes into lines of at most `limits.OUTPUT_LINE_BYTES_MAX` bytes.

    A progress bar is one line that is overwritten after carriage returns until its newline arrives. Its present state
    counts as a line, too: when it first appears, and then every `limits.OUTPUT_PROGRESS_SECONDS`.
    """

    def __init__(self, line_bytes_max: int = limits.OUTPUT_LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._rest = b""
        self._progress_at = -math.inf

    def feed(self, data: bytes, now: float | None = None) -> list[bytes]:
        """Return the lines that `data` completes, without their newlines.

        Args:
            now: Time in seconds; without it no progress is returned.
        """
        *complete, rest = (self._rest + data).split(b"\n")
        lines = list[bytes]()
        for line in complete:
            lines += self._cut(line)
        if b"\r" in rest[:-1] and rest.strip(b"\r"):  # one at the end may belong to a newline that has not arrived
            rest = _visible(rest)
            if now is not None and now >= self._progress_at + limits.OUTPUT_PROGRESS_SECONDS:
                self._progress_at = now
                lines.append(rest)
        if len(rest) > self._line_bytes_max:
            *pieces, rest = self._cut(rest)
            lines += pieces
        self._rest = rest
        return lines

    def close(self) -> list[bytes]:
        """Return the text after the last newline, if any."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def _cut(self, line: bytes) -> list[bytes]:
        size = self._line_bytes_max
        return [line[start : start + size] for start in range(0, max(len(line), 1), size)]


def _visible(line: bytes) -> bytes:
    """Return the visible part of a line with carriage returns: the text after the last one that text follows."""
    text = line.rstrip(b"\r")
    return line[text.rfind(b"\r") :] if b"\r" in text else line


class Tail:
    """The last bytes of a stream."""

    def __init__(self, size: int = limits.STDERR_TAIL_BYTES) -> None:
        self._size = size
        self._data = b""

    def feed(self, data: bytes | bytearray) -> None:
        """Append `data`, drop the oldest bytes."""
        self._data = (self._data + data)[-self._size :]

    def read(self) -> bytes:
        return self._data


class OutputQueue:
    """Lines on their way to the controller: first in, first out, bounded by bytes.

    It queues markers, too; they come out in order, between batches, and are never dropped.

    Args:
        bytes_max: Size in bytes beyond which lines are dropped and counted.
    """

    def __init__(self, bytes_max: int = limits.OUTPUT_QUEUE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._items: deque[OutputChunk | int] = deque()
        self._bytes = 0
        self._dropped: dict[tuple[str, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, member: str, stream: int, lines: list[bytes]) -> None:
        """Append lines of one stream; lines without room are dropped and counted."""
        kept = list[bytes]()
        for line in lines:
            cost = len(line) + 1
            if self._bytes + cost > self._bytes_max:
                break
            self._bytes += cost
            kept.append(line)
        if kept:
            dropped = self._dropped.pop((member, stream), 0)
            self._append(OutputChunk(member, stream, dropped, tuple(kept)))
        if len(kept) < len(lines):
            lost = self._dropped.get((member, stream), 0) + len(lines) - len(kept)
            self._dropped[(member, stream)] = lost

    def close(self, member: str, stream: int) -> None:
        """Note the end of a stream: a count of dropped lines that no line follows is queued by itself."""
        dropped = self._dropped.pop((member, stream), 0)
        if dropped:
            self._append(OutputChunk(member, stream, dropped, ()))

    def mark(self, number: int) -> None:
        """Append a marker, after the counts of lines dropped so far."""
        for member, stream in list(self._dropped):
            self.close(member, stream)
        self._items.append(number)

    def take(self, bytes_max: int = limits.OUTPUT_BATCH_BYTES_MAX) -> tuple[OutputChunk, ...] | int | None:
        """Remove and return the next batch of about `bytes_max` bytes, or the next marker, or None."""
        batch, size = list[OutputChunk](), 0
        while self._items and size < bytes_max:
            item = self._items[0]
            if isinstance(item, int):
                if batch:
                    break
                return int(self._items.popleft())  # type: ignore[arg-type]
            chunk, rest = _split(item, bytes_max - size)
            if rest is None:
                self._items.popleft()
            else:
                self._items[0] = rest
            batch.append(chunk)
            taken = _cost(chunk)
            size += max(taken, 1)
            self._bytes -= taken
        return tuple(batch) or None

    def _append(self, chunk: OutputChunk) -> None:
        self._items.append(chunk)


def _cost(chunk: OutputChunk) -> int:
    return sum(map(len, chunk.lines)) + len(chunk.lines)


def _split(chunk: OutputChunk, bytes_max: int) -> tuple[OutputChunk, OutputChunk | None]:
    """Cut `chunk` after the line that reaches `bytes_max`."""
    size = 0
    for count, line in enumerate(chunk.lines, 1):
        size += len(line) + 1
        if size >= bytes_max and count < len(chunk.lines):
            first = OutputChunk(chunk.member, chunk.stream, chunk.dropped, chunk.lines[:count])
            return first, OutputChunk(chunk.member, chunk.stream, 0, chunk.lines[count:])
    return chunk, None


class OutputLog:
    """Keeps received chunks of lines, at most `limits.OBSERVED_OUTPUT_BYTES` of them.

    The cost is that of a chunk, not of its lines: rows are made on request. Another thread may request rows meanwhile.
    """

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, float, OutputChunk]] = deque()
        self._bytes = 0
        self._count = 0

    def keep(self, chunks: Iterable[OutputChunk]) -> None:
        """Append shown chunks; drop the oldest ones."""
        now = time.time()
        for chunk in chunks:
            self._chunks.append((self._count, now, chunk))
            self._count += len(chunk.lines) + bool(chunk.dropped)
            self._bytes += _kept_bytes(chunk)
        while self._bytes > limits.OBSERVED_OUTPUT_BYTES and len(self._chunks) > 1:
            self._bytes -= _kept_bytes(self._chunks.popleft()[2])

    def after(self, number: int) -> list[OutputRow]:
        """Return the kept lines with a greater number, oldest first; if one answer cannot hold them, the newest."""
        rows = (row for first, at, chunk in list(self._chunks) for row in _rows(first, at, chunk))
        return [row for row in rows if row.number > number][-limits.OBSERVED_OUTPUT_LINES :]


def _kept_bytes(chunk: OutputChunk) -> int:
    return sum(map(len, chunk.lines)) + 64 * (len(chunk.lines) + 1)  # 64: Python's overhead


def _rows(first: int, at: float, chunk: OutputChunk) -> Iterator[OutputRow]:
    from trimesh._wire.observed import OutputRow  # noqa: PLC0415 - loaded with the first block

    number = first
    if chunk.dropped:
        number += 1
        yield OutputRow(number=number, at=at, name=chunk.member, stream=chunk.stream, dropped=chunk.dropped)
    for line in chunk.lines:
        number += 1
        text = _text_of(line)
        yield OutputRow(number=number, at=at, name=chunk.member, stream=chunk.stream, text=text)


class OutputPrinter:
    """Writes worker output to `sys.stdout` and `sys.stderr` as they are at that moment, so that capture works.

    It writes with no context variable set. A notebook shows text under the cell that a context variable names, here the
    one in which the mesh was opened; without the variable, under the running cell.

    Attributes:
        log: The newest output, for observers.
    """

    def __init__(self) -> None:
        self.log = OutputLog()
        self._same: SameLines | None = None

    def write(self, chunks: Sequence[OutputChunk], *, is_far: bool = False) -> bool:
        """Write chunks in order, one call for each run of one stream; a broken stream loses them silently.

        Args:
            is_far: Whether they are of other hosts: lines repeated by many processes are then counted.

        Returns:
            Whether `write_counts` is to be called, `limits.OUTPUT_SAME_SECONDS` from now.
        """
        self.log.keep(chunks)
        if not is_far:
            contextvars.Context().run(self._write, chunks)
            return False
        if self._same is None:
            self._same = SameLines()
        was_told = bool(self._same)
        contextvars.Context().run(self._write, self._same.take(chunks, time.monotonic()))
        return not was_told and bool(self._same)

    def write_counts(self, *, at_once: bool = False) -> bool:
        """Write the counts of lines that equal shown ones.

        Args:
            at_once: Whether to include counts whose second is not over.

        Returns:
            See `write`.
        """
        if self._same is None:
            return False
        due = self._same.due(math.inf if at_once else time.monotonic())
        if due:
            contextvars.Context().run(self._write, due)
        return bool(self._same)

    def _write(self, chunks: Iterable[OutputChunk]) -> None:
        texts, stream = list[str](), STDOUT
        for chunk in chunks:
            if chunk.stream != stream and texts:
                _write(stream, "".join(texts))
                texts = []
            stream = chunk.stream
            texts += _shown(chunk)
        if texts:
            _write(stream, "".join(texts))


def _shown(chunk: OutputChunk) -> list[str]:
    prefix = f"{chunk.member} | "
    shown = list[str]()
    if chunk.dropped:
        shown.append(f"{prefix}({chunk.dropped} lines lost: they came faster than they could be shown)\n")
    for line in chunk.lines:
        text = _text_of(line)
        if not (line.startswith(_OF_FAULTS) and _is_hidden(text)):
            shown.append(f"{prefix}{text}\n")
    return shown


def _is_hidden(line: str) -> bool:
    from trimesh._wire.exceptions.tracebacks import is_hidden  # noqa: PLC0415 - only crashes need it

    return is_hidden(line)


def _text_of(line: bytes) -> str:
    """Return the text after the last carriage return, which a terminal would show of a progress bar."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _write(stream: int, text: str) -> None:
    target: TextIO | None = sys.stdout if stream == STDOUT else sys.stderr
    if target is None:  # pyright: ignore[reportUnnecessaryComparison] - a program without a console
        return
    try:
        try:
            target.write(text)
        except UnicodeEncodeError:
            encoding = target.encoding
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        target.flush()
    except Exception:  # noqa: BLE001 - gone, closed, or a notebook's between two cells: nowhere to report to
        return


# ---- identical lines of many processes on other hosts, shown as one (rule H12) ---------------------------------------

_Key = tuple[str, int, bytes]


class _Same:
    """A group of equal lines."""

    __slots__ = ("members", "more", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.members = set[str]()
        self.more = 0


class SameLines:
    """Lines shown in the last `limits.OUTPUT_SAME_SECONDS`, with counts of equal ones. Callers pass the time."""

    def __init__(self) -> None:
        self._found: dict[_Key, _Same] = {}

    def __bool__(self) -> bool:
        """True if there is a count to report."""
        return any(same.more for same in self._found.values())

    def take(self, chunks: Iterable[OutputChunk], now: float) -> list[OutputChunk]:
        """Return the chunks to show now: lines that do not equal many others, and counts that are due."""
        shown = self.due(now)
        for chunk in chunks:
            lines = tuple(line for line in chunk.lines if self._is_shown(chunk, line, now))
            if lines or chunk.dropped:
                shown.append(chunk if len(lines) == len(chunk.lines) else msgspec.structs.replace(chunk, lines=lines))
        return shown

    def _is_shown(self, chunk: OutputChunk, line: bytes, now: float) -> bool:
        key = (_mesh_of(chunk.member), chunk.stream, line)
        same = self._found.get(key)
        if same is None:
            if len(self._found) < limits.OUTPUT_SAME_KEPT:
                same = self._found[key] = _Same(now + limits.OUTPUT_SAME_SECONDS)
                same.members.add(chunk.member)
            return True
        if len(same.members) >= limits.OUTPUT_SAME_SHOWN:
            same.more += 1
            return False
        same.members.add(chunk.member)
        return True

    def due(self, now: float) -> list[OutputChunk]:
        """Return the counts whose time is over, oldest first, and forget them."""
        told = list[OutputChunk]()
        for key, same in list(self._found.items()):
            if now < same.until:
                break  # they are ordered by their ends
            del self._found[key]
            if same.more:
                mesh, stream, line = key
                told.append(OutputChunk(mesh, stream, 0, (b"(x%d more) %b" % (same.more, line),)))
        return told


def _mesh_of(member: str) -> str:
    return member.partition("[")[0]
