"""Agents on this machine: over real TCP and TLS, for development and tests."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Final

import attrs
import trio

from trimesh._runtime.hosts import marked
from trimesh._runtime.system import host_name
from trimesh.context_managers import asynccontextmanager
from trimesh.jobs.child_agent import ChildAgent, start_child
from trimesh.jobs.forked import AgentTemplate, TemplateChild, interpreter_command
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.launcher import AgentOrder, Launcher

_BOOT: Final = "import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; from trimesh.jobs.agent import {0}; {0}()"


@attrs.frozen
class LocalJob(Job):
    """Hosts that are agents on this machine: `async with LocalJob(3) as hosts:`.

    They talk to the controller and to each other as agents of other machines do, over TCP on 127.0.0.1 and TLS.

    Attributes:
        hosts: How many, or a mapping of mesh names to numbers: `hosts["trainers"]` is a part of the mesh.
        apart: Whether their processes count as on different machines: buffers between them go over the network.
        spares: How many more agents can be started, each in the place of a host that is lost; see `Restart`.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None lets the job make its own.
        insecure: "I understand" does without TLS: whoever is in the network reads all of it, and can change it.
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
        if len(self.hosts) == 1:  # nothing is gained
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
    """Return what starts an agent on this machine, with the interpreter and the paths of this process.

    Args:
        entry: The function of `trimesh.jobs.agent` that it is: `main` or `main_prepared`.
    """
    return interpreter_command(_BOOT.format(entry))
