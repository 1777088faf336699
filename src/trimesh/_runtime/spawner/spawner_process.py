"""The spawner process, as its parent starts and ends it: started by exec, or in an agent of a host by fork.

An agent that has imported the spawners' modules forks a spawner at a tenth of the cost of executing one.

    agent: imports --fork--> spawner --fork--> workers
           reads its order, and secrets, afterwards

A forked spawner has what an executed one has: session, streams, descriptors, environment, mark.

FA-1 Processes below an agent carry its mark, not the controller's: agents of one machine do not end each other's.
FA-2 When `open_far_root` is left, the spawner and everything below it is gone and reaped, or stuck in the kernel.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import ExitStack, suppress
from typing import Final, NoReturn, Protocol

import trio

from trimesh import limits
from trimesh._runtime.spawner import loop, wire
from trimesh._runtime.spawner.client import SpawnerClient, kill_rest
from trimesh._runtime.spawner.socket import BrokerSocket, Received, broker_pair
from trimesh._runtime.system import exits, linux, records
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.linux import has_proc, refusals
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.ids import ProcId

_BOOT: Final = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[4:]; "
    "from trimesh._runtime.spawner.loop import main; main(sys.argv[1:4])"
)

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment that keeps numpy and torch from starting threads on import (rule O2); workers get their own counts."""


_STOP_SECONDS: Final = limits.KILL_SECONDS + 2 * limits.EXIT_REPORT_SECONDS
"""Time limit of a stop: the spawner gives up stuck workers after `KILL_SECONDS` and needs moments for the rest."""


class SpawnerChild(Protocol):
    """A child process: the part of `subprocess.Popen` that is used here."""

    pid: int
    returncode: int | None

    def kill(self) -> None:
        """Kill it, unless it was reaped."""

    def wait(self) -> int:
        """Wait until it has ended, reap it and return its exit code (negative for a signal)."""
        ...


BeginChild = Callable[[list[int], list[int | None], int], SpawnerChild]
"""Starts the process of a spawner, given passed descriptors (the broker socket, a pidfd of this process), its standard
streams (None: those of this process), and the root of its family."""


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
            raise SpawnError("the spawner is started with sys.executable, which is empty here: set it to a Python path")
        return cls.begin(root_id, _execute)

    @classmethod
    def begin(cls, root_id: int, begin: BeginChild) -> SpawnerProcess:
        """Start a spawner with the function `begin`; see `start`.

        Raises:
            SpawnError: It cannot be started.
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
                os.kill(self.pid, signum)  # it is not reaped yet, so its pid cannot be reused
            except OSError:
                return False
        return True

    async def wait(self) -> int:
        """Wait for its end, reap it and return its exit code (negative for a signal). Called once."""
        await trio.lowlevel.wait_readable(self._pidfd)
        return self._process.wait()

    async def end(self, client: SpawnerClient) -> bool:
        """Request that it ends with all processes below it; kill it if it does not. Bounded; the caller shields.

        Args:
            client: Connection of its root to it.

        Returns:
            Whether it ended in good order. If not, some processes below it may be left.
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
        """End a spawner that has received nothing, so has no workers. Blocking: until the kernel has killed it."""
        self._process.kill()
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Close the descriptors."""
        _open.discard(self)
        self.broker.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def forget(self) -> None:
        """In a forked child, whose child the spawner is not: close the copies of descriptors, and never signal it."""
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
        env={**os.environ, **ONE_THREAD, linux.MARKER: linux.marker_of(root_id, root_id)},
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
    except OSError:  # out of descriptors
        process.kill()
        process.wait()
        raise


def _is_stream(fd: int) -> bool:
    """Return whether `fd` is a standard stream: inheritable. If that was closed, another file may have its number."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


# ---- forking ---------------------------------------------------------------------------------------------------------

_NO_MARK: Final = linux.marker_of(0, 0)


def marked(env: dict[str, str]) -> dict[str, str]:
    """Return the environment for executing a process that is to fork its spawner: with room for its mark."""
    return {linux.MARKER: _NO_MARK, **env}


def import_for_spawners() -> None:
    """Import the modules of spawners, so that they can be forked from here. Starts no thread and opens nothing."""
    for name in MODULES:
        importlib.import_module(name)
    loop.load_native()


