"""`SSHJob`: agents on other machines, started by the system's ssh command with the user's configuration."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
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
    """Return the hosts of an `SSHJob`: names of hosts, or lists of them by the names of meshes.

    Raises:
        TypeError, ValueError: It is neither, or ssh would not take a name.
    """
    if isinstance(hosts, str) or not isinstance(hosts, Mapping | Sequence):
        raise TypeError(
            f"an SSHJob takes a list of host names, or a mapping of mesh names to such lists, got {hosts!r}"
        )
    parts: dict[Any, Any] = {**hosts} if isinstance(hosts, Mapping) else {"hosts": hosts}
    for mesh, names in parts.items():
        if not isinstance(mesh, str) or isinstance(names, str) or not isinstance(names, Sequence) or not names:
            raise ValueError(f"each mesh of hosts must have a name and a list of host names, got {mesh!r}: {names!r}")
        for name in cast("Sequence[object]", names):
            if not isinstance(name, str) or not name or name.startswith("-") or set(name) & set(" \t\n'\"\\"):
                raise ValueError(
                    f"the name of a host must be one that `ssh NAME` takes: host, user@host or an alias; got {name!r}"
                )
    count = sum(map(len, parts.values()))
    if not 1 <= count <= limits.JOB_HOSTS_MAX:
        raise ValueError(f"a job must have 1 to limits.JOB_HOSTS_MAX ({limits.JOB_HOSTS_MAX}) hosts, got {count}")
    if isinstance(hosts, Mapping):
        return {mesh: tuple(names) for mesh, names in parts.items()}
    return tuple(parts["hosts"])


def checked_spares(spares: Any) -> tuple[str, ...]:
    """Return names of spare hosts.

    Raises:
        TypeError, ValueError: It is no list of names that ssh takes.
    """
    if isinstance(spares, str) or not isinstance(spares, Sequence):
        raise TypeError(f"spares= must be a list of host names, got {spares!r}")
    return cast("tuple[str, ...]", checked_names(spares)) if spares else ()


def _checked_host(_: object, __: object, host: Any) -> None:
    checked_names([host])


@attrs.frozen
class SSH:
    """Relay for a program that hosts cannot reach: a host that ssh reaches, such as a login node.

    `SSHJob(["n1", "n2"], via=SSH("login"))`. Hosts connect to a small relay there, which passes their TLS sessions on
    through one ssh connection of the program; it sees only ciphertext. The ssh server must allow `ssh -R` of a port of
    its loopback address. The relay ends with the program.

    Attributes:
        host: Name of the host as `ssh` takes it.
        options: Arguments of ssh before the name: `("-p", "2222")`.
        python: An interpreter there: Python 3.6 or newer, without trimesh.
    """

    host: str = attrs.field(validator=_checked_host)
    options: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)
    python: str = attrs.field(default="python3", kw_only=True)

    def command(self) -> tuple[str, ...]:
        """Return the arguments that precede a shell line to run it there."""
        return ("ssh", *self.options, *_ALWAYS, "--", self.host)


def checked_via(_: object, __: object, via: Any) -> None:
    """Validate the attribute `via` of a job: an `SSH` or None.

    Raises:
        TypeError: It is something else.
    """
    if via is not None and not isinstance(via, SSH):
        raise TypeError(f'via= takes the relay host, jobs.SSH("login"), or None, got {via!r}')


@attrs.frozen
class SSHJob(Job):
    """Hosts that are reached by ssh: `async with SSHJob(["n1", "n2"]) as hosts:`.

    The `ssh` command of this machine starts the agents with its own configuration: aliases, keys, jump hosts, and
    connections that are shared already (ControlMaster). It never prompts, so each host's key must be known, and each
    host must accept a key of this user. Agents end with their connection.

    Attributes:
        hosts: Names of the hosts as `ssh` takes them; or lists of names by the names of meshes.
        python: The interpreter on the hosts; None takes the first that exists there and has trimesh: the path of this
            program's interpreter, `python3.N` of the same version, `python3`, `python`.
        options: Arguments of ssh before the name of the host: `("-F", "cluster.conf")`, `("-p", "2222")`.
        env: Environment variables of the agents and their processes; never passed as arguments.
        via: Relay and jump host, if hosts cannot reach this program, see `SSH`.
        interface: Address at which this program, or its relay, listens for the hosts: an address of this machine, its
            name, or the name of an interface; None takes that of the route to the first host, or to its first jump
            host.
        spares: Names of hosts that stand by: each replaces a lost one; see `Restart`.
        pickle: "off" unpickles nothing in this program and its processes, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None makes certificates for this job.
        insecure: "I understand" turns TLS off: any machine in the network can read and change all traffic.
    """

    hosts: Sequence[str] | Mapping[str, Sequence[str]] = attrs.field(converter=checked_names)
    python: str | None = attrs.field(default=None, kw_only=True)
    options: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)
    via: SSH | None = attrs.field(default=None, kw_only=True, validator=checked_via)
    interface: str | None = attrs.field(default=None, kw_only=True)
    spares: Sequence[str] = attrs.field(default=(), kw_only=True, converter=checked_spares)

    @property
    def parts(self) -> Mapping[str, int]:
        """See `Job.parts`."""
        if isinstance(self.hosts, Mapping):
            return {mesh: len(names) for mesh, names in self.hosts.items()}
        return {"hosts": len(self.hosts)}

    def launcher(self) -> SSHLauncher:
        """See `Job.launcher`."""
        return SSHLauncher(self)


def _proxy(via: SSH) -> str:
    command = ["ssh", *via.options, *_ALWAYS, "-W", "[%h]:%p", "--", via.host]
    return " ".join(word if word == "[%h]:%p" else shlex.quote(word.replace("%", "%%")) for word in command)


class RelayedLauncher(Launcher):
    """Launcher of a job with `via=`."""

    async def relay(self, stack: AsyncExitStack, via: SSH, interface: str | None, towards: str) -> None:
        """Open the relay until `stack` is left, and let the program listen behind it.

        Args:
            interface: Attribute of the job: where the relay listens.
            towards: A host, as the relay host resolves it.
        """
        from trimesh.jobs.ssh_relay import open_ssh_relay  # noqa: PLC0415 - few jobs need it, and it needs `SSH`

        place = await stack.enter_async_context(open_ssh_relay(via, interface or "", towards))
        self.interface, self.port, self.advertised = "127.0.0.1", place.port, (place.address,)


class SSHLauncher(RelayedLauncher):
    """Starts agents by ssh."""

    def __init__(self, job: SSHJob) -> None:
        names = job.hosts.values() if isinstance(job.hosts, Mapping) else (job.hosts,)
        self.hosts = [*(name for part in names for name in part), *job.spares]
        self.interface = ""
        self._job = job
        jump = () if job.via is None else ("-o", f"ProxyCommand={_proxy(job.via)}", "-o", "ProxyJump=none")
        self._ssh = ("ssh", *jump, *job.options, *_ALWAYS)
        self._starting = trio.CapacityLimiter(limits.SSH_STARTS_AT_ONCE)
        self._folder = Path()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        if shutil.which("ssh") is None:
            raise SpawnError("an SSHJob needs the command ssh (OpenSSH), which is not on the PATH of this program")
        own, via = self._job.interface, self._job.via
        async with AsyncExitStack() as stack:
            if via is None:
                self.interface = await (self._find_interface() if own is None else address_of(own))
            else:
                towards = "" if own else (await self._said(self.hosts[0])).get("hostname", self.hosts[0])
                await self.relay(stack, via, own, towards)
            folder = tempfile.TemporaryDirectory(prefix="trimesh-ssh-", ignore_cleanup_errors=True)
            self._folder = Path(stack.enter_context(folder))  # of mode 0700: a socket there leads to a host
            yield

    async def _find_interface(self) -> str:
        host = self.hosts[0]
        for _ in range(limits.SSH_JUMPS_MAX):
            said = await self._said(host)
            jump = said.get("proxyjump", "").split(",")[0]
            if jump in _DIRECT and said.get("proxycommand", "") not in _DIRECT:
                return await address_towards()  # the command may lead anywhere
            if jump in _DIRECT:
                return await address_towards(said.get("hostname", host))
            host = jump.removeprefix("ssh://").partition(":")[0]
        raise SpawnError(
            f"the route to {self.hosts[0]} must have at most limits.SSH_JUMPS_MAX ({limits.SSH_JUMPS_MAX}) jump hosts, "
            "got more: pass interface="
        )

    async def _said(self, host: str) -> Mapping[str, str]:
        """Return the configuration of ssh for a host."""
        found = await trio.run_process(
            [*self._ssh, "-G", "--", host], capture_stdout=True, capture_stderr=True, check=False
        )
        if found.returncode != 0:
            words = found.stderr.decode(errors="replace").strip()
            raise SpawnError(f"ssh rejects options= or its configuration, for {host}: {words}")
        lines = found.stdout.decode(errors="replace").splitlines()
        return {name: value for name, _, value in (line.partition(" ") for line in lines)}

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
            return AgentExit("it was killed, or its ssh connection broke", words)
        if failure is not None and code > 0:
            return AgentExit(failure, words, "refused")
        ended = await super().exit_of(code)
        return AgentExit(f"ssh: {ended.text}", words) if code < 0 else ended


# ---- failures of ssh: its messages, and what to do about each --------------------------------------------------------

SSH_FAILED: Final = 255
"""Exit code of ssh itself; others are those of the remote command."""

_NOT_FOUND: Final = 127

_MEANINGS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"REMOTE HOST IDENTIFICATION HAS CHANGED|Offending .* key",
            "its host key differs from the known one: find out why, then correct the known_hosts file",
        ),
        (
            r"Host key verification failed|host key is known for",
            "its host key is not known: connect once by hand (ssh {host}), or add it to the known_hosts file",
        ),
        (
            r"Permission denied|Too many authentication failures|No supported authentication methods",
            "it refuses this user, and a job cannot type a password: `ssh -o BatchMode=yes {host} true` must work, so "
            "load a key into the ssh agent, or name it in ssh's configuration",
        ),
        (r"Could not resolve hostname|Name or service not known", "its name cannot be resolved on this machine"),
        (r"Connection refused", "no ssh server listens at its address"),
        (r"timed out|No route to host|Network is unreachable", "it does not answer"),
        (
            r"Bad configuration option|Can't open user config file|unknown option|illegal option|usage: ssh",
            "ssh rejects options= or its configuration",
        ),
        (
            r"kex_exchange_identification|Connection (closed|reset) by|banner exchange|stdio forwarding failed",
            "its ssh server, or the one of a jump host, has closed the connection (too many at once, or not allowed)",
        ),
    )
)


def start_failure(host: str, code: int, lines: Sequence[str], python: str | None) -> str | None:
    """Return why ssh did not start an agent; None if the cause is unknown.

    Args:
        host: Name of the host, as passed to ssh.
        code: Exit code of ssh.
        lines: Lines on its standard error, of ssh and of the remote command.
        python: The interpreter that the job names.
    """
    if code == NO_PYTHON:
        return (
            "no Python with trimesh was found there: install trimesh-actors for the same Python, or pass python=, the "
            "path of the interpreter there"
        )
    if code == _NOT_FOUND and python is not None:
        return f"python= must name an interpreter there, got {python}, which does not exist"
    if code == 1 and any("No module named" in line and "trimesh" in line for line in lines):
        return f"trimesh is not installed for {python or 'the Python there'}: install trimesh-actors there"
    if code != SSH_FAILED:
        return None
    text = "\n".join(lines)
    for pattern, words in _MEANINGS:
        if pattern.search(text):
            return words.format(host=host)
    return "ssh could not connect, or the connection broke"
