"""Agents on this machine: over real TCP and TLS, for development and tests."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs

from trimesh.jobs.child_agent import ChildAgent, start_child
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.launcher import AgentOrder

_BOOT: Final = "import sys; sys.path[:] = sys.argv[1:]; from trimesh.jobs.agent import main; main()"


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

    async def start(self, rank: int, order: AgentOrder) -> ChildAgent:
        """See `Launcher.start`."""
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
        command: list[str] = [sys.executable, *flags, "-c", _BOOT, *sys.path]
        agent = ChildAgent(await start_child(command, self.hosts[rank]))
        try:
            await agent.tell(order)
        except BaseException:
            await agent.stop()
            raise
        return agent
