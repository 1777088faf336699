"""Hosts that agents serve: the agent's side, the controller's side, and what goes between the two."""

from trimesh._runtime.hosts.agent import AgentEnd, HostAgent, open_agent
from trimesh._runtime.hosts.agent_table import AgentTable
from trimesh._runtime.hosts.family_hosts import HostSessions, open_hosts_proc, own_hosts
from trimesh._runtime.hosts.host_group import ManyHosts
from trimesh._runtime.hosts.job_host import JobHost
from trimesh._runtime.hosts.job_place import JobPlace, Successors
from trimesh._runtime.hosts.neighbours import Connected, Neighbours
from trimesh._runtime.hosts.remote_host import RemoteHost, open_remote_host
from trimesh._runtime.hosts.session_pipe import SessionPipe
from trimesh._runtime.spawner.forking import can_fork_spawners, fork_spawner, import_for_spawners, marked
from trimesh._runtime.spawner.process import SpawnerProcess

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
