"""`PipedCommand`: a command whose output is read by lines and sent through a port.

command --pipes--> LineCutter --> port --> the program
"""

from __future__ import annotations

import array
import fcntl
import subprocess
import termios
from functools import partial
from typing import Any, Final, Literal, cast

import trio

from trimesh import limits
from trimesh._runtime.channels import Port
from trimesh._runtime.system import LineCutter, Tail, run_process

STDOUT: Final = 1
STDERR: Final = 2

Lines = tuple[int, int, list[bytes]]
"""Rank of the process, stream, and lines."""


def stream_name(stream: int) -> Literal["stdout", "stderr"]:
    return "stderr" if stream == STDERR else "stdout"


async def bound_when_cancelled(reading: trio.CancelScope) -> None:
    """Wait for a cancel; then give a shielded scope, in which output is read, a deadline."""
    try:
        await trio.sleep_forever()
    finally:
        reading.deadline = trio.current_time() + limits.COMMAND_FLUSH_SECONDS


def text_of_line(line: bytes) -> str:
    """Return the text after the last carriage return, which a terminal would show of a progress bar."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class PipedCommand:
    """A command whose output is read by lines until it ends.

    Args:
        lines: Receives the lines; None discards them.
        rank: Rank put in front of them.
        tail_bytes: Size of `last_words`.

    Attributes:
        last_words: The end of its standard error.
    """

    def __init__(self, lines: Port[Lines] | None, rank: int, *, tail_bytes: int = limits.STDERR_TAIL_BYTES) -> None:
        self.last_words = Tail(tail_bytes)
        self._lines = lines
        self._rank = rank
        self._ended = trio.Event()
        self._code = 0
        self._reading: set[trio.CancelScope] = set()

    async def run(self, command: list[str], **options: Any) -> int:
        """Run the command, and return its exit code once all its output has been sent.

        Raises:
            OSError: It could not be started.
        """
        failure: OSError | None = None
        async with trio.open_nursery() as nursery:
            try:
                process = cast("trio.Process", await nursery.start(partial(self._keep, command, options)))
            except OSError as error:  # kept: a nursery would wrap it
                failure = error
            else:
                # Shielded: output during its grace is read, too, so that its clean-up does not fail by a broken pipe.
                with trio.CancelScope(shield=True) as scope:
                    async with trio.open_nursery() as readers:
                        readers.start_soon(self._read, process.stdout, STDOUT)
                        readers.start_soon(self._read, process.stderr, STDERR)
                        await self._ended.wait()
                        nursery.start_soon(bound_when_cancelled, scope)
                nursery.cancel_scope.cancel(reason="all output has been read")
        if failure is not None:
            raise failure
        return self._code

    async def _keep(
        self, command: list[str], options: dict[str, Any], *, task_status: trio.TaskStatus[trio.Process]
    ) -> None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            done = await run_process(command, check=False, task_status=task_status, **{**pipes, **options})
            self._code = done.returncode
        finally:
            self._ended.set()
            for scope in self._reading:
                scope.cancel(reason="the command has ended")

    async def _read(self, pipe: Any, stream: int) -> None:
        """Read until the pipe is closed, or the command has ended and the pipe is empty: a daemon may keep it open."""
        cutter = LineCutter()
        async with pipe:
            while not self._ended.is_set():
                data: bytes | None = None
                with trio.CancelScope() as scope:
                    self._reading.add(scope)
                    data = await pipe.receive_some(limits.OUTPUT_BATCH_BYTES_MAX)
                self._reading.discard(scope)
                if data == b"":
                    break
                await self._take(stream, data or b"", cutter.feed(data or b"", trio.current_time()))
            left = _bytes_in(pipe.fileno())
            while left > 0 and (data := await pipe.receive_some(min(left, limits.OUTPUT_BATCH_BYTES_MAX))):
                left -= len(data)
                await self._take(stream, data, cutter.feed(data))
            await self._take(stream, b"", cutter.close())

    async def _take(self, stream: int, data: bytes, lines: list[bytes]) -> None:
        if stream == STDERR:
            self.last_words.feed(data)
        if lines and self._lines is not None:
            await self._lines.send((self._rank, stream, lines))


def _bytes_in(pipe: int) -> int:
    """Return how many bytes can be read from a pipe without waiting."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]
