"""Agents on this machine: over real TCP and TLS, for development and tests."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trimesh import limits
from trimesh._runtime.system import signal_name
from trimesh.errors import SpawnError
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.launcher import AgentExit, AgentOrder

_BOOT: Final = "import sys; sys.path[:] = sys.argv[1:]; from trimesh.jobs.agent import main; main()"
_LAST_LINES: Final = 20
_READ_BYTES: Final = 1 << 16


@attrs.frozen
class LocalJob(Job):
    """Hosts that are agents on this machine: `async with LocalJob(3) as hosts:`.

    They talk to the controller and to each other as agents of other machines do, over TCP on 127.0.0.1 and TLS.

    Attributes:
        hosts: How many, or a mapping of mesh names to numbers: `hosts["trainers"]` is a part of the mesh.
        apart: Whether their processes count as on different machines: buffers between them go over the network.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes the setting.
    """

    hosts: int | Mapping[str, int] = attrs.field(converter=checked_hosts)
    apart: bool = attrs.field(default=False, kw_only=True)

    def launcher(self) -> LocalLauncher:
        """See `Job.launcher`."""
        return LocalLauncher(sum(self.parts.values()))

    def host_id(self, rank: int) -> str:
        """See `Job.host_id`."""
        return f"local{rank}" if self.apart else ""


class LocalLauncher:
    """Starts agents as children of this process; see `Launcher`."""

    interface = "127.0.0.1"

    def __init__(self, count: int) -> None:
        self.hosts: Sequence[str] = [f"{socket.gethostname()}/{rank}" for rank in range(count)]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """See `Launcher.open`."""
        yield

    async def start(self, rank: int, order: AgentOrder) -> LocalAgent:
        """See `Launcher.start`."""
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
        command: list[str] = [sys.executable, *flags, "-c", _BOOT, *sys.path]
        try:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SpawnError(f"cannot start the agent of {self.hosts[rank]}: {error}") from error
        agent = LocalAgent(process)
        try:
            await agent.tell(order)
        except BaseException:
            await agent.stop()
            raise
        return agent


class LocalAgent:
    """A child process that is an agent; see `StartedAgent`."""

    def __init__(self, process: trio.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._last_lines = deque[str](maxlen=_LAST_LINES)

    async def tell(self, order: AgentOrder) -> None:
        """Write the order."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(order.line)
        except trio.BrokenResourceError:  # it has ended: `wait` says how
            return

    async def wait(self) -> AgentExit:
        """See `StartedAgent.wait`."""
        assert self._process.stderr is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_errors)
            code = await self._process.wait()
            nursery.cancel_scope.deadline = trio.current_time() + limits.OUTPUT_FLUSH_SECONDS
        text = signal_name(-code) if code < 0 else f"exit code {code}"
        return AgentExit(text, "\n".join(self._last_lines))

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        try:
            while data := await self._process.stderr.receive_some(_READ_BYTES):
                self._last_lines.extend(data.decode(errors="replace").splitlines())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    @trio.lowlevel.enable_ki_protection
    async def stop(self) -> None:
        """See `StartedAgent.stop`."""
        process = self._process
        with trio.CancelScope(shield=True):
            if process.stdin is not None:
                await process.stdin.aclose()
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                with trio.move_on_after(limits.KILL_SECONDS):
                    await process.wait()
            if process.stderr is not None:
                await process.stderr.aclose()
