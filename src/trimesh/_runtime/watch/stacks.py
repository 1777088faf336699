"""Remote stacks: another process's main thread in Python, even while C code there holds the GIL, and its tasks.

A worker gives `faulthandler` a memory file and a signal; the owner of the worker sends the signal and reads the file
by its name in /proc. Neither interpreter has to run for that. A second signal makes the worker's interpreter add the
activity of its actors; that arrives once the main thread executes a bytecode.

BS-1 At most `FRAMES_MAX` frames of one stack stay, innermost first: those of the program and of libraries that it uses.
BS-2 A stack without such frames keeps its innermost ones, except those of frozen modules if it has others.
"""

from __future__ import annotations

import base64
import faulthandler
import logging
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trimesh import limits
from trimesh._wire.exceptions.tracebacks import is_named, package_of_line
from trimesh.errors import with_cells

if TYPE_CHECKING:
    from trimesh._runtime.meshes.member import Member


STACK_SIGNAL: Final = signal.SIGRTMAX - 3
"""Real-time signals have no meaning of their own; the topmost ones are the least used by libraries."""

TASKS_SIGNAL: Final = signal.SIGRTMAX - 4

STACK_BYTES_MAX: Final = 16_384
"""A stack of the 100 frames that faulthandler writes."""

TASKS_BYTES_MAX: Final = 32_768
"""Text on the tasks of one process: some hundred frames."""

TABLES_BYTES_MAX: Final = 1 << 18
"""Tables of one process, written as text: a thousand calls."""

FILE_BYTES_MAX: Final = 1 << 21
"""The file starts anew beyond this size; a process is queried seldom."""

STACK_SECONDS: Final = 0.05
"""Delay from the signal to reading the file; a process that has not run by then is not running."""

TASKS_SECONDS: Final = 0.5
"""The same for the tasks, which Python writes: long enough for a process that waits for a CPU."""

_READ_BYTES: Final = STACK_BYTES_MAX + TASKS_BYTES_MAX + TABLES_BYTES_MAX
_TASKS_HEAD: Final = "\n==== tasks "
_TABLES_HEAD: Final = "\n==== tables "
_LOOP_HEAD: Final = "in the loop"
_STACK_HEAD: Final = "Stack (most recent call first)"

Describe = Callable[[FrameType | None], tuple[bool, str]]
"""Returns whether the main thread, interrupted in a frame, waits in Trio's loop, and the activity of the actors."""

Tables = Callable[[], bytes]
"""Returns the tables of this process, as encoded by `_wire.observed`."""


class Report(msgspec.Struct, frozen=True):
    """Report of a process about itself.

    Attributes:
        stack: Of its main thread, innermost call first, or "" when there is none.
        tasks: Activity of its actors; None when its interpreter has not reported since the request.
        is_in_loop: Whether the main thread waits in Trio's loop, so that its stack is of no interest.
        tables: As encoded by `_wire.observed`, b"" if that failed; None if not reported since the request. They are
            written after the tasks.
    """

    stack: str = ""
    tasks: str | None = None
    is_in_loop: bool = False
    tables: bytes | None = None


def arm_stack(describe: Describe | None = None, tables: Tables | None = None) -> int:
    """Make this process write its main thread's stack at `STACK_SIGNAL`; return the descriptor of the file.

    Args:
        describe: Called for the tasks at `TASKS_SIGNAL`, in a signal handler.
        tables: Called for the tables then.
    """
    fd = os.memfd_create("trimesh-stack", os.MFD_CLOEXEC)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)
    if describe is not None:
        known = describe

        def write_tasks(_: int, frame: FrameType | None) -> None:
            try:
                is_in_loop, text = known(frame)
            except Exception as error:  # noqa: BLE001 - it runs in the middle of anything, which must go on
                is_in_loop, text = False, f"its tasks cannot be described: {error!r}"
            if os.lseek(fd, 0, os.SEEK_CUR) > FILE_BYTES_MAX:
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
            now = time.monotonic()
            head = f"{_TASKS_HEAD}{now} {_LOOP_HEAD if is_in_loop else ''}\n"
            os.write(fd, (head + text).encode(errors="replace")[:TASKS_BYTES_MAX] + b"\n")
            if tables is not None:  # last: a reader of the tasks alone need not wait for them
                os.write(fd, _tables_text(tables, now))

        signal.signal(TASKS_SIGNAL, write_tasks)
        signal.siginterrupt(TASKS_SIGNAL, False)  # noqa: FBT003 - calls of the system in C libraries go on
    return fd


def _tables_text(tables: Tables, now: float) -> bytes:
    """Return the tables as stored in the file; empty ones if they fail or are too large."""
    try:
        text = base64.b64encode(tables())
    except Exception:  # noqa: BLE001 - it runs in the middle of anything, which must go on
        text = b""
    return f"{_TABLES_HEAD}{now} ".encode() + (text if len(text) <= TABLES_BYTES_MAX else b"") + b"\n"


def request_stack(pid: int) -> None:
    """Request the stack of a process of ours. Does nothing if it has ended."""
    _send(pid, STACK_SIGNAL)


def request_report(pid: int) -> float:
    """Request stack and tasks of a process of ours; return the time of that, for `read_report`."""
    asked_at = time.monotonic()
    _send(pid, STACK_SIGNAL, TASKS_SIGNAL)
    return asked_at


