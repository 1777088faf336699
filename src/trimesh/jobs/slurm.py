"""Slurm jobs: agents on the nodes of a new allocation, or of the one in which the program runs.

    salloc, whose standard input the program holds --> queue, shown by squeue --> job number, nodes
    srun --overlap, one for each node, its standard input the lifeline of the agent
    time limit - notice --> `wait_notice`      time limit - grace --> `wait_end`

NL-1 The allocation ends with the block and with the program, however that ends: the shell that holds it reads the end
     of its standard input, also while it waits in the queue.
NL-2 A job that is not known to live counts as dead; errors about its hosts quote Slurm.
NL-3 The jobs are interactive (salloc), so Slurm never requeues them.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, cast

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import address_of, address_towards
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.launcher import AgentExit, AgentOrder, ChildAgent, FarAgent, agent_command, start_child
from trimesh.jobs.slurm_output import (
    QUEUE_FORMAT,
    JobState,
    ahead_of,
    granted,
    job_state,
    last_words,
    node_address,
    node_words,
    queued_job,
)
from trimesh.jobs.ssh import SSH, RelayedLauncher, checked_via
from trimesh.plain_numbers import plain_whole

_OF_A_PART: Final[Mapping[str, type | tuple[type, ...]]] = {
    "hosts": int,
    "gpus": int,
    "cpus": int,
    "memory": str,
    "partition": str,
    "options": (list, tuple),
}


def _checked_parts(hosts: Any) -> int | Mapping[str, int | Mapping[str, Any]]:
    """Return the hosts of a Slurm job: as `checked_hosts`, or with parts that are mappings of `hosts` and resources.

    Raises:
        TypeError, ValueError: They have another form.
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
            raise ValueError(f"a part of a SlurmJob {rule}, got {key!r}: {value!r} in {name!r}")
    if "hosts" not in part:
        raise ValueError(f"a part of a SlurmJob must have a number of hosts, got {name!r}: {part!r}: add 'hosts': 4")
    return {**part, "options": tuple(part.get("options", ()))}


def _checked_seconds(_job: object, _attribute: object, seconds: Any) -> None:
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0):
        raise ValueError(f"notice= of a SlurmJob must be a number of seconds >= 0, or None, got {seconds!r}")


class Component(msgspec.Struct, frozen=True):
    """Part of a grant with equal resources: an allocation, or a component of a heterogeneous job.

    Attributes:
        ranks: Ranks of the hosts on its nodes, in order.
        options: Arguments of salloc.
        has_memory: Whether they request an amount of memory.
    """

    ranks: tuple[int, ...]
    options: tuple[str, ...]
    has_memory: bool


