"""Agents on other machines, started by the ssh command of the system, as its user has configured it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import attrs
import trio

from trimesh import limits
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import address_of, address_towards
from trimesh.jobs.job import Job
from trimesh.jobs.launcher import NO_PYTHON, AgentExit, AgentOrder, FarAgent, Launcher, agent_command, start_child

_ALWAYS: Final = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
    *("-o", f"ConnectTimeout={limits.SSH_CONNECT_SECONDS}"),
)
_DIRECT: Final = ("", "none")


def checked_names(hosts: Any) -> tuple[str, ...] | Mapping[str, tuple[str, ...]]:
    """Return what an `SSHJob` is made from: names of hosts, or lists of them by the names of meshes.

    Raises:
        TypeError, ValueError: It is neither, or a name is none that ssh takes.
    """
    if isinstance(hosts, str) or not isinstance(hosts, Mapping | Sequence):
        raise TypeError(
            f"an SSHJob takes a list of host names, or a mapping of mesh names to such lists, got {hosts!r}"
        )
    parts: dict[Any, Any] = {**hosts} if isinstance(hosts, Mapping) else {"hosts": hosts}
    for mesh, names in parts.items():
        if not isinstance(mesh, str) or isinstance(names, str) or not isinstance(names, Sequence) or not names:
            raise ValueError(f"each mesh of hosts has a name and a list of host names, got {mesh!r}: {names!r}")
        for name in cast("Sequence[object]", names):
            if not isinstance(name, str) or not name or name.startswith("-") or set(name) & set(" \t\n'\"\\"):
                raise ValueError(
                    f"the name of a host is what `ssh NAME` takes: host, user@host or an alias; got {name!r}"
                )
    count = sum(map(len, parts.values()))
    if not 1 <= count <= limits.JOB_HOSTS_MAX:
        raise ValueError(f"a job has 1 to limits.JOB_HOSTS_MAX ({limits.JOB_HOSTS_MAX}) hosts, got {count}")
    if isinstance(hosts, Mapping):
        return {mesh: tuple(names) for mesh, names in parts.items()}
    return tuple(parts["hosts"])


def checked_spares(spares: Any) -> tuple[str, ...]:
    """Return names of spare hosts.

    Raises:
        TypeError, ValueError: It is no list of names that ssh takes.
    """
    if isinstance(spares, str) or not isinstance(spares, Sequence):
        raise TypeError(f"spares= is a list of host names, got {spares!r}")
    return cast("tuple[str, ...]", checked_names(spares)) if spares else ()


@attrs.frozen
class SSHJob(Job):
    """Hosts that are reached by ssh: `async with SSHJob(["n1", "n2"]) as hosts:`.

    Agents are started by the `ssh` of this machine: aliases, keys, jump hosts and whatever else its configuration says
    hold. A connection that is shared already (ControlMaster) is used. Nothing is typed, so each host has to be known
    and to take a key. Agents end with the connection.

    Attributes:
        hosts: What `ssh` takes, one for each host; or lists of them by the names of meshes.
        python: The interpreter on the hosts; None takes the first of this program's own path, `python3.N` of the same
            version, `python3` and `python` there that has trimesh.
        options: Arguments of ssh before the name of the host: `("-F", "cluster.conf")`, `("-p", "2222")`.
        env: Environment variables of the agents and of what they start; they do not show in any argument.
        interface: Where this program listens for the hosts: an address of this machine, its name, or the name of an
            interface; None takes the address of the route to the first host, or to its first jump host.
        spares: What `ssh` takes, for hosts that stand by: each takes the place of one that is lost; see `Restart`.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None lets the job make its own.
        insecure: "I understand" does without TLS: whoever is in the network reads all of it, and can change it.
    """

    hosts: Sequence[str] | Mapping[str, Sequence[str]] = attrs.field(converter=checked_names)
    python: str | None = attrs.field(default=None, kw_only=True)
    options: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)
    env: Mapping[str, str] = attrs.field(factory=dict[str, str], kw_only=True)
    interface: str | None = attrs.field(default=None, kw_only=True)
    spares: Sequence[str] = attrs.field(default=(), kw_only=True, converter=checked_spares)

    @property
    def parts(self) -> Mapping[str, int]:
        """See `Job.parts`."""
        if isinstance(self.hosts, Mapping):
            return {mesh: len(names) for mesh, names in self.hosts.items()}
        return {"hosts": len(self.hosts)}

    @property
    def agent_env(self) -> Mapping[str, str]:
        """See `Job.agent_env`."""
        return self.env

    def launcher(self) -> SSHLauncher:
        """See `Job.launcher`."""
        return SSHLauncher(self)


class SSHLauncher(Launcher):
    """Starts agents by ssh."""

    def __init__(self, job: SSHJob) -> None:
        names = job.hosts.values() if isinstance(job.hosts, Mapping) else (job.hosts,)
        self.hosts = [*(name for part in names for name in part), *job.spares]
        self.interface = ""
        self._job = job
        self._ssh = ("ssh", *job.options, *_ALWAYS)
        self._starting = trio.CapacityLimiter(limits.SSH_STARTS_AT_ONCE)
        self._folder = Path()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        if shutil.which("ssh") is None:
            raise SpawnError("an SSHJob needs the command ssh (OpenSSH), which is not on the PATH of this program")
        own = self._job.interface
        self.interface = await (self._find_interface() if own is None else address_of(own))
        with tempfile.TemporaryDirectory(prefix="trimesh-ssh-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)  # of mode 0700: whoever reaches a socket in it reaches the host
            yield

    async def _find_interface(self) -> str:
        host = self.hosts[0]
        for _ in range(limits.SSH_JUMPS_MAX):
            found = await trio.run_process(
                [*self._ssh, "-G", "--", host], capture_stdout=True, capture_stderr=True, check=False
            )
            if found.returncode != 0:
                words = found.stderr.decode(errors="replace").strip()
                raise SpawnError(f"ssh does not understand options= or its configuration, for {host}: {words}")
            lines = found.stdout.decode(errors="replace").splitlines()
            said = {name: value for name, _, value in (line.partition(" ") for line in lines)}
            jump = said.get("proxyjump", "").split(",")[0]
            if jump in _DIRECT and said.get("proxycommand", "") not in _DIRECT:
                return await address_towards()  # what the command does is not known
            if jump in _DIRECT:
                return await address_towards(said.get("hostname", host))
            host = jump.removeprefix("ssh://").partition(":")[0]
        raise SpawnError(f"{self.hosts[0]} is reached over more than {limits.SSH_JUMPS_MAX} jump hosts: say interface=")

    async def start(self, rank: int, order: AgentOrder) -> SSHAgent:
        host, job = self.hosts[rank], self._job
        async with self._starting:
            shared = await trio.run_process(
                [*self._ssh, "-O", "check", "--", host],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            path = self._folder / str(rank)
            own = () if shared.returncode == 0 else ("-o", "ControlMaster=auto", "-o", f"ControlPath={path}")
            ssh = ("ssh", *own, "-o", "ControlPersist=no", *self._ssh[1:])
            command = agent_command(job.python, sys.executable, sys.version_info[:2])
            agent = SSHAgent(await start_child([*ssh, "--", host, command], host), host, job.python, ssh)
            await agent.begin(order)
        return agent


class SSHAgent(FarAgent):
    """An ssh client that carries an agent; see `StartedAgent`."""

    def __init__(self, process: trio.Process, host: str, python: str | None, ssh: Sequence[str]) -> None:
        super().__init__(process, (*ssh, "--", host))
        self._host = host
        self._python = python

    async def exit_of(self, code: int) -> AgentExit:
        words = "\n".join(self.last_lines)
        failure = start_failure(self._host, code, self.last_lines, self._python)
        if code == SSH_FAILED and self.number is not None:
            return AgentExit("it was killed, or the connection of ssh broke", words)
        if failure is not None and code > 0:
            return AgentExit(failure, words, "refused")
        ended = await super().exit_of(code)
        return AgentExit(f"ssh: {ended.text}", words) if code < 0 else ended


# ---- what ssh says when it cannot do something, in words that say what to do -----------------------------------------

SSH_FAILED: Final = 255
"""Exit code of ssh itself; others are those of the remote command."""

_NOT_FOUND: Final = 127

_MEANINGS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"REMOTE HOST IDENTIFICATION HAS CHANGED|Offending .* key",
            "its host key is another one than the one that is known: find out why, then mend the file of known hosts",
        ),
        (
            r"Host key verification failed|host key is known for",
            "its host key is not known: connect once by hand (ssh {host}), or add it to the file of known hosts",
        ),
        (
            r"Permission denied|Too many authentication failures|No supported authentication methods",
            "it does not let this user in, and a job cannot type a password: `ssh -o BatchMode=yes {host} true` has to "
            "work, so load a key into the ssh agent, or name it in ssh's configuration",
        ),
        (r"Could not resolve hostname|Name or service not known", "its name is not known here"),
        (r"Connection refused", "no ssh server listens at its address"),
        (r"timed out|No route to host|Network is unreachable", "it does not answer"),
        (
            r"Bad configuration option|Can't open user config file|unknown option|illegal option|usage: ssh",
            "ssh does not understand options= or its configuration",
        ),
        (
            r"kex_exchange_identification|Connection (closed|reset) by|banner exchange|stdio forwarding failed",
            "its ssh server, or the one of a jump host, has closed the connection (too many at once, or not allowed)",
        ),
    )
)


def start_failure(host: str, code: int, lines: Sequence[str], python: str | None) -> str | None:
    """Return why ssh has not started an agent; None where it says nothing that is known.

    Args:
        host: Its name, as ssh got it.
        code: Exit code of ssh.
        lines: That ssh, and what it ran, have written to standard error.
        python: The interpreter that the job names.
    """
    if code == NO_PYTHON:
        return (
            "no Python with trimesh was found there: install trimesh-actors for the same Python, or say python=, the "
            "path of the interpreter there"
        )
    if code == _NOT_FOUND and python is not None:
        return f"there is no {python}, which python= names"
    if code == 1 and any("No module named" in line and "trimesh" in line for line in lines):
        return f"trimesh is not installed for {python or 'the Python there'}: install trimesh-actors there"
    if code != SSH_FAILED:
        return None
    text = "\n".join(lines)
    for pattern, words in _MEANINGS:
        if pattern.search(text):
            return words.format(host=host)
    return "ssh could not connect, or the connection broke"
