"""`Job`: base class of `LocalJob`, `SSHJob`, `SlurmJob` and others, which start agents on hosts for a block."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Literal, cast

import attrs

from trimesh import limits
from trimesh._runtime.system import checked_variables
from trimesh.actor.host_mesh import HostMesh
from trimesh.actor.spawning import Spawning
from trimesh.context_managers import asynccontextmanager
from trimesh.jobs.launcher import Launcher
from trimesh.jobs.pki import OwnPKI, checked_insecure
from trimesh.plain_numbers import plain_whole, whole_number

Pickle = Literal["on", "off"]


def checked_hosts(hosts: Any) -> int | Mapping[str, int]:
    """Check the argument `hosts`: a number of hosts, or a mapping of mesh names to numbers.

    Raises:
        TypeError, ValueError: It is neither, or a number is below 1, or there are too many hosts.
    """
    if isinstance(hosts, Mapping):
        parts: dict[Any, Any] = {**hosts}
        parts = {name: plain_whole(count) for name, count in parts.items()}
    elif (number := whole_number(hosts)) is not None:
        parts = {"hosts": number}
    else:
        raise TypeError(f"a job takes a number of hosts, or a mapping of names to numbers, got {hosts!r}")
    for name, count in parts.items():
        if not isinstance(name, str) or whole_number(count) is None or count < 1:
            raise ValueError(f"each mesh of hosts must have a name and at least 1 host, got {name!r}: {count!r}")
    if not 1 <= sum(parts.values()) <= limits.JOB_HOSTS_MAX:
        raise ValueError(f"a job must have 1 to limits.JOB_HOSTS_MAX ({limits.JOB_HOSTS_MAX}) hosts, got {hosts!r}")
    return parts if isinstance(hosts, Mapping) else parts["hosts"]


def checked_pki(_: object, __: object, pki: Any) -> None:
    """Validate the attribute `pki`: an `OwnPKI` or None.

    Raises:
        TypeError: It is something else.
    """
    if pki is not None and not isinstance(pki, OwnPKI):
        raise TypeError(f"pki= takes an OwnPKI(certificate=, key=, authority=, peers=), or None, got {pki!r}")


def _check_insecure(job: Job, _: object, insecure: object) -> None:
    checked_insecure(insecure, job.pki)


def _checked_env(env: Any) -> Mapping[str, str]:
    return checked_variables(env, "env")


class _Entered(list[Spawning[HostMesh]]):
    """Open blocks of a job in this program. They are not pickled with the job."""

    def __reduce_ex__(self, protocol: object) -> tuple[type[_Entered], tuple[()]]:
        return _Entered, ()


@attrs.frozen
class Job:
    """Base class of jobs. A job starts nothing until its block is entered: `async with job as hosts:`.

    A subclass defines the hosts and how agents start there. A job can be entered again after its block has ended: it
    starts new agents.

    Attributes:
        hosts: Number of hosts, or numbers by the names of their meshes.
        env: Environment variables of the agents and their processes; never passed as arguments.
        pickle: Mode of the program, "on" or "off"; None for the setting.
        pki: Certificates of your own authority; None to create an authority.
        insecure: "I understand" turns TLS between hosts off.
        shared: Let actors that get the hosts as an argument spawn on them.
    """

    _entered: _Entered = attrs.field(factory=_Entered, init=False, eq=False, repr=False, hash=False)

    hosts: Any
    env: Mapping[str, str] = attrs.field(factory=dict[str, str], kw_only=True, converter=_checked_env)
    pickle: Pickle | None = attrs.field(default=None, kw_only=True, validator=attrs.validators.in_(("on", "off", None)))
    pki: OwnPKI | None = attrs.field(default=None, kw_only=True, validator=checked_pki)
    insecure: str = attrs.field(default="", kw_only=True, validator=_check_insecure)
    shared: bool = attrs.field(default=False, kw_only=True, validator=attrs.validators.instance_of(bool))

    def launcher(self) -> Launcher:
        """Return a launcher for the agents of one run of the job."""
        raise NotImplementedError

    def host_id(self, rank: int) -> str:
        """Return the setting `host_id` for the processes of a host; "" for the id of the machine."""
        del rank
        return ""

    @property
    def is_one_machine(self) -> bool:
        """True if all hosts are this machine, so that agents may connect to each other at a loopback address."""
        return False

    @property
    def agent_env(self) -> Mapping[str, str]:
        """Environment variables that agents set for themselves and their child processes."""
        return self.env

    @property
    def is_named(self) -> bool:
        """True if `hosts` is a mapping: the job has several named meshes of hosts."""
        return isinstance(self.hosts, Mapping)

    @property
    def parts(self) -> Mapping[str, int]:
        """Numbers of hosts by the names of their meshes; a single mesh without a name is called `hosts`."""
        return cast("Mapping[str, int]", self.hosts) if self.is_named else {"hosts": self.hosts}

    async def __aenter__(self) -> HostMesh:
        """Start the agents, and wait until processes can be started on all hosts.

        Raises:
            MeshErrorGroup: An agent could not be started; those on other hosts were ended.
        """
        spawning = Spawning(repr(self), self._open, _adopt)
        hosts = await spawning.__aenter__()
        self._entered.append(spawning)
        return hosts

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave the block: wait until all processes on the hosts have ended, then end the agents."""
        return await self._entered.pop().__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[HostMesh, None]:
        from trimesh.jobs.opening import open_job  # noqa: PLC0415 - it needs the job

        async with open_job(self) as hosts:
            yield hosts


async def _adopt() -> HostMesh:
    raise RuntimeError("a job needs a block: write `async with job as hosts:`")
