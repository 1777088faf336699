"""Agents on the nodes of a Slurm allocation: one that is asked for, or the one in which the program runs.

    salloc, with a standard input that the program holds --> number, nodes
    srun --overlap, one for each node, its standard input the lifeline of the agent

NL-1 The allocation ends with the block, and with the program, however that ends: whatever holds it reads the end of its
     standard input, also while it waits in the queue.
NL-2 A job that is not known to live is dead; what was lost by it says so in the words of Slurm.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from trimesh import limits
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import address_of, address_towards
from trimesh.jobs.child_agent import ChildAgent, FarAgent, start_child
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.launcher import AgentExit, AgentOrder
from trimesh.jobs.remote_python import agent_command
from trimesh.jobs.words.slurm import JobState, granted, job_state, last_words, node_address

_HOLD: Final = (
    'exec 3<&0; g=; trap g=1 USR1; HOLDER=$$; export HOLDER; salloc "$@" <&3 & p=$!; exec 2>/dev/null; '
    'cat >/dev/null; [ "$g" ] || kill $p; wait $p'
)
"""Ends with its standard input: salloc is killed while it is in the queue. Once it has nodes it ends with its command,
which reads the same: a signal at that moment may leave it spinning (22.05)."""

_SAY: Final = (
    'echo "trimesh-job $SLURM_JOB_ID $SLURM_JOB_NODELIST" >&2; kill -s USR1 $HOLDER; unset HOLDER; exec cat >/dev/null'
)
_STEP: Final = ("--overlap", "-N1", "-n1", "--kill-on-bad-exit=0", "--mpi=none", "--cpu-bind=none", "--mem=0")
_OF_OTHERS: Final = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_CPUS_PER_TASK", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_EXCLUSIVE", "SLURM_EXACT"),
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_CPU_BIND", "SLURM_TRES_PER_TASK"),
)
"""Variables of the batch script around the program, which srun would take for options of ours."""


@attrs.frozen
class SlurmJob(Job):
    """Hosts that are nodes of Slurm: `async with SlurmJob(4, gpus=8, time="4:00:00") as hosts:`.

    Inside of an allocation (`SLURM_JOB_ID` is set) its first nodes are used, and what follows `hosts` but `python` and
    `interface` says nothing. Else one is asked for: entering waits in the queue for as long as that takes, and a cancel
    leaves nothing queued. The allocation ends with the block.

    Attributes:
        hosts: How many nodes, or a mapping of mesh names to numbers.
        gpus, cpus, memory: Of each node, as `--gpus-per-node`, `--cpus-per-task` and `--mem` say them.
        time: Limit of time, as Slurm writes it: "4:00:00", "2-0", or minutes.
        partition, account: Of the job.
        options: Further arguments of salloc: `("--exclusive",)`.
        python: The interpreter on the nodes; None takes the path of this program's own, else see `SSHJob`.
        interface: Where this program listens for the nodes; None takes the address of the route to the first one.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes the setting.
    """

    hosts: int | Mapping[str, int] = attrs.field(converter=checked_hosts)
    gpus: int | None = attrs.field(default=None, kw_only=True)
    cpus: int | None = attrs.field(default=None, kw_only=True)
    memory: str | None = attrs.field(default=None, kw_only=True)
    time: str | int | None = attrs.field(default=None, kw_only=True)
    partition: str | None = attrs.field(default=None, kw_only=True)
    account: str | None = attrs.field(default=None, kw_only=True)
    options: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)
    python: str | None = attrs.field(default=None, kw_only=True)
    interface: str | None = attrs.field(default=None, kw_only=True)

    def launcher(self) -> SlurmLauncher:
        """See `Job.launcher`."""
        return SlurmLauncher(self)

    def salloc_options(self, name: str) -> list[str]:
        """Return the arguments of salloc for this job, named `name`."""
        asked: dict[str, Any] = {
            "job-name": name,
            "nodes": sum(self.parts.values()),
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus,
            "cpus-per-task": self.cpus,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
        }
        return [f"--{option}={value}" for option, value in asked.items() if value is not None] + list(self.options)


class SlurmLauncher:
    """Starts agents by srun; see `Launcher`."""

    def __init__(self, job: SlurmJob) -> None:
        self.hosts: Sequence[str] = [""] * sum(job.parts.values())
        self.interface = ""
        self._job = job
        self._number = ""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """See `Launcher.open`."""
        missing = [name for name in ("salloc", "srun", "scancel", "scontrol") if shutil.which(name) is None]
        if missing:
            raise SpawnError(f"a SlurmJob needs the commands of Slurm, and {missing[0]} is not on the PATH")
        if number := os.environ.get("SLURM_JOB_ID", ""):
            nodes = os.environ.get("SLURM_JOB_NODELIST", "")
            await self._use(number, nodes)
            yield
            return
        name = f"trimesh-{secrets.token_hex(6)}"
        command = ["sh", "-c", _HOLD, "salloc", *self._job.salloc_options(name), "sh", "-c", _SAY]
        holder = _Holder(await start_child(command, "the allocation of Slurm"))
        try:
            line = await holder.read_until(lambda text: granted(text) is not None)
            found = None if line is None else granted(line)
            if found is None:
                raise SpawnError(f"Slurm gives no allocation for {self._job!r}: {last_words(holder.last_lines)}")
            await self._use(*found)
            yield
        finally:
            await self._give_back(holder, name)

    async def _use(self, number: str, nodes: str) -> None:
        listed = await _ask("scontrol", "show", "hostnames", nodes)
        names = listed.split()
        if len(names) < len(self.hosts):
            raise SpawnError(
                f"{self._job!r} needs {len(self.hosts)} nodes, and the allocation {number} has {len(names)}: {nodes}"
            )
        self._number = number
        self.hosts = names[: len(self.hosts)]
        if self._job.interface is not None:
            self.interface = await address_of(self._job.interface)
        else:
            node = await _ask("scontrol", "-o", "show", "node", self.hosts[0])
            self.interface = await address_towards(node_address(node) or self.hosts[0])

    @staticmethod
    async def _give_back(holder: _Holder, name: str) -> None:
        """End the allocation, or what waits for one; nothing of its name is left in Slurm."""
        with trio.CancelScope(shield=True):
            await holder.close_lifeline()
            with trio.move_on_after(limits.SLURM_END_SECONDS) as scope:
                await holder.ended()
            await holder.stop()
            if scope.cancelled_caught:
                with trio.move_on_after(limits.SLURM_END_SECONDS):
                    await _ask("scancel", "--quiet", f"--name={name}")

    async def start(self, rank: int, order: AgentOrder) -> SlurmAgent:
        """See `Launcher.start`."""
        node, job = self.hosts[rank], self._job
        srun = ("srun", f"--jobid={self._number}", f"--nodelist={node}", *_STEP)
        command = agent_command(job.python, sys.executable, sys.version_info[:2])
        agent = SlurmAgent(
            await start_child([*srun, "sh", "-c", command], node, _own_environment()), node, self._number, srun
        )
        await agent.begin(order)
        return agent


class _Holder(ChildAgent):
    """The shell around salloc, with a process group of their own."""

    async def end(self) -> None:
        """See `ChildAgent.end`."""
        os.killpg(self.pid, signal.SIGKILL)  # it is not reaped, so the number is its own


class SlurmAgent(FarAgent):
    """A step of Slurm that carries an agent; see `StartedAgent`."""

    def __init__(self, process: trio.Process, node: str, job: str, srun: Sequence[str]) -> None:
        super().__init__(process)
        self._node = node
        self._job = job
        self._srun = srun

    async def exit_of(self, code: int) -> AgentExit:
        """See `ChildAgent.exit_of`: what Slurm says, where that is why."""
        ended = await super().exit_of(code)
        try:
            said = job_state(await _ask("scontrol", "-o", "show", "job", self._job))
        except SpawnError:
            said = JobState("")
        if said.is_alive:
            return ended if self.number is not None else AgentExit(f"srun: {ended.text}", ended.last_words, "refused")
        return AgentExit(f"{said.text}; srun: {ended.text}", ended.last_words, said.reason)

    async def end(self) -> None:
        """See `ChildAgent.end`: kill the agent by another step on its node."""
        with trio.move_on_after(limits.SSH_END_SECONDS):
            await self.ended()
        if not self.has_ended and self.number is not None:
            await trio.run_process(
                [*self._srun, "sh", "-c", f"kill -s KILL {self.number}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_own_environment(),
                check=False,
            )
            await self.ended()


def _own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}


async def _ask(*command: str) -> str:
    """Run a command of Slurm, and return what it writes.

    Raises:
        SpawnError: It failed; with its words.
    """
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode != 0:
        words = last_words(done.stderr.decode(errors="replace").splitlines())
        raise SpawnError(f"{' '.join(command)} failed: {words}")
    return done.stdout.decode(errors="replace")
