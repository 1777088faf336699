"""Launchers: interface between a job and the program that starts its agents on hosts.

A job makes one launcher, which starts one agent a host. An agent is a program that reads one line, its *order*, from
standard input and ends when that is closed; nothing secret is ever in its arguments or its environment.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.system import signal_name
from trimesh.errors import SpawnError
from trimesh.jobs.pki import OwnPKI

if TYPE_CHECKING:
    from trimesh.jobs.local import TemplateChild


class AgentOrder(msgspec.Struct, frozen=True):
    """Order of an agent: one line on its standard input.

    Attributes:
        token: Join token; a secret.
        addresses: Where the controller listens, `host:port`, to be tried in order.
        host_id: Setting `host_id` of the processes there; "" leaves it to the machine.
        env: Environment variables that the agent sets, for itself and what it starts.
        is_one_machine: Whether all hosts of the job are this machine, so that agents may meet at a loopback address.
        pki: Certificates of the user's, whose files the agent reads; None joins for one of the mesh.
    """

    token: str
    addresses: tuple[str, ...]
    host_id: str = ""
    env: Mapping[str, str] = {}
    is_one_machine: bool = False
    pki: OwnPKI | None = None

    def __repr__(self) -> str:
        return f"AgentOrder({', '.join(self.addresses)}, token not shown)"

    @property
    def line(self) -> bytes:
        """The order as one line, with its newline."""
        return msgspec.json.encode(self) + b"\n"

    @staticmethod
    def parse(line: bytes) -> AgentOrder:
        """Read `line`. The error shows nothing of it.

        Raises:
            ValueError: It is none.
        """
        try:
            return msgspec.json.decode(line, type=AgentOrder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ValueError(f"an agent reads its order as one line, got {len(line)} bytes that are none") from None


class AgentExit(msgspec.Struct, frozen=True):
    """End of an agent.

    Attributes:
        text: In words: "exit code 3", "SIGKILL", or those of the scheduler.
        last_words: The last lines that it has written, or "".
        reason: See `HostLost.reason`.
    """

    text: str
    last_words: str = ""
    reason: str = "agent exit"


class StartedAgent(Protocol):
    """An agent that was started."""

    async def wait(self) -> AgentExit:
        """Wait until it has ended, or is not known to live any more, and return how. Called once."""
        ...

    async def stop(self) -> None:
        """End it, with what it has started, by force; return when nothing of it is left. Shielded, bounded."""


class Launcher(ABC):
    """Starts the agents of one run of a job. Opened once; the rest is used while it is open, from several tasks.

    A subclass sets `hosts` and `interface` and defines `open` and `start`. The rest has defaults: no queue, no further
    hosts, no time limit.

    Attributes:
        hosts: Names of the hosts, in the order of the job, then of spare ones; "" for one that reports its own.
        interface: Address at which the controller listens for them, a number; it is advertised, too.
        port: At which the controller listens; 0 lets the system choose.
        advertised: What agents dial, `host` or `host:port`, where that is another address than `interface`.
        starts_again: Whether `start` can be called again for a host whose agent has ended; else `grow` gets another
            one in its place.
    """

    hosts: Sequence[str]
    interface: str
    port: int = 0
    advertised: tuple[str, ...] = ()
    starts_again: bool = True

    @property
    def can_grow(self) -> bool:
        """True if it defines `grow`; else only spare hosts can be added."""
        return type(self).grow is not Launcher.grow

    def tell_by(self, say: Callable[[str], None]) -> None:
        """Receive, before it is opened, the function that shows what `open` waits for, each time anew."""
        del say

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[object]:
        """Get ready to start agents: find addresses, wait in a queue. Once left, nothing of it is left.

        Entering it may take for as long as a queue does; a cancel leaves nothing queued.

        Raises:
            SpawnError: It cannot; the message includes the scheduler's reason.
        """

    async def allocate(self, addresses: tuple[str, ...], say: Callable[[str], None]) -> None:
        """Get a place for each agent; called once, before the first `start`, after which `hosts` has their names.

        It may take for as long as a queue does. No token is out yet, so none becomes too old. What it has asked for
        ends with the block of `open`.

        Args:
            addresses: What agents will dial, in order.
            say: Shows the reason for waiting.

        Raises:
            SpawnError: No allocation was granted; the message includes the scheduler's reason.
        """
        del addresses, say
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def start(self, rank: int, order: AgentOrder) -> StartedAgent:
        """Start the agent of one host. A cancel leaves nothing of it. Called again where one was lost and has ended.

        Args:
            rank: The place of the host in `hosts`.
            order: For its standard input.

        Raises:
            SpawnError: It cannot be started; the message includes the scheduler's reason.
        """

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        """Get a place for more agents, and return their places in `hosts`, which has their names then.

        It may take for as long as a queue does; a cancel leaves nothing queued.

        Args:
            count: How many.
            say: Shows the reason for waiting.

        Raises:
            SpawnError: No more were granted; the message includes the scheduler's reason.
        """
        del say
        await trio.lowlevel.checkpoint()
        raise SpawnError(f"{count} more hosts cannot be had: {type(self).__name__} defines no grow()")

    async def give_back(self, ranks: Sequence[int]) -> None:
        """Give up what `grow` has got, and nothing runs on any more. Shielded, bounded."""
        del ranks
        await trio.lowlevel.checkpoint()

    async def replace(self, rank: int) -> None:
        """Get another machine at a place of `hosts`, if there is one, after the program has given up the host there.

        The agent that was there has ended. `hosts` has the name of the new machine afterwards.

        Raises:
            SpawnError: It cannot be had.
        """
        del rank
        await trio.lowlevel.checkpoint()

    async def wait_notice(self) -> str:
        """Wait until a time limit of the hosts is so near that a program is to save what it has; return why."""
        await trio.sleep_forever()

    async def wait_end(self, ahead: float = 0.0) -> str:
        """Wait until the block of the hosts has to be left now, to be left in order; return why, in words.

        Args:
            ahead: Seconds more that leaving it takes.
        """
        del ahead
        await trio.sleep_forever()


# ---- child agent -----------------------------------------------------------------------------------------------------

# An agent whose way there is a child process of this one: the agent itself, or a command that carries it elsewhere.

_READ_BYTES: Final = 1 << 16


class ChildAgent:
    """A process that is an agent, or carries one: its standard input is the lifeline; see `StartedAgent`.

    Attributes:
        pid: Of the child process.
        last_lines: That it has written to standard error.
    """

    def __init__(self, process: trio.Process | TemplateChild) -> None:
        self.pid = process.pid
        self.last_lines = deque[str](maxlen=limits.AGENT_LINES_KEPT)
        self._process = process
        self._rest = b""

    @property
    def has_ended(self) -> bool:
        """True if the child process has ended and was reaped."""
        return self._process.returncode is not None

    async def tell(self, order: AgentOrder) -> None:
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):  # it has ended: `wait` says how
            await self._process.stdin.send_all(order.line)

    async def begin(self, order: AgentOrder) -> None:
        """Write the order; a cancel ends the process."""
        try:
            await self.tell(order)
        except BaseException:
            await self.stop()
            raise

    async def read_until(self, is_last: Callable[[str], bool]) -> str | None:
        """Read standard error until a line is the last to be read, and return that; None where it ends before."""
        while data := await self._receive():
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest[-limits.AGENT_LINE_BYTES_MAX :]
            for number, line in enumerate(lines):
                text = line.decode(errors="replace").rstrip("\r")
                if is_last(text):
                    self.last_lines += [one.decode(errors="replace") for one in lines[number + 1 :]]
                    return text
                self.last_lines.append(text)
        if self._rest:
            self.last_lines.append(self._rest.decode(errors="replace"))
            self._rest = b""
        return None

    async def _receive(self) -> bytes | bytearray:
        assert self._process.stderr is not None
        try:
            return await self._process.stderr.receive_some(_READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def wait(self) -> AgentExit:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read_until, _is_never_last)
            code = await self._process.wait()
            nursery.cancel_scope.deadline = trio.current_time() + limits.AGENT_WORDS_SECONDS
        return await self.exit_of(code)

    async def exit_of(self, code: int) -> AgentExit:
        """Return what its exit code means, negative for a signal."""
        text = signal_name(-code) if code < 0 else f"exit code {code}"
        return AgentExit(text, "\n".join(self.last_lines))

    async def ended(self) -> None:
        """Wait until the child process has ended, and nothing else."""
        await self._process.wait()

    async def close_lifeline(self) -> None:
        """Close its standard input."""
        if self._process.stdin is not None:
            await self._process.stdin.aclose()

    async def end(self) -> None:
        """End it before it is killed, once its lifeline is closed; bounded by the caller. Nothing by default."""

    @trio.lowlevel.enable_ki_protection
    async def stop(self) -> None:
        process = self._process
        with trio.CancelScope(shield=True):
            if process.stdin is not None:
                await process.stdin.aclose()
            if process.returncode is None:
                with trio.move_on_after(limits.KILL_SECONDS):
                    await self.end()
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                with trio.move_on_after(limits.KILL_SECONDS):
                    await process.wait()
            if process.stderr is not None:
                await process.stderr.aclose()


class FarAgent(ChildAgent):
    """A command that carries an agent to another machine; the first that it says there is the number of its process.

    Args:
        process: Of the command.
        shell: What runs a line of shell there: arguments before that.
        env: Of the command; None for that of this process.

    Attributes:
        number: Of the agent, on its machine; None where it has never run.
    """

    def __init__(self, process: trio.Process, shell: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        super().__init__(process)
        self.number: int | None = None
        self._shell = shell
        self._env = env

    async def tell(self, order: AgentOrder) -> None:
        """Write the order, and wait until the agent runs there, or the command has ended."""
        await super().tell(order)
        line = await self.read_until(lambda text: agent_number(text) is not None)
        self.number = None if line is None else agent_number(line)

    async def end(self) -> None:
        """See `ChildAgent.end`: kill the agent by another command."""
        with trio.move_on_after(limits.SSH_END_SECONDS):
            await self.ended()
        if not self.has_ended and self.number is not None:
            kill, null = f"kill -s KILL {self.number}", subprocess.DEVNULL
            await trio.run_process(
                [*self._shell, kill], stdin=null, stdout=null, stderr=null, env=self._env, check=False
            )
            await self.ended()


def _is_never_last(_: str) -> bool:
    return False


async def start_child(
    command: Sequence[str], host: str, env: Mapping[str, str] | None = None, *, is_apart: bool = True
) -> trio.Process:
    """Start the command that carries the agent of a host, with pipes for standard input and error.

    `is_apart` gives it a session, and a process group, of its own.

    Raises:
        SpawnError: It cannot be started.
    """
    try:
        return await trio.lowlevel.open_process(
            list(command), stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=is_apart, env=env
        )
    except OSError as error:
        raise SpawnError(f"cannot start the agent of {host}: {error}") from error


# ---- the command line of an agent on another machine, for the shell of whoever has an account there ------------------

# A login shell may be sh, csh or fish: the command is one line, quoted by single quotes, with no quote, backslash or
# `!` inside the quotes, and hands over to sh at once.

NO_PYTHON: Final = 78
"""Exit code where no Python is found that could be an agent (EX_CONFIG)."""

_NUMBER: Final = re.compile(r"trimesh-agent (\d+)\s*")
_RUN: Final = 'exec "$p" -m trimesh.jobs.agent'
_SAY: Final = 'echo "trimesh-agent $$" >&2'
_FIND: Final = (
    'for n in "$@"; do p=$(command -v "$n") || { t="$t; $n is not there"; continue; }; '
    f'if w=$("$p" -c "$0" 2>&1); then {_SAY}; {_RUN}; fi; t="$t; $n: $w"; done; '
    f'echo "no Python here can be an agent$t" >&2; exit {NO_PYTHON}'
)
_CHECK: Final = (
    "import sys, importlib.util as u; v = sys.version_info[:2]; "
    'sys.exit("it is Python %d.%d" % v if v != ({major}, {minor}) else '
    'None if u.find_spec("trimesh") else "it has no trimesh")'
)


def agent_command(python: str | None, executable: str, version: tuple[int, int]) -> str:
    """Return a shell line that writes its process id and starts an agent.

    Args:
        python: The interpreter; None takes the first of some that has trimesh and the version of this program.
        executable: The interpreter of this program: the first one that is tried.
        version: Of this program, its first two numbers.
    """
    if python is not None:
        return f"exec /bin/sh -c {shlex.quote(f'p=$0; {_SAY}; {_RUN}')} {shlex.quote(python)}"
    major, minor = version
    # `!` is the history of csh, so `!=` is written by its other name.
    check = _CHECK.format(major=major, minor=minor).replace("v != (", "not v == (")
    names = dict.fromkeys((executable, f"python{major}.{minor}", "python3", "python"))
    words = " ".join(shlex.quote(name) for name in names if name)
    return f"exec /bin/sh -c {shlex.quote(_FIND)} {shlex.quote(check)} {words}"


def agent_number(line: str) -> int | None:
    """Return the process id that a line says, or None."""
    found = _NUMBER.fullmatch(line)
    return None if found is None else int(found[1])
