"""The program's side of `HostMesh.shell`: a terminal of this machine as that of a shell on a host."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from trimesh import limits
from trimesh._runtime.channels import Port, Receiver
from trimesh.actor.channel import open_channel
from trimesh.actor.host_mesh import HostMesh
from trimesh.jobs.on_hosts.running import checked_command, checked_variables
from trimesh.jobs.on_hosts.shell_runner import ShellRunner, Size

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
        raise ValueError(f"a terminal is that of one host, got {len(hosts)}: write hosts.slice(hosts=0).shell()")
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
        except Exception as error:  # noqa: BLE001 - raised below, as the blocks of meshes would wrap it
            outcome = error
    if isinstance(outcome, Exception):
        try:
            raise outcome
        finally:
            del outcome
    return outcome


class Screen:
    """A terminal of this machine, whose keys come one by one."""

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
    """Open a terminal anew, so that what is said of it is not said of the standard input of others."""
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
            "shell() needs a terminal, and standard input is none: write terminal= for another one, or run a command "
            "by `await hosts.run([...])`"
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
    if threading.current_thread() is not threading.main_thread():  # no signal comes here: the size stays as it is
        return
    with trio.open_signal_receiver(signal.SIGWINCH) as signals:
        async for _ in signals:
            await runner.resize.call_one(screen.size)
