"""Workers at the spawner: their descriptors, their output, their ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.boot import WorkerStart
from trimesh._runtime.spawner.socket import BrokerSocket, broker_pair
from trimesh._runtime.system import linux, records
from trimesh._runtime.system.exits import ExitReport, decode_tail, parent_of, stat_of
from trimesh._runtime.system.forks import TRACKER_MARK, release_tracker
from trimesh._runtime.system.output import STDERR, STDOUT, LineCutter, OutputQueue, Tail

_READ_BYTES: Final = 65_536
_DRAIN_READS_MAX: Final = 64
"""Reads of one pipe in a row: 4 MiB, more than the largest pipe, so an endless writer cannot hold up the spawner."""


class OutputPipe:
    """One stream of one worker: read by the spawner, so that the worker never waits.

    Args:
        fd: Read end; owned.
        member: Name and coordinates of the worker.
        stream: 1 or 2.
        queue: Destination of whole lines; None keeps the tail only.
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
            False when there is nothing more to read now; `is_ended` is set at the end of the stream.
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
        """Read all available data."""
        for _ in range(_DRAIN_READS_MAX):
            if not self.read():
                return

    def close(self) -> None:
        """Read all available data, pass on the last, unfinished line, close."""
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
        is_open: Whether it is still served.
        awaits_room: Whether the poll loop waits for room in it.
    """

    def __init__(self, broker: BrokerSocket, proc_id: int) -> None:
        self.broker = broker
        self.proc_id = proc_id
        self.is_open = True
        self.awaits_room = False


class SpawnedWorker:
    """A worker that is being started or runs.

    Attributes:
        launch: The request to start it.
        owner: Connection of the requesting process.
        pid, pidfd: Pid and pidfd of the worker; -1 before the fork.
        broker: The spawner's end of its broker socket.
        link: The owner's end of its link, until it is handed over; then -1.
        has_entered: Whether it runs its entry.
        refusal: Why its set-up failed.
        has_hung_up: Whether it closed its broker socket, or broke the protocol, before it entered.
        file_offset: Size of the output file before it.
        user: User id that the requesting process acts for.
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
        """Return the end of its standard error."""
        if self.launch.output == "file":
            return decode_tail(_file_tail(self.launch.output_path, self.file_offset, self.user))
        return decode_tail(b"".join(pipe.tail.read() for pipe in self.pipes if pipe.tail is not None))

    def close(self) -> None:
        """Close all descriptors."""
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
    """Return the end of a file; nothing if `user` does not own it, so that the spawner reads no others for a user."""
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
        owner: Connection of the requesting process.
        output: Queue for its lines.

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
        self._reports: OrderedDict[int, ExitReport] = OrderedDict()

    def add(self, report: ExitReport) -> None:
        """Remember `report`, forget the oldest."""
        self._reports[report.proc_id] = report
        if len(self._reports) > self._size:
            self._reports.popitem(last=False)

    def get(self, proc_id: int) -> ExitReport | None:
        """Return the report of `proc_id`, if it is remembered."""
        return self._reports.get(proc_id)


# ---- descendants that workers leave behind and nothing else would end ------------------------------------------------

# A worker leads its own session and process group. Its descendants are found by three marks: the group (killed with
# it), the session, and the environment marker, which also names those that have left both. The spawner is the subreaper
# of the family, so a descendant whose parent has ended becomes a child of the spawner, where it is seen.

_WALKS_MAX: Final = 10
"""Walks up to the ancestors of one process, of which any may end meanwhile."""

_READS_MAX: Final = 10
"""Reads of one environment in a row, of which each may fall into the start of another program."""

_VSIZE, _CODE_END, _ENV_START, _ENV_END = (number - 3 for number in (23, 27, 50, 51))

_TRACKER: Final = re.compile(rb"(?:^|\0)" + TRACKER_MARK.encode() + rb"=")
_MARK: Final = re.compile(rb"(?:^|\0)" + linux.MARKER.encode() + rb"=([0-9a-f]{16})\.([0-9a-f]{16})\0")


