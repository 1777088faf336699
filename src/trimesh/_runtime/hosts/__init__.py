"""Hosts that agents serve: the agent's side, the controller's side, and what goes between the two."""

from trimesh._runtime.hosts.agent import HostAgent, open_agent
from trimesh._runtime.hosts.family_hosts import HostSessions, open_hosts_proc, own_hosts
from trimesh._runtime.hosts.host_group import ManyHosts
from trimesh._runtime.hosts.remote_host import RemoteHost, open_remote_host
from trimesh._runtime.hosts.session_pipe import SessionPipe

__all__ = [
    "HostAgent",
    "HostSessions",
    "ManyHosts",
    "RemoteHost",
    "SessionPipe",
    "open_agent",
    "open_hosts_proc",
    "open_remote_host",
    "own_hosts",
]
