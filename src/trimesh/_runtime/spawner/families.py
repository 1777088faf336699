"""Workers as the spawner sees them: their descriptors, their output, how they have ended."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.boot import WorkerStart
from trimesh._runtime.spawner.socket import BrokerSocket, broker_pair
from trimesh._runtime.system import records
from trimesh._runtime.system.exits import decode_tail
from trimesh._runtime.system.output import STDERR, STDOUT, LineCutter, OutputQueue, Tail

_READ_BYTES: Final = 65_536
_DRAIN_READS_MAX: Final = 64
"""Reads of one pipe in a row: 4 MiB, more than the largest pipe, so a writer that goes on cannot hold the spawner."""


class OutputPipe:
    """One stream of one worker: read by the spawner, so that the worker never waits.

    Args:
        fd: Read end; owned.
        member: Name and coordinates of the worker.
        stream: 1 or 2.
        queue: Where whole lines go; None keeps the tail only.
    """

    def __init__(self, fd: int, member: str, stream: int, queue: OutputQueue | None) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.tail = Tail() if stream == STDERR else None
        self.is_ended = False
        self._member = member
        self._stream = stream
        self._queue = queue
        self._cutter = LineCutter()

    def read(self) -> bool:
        """Read once.

        Returns:
            False when there is nothing more to read now; `is_ended` tells whether anything may come.
        """
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self.is_ended = not data
        if self.tail is not None:
            self.tail.feed(data)
        if self._queue is not None and data:
            self._queue.put(self._member, self._stream, self._cutter.feed(data, time.monotonic()))
        return bool(data)

    def drain(self) -> None:
        """Read what is there."""
        for _ in range(_DRAIN_READS_MAX):
            if not self.read():
                return

    def close(self) -> None:
        """Read what is there, hand on the last, unfinished line, close."""
        if self.fd < 0:
            return
        self.drain()
        if self._queue is not None:
            self._queue.put(self._member, self._stream, self._cutter.close())
            self._queue.close(self._member, self._stream)
        os.close(self.fd)
        self.fd = -1


class Connection:
    """A broker socket under the poll loop.

    Attributes:
        proc_id: The process at its other end.
        is_open: It is still served.
        awaits_room: The poll loop waits for room in it.
    """

    def __init__(self, broker: BrokerSocket, proc_id: int) -> None:
        self.broker = broker
        self.proc_id = proc_id
        self.is_open = True
        self.awaits_room = False


class SpawnedWorker:
    """A worker that is being started or runs.

    Attributes:
        launch: The request that asked for it.
        owner: Connection of the process that asked.
        pid, pidfd: Of the worker; -1 before the fork.
        broker: Our end of its broker socket.
        link: The owner's end of its link, until it is handed over; then -1.
        has_entered: It runs its entry.
        refusal: Why its set-up failed.
        has_hung_up: It has closed its broker socket, or broke the protocol, before it entered.
        file_offset: Size that the output file had before it.
        user: Whom the process acts for that asked for it.
    """

    def __init__(
        self,
        launch: wire.Launch,
        owner: Connection,
        broker: BrokerSocket,
        link: int,
        pipes: list[OutputPipe],
        pid: int = -1,
    ) -> None:
        self.launch = launch
        self.owner = owner
        self.broker = broker
        self.link = link
        self.pipes = pipes
        self.pid = pid
        self.pidfd: int = -1
        self.has_entered = False
        self.refusal: str | None = None
        self.has_hung_up = False
        self.file_offset = 0
        self.user = os.geteuid()

    @property
    def proc_id(self) -> int:
        return self.launch.config.proc_id

    @property
    def name(self) -> str:
        """Mesh and coordinates."""
        return records.member_name(self.launch.config)

    def take_link(self) -> int:
        """Return the owner's end of the link, which is the caller's from now on."""
        fd, self.link = self.link, -1
        return fd

    def stderr_tail(self) -> str:
        """Return its last words."""
        if self.launch.output == "file":
            return decode_tail(_file_tail(self.launch.output_path, self.file_offset, self.user))
        return decode_tail(b"".join(pipe.tail.read() for pipe in self.pipes if pipe.tail is not None))

    def close(self) -> None:
        """Give back every descriptor."""
        for pipe in self.pipes:
            pipe.close()
        self.broker.close()
        for fd in (self.link, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.link = self.pidfd = -1

    def signal_group(self, signum: int) -> None:
        """Signal the worker and its group. It is not reaped yet, so its number cannot belong to another process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # of another user: it ends by its lifelines
            try:
                os.killpg(self.pid, signum)
            except ProcessLookupError:  # forked a moment ago and not yet leader of its group
                os.kill(self.pid, signum)


