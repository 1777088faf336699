"""Hosts served by agents: the agent, the controller's side, and the protocol between the two."""

from trimesh._runtime.hosts.agent import AgentEnd, HostAgent, open_agent
from trimesh._runtime.hosts.host_group import (
    HostSessions,
    JobHost,
    JobPlace,
    ManyHosts,
    Successors,
    open_hosts_proc,
    own_hosts,
)
from trimesh._runtime.hosts.neighbours import Connected, Neighbours
from trimesh._runtime.hosts.remote_host import AgentTable, RemoteHost, SessionPipe, open_remote_host
from trimesh._runtime.spawner.spawner_process import (
    SpawnerProcess,
    can_fork_spawners,
    fork_spawner,
    import_for_spawners,
    marked,
)

__all__ = [
    "AgentEnd",
    "AgentTable",
    "Connected",
    "HostAgent",
    "HostSessions",
    "JobHost",
    "JobPlace",
    "ManyHosts",
    "Neighbours",
    "RemoteHost",
    "SessionPipe",
    "SpawnerProcess",
    "Successors",
    "can_fork_spawners",
    "fork_spawner",
    "import_for_spawners",
    "marked",
    "open_agent",
    "open_hosts_proc",
    "open_remote_host",
    "own_hosts",
]