@attrs.frozen
class SlurmJob(Job):
    """Hosts that are nodes of Slurm: `async with SlurmJob(4, gpus=8, time="4:00:00") as hosts:`.

    Inside an allocation (`SLURM_JOB_ID` is set) its first nodes are used, and the attributes that request resources are
    ignored: `gpus` to `account`, and `options`. Otherwise entering requests an allocation and waits in the queue for as
    long as that takes; a cancel leaves nothing queued. The allocation ends with the block.

    A part of a mapping may have resources of its own: `{"trainers": 4, "loaders": {"hosts": 2, "gpus": 0, "cpus": 64,
    "partition": "cpu"}}`. Its `gpus`, `cpus`, `memory` and `partition` replace those of the job, its `options` are
    added. The job is then heterogeneous, with one component for each part; all parts start together.

    Attributes:
        hosts: Number of nodes, or a mapping of mesh names to numbers, or to mappings as above.
        gpus, cpus, memory: Resources of each node, as `--gpus-per-node`, `--cpus-per-task` and `--mem`.
        time: Time limit, as Slurm takes it: "4:00:00", "2-0", or minutes.
        partition, account: Partition and account of the job.
        options: Further arguments of salloc: `("--exclusive",)`.
        python: The interpreter on the nodes; None searches as `SSHJob` does.
        env: Environment variables of the agents and their processes; never passed as arguments.
        via: Login node, where Slurm's commands and a relay run, for a program outside of the cluster, see `SSH`.
        interface: Address at which this program, or its relay, listens for the nodes; None takes that of the route to
            the first node.
        notice: Seconds before the time limit at which `HostMesh.wait_notice` returns; None takes
            `limits.SLURM_NOTICE_SECONDS`, and at most half of the time left. When only the grace of the block and
            `limits.SLURM_LEAVE_SECONDS` are left, the block is cancelled.
        pickle: "off" unpickles nothing in this program and its processes, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None makes certificates for this job.
        insecure: "I understand" turns TLS off: any machine in the network can read and change all traffic.
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
    via: SSH | None = attrs.field(default=None, kw_only=True, validator=checked_via)
    interface: str | None = attrs.field(default=None, kw_only=True)
    notice: float | None = attrs.field(default=None, kw_only=True, validator=_checked_seconds)

    def launcher(self) -> SlurmLauncher:
        """See `Job.launcher`."""
        return SlurmLauncher(self)

    @property
    def parts(self) -> Mapping[str, int]:
        """See `Job.parts`."""
        if not isinstance(self.hosts, Mapping):
            return {"hosts": self.hosts}
        given = self.hosts.items()
        return {name: cast("int", part["hosts"]) if isinstance(part, Mapping) else part for name, part in given}

    @property
    def is_heterogeneous(self) -> bool:
        """True if a part has resources of its own."""
        return isinstance(self.hosts, Mapping) and any(isinstance(part, Mapping) for part in self.hosts.values())

    def components(self, name: str) -> Sequence[Component]:
        """Return the components to request by salloc, for a job named `name`, in the order of its arguments.

        Slurm gives a component without `--mem` the memory of the one before it, so components without come first.
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


# ---- launcher: salloc, squeue and srun -------------------------------------------------------------------------------

_HOLD: Final = (
    'exec 3<&0; g=; trap g=1 USR1; HOLDER=$$; export HOLDER; salloc "$@" <&3 & p=$!; exec 2>/dev/null; '
    'cat >/dev/null; [ "$g" ] || kill $p; wait $p'
)
"""Shell that ends with its standard input: it then kills an salloc that is in the queue. An salloc that has nodes ends
with its command, which reads the same input: a signal at that moment may leave salloc spinning (22.05)."""

_SAY: Final = (
    'n=$SLURM_JOB_NODELIST; i=0; while [ $i -lt "${SLURM_HET_SIZE:-0}" ]; do '
    'eval "n=\\"\\$n \\$SLURM_JOB_NODELIST_HET_GROUP_$i\\""; i=$((i+1)); done; '
    'echo "trimesh-job" "$SLURM_JOB_ID" $n >&2; kill -s USR1 $HOLDER; unset HOLDER; exec cat >/dev/null'
)
_STEP: Final = ("--overlap", "-N1", "-n1", "--kill-on-bad-exit=0", "--mpi=none", "--cpu-bind=none", "--mem=0")


class _Node(msgspec.Struct, frozen=True):
    """A node that is a host: its name, and its component in a heterogeneous job, or None."""

    name: str
    component: int | None


