"""Launchers: interface between a job and the program that starts its agents on hosts.

A job makes one launcher, which starts one agent per host. An agent is a program that reads one line, its *order*, from
standard input and ends when that is closed; its arguments and environment never contain a secret.
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
        addresses: Addresses of the controller, `host:port`, to be dialled in order.
        host_id: Setting `host_id` of the processes there; "" takes that of the machine.
        env: Environment variables that the agent sets for itself and its processes.
        is_one_machine: Whether all hosts of the job are this machine, so that agents may meet at a loopback address.
        pki: Files with the user's certificates, which the agent reads; None takes a certificate of the mesh.
        is_patient: Whether it dials again, for `limits.HOST_REACH_SECONDS`, if no process listens at the
            addresses.
    """

    token: str
    addresses: tuple[str, ...]
    host_id: str = ""
    env: Mapping[str, str] = {}
    is_one_machine: bool = False
    pki: OwnPKI | None = None
    is_patient: bool = False

    def __repr__(self) -> str:
        return f"AgentOrder({', '.join(self.addresses)}, token not shown)"

    @property
    def line(self) -> bytes:
        """The order as one line, with its newline."""
        return msgspec.json.encode(self) + b"\n"

    @staticmethod
    def parse(line: bytes) -> AgentOrder:
        """Parse `line`. The error contains nothing of it, as it is secret.

        Raises:
            ValueError: It is no order.
        """
        try:
            return msgspec.json.decode(line, type=AgentOrder)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ValueError(
                f"standard input of an agent must begin with its order, one line, got {len(line)} other bytes: start "
                "it by a job, or by `trimesh host join`"
            ) from None


class AgentExit(msgspec.Struct, frozen=True):
    """End of an agent.

    Attributes:
        text: Description: "exit code 3", "SIGKILL", or the scheduler's.
        last_words: The last lines that it wrote, or "".
        reason: See `HostLost.reason`.
    """

    text: str
    last_words: str = ""
    reason: str = "agent exit"


class StartedAgent(Protocol):
    """An agent that was started."""

    async def wait(self) -> AgentExit:
        """Wait until the agent has ended, or is no longer known to live; return how it ended. Called once."""
        ...

    async def stop(self) -> None:
        """Kill the agent and its processes; return when nothing of it is left. Shielded, bounded."""


class Launcher(ABC):
    """Starts the agents of one run of a job. Opened once; its other methods are called while it is open, from any task.

    A subclass sets `hosts` and `interface` and defines `open` and `start`. The rest has defaults: no queue, no further
    hosts, no time limit.

    Attributes:
        hosts: Names of the hosts, in the order of the job, then of spare ones; "" for one that reports its own.
        interface: IP address at which the controller listens for the hosts, and which they dial unless `advertised`.
        port: Port at which the controller listens; 0 lets the system choose.
        advertised: Addresses that agents dial instead of `interface`, `host` or `host:port`.
        starts_again: Whether `start` can be called again for a host whose agent has ended; otherwise `grow` gets
            another host.
    """

    hosts: Sequence[str]
    interface: str
    port: int = 0
    advertised: tuple[str, ...] = ()
    starts_again: bool = True

    @property
    def can_grow(self) -> bool:
        """True if it defines `grow`; otherwise only spare hosts can be added."""
        return type(self).grow is not Launcher.grow

    def tell_by(self, say: Callable[[str], None]) -> None:
        """Store `say`, which shows what `open` waits for; each call replaces the text. Called before `open`."""
        del say

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[object]:
        """Prepare to start agents: find addresses, wait in a queue. When the block is left, nothing remains.

        Entering may take as long as a queue does; a cancel leaves nothing queued.

        Raises:
            SpawnError: It cannot start agents; the message includes the scheduler's reason.
        """

    async def allocate(self, addresses: tuple[str, ...], say: Callable[[str], None]) -> None:
        """Allocate a host for each agent; called once, before the first `start`. Afterwards `hosts` has all names.

        It may take as long as a queue does: no token is issued yet, so none expires. The allocation ends with the block
        of `open`.

        Args:
            addresses: Addresses that agents will dial, in order.
            say: Shows the reason for waiting.

        Raises:
            SpawnError: No allocation was granted; the message includes the scheduler's reason.
        """
        del addresses, say
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def start(self, rank: int, order: AgentOrder) -> StartedAgent:
        """Start the agent of one host. A cancel leaves nothing of it. Called again after a lost agent has ended.

        Args:
            rank: Index of the host in `hosts`.
            order: Order for its standard input.

        Raises:
            SpawnError: It cannot be started; the message includes the scheduler's reason.
        """

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        """Allocate hosts for more agents, add their names to `hosts`, and return their indices there.

        It may take as long as a queue does; a cancel leaves nothing queued.

        Args:
            count: Number of further hosts.
            say: Shows the reason for waiting.

        Raises:
            SpawnError: No more were granted; the message includes the scheduler's reason.
        """
        del say
        await trio.lowlevel.checkpoint()
        raise SpawnError(f"cannot add {count} hosts: {type(self).__name__} defines no grow()")

    async def give_back(self, ranks: Sequence[int]) -> None:
        """Release hosts that `grow` allocated and on which nothing runs any more. Shielded, bounded."""
        del ranks
        await trio.lowlevel.checkpoint()

    async def replace(self, rank: int) -> None:
        """Put another machine at an index of `hosts`, if there is one, after the program has given up the host there.

        Its agent has ended before. Afterwards `hosts` has the name of the new machine.

        Raises:
            SpawnError: The machine could not be replaced.
        """
        del rank
        await trio.lowlevel.checkpoint()

    async def wait_notice(self) -> str:
        """Wait until a time limit of the hosts is so near that a program should save its work; return the reason."""
        await trio.sleep_forever()

    async def wait_end(self, ahead: float = 0.0) -> str:
        """Wait until the block of the hosts must be left for its clean-up to finish in time; return the reason.

        Args:
            ahead: Seconds that leaving takes beyond the block's grace.
        """
        del ahead
        await trio.sleep_forever()


