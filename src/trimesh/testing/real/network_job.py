"""Job with hosts in network namespaces, whose network a test can disturb."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trimesh import limits
from trimesh._runtime.hosts import marked
from trimesh.jobs.job import Job
from trimesh.jobs.launcher import AgentExit, AgentOrder, ChildAgent, Launcher, start_child
from trimesh.jobs.local import agent_command
from trimesh.testing.real.host_network import CONTROLLER, HostNetwork


@attrs.frozen
class NetworkJob(Job):
    """All hosts of a network: agents like those of a `LocalJob`, each in its own namespace.

    Attributes:
        hosts: Number of hosts.
        network: Their network.
        direct: Setting `direct` of the agents.
        agents: Latest agent of each host, by rank.
    """

    network: HostNetwork = attrs.field(repr=False)
    direct: str = attrs.field(default="", kw_only=True)
    hosts: int = attrs.field(init=False, default=attrs.Factory(lambda self: len(self.network), takes_self=True))
    agents: dict[int, NetworkAgent] = attrs.field(factory=dict[int, Any], init=False, repr=False, eq=False, hash=False)

    @property
    def agent_env(self) -> Mapping[str, str]:
        """See `Job.agent_env`."""
        return {**self.env, **({"TRIMESH_DIRECT": self.direct} if self.direct else {})}

    def launcher(self) -> NetworkLauncher:
        """See `Job.launcher`."""
        return NetworkLauncher(self)

    def kill_agent(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the agent of a host, if it runs."""
        agent = self.agents.get(rank)
        if agent is not None and not agent.has_ended:
            os.kill(agent.pid, signum)

    def host_id(self, rank: int) -> str:
        """See `Job.host_id`: buffers treat the hosts as different machines."""
        return f"net{rank}"


class NetworkLauncher(Launcher):
    """Starts agents in the namespaces of a network."""

    def __init__(self, job: NetworkJob) -> None:
        self.hosts = [f"net/{rank}" for rank in range(job.hosts)]
        self.interface = job.network.address(CONTROLLER)
        self._job = job

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        yield

    async def start(self, rank: int, order: AgentOrder) -> NetworkAgent:
        network = self._job.network
        command = [*network.namespace(rank).prefix, *agent_command()]
        agent = NetworkAgent(await start_child(command, self.hosts[rank], marked(dict(os.environ))), network, rank)
        self._job.agents[rank] = agent
        await agent.begin(order)
        return agent


class NetworkAgent(ChildAgent):
    """An agent that its launcher reaches only by the network, as by ssh: while its host is cut off nothing is reported.

    Attributes:
        exit_code: Exit code if it ended before it was stopped, negative for a signal; else None.
    """

    def __init__(self, process: trio.Process, network: HostNetwork, rank: int) -> None:
        super().__init__(process)
        self.exit_code: int | None = None
        self._network = network
        self._rank = rank

    async def exit_of(self, code: int) -> AgentExit:
        await self._network.wait_uncut(self._rank)
        return await super().exit_of(code)

    async def stop(self) -> None:
        """Stop it; an agent that is cut off is left to its lease first. See `StartedAgent.stop`."""
        with trio.CancelScope(shield=True):
            if self._network.is_cut(self._rank):
                with trio.move_on_after(limits.AGENT_LEASE_SECONDS + limits.KILL_SECONDS):
                    await self.ended()
            if self.has_ended:
                self.exit_code = self._process.returncode
            await super().stop()