class SlurmLauncher(RelayedLauncher):
    """Starts agents by srun."""

    def __init__(self, job: SlurmJob) -> None:
        self.hosts = [""] * sum(job.parts.values())
        self.interface = ""
        self._job = job
        self._number = ""
        self._nodes: Sequence[_Node] = ()
        self._idle: Sequence[_Node] = ()
        self._notice: float | None = None
        self._say: Callable[[str], None] = lambda _: None
        self._run = _local if job.via is None else partial(_at_login, job.via)

    def tell_by(self, say: Callable[[str], None]) -> None:
        self._say = say

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            yield

    async def _open(self, stack: AsyncExitStack) -> None:
        via = self._job.via
        names = ("salloc", "srun", "scancel", "scontrol", "squeue")
        if via is not None:
            missing = (await self._ask("sh", "-c", _MISSING, "sh", *names)).split()
        else:
            missing = [name for name in names if shutil.which(name) is None]
        if missing:
            where = "" if via is None else f" of {via.host}"
            raise SpawnError(f"a SlurmJob needs Slurm's commands on the PATH{where}, and {missing[0]} is not there")
        if via is None and (number := os.environ.get("SLURM_JOB_ID", "")):
            await self._use(stack, number, _nodes_around(os.environ))
            return
        name = f"trimesh-{secrets.token_hex(6)}"
        command = ["sh", "-c", _HOLD, "salloc", *self._job.salloc_options(name), "sh", "-c", _SAY]
        holder = _Holder(await start_child(self._run(command), "the allocation of Slurm"))
        stack.push_async_callback(self._give_back, holder, name)
        found = await self._wait_granted(holder, name)
        if found is None:
            raise SpawnError(f"Slurm granted no allocation for {self._job!r}: {last_words(holder.last_lines)}")
        await self._use(stack, *found)

    async def _ask(self, *command: str) -> str:
        """Run a command of Slurm, and return its standard output; see `ask`."""
        return await ask(*command, run=self._run)

    async def _wait_granted(self, holder: _Holder, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Wait in the queue and show the reason; return job number and nodes, or None if no job was granted."""
        found: tuple[str, tuple[str, ...]] | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_follow_queue, name, self._say, self._ask)
            line = await holder.read_until(lambda text: granted(text) is not None)
            found = None if line is None else granted(line)
            nursery.cancel_scope.cancel(reason="the job has left the queue")
        return found

    async def _use(self, stack: AsyncExitStack, number: str, listed: Sequence[str]) -> None:
        groups = [(await self._ask("scontrol", "show", "hostnames", nodes)).split() for nodes in listed if nodes]
        self._number = number
        self._nodes = self._chosen(groups, ", ".join(listed))
        self.hosts = [node.name for node in self._nodes]
        self._idle = [node for node in _nodes_of(groups) if node not in self._nodes]
        own, via, towards = self._job.interface, self._job.via, ""
        if own is None:
            node = await self._ask("scontrol", "-o", "show", "node", self.hosts[0])
            towards = node_address(node) or self.hosts[0]
        if via is not None:
            await self.relay(stack, via, own, towards)
        else:
            self.interface = await (address_towards(towards) if own is None else address_of(own))

    def _chosen(self, groups: Sequence[Sequence[str]], listed: str) -> Sequence[_Node]:
        """Choose the hosts among the nodes of each component; return them in the order of the mesh."""
        job = self._job
        if len(groups) <= 1 or not job.is_heterogeneous:
            nodes = _nodes_of(groups)
            if len(nodes) < len(self.hosts):
                raise SpawnError(
                    f"{job!r} needs {len(self.hosts)} nodes, and the allocation {self._number} has only {len(nodes)}, "
                    f"{listed}: request more, or use fewer hosts"
                )
            return nodes[: len(self.hosts)]
        components = job.components("")
        if len(components) > len(groups) or any(
            len(one.ranks) > len(names) for one, names in zip(components, groups, strict=False)
        ):
            raise SpawnError(
                f"{job!r} needs a component with enough nodes for each part, first those without memory=, and the "
                f"components of the allocation {self._number} are {listed}"
            )
        chosen = dict[int, _Node]()
        for group, component in enumerate(components):
            for rank, name in zip(component.ranks, groups[group], strict=False):
                chosen[rank] = _Node(name, group)
        return [chosen[rank] for rank in range(len(self.hosts))]

    async def _give_back(self, holder: _Holder, name: str) -> None:
        """End the allocation, or the request for it; no job of this name is left in Slurm."""
        with trio.CancelScope(shield=True):
            await holder.close_lifeline()
            with trio.move_on_after(limits.SLURM_END_SECONDS) as scope:
                await holder.ended()
            await holder.stop()
            if scope.cancelled_caught:
                with trio.move_on_after(limits.SLURM_END_SECONDS):
                    await self._ask("scancel", "--quiet", f"--name={name}")

    # ---- the time limit --------------------------------------------------------------------------------------

    async def wait_notice(self) -> str:
        return await self._wait_left(self._notice_seconds)

    async def wait_end(self, ahead: float = 0.0) -> str:
        grace = reread().grace
        own = grace if math.isfinite(grace) else 0.0  # a block without a finite grace gets the rest
        return await self._wait_left(lambda _: own + limits.SLURM_LEAVE_SECONDS + ahead)

    def _notice_seconds(self, left: float) -> float:
        if self._notice is None:  # at most half of a short job
            own = self._job.notice
            self._notice = min(limits.SLURM_NOTICE_SECONDS, left / 2) if own is None else own
        return self._notice

    async def _wait_left(self, seconds: Callable[[float], float]) -> str:
        """Wait until `seconds` are left; the time limit is queried again and again, as an operator may change it."""
        while True:
            left: float | None = None
            pause = limits.SLURM_LIMIT_LOOK_SECONDS
            try:
                said = job_state(await self._ask("scontrol", "-o", "show", "job", self._number), now=time.time())
            except SpawnError:  # Slurm's controller is away; the job goes on
                said = None
            if said is not None and said.limit_seconds is not None and said.run_seconds is not None:
                left = said.limit_seconds - said.run_seconds
                ahead = seconds(left)
                if left <= ahead:
                    return f"the Slurm job {self._number} reaches its time limit in {max(left, 0):.0f} s"
                pause = min(pause, max(left - ahead, limits.SLURM_LIMIT_LOOK_SECONDS_MIN))
            await trio.sleep(pause)

    # ---- more nodes ------------------------------------------------------------------------------------------

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        """Use further nodes of the allocation; see `Launcher.grow`."""
        del say
        await trio.lowlevel.checkpoint()
        if count > len(self._idle):
            raise SpawnError(
                f"cannot add {count} hosts: the Slurm allocation {self._number} has {len(self._idle)} unused nodes, "
                "and a running job gets no more: run the program in a larger allocation"
            )
        first = len(self.hosts)
        more, self._idle = self._idle[:count], self._idle[count:]
        self._nodes = [*self._nodes, *more]
        self.hosts = [node.name for node in self._nodes]
        return range(first, first + count)

    async def give_back(self, ranks: Sequence[int]) -> None:
        self._idle = [*(self._nodes[rank] for rank in ranks), *self._idle]

    # ---- agents ----------------------------------------------------------------------------------------------

    async def start(self, rank: int, order: AgentOrder) -> SlurmAgent:
        node, job = self._nodes[rank], self._job
        group = () if node.component is None else (f"--het-group={node.component}",)
        srun = ("srun", f"--jobid={self._number}", *group, f"--nodelist={node.name}", *_STEP)
        command = agent_command(job.python, sys.executable, sys.version_info[:2])
        process = await start_child(self._run([*srun, "sh", "-c", command]), node.name, own_environment())
        agent = SlurmAgent(process, node.name, self._number, srun, self._run)
        await agent.begin(order)
        return agent


async def _follow_queue(name: str, say: Callable[[str], None], ask: Callable[..., Awaitable[str]]) -> None:
    """Show at intervals what Slurm reports that a job waits for."""
    await trio.sleep(limits.PROGRESS_SECONDS)
    while True:
        try:
            job = queued_job(await ask("squeue", "--noheader", f"--name={name}", f"--format={QUEUE_FORMAT}"))
            if job is not None:
                waiting = ["--states=PENDING", f"--partition={job.partition}", "--sort=-p,i", "--format=%i"]
                say(job.text(ahead_of(await ask("squeue", "--noheader", *waiting), job.number)))
        except SpawnError as error:
            say(f"Slurm's queue cannot be read: {error}")
        await trio.sleep(limits.SLURM_QUEUE_LOOK_SECONDS)


def _nodes_of(groups: Sequence[Sequence[str]]) -> Sequence[_Node]:
    """Return all nodes of an allocation, by components."""
    is_one = len(groups) == 1
    return [_Node(name, None if is_one else group) for group, names in enumerate(groups) for name in names]


def _nodes_around(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of each component of the allocation in which the program runs, in Slurm's notation."""
    size = environ.get("SLURM_HET_SIZE", "")
    if not size.isdecimal():
        return (environ.get("SLURM_JOB_NODELIST", ""),)
    return tuple(environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in range(int(size)))


class _Holder(ChildAgent):
    """The shell around salloc, with a process group of their own."""

    async def end(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)  # it is not reaped yet, so its pid cannot be reused


# ---- an agent in a job step, and its end as Slurm reports it ---------------------------------------------------------


class SlurmAgent(FarAgent):
    """A job step that carries an agent; see `StartedAgent`."""

    def __init__(self, process: trio.Process, node: str, job: str, srun: Sequence[str], run: Run) -> None:
        super().__init__(process, (*srun, "sh", "-c"), own_environment(), run)
        self._node = node
        self._job = job
        self._ask = partial(ask, run=run)

    async def exit_of(self, code: int) -> AgentExit:
        """See `ChildAgent.exit_of`; with the state of the job and the node if they are the reason."""
        ended = await super().exit_of(code)
        try:
            said = job_state(await self._ask("scontrol", "-o", "show", "job", self._job))
        except SpawnError:
            said = JobState("")
        node = await self._node_words(said)
        if said.is_alive:
            if self.number is None:
                return AgentExit(f"srun: {ended.text}{node}", ended.last_words, "refused")
            return AgentExit(f"{ended.text}{node}", ended.last_words, "node failed" if node else ended.reason)
        return AgentExit(f"{said.text}{node}; srun: {ended.text}", ended.last_words, said.reason)

    async def _node_words(self, said: JobState) -> str:
        """Return the state of the node if it may be the reason; otherwise ""."""
        if not said.is_alive and said.reason != "node failed":
            return ""
        try:
            words = node_words(await self._ask("scontrol", "-o", "show", "node", self._node))
        except SpawnError:
            return ""
        return f"; Slurm says that {self._node} is {words}" if words.startswith(("DOWN", "FAIL", "NOT")) else ""


# ---- Slurm's commands and their environment --------------------------------------------------------------------------

_OF_OTHERS: Final = re.compile(
    r"SLURM_(NTASKS|NPROCS|NNODES|JOB_NUM_NODES|NTASKS_PER_NODE|CPUS_PER_TASK|TASKS_PER_NODE|DISTRIBUTION|EXCLUSIVE"
    r"|EXACT|MEM_PER_(NODE|CPU|GPU)|CPU_BIND|TRES_PER_TASK|HET_SIZE|PACK_SIZE|\w+_(HET|PACK)_GROUP_\d+)"
)
"""Variables of the batch script around the program, which srun would take as options."""

_OF_TEXT: Final = re.compile(r"(SQUEUE|SCONTROL|SINFO)_\w+|SLURM_(TIME_FORMAT|JSON|YAML)")
"""Variables by which users change the output format of the commands."""


def own_environment() -> dict[str, str]:
    """Return the environment of srun."""
    return {name: value for name, value in os.environ.items() if not _OF_OTHERS.fullmatch(name)}


Run = Callable[[Sequence[str]], Sequence[str]]
"""Makes of a command the one that runs it where Slurm's commands are."""

_MISSING: Final = 'for n in "$@"; do command -v "$n" >/dev/null || echo "$n"; done'


def _local(command: Sequence[str]) -> Sequence[str]:
    return command


def _at_login(via: SSH, command: Sequence[str]) -> Sequence[str]:
    return (*via.command(), shlex.join(command))


async def ask(*command: str, run: Run = _local) -> str:
    """Run a command of Slurm, and return its standard output.

    Raises:
        SpawnError: It failed; the message includes its standard error.
    """
    env = {name: value for name, value in os.environ.items() if not _OF_TEXT.fullmatch(name)}
    done = await trio.run_process(run(command), capture_stdout=True, capture_stderr=True, check=False, env=env)
    if done.returncode != 0:
        words = last_words(done.stderr.decode(errors="replace").splitlines())
        raise SpawnError(f"{' '.join(command)} failed: {words}")
    return done.stdout.decode(errors="replace")