# ---- child agent -----------------------------------------------------------------------------------------------------

_READ_BYTES: Final = 1 << 16


class ChildAgent:
    """A child process that is an agent, or a command that carries one; its standard input is the agent's lifeline.

    See `StartedAgent`.

    Attributes:
        pid: Process id of the child.
        last_lines: The last lines of its standard error.
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
        """Read standard error until `is_last` accepts a line, and return that line; None if the stream ends before."""
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
        """Return the end of the agent for an exit code, -N for signal N."""
        text = signal_name(-code) if code < 0 else f"exit code {code}"
        return AgentExit(text, "\n".join(self.last_lines))

    async def ended(self) -> None:
        """Wait only until the child process has ended."""
        await self._process.wait()

    async def close_lifeline(self) -> None:
        """Close its standard input."""
        if self._process.stdin is not None:
            await self._process.stdin.aclose()

    async def end(self) -> None:
        """Subclass hook: end the agent after its lifeline was closed, before it is killed. The caller bounds it."""

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
    """A command that carries an agent to another machine, where the agent first writes its process id.

    Args:
        process: Process of the command.
        shell: Arguments that precede a shell line to run it on that machine.
        env: Environment of the command; None for that of this process.
        run: Makes of such arguments the command that runs them, if that is on another machine.

    Attributes:
        number: Process id of the agent on its machine; None if it never ran.
    """

    def __init__(
        self,
        process: trio.Process,
        shell: Sequence[str],
        env: Mapping[str, str] | None = None,
        run: Callable[[Sequence[str]], Sequence[str]] = tuple,
    ) -> None:
        super().__init__(process)
        self._run = run
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
                self._run([*self._shell, kill]), stdin=null, stdout=null, stderr=null, env=self._env, check=False
            )
            await self.ended()


def _is_never_last(_: str) -> bool:
    return False


async def start_child(
    command: Sequence[str], host: str, env: Mapping[str, str] | None = None, *, is_apart: bool = True
) -> trio.Process:
    """Start the command that carries the agent of a host, with pipes for standard input and error.

    `is_apart` gives it a session and a process group of its own.

    Raises:
        SpawnError: It cannot be started.
    """
    try:
        return await trio.lowlevel.open_process(
            list(command), stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=is_apart, env=env
        )
    except OSError as error:
        raise SpawnError(f"cannot start the agent of {host}: {error}") from error


# ---- the command line of an agent on another machine, for any login shell there --------------------------------------

# A login shell may be sh, csh or fish: the command is one line, quoted by single quotes, with no quote, backslash or
# `!` inside the quotes, and hands over to sh at once.

NO_PYTHON: Final = 78
"""Exit code if no Python there can run an agent (EX_CONFIG)."""

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
        python: The interpreter; None takes the first of a few names that has trimesh and the version of this program.
        executable: Path of this program's interpreter, which is tried first.
        version: Major and minor version of this program's Python.
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
    """Return the process id in a line that an agent's shell wrote, or None."""
    found = _NUMBER.fullmatch(line)
    return None if found is None else int(found[1])
