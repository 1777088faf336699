"""An agent whose way there is a child process of this one: the agent itself, or a command that carries it elsewhere."""

from __future__ import annotations

import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from trimesh import limits
from trimesh._runtime.system import signal_name
from trimesh.errors import SpawnError
from trimesh.jobs.launcher import AgentExit, AgentOrder
from trimesh.jobs.remote_python import agent_number

if TYPE_CHECKING:
    from trimesh.jobs.forked import TemplateChild

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
        """Whether the child process has ended and was reaped."""
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
    """Start what carries the agent of a host, with pipes for standard input and error.

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