def _send(pid: int, *signals: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for number in signals:
            signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return
    finally:
        os.close(pidfd)


def read_stack(pid: int, fd: int) -> str:
    """Return the last stack that a process wrote, innermost call first, or "" when there is none."""
    return _stack_in(_read(pid, fd))


def read_report(pid: int, fd: int, asked_at: float) -> Report:
    """Return the report of a process since the request."""
    text = _read(pid, fd)
    at = text.rfind(_TASKS_HEAD)
    if at < 0:
        return Report(_stack_in(text))
    head, _, tasks = text[at + len(_TASKS_HEAD) :].partition("\n")
    said_at, _, where = head.partition(" ")
    try:
        is_fresh = float(said_at) >= asked_at
    except ValueError:
        is_fresh = False
    if not is_fresh:
        return Report(_stack_in(text))
    said = tasks.partition(_STACK_HEAD)[0].partition(_TABLES_HEAD)[0].strip("\n")
    return Report(_stack_in(text), said, where == _LOOP_HEAD, _tables_in(text, said_at))


def _tables_in(text: str, said_at: str) -> bytes | None:
    at = text.rfind(f"{_TABLES_HEAD}{said_at} ")
    if at < 0:
        return None
    line, is_whole, _ = text[at + len(_TABLES_HEAD) :].partition("\n")
    try:
        return base64.b64decode(line.partition(" ")[2], validate=True) if is_whole else None
    except ValueError:
        return None


def _read(pid: int, fd: int) -> str:
    try:
        with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES))
            return file.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _stack_in(text: str) -> str:
    # The file is appended to at each request: the last stack is the requested one.
    head = text.rfind("(most recent call first)")
    stack = text[text.rfind("\n", 0, max(0, head)) + 1 :].partition(_TABLES_HEAD)[0].partition(_TASKS_HEAD)[0]
    return stack.strip()[:STACK_BYTES_MAX]


# ---- stacks cut to the few frames that show where a program is, for logs ---------------------------------------------

FRAMES_MAX: Final = 4

_FRAME: Final = r'( *)(?:File "|and \d+ frames more)'  # compiled on first use


def brief(lines: Iterable[str]) -> list[str]:
    """Return lines with the stacks among them cut."""
    found = list[str]()
    for indent, group in groupby(lines, _indent_of_frame):
        some = list(group)
        found += some if indent is None else _cut([line for line in some if 'File "' in line])
    return found


def _indent_of_frame(line: str) -> str | None:
    """Return the indent of a frame, which separates stacks; None for a line that is not a frame."""
    match = re.match(_FRAME, line)
    return None if match is None else match[1]


def _cut(frames: Sequence[str]) -> Sequence[str]:
    named = [line for line in frames if is_named(package_of_line(line))]
    return (named or [line for line in frames if 'File "<frozen ' not in line] or frames)[:FRAMES_MAX]


# ---- stalls: the native thread of a child process answers while its Trio loop does not run ---------------------------

# A stall does not count as a failure: a long computation in an endpoint looks like this, and so does loading a model.
# It is logged with the stack of the main thread, which shows the reason. Nothing is killed, no call ends.

_log = logging.getLogger("trimesh")


class StallReport:
    """Reports the stalls of one child process, at most once in `limits.STALL_AGAIN_SECONDS`.

    Attributes:
        count: Stalls so far.
        listeners: Called with the seconds and the stack of the main thread ("" if there is none).
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.count = 0
        self.listeners: list[Callable[[float, str], None]] = []
        self._said_at: float = -math.inf
        self._behind = 0.0  # last report of the process, which reports whenever the time has doubled
        self._behind_at = 0.0

    @property
    def seconds(self) -> float:
        """Seconds for which its loop has not run; 0 when it runs."""
        return self._behind + self.member.proc.now() - self._behind_at if self._behind else 0.0

    def take(self, seconds: float) -> None:
        """Handle a report of its transport: seconds behind, or 0 when the loop runs again."""
        if not self._behind and seconds:
            self.count += 1
        elif self._behind and not seconds:
            _log.info("%s (pid %d) runs again", self.member.label, self.member.pid)
        now = self.member.proc.now()
        self._behind, self._behind_at = seconds, now
        if seconds and not self.member.gone.is_set() and now >= self._said_at + limits.STALL_AGAIN_SECONDS:
            self._said_at = now
            self.member.proc.nursery.start_soon(self._say, seconds)

    @trio.lowlevel.enable_ki_protection
    async def _say(self, seconds: float) -> None:
        from trimesh._wire.exceptions.tracebacks import shown_stack  # noqa: PLC0415 - only stalls need it

        member = self.member
        stack = ""
        if member.stack_fd >= 0:  # a simulated process has none
            request_stack(member.pid)
            await trio.sleep(STACK_SECONDS)
            stack = read_stack(member.pid, member.stack_fd)
        text = (
            f"{member.label} (pid {member.pid}) is stalled: its Trio loop has not run for {seconds:.1f} s. A call that "
            "blocks does this: await its async counterpart, or write a plain `def` under @endpoint(thread=True)"
        )
        _log.warning("%s\n%s", text, with_cells(shown_stack(stack)) or "  its stack is not available")
        for listener in self.listeners:
            listener(seconds, stack)
