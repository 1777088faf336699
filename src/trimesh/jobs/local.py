"""`LocalJob`: agents on this machine, over real TCP and TLS, for development and tests.

A template process imports the agent's modules once and forks the agents, so that only one interpreter starts.

    program --exec--> template: imports --fork--> agent --fork--> its spawner
       |                 |<---- streams of an agent, a socket for it
       |<-- pid, pidfd, then how it has ended

AF-1 A copy first takes a session and a process group of its own, and the standard input that is its lifeline; then it
     runs the same function as an executed agent.
AF-2 A copy starts with the state that an executed agent would inherit: if the program's environment, working directory,
     `sys.path` or interpreter has changed since the template started, the agent is executed instead.
AF-3 The template, as the parent, reports how an agent ended. If the template is killed, the system kills its copies.
AF-4 An agent is also executed if the template has ended; if the template could not start, the agent reports why.
AF-5 The template ends when the program has closed its end of the socket: at once if no copy is left, else when the last
     copy has ended, by its own lifeline.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, NoReturn

import attrs
import trio

from trimesh import limits
from trimesh._runtime.hosts import import_for_spawners, marked
from trimesh._runtime.system import close_others, host_name, set_parent_death_signal, set_process_name
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.launcher import AgentOrder, ChildAgent, Launcher, start_child

_BOOT: Final = "import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; from trimesh.jobs.agent import {0}; {0}()"


@attrs.frozen
class LocalJob(Job):
    """Hosts that are agents on this machine: `async with LocalJob(3) as hosts:`.

    They are connected to the controller and to each other as agents on other machines, by TCP on 127.0.0.1 and TLS.

    Attributes:
        hosts: Number of hosts, or a mapping of mesh names to numbers: `hosts["trainers"]` is a part of the mesh.
        apart: Whether their processes count as on different machines: buffers between them go over the network.
        spares: Number of further agents that can be started, each to replace a lost host; see `Restart`.
        env: Environment variables of the agents and their processes, over those of this program.
        pickle: "off" unpickles nothing in this program and its processes, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None makes certificates for this job.
        insecure: "I understand" turns TLS off: any machine in the network can read and change all traffic.
    """

    hosts: int | Mapping[str, int] = attrs.field(converter=checked_hosts)
    apart: bool = attrs.field(default=False, kw_only=True)
    spares: int = attrs.field(default=0, kw_only=True, validator=attrs.validators.ge(0))

    def launcher(self) -> LocalLauncher:
        """See `Job.launcher`."""
        return LocalLauncher(sum(self.parts.values()) + self.spares)

    @property
    def is_one_machine(self) -> bool:
        """See `Job.is_one_machine`."""
        return True

    def host_id(self, rank: int) -> str:
        """See `Job.host_id`."""
        return f"local{rank}" if self.apart else ""


class LocalLauncher(Launcher):
    """Starts agents as children of this process."""

    interface = "127.0.0.1"

    def __init__(self, count: int) -> None:
        self.hosts = ()
        self._add(count)
        self._template: AgentTemplate | None = None

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        if len(self.hosts) == 1:  # a template would save no time
            yield
            return
        self._template = AgentTemplate.start()
        try:
            yield
        finally:
            await self._template.close()

    def _add(self, count: int) -> Sequence[int]:
        ranks = range(len(self.hosts), len(self.hosts) + count)
        self.hosts = (*self.hosts, *(f"{host_name()}/{rank}" for rank in ranks))
        return ranks

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        del say
        await trio.lowlevel.checkpoint()
        return self._add(count)

    async def start(self, rank: int, order: AgentOrder) -> ChildAgent:
        agent = ChildAgent(await self._process_for(self.hosts[rank]))
        await agent.begin(order)
        return agent

    async def _process_for(self, host: str) -> trio.Process | TemplateChild:
        if self._template is not None and self._template.is_like_this:
            forked = await self._template.fork(host)
            if forked is not None:
                return forked
        return await start_child(agent_command(), host, marked(dict(os.environ)))


def agent_command(entry: str = "main") -> list[str]:
    """Return the command that starts an agent on this machine, with the interpreter and `sys.path` of this process.

    Args:
        entry: The function of `trimesh.jobs.agent` to run: `main` or `main_prepared`.
    """
    return interpreter_command(_BOOT.format(entry))


# ---- protocol of the program and the template ------------------------------------------------------------------------

# A request is one byte with three descriptors: standard input and error of the agent, and the socket of its replies.
# First reply: the agent's process id with a pidfd, from the copy once it leads its session; or why it could not be
# forked. Last reply: its exit code, from the template.

REQUEST: Final = b"\1"
REQUEST_FDS: Final = 3
NUMBER: Final = struct.Struct("<i")
TEXT_BYTES_MAX: Final = 1 << 12

LEFT_SECONDS: Final = limits.AGENT_LEASE_SECONDS + limits.KILL_SECONDS
"""Time in which an agent ends after its lifeline is closed, unless a signal has stopped it."""


# ---- the template's side ---------------------------------------------------------------------------------------------


def serve() -> NoReturn:
    """Fork an agent for each request, and report how each ended; exit this process when the program has left."""
    requests = socket.socket(fileno=os.dup(0))
    program = os.pidfd_open(os.getppid())
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    set_process_name("trimesh-agents")
    import_for_spawners()
    from trimesh.jobs.agent import main  # noqa: PLC0415 - `python -m` warns of a program that was imported before

    _Template(requests, program, main).run()
    os._exit(0)


class _Template:
    """The loop of the template, which is the parent of the copies; each copy runs `main`."""

    def __init__(self, requests: socket.socket, program: int, main: Callable[[], NoReturn]) -> None:
        self._requests = requests
        self._program = program
        self._main = main
        self._copies: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()
        self._end = math.inf

    def run(self) -> None:
        """Serve until the program has left and no copy is left; at most `LEFT_SECONDS` after the program has left."""
        for fd in (self._requests.fileno(), self._program):
            self._poll.register(fd, select.POLLIN)
        while self._copies or self._end == math.inf:
            left = self._end - time.monotonic()
            if left <= 0:
                return
            for fd, _ in self._poll.poll(None if left == math.inf else 1000 * left):
                if fd in self._copies:
                    self._reap(fd)
                elif fd == self._program or not self._take():
                    self._leave()

    def _leave(self) -> None:
        if self._end == math.inf:
            self._end = time.monotonic() + LEFT_SECONDS
            self._poll.unregister(self._requests)
            self._poll.unregister(self._program)

    def _take(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._requests, 1, REQUEST_FDS, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != REQUEST_FDS:  # the program has closed its end, or this process is out of descriptors
            for fd in fds:
                os.close(fd)
            return bool(data)
        told = socket.socket(fileno=fds[2])
        try:
            self._fork(fds[0], fds[1], told)
        except OSError as error:
            with suppress(OSError):
                told.send(str(error).encode()[:TEXT_BYTES_MAX])
            told.close()
        finally:
            os.close(fds[0])
            os.close(fds[1])
        return True

    def _fork(self, stdin: int, stderr: int, told: socket.socket) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _be_copy(stdin, stderr, told, parent)
                self._main()
            except BaseException:  # noqa: BLE001 - a copy must not go on as the template
                traceback.print_exc()
            finally:
                os._exit(1)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._copies[pidfd] = pid, told
        self._poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        pid, told = self._copies.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            told.send(NUMBER.pack(code))
        told.close()


def _be_copy(stdin: int, stderr: int, told: socket.socket, parent: int) -> None:
    os.setsid()
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(stdin, 0)
    os.dup2(stderr, 2)
    with suppress(OSError):  # the requester was cancelled: then the standard input is closed, too
        socket.send_fds(told, [NUMBER.pack(os.getpid())], [os.pidfd_open(os.getpid())])
    close_others({0, 1, 2})
    set_process_name("trimesh-agent")


# ---- the program's side of the template ------------------------------------------------------------------------------

BOOT: Final = "import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; from trimesh.jobs.local import serve; serve()"


def interpreter_command(program: str) -> list[str]:
    """Return the command that runs source text with the interpreter, options and `sys.path` of this process."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return [sys.executable, *flags, "-c", program, *sys.path]


