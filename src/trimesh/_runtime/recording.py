"""Flight records: folders (`.records/MILLISECONDS-PID-ID/PROC` in this user's private folder) and writing.

A run's controller creates its folder and removes it when the outermost block is left without an error. Folders of
other, ended runs are removed, oldest first, when there are many or they are old.

RF-1 Only folders of this user, with names of that form, are entered or removed, and links are never followed.

A flight record is a mapped file, which the kernel keeps however the process ends.

    a slot takes a call --> its row (`CallRecorder.began`) --> the time of its end (`CallRecorder.ended`)
    events, snapshots, errors --> the log (`FlightRecorder.note`)

RW-1 Nothing here waits, makes a system call, or raises, once the file is open: its pages were reserved.
RW-2 One thread writes: that of the Trio loop.
RW-3 A forked child writes into memory of its own.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trimesh import limits
from trimesh._runtime.system.exits import start_of
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.user_files import entered, user_folder
from trimesh._transport.native.carriers import boot_id
from trimesh._wire import flight
from trimesh._wire.flight import CANCELLED, RAISED
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._wire.observed import ActorRow


_RUN: Final = re.compile(r"([0-9]{13})-([0-9]{1,9})-([0-9a-f]{1,16})")
_FILE: Final = re.compile(r"[0-9a-f]{1,16}")
HISTORY_FILE: Final = "history.sqlite"
"""Name of the history of a run in its folder; SQLite keeps two files more beside it."""


class RunFolder(msgspec.Struct, frozen=True):
    """The folder of the flight records of one run.

    Attributes:
        begun_at: Unix time.
        pid: Pid of the controller.
        root: Id of the controller in rows.
    """

    path: Path
    begun_at: float
    pid: int
    root: str


def records_folder() -> Path:
    """Return where the folders of runs are."""
    return user_folder() / ".records"


def make_run_folder(pid: int, root: str) -> Path:
    """Make the folder of a run, and remove folders of ended runs that are too many or too old.

    Raises:
        OSError: The folder cannot be trusted or made.
    """
    clean_up(limits.RECORD_RUNS_MAX - 1)
    path = records_folder() / f"{round(time.time() * 1000):013d}-{pid}-{root}"
    path.mkdir(mode=0o700)
    return path


def folder_here(path: Path) -> Path:
    """Return the folder of a run on another host than its controller's; make it if it is missing.

    Args:
        path: The folder on the controller's host, of which only the name is used.

    Raises:
        OSError: The folder cannot be trusted or made, or `path` is not named as the folder of a run.
    """
    if not _RUN.fullmatch(path.name):
        raise OSError(f"the record folder of a run must be named MILLISECONDS-PID-ID, got {path.name!r}")
    with entered(user_folder()), entered(records_folder()), entered(records_folder() / path.name):
        return records_folder() / path.name


def run_folders() -> list[RunFolder]:
    """Return the folders of this user's runs, the newest first.

    Raises:
        OSError: The folder above them cannot be trusted.
    """
    with entered(user_folder()), entered(records_folder()) as fd:
        names = os.listdir(fd)
    found = [match for name in names if (match := _RUN.fullmatch(name))]
    found.sort(key=lambda match: match[0], reverse=True)
    return [RunFolder(records_folder() / match[0], int(match[1]) / 1000, int(match[2]), match[3]) for match in found]


def files_of(folder: Path) -> list[Path]:
    """Return the flight records in the folder of a run.

    Raises:
        OSError: It cannot be read.
    """
    return sorted(folder / name for name in os.listdir(folder) if _FILE.fullmatch(name))


def read_file(path: Path, nbytes: int = limits.RECORD_FILE_BYTES_MAX + 1) -> bytes:
    """Return the first bytes of a flight record.

    Raises:
        OSError: It cannot be read, or is a link.
    """
    with open(path, "rb", opener=_open_itself) as file:
        return file.read(nbytes) or b""


def read_actors(record: str) -> tuple[ActorRow, ...]:
    """Return the actors in a flight record of this host; none if it cannot be read.

    Args:
        record: Its path on the controller's host, of which only the names are used.
    """
    name = Path(record)
    if not _RUN.fullmatch(name.parent.name) or not _FILE.fullmatch(name.name):
        return ()
    try:
        return flight.read_flight(read_file(records_folder() / name.parent.name / name.name)).actors()
    except (OSError, ProtocolError):
        return ()


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def is_open(path: Path) -> bool:
    """Return whether `path` is a flight record that its process, which lives, has not ended."""
    try:
        head, ended_at = flight.read_head(read_file(path, flight.PAGE_BYTES))
    except (OSError, ProtocolError):
        return False
    return not ended_at and is_running(head)


def is_running(head: flight.FlightHead) -> bool:
    """Return whether the process of a record lives."""
    return head.boot == boot_id() and head.ticks == start_of(head.proc.pid)


def is_alive(folder: RunFolder) -> bool:
    """Return whether a run goes on: the record of its controller is open, or, where there is none, any other record.

    Raises:
        OSError: The folder cannot be read.
    """
    root = folder.path / folder.root
    return is_open(root) if root.exists() else any(is_open(path) for path in files_of(folder.path))


def clean_up(keep: int) -> None:
    """Remove folders of ended runs that are older than `limits.RECORD_AGE_SECONDS`, or not among the newest `keep`.

    Raises:
        OSError: The folder above them cannot be trusted.
    """
    oldest = time.time() - limits.RECORD_AGE_SECONDS
    for place, folder in enumerate(run_folders()):
        if place >= keep or folder.begun_at < oldest:
            with suppress(OSError):
                if not is_alive(folder):
                    remove(folder.path)


def remove(folder: Path) -> None:
    """Remove the folder of a run, with its records. What cannot be removed stays."""
    with suppress(OSError):
        for path in [*files_of(folder), *(folder / f"{HISTORY_FILE}{end}" for end in ("", "-wal", "-shm"))]:
            with suppress(FileNotFoundError):
                path.unlink()
        folder.rmdir()


def thin_out(folder: Path) -> None:
    """Remove records of processes that have ended from the folder of a running run, when there are many."""
    with suppress(OSError):
        files = files_of(folder)
        if len(files) <= limits.RECORD_ENDED_MAX:
            return
        ended = [(path.stat().st_mtime, path) for path in files if not is_open(path)]
        for _, path in sorted(ended)[: max(0, len(ended) - limits.RECORD_ENDED_MAX)]:
            with suppress(FileNotFoundError):
                path.unlink()


# ---- the flight record of this process: a mapped file, which the kernel keeps however the process ends ---------------

assert (flight.ROW_BYTES, flight.ROW.size) == (1 << 6, 6 << 3), "literals in _Rows"
_GENERATION: Final = flight.HALF
_CLOSING: Final = struct.Struct("<d")
_USED: Final = struct.Struct("<Q")


class FlightRecorder:
    """The record of this process.

    Args:
        path: Path of the file, which must not exist.
        now: Returns the time by the clock of `head.clock_at`; called twice for each recorded call.

    Raises:
        OSError: The file cannot be made, or the disk is full.
        ValueError: The head is too large.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_defined",
        "_errors",
        "_errors_since",
        "_generation",
        "_half",
        "_halves",
        "_lasted",
        "_map",
        "_names",
        "_rows",
        "_used",
        "_view",
        "path",
    )

    def __init__(self, path: Path, head: flight.FlightHead, now: Callable[[], float]) -> None:
        self.path = path
        rows = limits.RECORD_ROWS
        self._half: Final = limits.RECORD_HALF_BYTES
        names = limits.RECORD_NAMES_BYTES
        page = flight.first_page(head, rows, names, self._half)
        size = flight.file_bytes(rows, names, self._half)
        self._map = _map_new(path, size)
        self._view = memoryview(self._map)
        self._view[: len(page)] = page
        at = flight.PAGE_BYTES + names
        self._rows = _Rows(self._view[at : at + rows * flight.ROW_BYTES], now, self.raised)
        at += rows * flight.ROW_BYTES
        self._halves = [self._view[at : at + self._half], self._view[at + self._half : at + 2 * self._half]]
        self._used = 0
        self._names = 0
        self._defined: dict[int, flight.CallName] = {}
        self._lasted: dict[int, list[int]] = {}
        self._generation = 0
        self._at = 0
        self._errors = 0
        self._errors_since = 0.0
        self._turn()
        _open.add(self)

    def of_actor(self, mesh: str, point: dict[str, int]) -> CallRecorder:
        return self._rows.recorder(lambda endpoint: self.define(flight.CallName(mesh, point, endpoint)))

    def fold(self) -> None:
        """Add the calls that have ended since the last time to the histograms of their endpoints."""
        lasted, bounds = self._lasted, limits.LATENCY_BOUNDS
        for name, seconds in self._rows.lasted():
            counts = lasted.get(name)
            if counts is None:
                counts = lasted[name] = [0] * (len(bounds) + 1)
            counts[bisect_left(bounds, seconds)] += 1

    def endpoints(self) -> Iterator[tuple[flight.CallName, list[int], list[int]]]:
        """Yield each called endpoint: its name; its number, calls, bytes, errors and cancelled calls; its latencies."""
        for name, tally in list(self._rows.counted.items()):
            known = self._defined.get(name)
            if known is not None and known.mesh:
                yield known, tally, self._lasted.get(name, [])

    def define(self, name: flight.CallName) -> int:
        """Add a name; return its number, or `flight.NO_NAME` if there is no room."""
        data = flight.named(name)
        if not data or self._used + len(data) > limits.RECORD_NAMES_BYTES:
            return flight.NO_NAME
        at = flight.PAGE_BYTES + self._used
        self._view[at : at + len(data)] = data
        self._used += len(data)
        _USED.pack_into(self._view, flight.NAMES_USED, self._used)
        self._defined[self._names] = name
        self._names += 1
        return self._names - 1

    def note(self, record: flight.Record) -> None:
        """Append a record to the log; drop it if it is larger than half of the log."""
        data = flight.framed(flight.encode(record))
        room = self._half - flight.RECORD.size
        if flight.HALF.size + len(data) > room:
            return
        if self._at + len(data) > room:
            self._turn()
        half, at = self._halves[self._generation % 2], self._at
        end = at + len(data)
        half[end : end + flight.RECORD.size] = b"\0" * flight.RECORD.size
        # Its bytes before its size: until the size is written, a reader sees the end of the half here.
        half[at + flight.RECORD.size : end] = data[flight.RECORD.size :]
        half[at : at + flight.RECORD.size] = data[: flight.RECORD.size]
        self._at = end

    def _turn(self) -> None:
        """Continue in the other half, over the older records."""
        self._generation += 1
        half = self._halves[self._generation % 2]
        self._at = flight.HALF.size
        half[: self._at] = b"\0" * self._at
        half[self._at : self._at + flight.RECORD.size] = b"\0" * flight.RECORD.size
        _GENERATION.pack_into(half, 0, self._generation)

    def raised(self, number: int, text: str, line: str) -> None:
        """Note the error of a call, unless there were `limits.RECORD_ERRORS_PER_SECOND` in this second."""
        now = time.time()
        if abs(now - self._errors_since) > 1:
            self._errors, self._errors_since = 0, now
        self._errors += 1
        if self._errors <= limits.RECORD_ERRORS_PER_SECOND:
            shown, line = text[: limits.OBSERVED_TEXT_CHARS], line[: limits.OBSERVED_TEXT_CHARS]
            self.note(flight.RaisedError(at=now, number=number, text=shown, line=line))

    def end(self) -> None:
        """Mark an orderly end of the process, and write into the file no more. Idempotent."""
        if self in _open:
            _CLOSING.pack_into(self._view, flight.ENDED_AT, time.time())
            self.forget()

    def forget(self) -> None:
        """Unmap the file; write into private memory from now on."""
        _open.discard(self)
        views = [*self._rows.forget(), *self._halves, self._view]
        self._view = memoryview(bytearray(flight.PAGE_BYTES + limits.RECORD_NAMES_BYTES))
        self._halves = [memoryview(bytearray(self._half)) for _ in range(2)]
        for view in views:
            view.release()
        with suppress(BufferError):
            self._map.close()


