"""The spawner as its controller sees it: a child process, started by exec; or forked, see `forking`."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Protocol

import trio

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.client import SpawnerClient
from trimesh._runtime.spawner.socket import BrokerSocket, broker_pair
from trimesh._runtime.system import exits, prctl
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.system_calls import has_proc, refusals
from trimesh.errors import SpawnError

_BOOT: Final = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[4:]; "
    "from trimesh._runtime.spawner.main import main; main(sys.argv[1:4])"
)

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""numpy and torch start threads when they are imported, unless told so (rule O2); workers get counts of their own."""


_STOP_SECONDS: Final = limits.KILL_SECONDS + 2 * limits.EXIT_REPORT_SECONDS
"""A spawner that was told to stop gives up stuck workers after `KILL_SECONDS` and needs moments for the rest."""


class SpawnerChild(Protocol):
    """A child process: of `subprocess.Popen` what is used here."""

    pid: int
    returncode: int | None

    def kill(self) -> None:
        """Kill it, unless it was reaped."""

    def wait(self) -> int:
        """Wait until it has ended, reap it and return its exit code (negative for a signal)."""
        ...


BeginChild = Callable[[list[int], list[int | None], int], SpawnerChild]
"""Begins the process of a spawner, from descriptors that are passed (the broker socket, a pidfd of this process), what
its standard streams are (None: those of this process), and the root of its family."""


class SpawnerProcess:
    """A started spawner.

    Attributes:
        broker: The controller's end of the connection.
    """

    def __init__(self, broker: BrokerSocket, process: SpawnerChild, pidfd: int) -> None:
        self.broker = broker
        self.pid = process.pid
        self._process = process
        self._pidfd = pidfd
        _open.add(self)

    @classmethod
    def start(cls, root_id: int) -> SpawnerProcess:
        """Start the spawner in a session of its own.

        Called on the thread that runs Trio, and not through a worker thread: the kernel ties the parent-death signal
        to the thread that forks, and Trio's worker threads end when they are idle. Blocks for one `vfork` and `exec`.

        Raises:
            SpawnError: The interpreter cannot be started.
        """
        if not sys.executable:
            raise SpawnError("processes are started with sys.executable, which is empty in this embedded interpreter")
        return cls.begin(root_id, _execute)

    @classmethod
    def begin(cls, root_id: int, begin: BeginChild) -> SpawnerProcess:
        """Begin a spawner in this way; see `start`.

        Raises:
            SpawnError: It cannot be done.
        """
        if not has_proc():
            raise SpawnError(f"cannot start the spawner{refusals()}")
        try:
            with ExitStack() as undo:
                streams = [None if _is_stream(fd) else subprocess.DEVNULL for fd in (1, 2)]
                ours, theirs = (undo.enter_context(end) for end in broker_pair())
                own_pidfd = os.pidfd_open(os.getpid())
                undo.callback(os.close, own_pidfd)
                passed = [_above_streams(fd, undo) for fd in (theirs.fileno(), own_pidfd)]
                process = begin(passed, streams, root_id)
                pidfd = _open_pidfd(process)
                kept = socket.socket(fileno=ours.detach())
        except OSError as error:
            raise SpawnError(f"cannot start the spawner with {sys.executable!r}: {error}{refusals()}") from error
        return cls(BrokerSocket(kept), process, pidfd)

    def signal(self, signum: int) -> bool:
        """Signal the spawner, if it still runs.

        Returns:
            False when this process may not: it has given up privileges that the spawner has.
        """
        if self._process.returncode is not None:
            return True
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except ProcessLookupError:
            return True
        except OSError:  # a sandbox refuses the call, or the user is another one by now
            try:
                os.kill(self.pid, signum)  # it is not reaped yet, so its number is its own
            except OSError:
                return False
        return True

    async def wait(self) -> int:
        """Wait for its end, reap it and return its exit code (negative for a signal). Called once."""
        await trio.lowlevel.wait_readable(self._pidfd)
        return self._process.wait()

    async def end(self, client: SpawnerClient) -> bool:
        """Tell it to end with all that is below it, and kill it if it does not. Bounded; to be shielded.

        Args:
            client: Its root's connection to it.

        Returns:
            Whether it had finished its work. If not, something of what was below it may be left.
        """
        exit_code = None
        client.post(wire.Stop())
        self.signal(signal.SIGCONT)  # it may have been stopped
        with trio.move_on_after(_STOP_SECONDS) as scope:
            await client.ended.wait()
            exit_code = await self.wait()
        if scope.cancelled_caught:
            self.signal(signal.SIGKILL)
            with trio.move_on_after(limits.KILL_SECONDS) as scope:
                exit_code = await self.wait()
        if scope.cancelled_caught:
            exits.log_abandoned("the spawner", self.pid)
        return exit_code == 0

    def abandon(self) -> None:
        """End one that was never told anything, so has no workers. Blocking: until the kernel has killed it."""
        self._process.kill()
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Give back the descriptors."""
        _open.discard(self)
        self.broker.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def forget(self) -> None:
        """In a forked child: the spawner is a child of another process."""
        self._process.returncode = 0
        self.close()


_open: Final[ForgottenInChildren[SpawnerProcess]] = ForgottenInChildren()


def _execute(passed: list[int], streams: list[int | None], root_id: int) -> subprocess.Popen[bytes]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    command: list[str] = [sys.executable, *flags, "-c", _BOOT, *map(str, passed), str(os.getpid()), *sys.path]
    return subprocess.Popen(  # noqa: S603 - our own interpreter
        command,
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        env={**os.environ, **ONE_THREAD, prctl.MARKER: prctl.marker_of(root_id, root_id)},
        pass_fds=passed,
        start_new_session=True,
    )


def _above_streams(fd: int, undo: ExitStack) -> int:
    """Return `fd`, or a copy above the standard streams: in a program without them it may be 1 or 2 itself."""
    if fd > 2:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    undo.callback(os.close, copy)
    return copy


def _open_pidfd(process: SpawnerChild) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # no descriptor is left
        process.kill()
        process.wait()
        raise


def _is_stream(fd: int) -> bool:
    """Return whether `fd` is a standard stream; where those were closed, the number may be anything's by now."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