def _file_tail(path: bytes, offset: int, user: int) -> bytes:
    """Return the end of a file; nothing of one that is not `user`'s, for whom the spawner must read no other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return b""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or user not in (os.geteuid(), found.st_uid):
            return b""
        start = max(offset, found.st_size - limits.STDERR_TAIL_BYTES)
        return os.pread(fd, limits.STDERR_TAIL_BYTES, start)
    except OSError:
        return b""
    finally:
        os.close(fd)


class Prepared(msgspec.Struct, frozen=True):
    """A worker before its fork: the parent's half and the child's half."""

    member: SpawnedWorker
    start: WorkerStart

    def close_child_half(self) -> None:
        """In the parent, after the fork."""
        start = self.start
        for fd in (start.link, start.broker, start.stdout, start.stderr):
            if fd is not None:
                os.close(fd)


def prepare(blank: WorkerStart, owner: Connection, output: OutputQueue) -> Prepared:
    """Open every descriptor that a worker needs.

    Args:
        blank: The child's half without link, broker and streams.
        owner: Connection of the process that asks.
        output: Where its lines go.

    Raises:
        OSError: There are not enough descriptors; nothing stays open.
    """
    launch = blank.launch
    name = records.member_name(launch.config)
    queue = output if launch.output == "forward" else None
    with ExitStack() as undo:
        link, child_link = (undo.enter_context(end) for end in socket.socketpair())
        broker, child_broker = (undo.enter_context(end) for end in broker_pair())
        pipes, ends = list[OutputPipe](), dict[int, int]()
        for stream in _piped_streams(launch.output):
            read_end, ends[stream] = os.pipe()
            undo.callback(os.close, read_end)
            undo.callback(os.close, ends[stream])
            pipes.append(OutputPipe(read_end, name, stream, queue))
        undo.pop_all()
    start = msgspec.structs.replace(
        blank,
        link=child_link.detach(),
        broker=child_broker.detach(),
        stdout=ends.get(STDOUT),
        stderr=ends.get(STDERR),
    )
    member = SpawnedWorker(launch, owner, BrokerSocket(broker), link.detach(), pipes)
    member.user = blank.privileges.users[1]
    if launch.output == "file":
        with contextlib.suppress(OSError):
            member.file_offset = Path(os.fsdecode(launch.output_path)).stat().st_size
    return Prepared(member, start)


def _piped_streams(output: str) -> tuple[int, ...]:
    return {"forward": (STDOUT, STDERR), "discard": (STDERR,)}.get(output, ())


class ExitHistory:
    """Reports of the last `limits.EXIT_REPORTS` processes that have ended."""

    def __init__(self, size: int = limits.EXIT_REPORTS) -> None:
        self._size = size
        self._reports: OrderedDict[int, records.ExitRecord] = OrderedDict()

    def add(self, report: records.ExitRecord) -> None:
        """Remember `report`, forget the oldest."""
        self._reports[report.proc_id] = report
        if len(self._reports) > self._size:
            self._reports.popitem(last=False)

    def get(self, proc_id: int) -> records.ExitRecord | None:
        """Return the report of `proc_id`, if it is remembered."""
        return self._reports.get(proc_id)