def can_fork_spawners() -> bool:
    """Return whether this process may fork one: it has one thread, and was executed with a mark to overwrite."""
    mark = os.environ.get(linux.MARKER, "")
    return len(mark) == len(_NO_MARK) and len(os.listdir("/proc/self/task")) == 1


def fork_spawner(root_id: int) -> SpawnerProcess:
    """Fork a spawner; see `SpawnerProcess.start`. Called if `can_fork_spawners`, before this process holds secrets.

    All workers inherit the present stack and memory.

    Raises:
        SpawnError: It cannot be forked.
    """
    gc.freeze()  # the collector of neither process copies shared objects
    return SpawnerProcess.begin(root_id, _fork)


class _ForkedSpawner:
    """See `SpawnerChild`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _fork(passed: list[int], streams: list[int | None], root_id: int) -> _ForkedSpawner:
    del root_id  # the spawner receives it later, and writes its mark then
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    pid = os.fork()
    if pid != 0:
        return _ForkedSpawner(pid)
    try:
        _be_spawner(passed, streams, parent)
    except BaseException:  # noqa: BLE001 - the child must not continue as a second agent
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(loop.EXIT_FATAL)


def _be_spawner(passed: list[int], streams: list[int | None], parent: int) -> NoReturn:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    for number, stream in enumerate(streams, 1):
        if stream is not None:
            os.dup2(nothing, number)
    linux.close_others({0, 1, 2, *passed})
    os.environ.update(ONE_THREAD)
    gc.disable()
    loop.main([*map(str, passed), str(parent)])


# ---- root of a spawner whose controller is on another host: relays records between the two ---------------------------

NoticeHook = Callable[[Received], None]

MODULES = (records.ENTRY.partition(":")[0], "trimesh._runtime.life.local_host", "trimesh._runtime.life.ownership")


class FarRoot:
    """Stands for a controller on another host. Made by `open_far_root`.

    Attributes:
        client: The connection to the spawner.
    """

    def __init__(
        self,
        process: SpawnerProcess,
        controller: ProcId,
        own: ProcId,
        on_notice: NoticeHook,
        modules: tuple[str, ...],
        spared: Callable[[], Collection[int]],
    ) -> None:
        self.pid = process.pid
        self.client = SpawnerClient(process.broker, on_notice=self._noticed, on_lost=self._lost)
        self._process = process
        self._controller = controller
        self._own = own
        self._on_notice = on_notice
        self._modules = modules
        self._spared = spared
        self._ready = trio.Event()

    def _noticed(self, received: Received) -> None:
        if isinstance(received.record, wire.Ready):
            self._ready.set()
        else:
            self._on_notice(received)

    def _lost(self) -> None:
        self._ready.set()

    async def wait_ready(self) -> None:
        """Wait until workers can be forked.

        Raises:
            SpawnError: The spawner is lost, or takes too long.
        """
        self.client.post(wire.Hello(self._controller, MODULES + self._modules, self._own))
        await self.client.wait_ready(self._ready, "start")

    @trio.lowlevel.enable_ki_protection
    async def stop(self) -> None:
        """End the spawner and everything below it (FA-2). Bounded."""
        with trio.CancelScope(shield=True):
            if not await self._process.end(self.client):
                await kill_rest(self._own, lambda: [pid for pid in self._spared() if pid != self.pid])


@asynccontextmanager
async def open_far_root(
    controller: ProcId,
    own: ProcId,
    on_notice: NoticeHook,
    modules: tuple[str, ...] = (),
    spared: Callable[[], Collection[int]] = tuple,
    process: SpawnerProcess | None = None,
) -> AsyncGenerator[FarRoot, None]:
    """Start a spawner for a controller on another host.

    Args:
        on_notice: Called for all notices of the spawner, with descriptors that it then owns. Must not raise.
        modules: Imported once, before it forks.
        spared: Other spawners with the same mark; processes below them are left alone at the end.
        process: One that was started for `own` and has not received anything; None starts it.

    Raises:
        SpawnError: It cannot be started, or a module cannot be imported.
    """
    failure: SpawnError | None = None
    process = process or SpawnerProcess.start(own)
    try:
        root = FarRoot(process, controller, own, on_notice, modules, spared)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(root.client.run)
            try:
                try:
                    await root.wait_ready()
                except SpawnError as error:  # raised outside of the nursery, which would wrap it
                    failure = error
                else:
                    yield root
            finally:
                await root.stop()
                root.client.stop()
        if failure is not None:
            raise failure
    finally:
        process.close()