class CallRecorder:
    """Records the calls of one actor.

    Attributes:
        began: Record that a slot has taken a call; return the number of its row.
        ended: Record the end of the call with that number, whatever its outcome.
    """

    __slots__ = ("began", "ended")

    def __init__(self, began: Callable[[IncomingCall], int], ended: Callable[[int, IncomingCall], None]) -> None:
        self.began = began
        self.ended = ended


class _Rows:
    """Rows of the newest calls of this process, a ring.

    Args:
        now: Returns the time of the record's clock.
        raised: Called with the number of a failed call, and the text and line of its error.

    Attributes:
        recorder: Returns the `CallRecorder` of one actor; takes a function from an endpoint to its name's number.
        forget: Continue in private memory; return the views of the previous memory, for release.
        counted: Name, calls, bytes, errors and cancelled calls of each name.
    """

    __slots__ = ("_running", "_seen", "_state", "counted", "forget", "recorder")

    def __init__(self, rows: memoryview, now: Callable[[], float], raised: Callable[[int, str, str], None]) -> None:
        # In the path of every call: closures that share variables take a third of the time of methods.
        pack, mask, count = flight.ROW.pack_into, rows.nbytes // flight.ROW_BYTES - 1, 0
        counted = dict[int, list[int]]()
        times, words = rows.cast("d"), rows.cast("Q")

        def recorder(name_of: Callable[[str], int]) -> CallRecorder:
            tallies = dict[str, list[int]]()  # name, calls, bytes, errors, cancelled calls

            def began(call: IncomingCall) -> int:
                nonlocal count
                count = number = count + 1
                endpoint = call.spec.name
                try:
                    tally = tallies[endpoint]
                except KeyError:
                    name = name_of(endpoint)
                    tally = tallies[endpoint] = counted[name] = [name, 0, 0, 0, 0]
                tally[1] += 1
                tally[2] += call.nbytes
                at = (number & mask) << 6  # ROW_BYTES
                pack(rows, at, call.received_at, now(), call.peer.proc_id, call.call_id, tally[0], number)
                return number

            def ended(number: int, call: IncomingCall) -> None:
                if call.cancelled_by is not None or call.error_text:
                    tallies[call.spec.name][3 if call.error_text else 4] += 1
                    failed(number, call)
                if count - number <= mask:  # else a newer call has the row
                    times[((number & mask) << 3) + 6] = now()  # after the words of ROW

            return CallRecorder(began, ended)

        def failed(number: int, call: IncomingCall) -> None:
            if count - number > mask:
                return
            if call.error_text:
                raised(number, call.error_text, call.error_line)
            outcome = RAISED if call.error_text else CANCELLED
            words[((number & mask) << 3) + 7] = flight.not_returned(number, outcome)

        def forget() -> list[memoryview[Any]]:
            nonlocal rows, times, words
            views: list[memoryview[Any]] = [times, words, rows]
            rows = memoryview(bytearray(rows.nbytes))
            times, words = rows.cast("d"), rows.cast("Q")
            return views

        self.recorder: Final = recorder
        self.forget: Final = forget
        self.counted: Final = counted

        def state() -> tuple[int, int, memoryview[Any], memoryview[Any]]:
            return count, mask, times, words

        self._state: Final = state
        self._seen = 0
        self._running = list[int]()

    def lasted(self) -> Iterator[tuple[int, float]]:
        """Yield name and duration of each call that has ended since the last time, as far as its row is there."""
        count, mask, times, words = self._state()
        running, oldest = list[int](), count - mask
        for number in (*self._running, *range(self._seen + 1, count + 1)):
            if number < oldest:
                continue
            at = (number & mask) << 3
            seconds = times[at + 6] - times[at + 1]  # of END and ROW
            if seconds >= 0:
                yield words[at + 4], seconds
            else:
                running.append(number)
        self._seen, self._running = count, running


def _map_new(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Reserved, not merely long: a write to a page that the disk has no room for would kill the process (SIGBUS).
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


_open: ForgottenInChildren[FlightRecorder] = ForgottenInChildren()
