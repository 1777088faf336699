"""What a job of Slurm is to its user, and the arguments of salloc that it means."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import msgspec

from trimesh.jobs.job import Job, checked_hosts
from trimesh.plain_numbers import plain_whole

if TYPE_CHECKING:
    from trimesh.jobs.slurm.launcher import SlurmLauncher

_OF_A_PART: Final[Mapping[str, type | tuple[type, ...]]] = {
    "hosts": int,
    "gpus": int,
    "cpus": int,
    "memory": str,
    "partition": str,
    "options": (list, tuple),
}


def _checked_parts(hosts: Any) -> int | Mapping[str, int | Mapping[str, Any]]:
    """Return what a job of Slurm is made from: see `checked_hosts`; a part may be a mapping with `hosts` and its own.

    Raises:
        TypeError, ValueError: It is not that.
    """
    if not isinstance(hosts, Mapping):
        return checked_hosts(hosts)
    given: dict[Any, Any] = {**hosts}
    parts = dict[Any, Any]()
    numbers = dict[Any, Any]()
    for name, part in given.items():
        parts[name] = numbers[name] = part
        if isinstance(part, Mapping):
            own = parts[name] = _checked_part(name, {**part})
            numbers[name] = own["hosts"]
    checked_hosts(numbers)
    return parts


def _checked_part(name: Any, part: dict[Any, Any]) -> dict[str, Any]:
    part = {key: plain_whole(value) for key, value in part.items()}
    for key, value in part.items():
        wanted = _OF_A_PART.get(key)
        if wanted is None or isinstance(value, bool) or not isinstance(value, wanted):
            rule = f"takes {', '.join(_OF_A_PART)} (numbers, text, a list)"
            raise ValueError(f"a part of a SlurmJob {rule}, got {key!r}: {value!r} of {name!r}")
    if "hosts" not in part:
        raise ValueError(f"a part of a SlurmJob says how many hosts it has, got {part!r} of {name!r}: add 'hosts': 4")
    return {**part, "options": tuple(part.get("options", ()))}


def _checked_seconds(_job: object, _attribute: object, seconds: Any) -> None:
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0):
        raise ValueError(f"the notice of a SlurmJob is a number of seconds >= 0, or None, got {seconds!r}")


class Component(msgspec.Struct, frozen=True):
    """What Slurm gives at once with equal resources: an allocation, or a component of a heterogeneous job.

    Attributes:
        ranks: The hosts that are its nodes, in order.
        options: Arguments of salloc.
        has_memory: Whether those say an amount of memory.
    """

    ranks: tuple[int, ...]
    options: tuple[str, ...]
    has_memory: bool


@attrs.frozen
class SlurmJob(Job):
    """Hosts that are nodes of Slurm: `async with SlurmJob(4, gpus=8, time="4:00:00") as hosts:`.

    Inside of an allocation (`SLURM_JOB_ID` is set) its first nodes are used, and what follows `hosts` but `python`,
    `env`, `interface` and `notice` says nothing. Else one is asked for: entering waits in the queue for as long as that
    takes, and a cancel leaves nothing queued. The allocation ends with the block.

    A part of a mapping may have resources of its own: `{"trainers": 4, "loaders": {"hosts": 2, "gpus": 0, "cpus": 64,
    "partition": "cpu"}}`, with `gpus`, `cpus`, `memory`, `partition` in place of those of the job, and `options` beside
    them. The job is then a heterogeneous one of Slurm, whose parts start together, one component for each part.

    Attributes:
        hosts: How many nodes, or a mapping of mesh names to numbers, or to mappings as above.
        gpus, cpus, memory: Of each node, as `--gpus-per-node`, `--cpus-per-task` and `--mem` say them.
        time: Limit of time, as Slurm writes it: "4:00:00", "2-0", or minutes.
        partition, account: Of the job.
        options: Further arguments of salloc: `("--exclusive",)`.
        python: The interpreter on the nodes; None takes the path of this program's own, else see `SSHJob`.
        env: Environment variables of the agents and of what they start; they do not show in any argument.
        interface: Where this program listens for the nodes; None takes the address of the route to the first one.
        notice: Seconds before the limit of time at which `HostMesh.wait_notice` returns; None takes
            `limits.SLURM_NOTICE_SECONDS`. When the grace of the block is all that is left, the block is cancelled.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None lets the job make its own.
        insecure: "I understand" does without TLS: whoever is in the network reads all of it, and can change it.
    """

    hosts: int | Mapping[str, int | Mapping[str, Any]] = attrs.field(converter=_checked_parts)
    gpus: int | None = attrs.field(default=None, kw_only=True)
    cpus: int | None = attrs.field(default=None, kw_only=True)
    memory: str | None = attrs.field(default=None, kw_only=True)
    time: str | int | None = attrs.field(default=None, kw_only=True)
    partition: str | None = attrs.field(default=None, kw_only=True)
    account: str | None = attrs.field(default=None, kw_only=True)
    options: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)
    python: str | None = attrs.field(default=None, kw_only=True)
    env: Mapping[str, str] = attrs.field(factory=dict[str, str], kw_only=True)
    interface: str | None = attrs.field(default=None, kw_only=True)
    notice: float | None = attrs.field(default=None, kw_only=True, validator=_checked_seconds)

    def launcher(self) -> SlurmLauncher:
        """See `Job.launcher`."""
        from trimesh.jobs.slurm.launcher import SlurmLauncher  # noqa: PLC0415 - it needs the job

        return SlurmLauncher(self)

    @property
    def parts(self) -> Mapping[str, int]:
        """See `Job.parts`."""
        if not isinstance(self.hosts, Mapping):
            return {"hosts": self.hosts}
        given = self.hosts.items()
        return {name: cast("int", part["hosts"]) if isinstance(part, Mapping) else part for name, part in given}

    @property
    def agent_env(self) -> Mapping[str, str]:
        """See `Job.agent_env`."""
        return self.env

    @property
    def is_heterogeneous(self) -> bool:
        """Whether a part has resources of its own."""
        return isinstance(self.hosts, Mapping) and any(isinstance(part, Mapping) for part in self.hosts.values())

    def components(self, name: str) -> Sequence[Component]:
        """Return what salloc is asked for, by the name `name`, in the order of its arguments.

        A component of Slurm that says no memory gets that of the one before it, so those come first.
        """
        ranks = itertools.count()
        if not self.is_heterogeneous:
            return [self._component(name, {}, tuple(itertools.islice(ranks, sum(self.parts.values()))))]
        given = cast("Mapping[str, int | Mapping[str, Any]]", self.hosts)
        found = list[Component]()
        for part in given.values():
            own: Mapping[str, Any] = part if isinstance(part, Mapping) else {"hosts": part}
            found.append(self._component(name, own, tuple(itertools.islice(ranks, own["hosts"]))))
        return sorted(found, key=lambda one: one.has_memory)

    def _component(self, name: str, own: Mapping[str, Any], ranks: tuple[int, ...]) -> Component:
        said = {key: own.get(key, getattr(self, key)) for key in ("gpus", "cpus", "memory", "partition")}
        asked: dict[str, Any] = {
            "job-name": name,
            "nodes": len(ranks),
            "ntasks-per-node": 1,
            "gpus-per-node": said["gpus"] or None,
            "cpus-per-task": said["cpus"],
            "mem": said["memory"],
            "time": self.time,
            "partition": said["partition"],
            "account": self.account,
        }
        options = [f"--{option}={value}" for option, value in asked.items() if value is not None]
        return Component(ranks, (*options, *self.options, *own.get("options", ())), said["memory"] is not None)

    def salloc_options(self, name: str) -> list[str]:
        """Return the arguments of salloc for this job, named `name`."""
        found = list[str]()
        for component in self.components(name):
            found += [":"] if found else []
            found += component.options
        return found