def _surroundings() -> tuple[Any, ...]:
    """Return the state that a process executed now would inherit, and that this process may change later."""
    return dict(os.environ), os.getcwd(), list(sys.path), sys.executable


class AgentTemplate:
    """The program's handle on the template. Made by `start`; call `close` when its agents have ended."""

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._requests = requests
        self._lock = trio.Lock()
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._surroundings = _surroundings()

    @staticmethod
    def start() -> AgentTemplate:
        """Start the template; `fork` may be called at once.

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
            raise SpawnError(f"cannot start the template process that forks agents: {error}") from error
        return AgentTemplate(ours, process)

    @property
    def is_like_this(self) -> bool:
        """True if an agent executed now would inherit the same state as the copies (AF-2)."""
        return self._surroundings == _surroundings()

    async def fork(self, host: str) -> TemplateChild | None:
        """Fork an agent; return None if the template has ended. After a cancel, the agent ends by its closed lifeline.

        Args:
            host: Name of its host, for the error.

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
                text = f"it exited with {NUMBER.unpack(data)[0]}" if is_code else data.decode(errors="replace")
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
        """End and reap the template; agents that are left end by their lifelines, or are killed. Shielded, bounded."""
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
        """Exit code, -N for signal N; None until the agent was reaped."""
        if self._returncode is None:
            try:
                data = self._told.recv(NUMBER.size)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            self._returncode = NUMBER.unpack(data)[0] if data else -signal.SIGKILL  # AF-3
            if not data:
                self.send_signal(signal.SIGKILL)  # the system does that, too, but perhaps later
            trio.lowlevel.notify_closing(self._told)
            self._told.close()
            os.close(self._pidfd)
            self._pidfd = -1
        return self._returncode

    async def wait(self) -> int:
        """Wait until the agent was reaped, and return its exit code."""
        await trio.lowlevel.checkpoint()
        async with self._lock:
            while (code := self.returncode) is None:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._told)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal to the agent, if it still runs."""
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
