"""The template of agents as the program sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._runtime.hosts import marked
from trimesh.errors import SpawnError
from trimesh.jobs.forked.messages import LEFT_SECONDS, NUMBER, REQUEST, TEXT_BYTES_MAX

BOOT: Final = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; from trimesh.jobs.forked.process import serve; serve()"
)


def interpreter_command(program: str) -> list[str]:
    """Return what runs a program with the interpreter, its options and the paths of this process."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return [sys.executable, *flags, "-c", program, *sys.path]


def _surroundings() -> tuple[Any, ...]:
    """Return what a process that is executed here and now inherits, and may be another one later."""
    return dict(os.environ), os.getcwd(), list(sys.path), sys.executable


class AgentTemplate:
    """The template as the program sees it. Made by `start`; `close` ends it, when its agents have ended."""

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._requests = requests
        self._lock = trio.Lock()
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._surroundings = _surroundings()

    @staticmethod
    def start() -> AgentTemplate:
        """Start it; it may be used at once.

        Raises:
            SpawnError: It cannot be started.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)  # noqa: FBT003
            try:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter
                    interpreter_command(BOOT),
                    stdin=theirs.fileno(),
                    env=marked(dict(os.environ)),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        except OSError as error:
            raise SpawnError(f"cannot start what agents are forked from: {error}") from error
        return AgentTemplate(ours, process)

    @property
    def is_like_this(self) -> bool:
        """Whether an agent that is executed now would inherit what its copies have (AF-2)."""
        return self._surroundings == _surroundings()

    async def fork(self, host: str) -> TemplateChild | None:
        """Fork an agent; None where the template has ended. A cancel leaves one that finds its standard input closed.

        Args:
            host: Its name, for the error.

        Raises:
            SpawnError: It cannot be forked.
        """
        with ExitStack() as ours, ExitStack() as theirs:
            try:
                stdin, stdin_there = _pipe(ours, theirs, is_read_there=True)
                stderr, stderr_there = _pipe(ours, theirs, is_read_there=False)
                told, told_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.enter_context(told)
                theirs.enter_context(told_there)
                told.setblocking(False)  # noqa: FBT003
                passed = [stdin_there, stderr_there, told_there.fileno()]
                await self._ask(passed)
                theirs.close()
                await trio.lowlevel.wait_readable(told)
                data, fds, _, _ = socket.recv_fds(told, TEXT_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            except (BrokenPipeError, ConnectionResetError):
                return None
            except OSError as error:
                raise SpawnError(f"cannot start the agent of {host}: {error}") from error
            if not data:
                return None
            if not fds:
                is_code = len(data) == NUMBER.size
                text = f"it has ended: {NUMBER.unpack(data)[0]}" if is_code else data.decode(errors="replace")
                raise SpawnError(f"cannot start the agent of {host}: {text}")
            ours.pop_all()
        in_stream, err_stream = trio.lowlevel.FdStream(stdin), trio.lowlevel.FdStream(stderr)
        return TemplateChild(NUMBER.unpack(data)[0], fds[0], in_stream, err_stream, told)

    async def _ask(self, fds: Sequence[int]) -> None:
        async with self._lock:
            while True:
                try:
                    socket.send_fds(self._requests, [REQUEST], fds)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._requests)
                else:
                    return

    @trio.lowlevel.enable_ki_protection
    async def close(self) -> None:
        """End it, and reap it; an agent that is left ends by its lifeline, or is killed. Shielded, bounded."""
        self._requests.close()
        with trio.CancelScope(shield=True):
            for seconds in (LEFT_SECONDS + limits.KILL_SECONDS, limits.KILL_SECONDS):
                with trio.move_on_after(seconds):
                    await trio.lowlevel.wait_readable(self._pidfd)
                    self._process.wait()
                    break
                self._process.kill()
        os.close(self._pidfd)


class TemplateChild:
    """An agent that was forked from the template; has the members of `trio.Process` that `ChildAgent` uses."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        stdin: trio.lowlevel.FdStream,
        stderr: trio.lowlevel.FdStream,
        told: socket.socket,
    ) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stderr = stderr
        self._pidfd = pidfd
        self._told = told
        self._lock = trio.Lock()
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal, once it has ended and was reaped; else None."""
        if self._returncode is None:
            try:
                data = self._told.recv(NUMBER.size)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            self._returncode = NUMBER.unpack(data)[0] if data else -signal.SIGKILL  # AF-3
            if not data:
                self.send_signal(signal.SIGKILL)  # the system does that, too, at some time
            trio.lowlevel.notify_closing(self._told)
            self._told.close()
            os.close(self._pidfd)
            self._pidfd = -1
        return self._returncode

    async def wait(self) -> int:
        """Wait until it was reaped, and return its exit code."""
        await trio.lowlevel.checkpoint()
        async with self._lock:
            while (code := self.returncode) is None:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._told)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)


def _pipe(ours: ExitStack, theirs: ExitStack, *, is_read_there: bool) -> tuple[int, int]:
    """Return the two ends of a pipe: ours, the agent's."""
    ends = os.pipe()
    here, there = reversed(ends) if is_read_there else ends
    ours.callback(os.close, here)
    theirs.callback(os.close, there)
    return here, there