class Children:
    """Children of this process, with adopted ones and zombies. Opens its file once: descriptors may run out later."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        try:
            self._fd = os.open(f"/proc/self/task/{self._pid}/children", os.O_RDONLY)
        except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
            self._fd = -1

    def pids(self) -> list[int]:
        if self._fd < 0:
            return [child for child in _all_pids() if parent_of(child) == self._pid]
        data, piece = b"", b" "
        while piece:
            piece = os.pread(self._fd, _READ_BYTES, len(data))
            data += piece
        return [int(word) for word in data.split()]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


class ExecutingError(Exception):
    """A process is about to run another program: its new environment is not laid out yet. Poll again soon."""


def marked_proc(pid: int) -> tuple[int, int] | None:
    """Return (family, worker) that a process is marked with, None when it has no mark or cannot be read.

    Raises:
        ExecutingError: It cannot be determined now.
    """
    environment = b""
    with contextlib.suppress(OSError):
        for _ in range(_READS_MAX):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if environment or not _may_have_environment(pid):
                break
        else:
            raise ExecutingError
    found = _MARK.search(environment + b"\0")
    return (int(found[1], 16), int(found[2], 16)) if found else None


def _may_have_environment(pid: int) -> bool:
    """Return whether a process whose environment reads as empty has one, or is about to have one.

    During `execve` the kernel sets the new memory first, then the bounds of the environment, and those of the code
    last: 3 of 100 reads fall in between for a shell that executes itself in a loop.
    """
    fields = stat_of(pid)
    memory, code_end, start, end = (int(fields[index]) for index in (_VSIZE, _CODE_END, _ENV_START, _ENV_END))
    is_laid_out_empty = code_end != 0 and start == end
    return memory != 0 and not is_laid_out_empty  # zombies and threads of the kernel have no memory


def kill_marked(root_id: int, spared: Collection[int] = ()) -> int:
    """SIGKILL every process of this machine that carries the mark of a family, except the caller.

    Used if the parent that could reap them is gone. Cost: reads one small file for each process of the machine.

    Args:
        spared: Pids of live spawners of the family: they, and all below them, are left alone.

    Returns:
        Number of processes that were signalled, and may need a moment to end, or could not be identified yet: repeat
        until 0.
    """
    left = 0
    for pid in _all_pids():
        try:
            if pid != os.getpid() and _is_marked(pid, root_id):
                left += _kill_if_marked(pid, root_id, spared)
        except ExecutingError:
            left += 1
    return left


def _kill_if_marked(pid: int, root_id: int, spared: Collection[int]) -> bool:
    with contextlib.suppress(OSError):  # gone meanwhile, or of another user
        pidfd = os.pidfd_open(pid)
        try:
            # Check again: the pid may have been reused before the pidfd was opened.
            if _is_marked(pid, root_id) and not _descends_from(pid, spared):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False


def _is_marked(pid: int, root_id: int) -> bool:
    found = marked_proc(pid)
    return found is not None and found[0] == root_id


def _descends_from(pid: int, ancestors: Collection[int]) -> bool:
    """Return whether a process is one of `ancestors`, or below one: a spawner keeps its descendants for life."""
    for _ in range(_WALKS_MAX):
        at, last = pid, pid
        while at > 1 and at not in ancestors:
            last, at = at, parent_of(at)
        if at in ancestors:
            return True
        if at == 1 or Path(f"/proc/{last}").exists():
            return False
    return True  # its parents end faster than they can be read: spare it


class Orphans:
    """Descendants of workers whose own parents have ended; children of the spawner by adoption."""

    def __init__(self, root_id: int, children: Children) -> None:
        self._root_id = root_id
        self._children = children
        self._owners: dict[int, int] = {}
        self._others_seen: float | None = None

    def reaped(self, pid: int) -> None:
        """Note that an orphan is gone; its pid may be used again."""
        self._owners.pop(pid, None)

    def sweep(self, workers: Mapping[int, int]) -> bool:
        """Kill the orphans whose worker has ended. Those whose worker is unknown live until the family ends.

        Args:
            workers: Process ids of the live workers, by pid.

        Returns:
            False when one could not be identified because it was executing another program: sweep again in a moment.
        """
        alive = {self._root_id, *workers.values()}  # processes started by a preloaded module carry the spawner's mark
        is_done = True
        for pid in [pid for pid in self._children.pids() if pid not in workers]:
            owner = self._owners.get(pid)
            if owner is None:
                try:
                    owner = self._owner_of(pid, workers)
                except ExecutingError:
                    is_done = False
                    continue
            if owner is None:
                continue
            self._owners[pid] = owner
            if owner not in alive:
                kill_child(pid)
        return is_done

    def end(self, children: Collection[int]) -> None:
        """Kill the rest of the family; resource trackers, too, if they do not end by themselves soon after.

        Call it again until none is left.
        """
        release_tracker()
        now = time.monotonic()
        others = [pid for pid in children if not is_tracker(pid)]
        if others or self._others_seen is None:
            self._others_seen = now
        for pid in others if now < self._others_seen + limits.TRACKER_SECONDS else children:
            kill_child(pid)

    def _owner_of(self, pid: int, workers: Mapping[int, int]) -> int | None:
        marked = marked_proc(pid)
        if marked is not None:
            return marked[1] if marked[0] == self._root_id else None  # else of another family, which ends by itself
        with contextlib.suppress(ProcessLookupError):
            return workers.get(os.getsid(pid))
        return None


def is_tracker(pid: int) -> bool:
    """Return whether a process is a live resource tracker."""
    with contextlib.suppress(OSError):
        return _TRACKER.search(Path(f"/proc/{pid}/environ").read_bytes()) is not None
    return False


def kill_child(pid: int) -> None:
    """SIGKILL a child that is not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
