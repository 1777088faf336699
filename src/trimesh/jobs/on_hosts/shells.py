"""`HostMesh.shell`: connects a local terminal to a shell on a host.

    keys --port--> terminal --> shell, leader of a session --> its output --> terminal --port--> the program

SR-1 The terminal closes with this process, which hangs up (SIGHUP) everything on it; a process that survives this is
     killed at the end of this process, by the mark in its environment.
SR-2 All output of the shell is sent before its exit code is reported.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import signal
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._runtime.channels import Port, Receiver
from trimesh.actor.actor import Actor
from trimesh.actor.channel import open_channel
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import HostMesh
from trimesh.jobs.on_hosts.commands import checked_command, checked_variables, host_environment

_FALLBACK: Size = (24, 80)


async def shell(
    hosts: HostMesh,
    command: Sequence[str | os.PathLike[str]] | None,
    *,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    terminal: str | os.PathLike[str] | None,
) -> int:
    """Run a shell on a host; see `HostMesh.shell`."""
    if len(hosts) != 1:
        raise ValueError(f"shell() needs one host, got {len(hosts)}: write hosts.slice(hosts=0).shell()")
    words = None if command is None else checked_command(command)
    variables = {"TERM": os.environ.get("TERM", "xterm"), **checked_variables(env)}
    place = None if cwd is None else os.fspath(cwd)
    outcome: int | Exception
    async with (
        _open_terminal(terminal) as screen,
        hosts.spawn_procs({}, name="shell") as procs,
        procs.spawn("shell", ShellRunner) as runner,
        open_channel(bytes, capacity=limits.FORWARD_CHUNKS) as (port, receiver),
    ):
        try:
            keys = await runner.start.call_one(words, variables, place, screen.size, port)
            port.close()
            outcome = await _joined(screen, runner, keys, receiver)
        except Exception as error:  # noqa: BLE001 - raised below: the blocks of meshes would wrap it
            outcome = error
    if isinstance(outcome, Exception):
        try:
            raise outcome
        finally:
            del outcome
    return outcome


class Screen:
    """A terminal of this machine in raw mode: each key is read as it is pressed."""

    def __init__(self, fd: int) -> None:
        self.stream = trio.lowlevel.FdStream(fd)
        self._fd = fd

    @property
    def size(self) -> Size:
        """Rows and columns."""
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            return _FALLBACK
        return (rows, columns) if rows and columns else _FALLBACK


@asynccontextmanager
async def _open_terminal(given: str | os.PathLike[str] | None) -> AsyncGenerator[Screen, None]:
    """Open a terminal anew: O_NONBLOCK set on standard input itself would affect other processes that share it."""
    fd = os.open(_name_of(given), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    screen = Screen(fd)
    async with screen.stream:
        before = termios.tcgetattr(fd)
        tty.setraw(fd, termios.TCSANOW)
        try:
            yield screen
        finally:
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _name_of(given: str | os.PathLike[str] | None) -> str:
    if given is not None:
        return os.fspath(given)
    try:
        return os.ttyname(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        raise ValueError(
            "shell() needs a terminal, and standard input is not one: pass terminal=, or run a command by "
            "`await hosts.run([...])`"
        ) from None


async def _joined(screen: Screen, runner: ShellRunner, keys: Port[bytes], receiver: Receiver[bytes]) -> int:
    """Carry keys and output until the shell has ended; return its exit code."""
    codes = list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_type, screen, keys)
        nursery.start_soon(_follow_size, screen, runner)
        async for data in receiver:
            await screen.stream.send_all(data)
        codes.append(await runner.wait.call_one())
        nursery.cancel_scope.cancel(reason="the shell has ended")
    return codes[0]


async def _type(screen: Screen, keys: Port[bytes]) -> None:
    async with keys:
        while data := await screen.stream.receive_some(limits.FORWARD_CHUNK_BYTES):
            await keys.send(bytes(data))


async def _follow_size(screen: Screen, runner: Any) -> None:
    if threading.current_thread() is not threading.main_thread():  # no signals arrive here: the size stays as it is
        return
    with trio.open_signal_receiver(signal.SIGWINCH) as signals:
        async for _ in signals:
            await runner.resize.call_one(screen.size)


# ---- the host's side of `HostMesh.shell`: the actor with the shell and its terminal ----------------------------------

_ON_TERMINAL: Final = 'exec "$@" <"$0" >"$0" 2>&1'
"""The first terminal that the leader of a session opens becomes that of the session."""

Size = tuple[int, int]
"""Rows and columns of a terminal."""


class ShellRunner(Actor):
    """Runs a shell on its host."""

    def __init__(self) -> None:
        self._ended = trio.Event()
        self._shown = trio.Event()
        self._patience = trio.CancelScope()
        self._code = 0

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Open a terminal, and hang up the processes left on it at the end."""
        self._terminal, self._shell_side = os.openpty()
        try:
            async with trio.open_nursery() as self._nursery:
                yield
                self._nursery.cancel_scope.cancel(reason="the shell is left")
        finally:
            os.close(self._terminal)
            self._close_shell_side()

    @endpoint(group="start")
    async def start(
        self, command: list[str] | None, env: dict[str, str], cwd: str | None, size: Size, output: Port[bytes]
    ) -> Port[bytes]:
        """Start the shell, and return the port for the user's keys.

        Args:
            command: Program and arguments; None for the shell of this user.
            env: Variables set over those of the host.
            cwd: Working directory; None for the home of this user.
            size: Rows and columns of the terminal.
            output: Receives the output of the shell.

        Raises:
            OSError: The shell could not be started.
        """
        self._resize(size)
        user = pwd.getpwuid(os.getuid())
        words = command or [os.environ.get("SHELL") or user.pw_shell or "/bin/sh"]
        home = user.pw_dir if await trio.Path(user.pw_dir).is_dir() else None
        process = await trio.lowlevel.open_process(
            ["sh", "-c", _ON_TERMINAL, os.ttyname(self._shell_side), *words],
            env={**host_environment(), **env},
            cwd=cwd or home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        keys: Port[bytes] = await self._nursery.start(partial(self._run, process, output))
        return keys

    @endpoint(group="resize")
    async def resize(self, size: Size) -> None:
        """Change the size of the terminal; programs on it get SIGWINCH."""
        self._resize(size)

    @endpoint(group="wait")
    async def wait(self) -> int:
        """Wait for the end of the shell, and return its exit code; -N if signal N ended it."""
        await self._ended.wait()
        return self._code

    def _resize(self, size: Size) -> None:
        rows, columns = (min(max(one, 1), limits.TERMINAL_CELLS_MAX) for one in size)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def _run(
        self, process: trio.Process, output: Port[bytes], *, task_status: trio.TaskStatus[Port[bytes]]
    ) -> None:
        terminal = trio.lowlevel.FdStream(os.dup(self._terminal))
        try:
            async with terminal, open_channel(bytes, capacity=limits.FORWARD_CHUNKS) as (port, receiver):
                task_status.started(port.clone())
                port.close()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_type_keys, receiver, terminal)
                    nursery.start_soon(self._show, terminal, output)
                    self._code = await process.wait()
                    self._ended.set()
                    self._close_shell_side()  # so reading ends when no other process has the terminal
                    with trio.move_on_after(limits.TERMINAL_SILENCE_SECONDS) as self._patience:
                        await self._shown.wait()
                    nursery.cancel_scope.cancel(reason="the shell has ended")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGHUP)
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
            output.close()

    async def _show(self, terminal: trio.lowlevel.FdStream, output: Port[bytes]) -> None:
        """Send output until no process has the terminal, or the shell has ended and other processes write nothing."""
        with suppress(trio.BrokenResourceError):  # the end of a terminal reads as EIO
            while data := await terminal.receive_some(limits.FORWARD_CHUNK_BYTES):
                self._patience.deadline = trio.current_time() + limits.TERMINAL_SILENCE_SECONDS
                with trio.CancelScope(shield=True):  # a cancel would lose the output that was read
                    await output.send(bytes(data))
        self._shown.set()

    def _close_shell_side(self) -> None:
        if self._shell_side >= 0:
            os.close(self._shell_side)
            self._shell_side = -1


async def _type_keys(keys: Receiver[bytes], terminal: trio.lowlevel.FdStream) -> None:
    async for data in keys:
        await terminal.send_all(data)
