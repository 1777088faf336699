"""Agents on the nodes of a Slurm allocation: one that is asked for, or the one in which the program runs.

    salloc, with a standard input that the program holds --> queue, told of by squeue --> number, nodes
    srun --overlap, one for each node, its standard input the lifeline of the agent
    limit of time - notice --> `wait_notice`      limit of time - grace --> `wait_end`

NL-1 The allocation ends with the block, and with the program, however that ends: whatever holds it reads the end of its
     standard input, also while it waits in the queue.
NL-2 A job that is not known to live is dead; what was lost by it says so in the words of Slurm.
NL-3 The jobs are interactive ones, which Slurm never puts into its queue again.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Final

import msgspec
import trio

from trimesh import limits
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import address_of, address_towards
from trimesh.jobs.launcher import AgentExit, AgentOrder, ChildAgent, FarAgent, Launcher, agent_command, start_child
from trimesh.jobs.slurm.job import SlurmJob
from trimesh.jobs.slurm.output import (
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

_HOLD: Final = (
    'exec 3<&0; g=; trap g=1 USR1; HOLDER=$$; export HOLDER; salloc "$@" <&3 & p=$!; exec 2>/dev/null; '
    'cat >/dev/null; [ "$g" ] || kill $p; wait $p'
)
"""Ends with its standard input: salloc is killed while it is in the queue. Once it has nodes it ends with its command,
which reads the same: a signal at that moment may leave it spinning (22.05)."""

_SAY: Final = (
    'n=$SLURM_JOB_NODELIST; i=0; while [ $i -lt "${SLURM_HET_SIZE:-0}" ]; do '
    'eval "n=\\"\\$n \\$SLURM_JOB_NODELIST_HET_GROUP_$i\\""; i=$((i+1)); done; '
    'echo "trimesh-job" "$SLURM_JOB_ID" $n >&2; kill -s USR1 $HOLDER; unset HOLDER; exec cat >/dev/null'
)
_STEP: Final = ("--overlap", "-N1", "-n1", "--kill-on-bad-exit=0", "--mpi=none", "--cpu-bind=none", "--mem=0")


class _Node(msgspec.Struct, frozen=True):
    """A node that is a host: its name, and the component of a heterogeneous job that has it, or None."""

    name: str
    component: int | None


class SlurmLauncher(Launcher):
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

    def tell_by(self, say: Callable[[str], None]) -> None:
        self._say = say

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        missing = [name for name in ("salloc", "srun", "scancel", "scontrol", "squeue") if shutil.which(name) is None]
        if missing:
            raise SpawnError(f"a SlurmJob needs the commands of Slurm, and {missing[0]} is not on the PATH")
        if number := os.environ.get("SLURM_JOB_ID", ""):
            await self._use(number, _nodes_around(os.environ))
            yield
            return
        name = f"trimesh-{secrets.token_hex(6)}"
        command = ["sh", "-c", _HOLD, "salloc", *self._job.salloc_options(name), "sh", "-c", _SAY]
        holder = _Holder(await start_child(command, "the allocation of Slurm"))
        try:
            found = await self._wait_granted(holder, name)
            if found is None:
                raise SpawnError(f"Slurm gives no allocation for {self._job!r}: {last_words(holder.last_lines)}")
            await self._use(*found)
            yield
        finally:
            await self._give_back(holder, name)

    async def _wait_granted(self, holder: _Holder, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Wait in the queue, and say what is waited for; return number and nodes, or None where there is none."""
        found: tuple[str, tuple[str, ...]] | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_follow_queue, name, self._say)
            line = await holder.read_until(lambda text: granted(text) is not None)
            found = None if line is None else granted(line)
            nursery.cancel_scope.cancel(reason="the job is not in the queue any more")
        return found

    async def _use(self, number: str, listed: Sequence[str]) -> None:
        groups = [(await ask("scontrol", "show", "hostnames", nodes)).split() for nodes in listed if nodes]
        self._number = number
        self._nodes = self._chosen(groups, ", ".join(listed))
        self.hosts = [node.name for node in self._nodes]
        self._idle = [node for node in _nodes_of(groups) if node not in self._nodes]
        if self._job.interface is not None:
            self.interface = await address_of(self._job.interface)
        else:
            node = await ask("scontrol", "-o", "show", "node", self.hosts[0])
            self.interface = await address_towards(node_address(node) or self.hosts[0])

    def _chosen(self, groups: Sequence[Sequence[str]], listed: str) -> Sequence[_Node]:
        """Return the hosts, in the order of the mesh, of the nodes of each component."""
        job = self._job
        if len(groups) <= 1 or not job.is_heterogeneous:
            nodes = _nodes_of(groups)
            if len(nodes) < len(self.hosts):
                raise SpawnError(
                    f"{job!r} needs {len(self.hosts)} nodes, and the allocation {self._number} has {len(nodes)}: "
                    f"{listed}"
                )
            return nodes[: len(self.hosts)]
        components = job.components("")
        if len(components) > len(groups) or any(
            len(one.ranks) > len(names) for one, names in zip(components, groups, strict=False)
        ):
            raise SpawnError(
                f"{job!r} needs a component of Slurm with enough nodes for each part, those without memory= first, and "
                f"the allocation {self._number} has {listed}"
            )
        chosen = dict[int, _Node]()
        for group, component in enumerate(components):
            for rank, name in zip(component.ranks, groups[group], strict=False):
                chosen[rank] = _Node(name, group)
        return [chosen[rank] for rank in range(len(self.hosts))]

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
                    await ask("scancel", "--quiet", f"--name={name}")

    # ---- the limit of time -----------------------------------------------------------------------------------

    async def wait_notice(self) -> str:
        return await self._wait_left(self._notice_seconds)

    async def wait_end(self, ahead: float = 0.0) -> str:
        grace = reread().grace
        own = grace if math.isfinite(grace) else 0.0  # a block without an end of its own gets what is left
        return await self._wait_left(lambda _: own + limits.SLURM_LEAVE_SECONDS + ahead)

    def _notice_seconds(self, left: float) -> float:
        if self._notice is None:  # of a short job not most of it
            own = self._job.notice
            self._notice = min(limits.SLURM_NOTICE_SECONDS, left / 2) if own is None else own
        return self._notice

    async def _wait_left(self, seconds: Callable[[float], float]) -> str:
        """Wait until the limit of time is so near; it is asked for again, as an operator may change it."""
        while True:
            left: float | None = None
            pause = limits.SLURM_LIMIT_LOOK_SECONDS
            try:
                said = job_state(await ask("scontrol", "-o", "show", "job", self._number), now=time.time())
            except SpawnError:  # its controller is away; the job goes on
                said = None
            if said is not None and said.limit_seconds is not None and said.run_seconds is not None:
                left = said.limit_seconds - said.run_seconds
                ahead = seconds(left)
                if left <= ahead:
                    return f"the Slurm job {self._number} reaches its limit of time in {max(left, 0):.0f} s"
                pause = min(pause, max(left - ahead, limits.SLURM_LIMIT_LOOK_SECONDS_MIN))
            await trio.sleep(pause)

    # ---- more nodes ------------------------------------------------------------------------------------------

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        """Use further nodes of the allocation; see `Launcher.grow`."""
        del say
        await trio.lowlevel.checkpoint()
        if count > len(self._idle):
            raise SpawnError(
                f"{count} more hosts cannot be had: the allocation {self._number} of Slurm has {len(self._idle)} nodes "
                "that are no host, and Slurm gives no more to a job that runs: run the program in a larger allocation"
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
        process = await start_child([*srun, "sh", "-c", command], node.name, own_environment())
        agent = SlurmAgent(process, node.name, self._number, srun)
        await agent.begin(order)
        return agent


async def _follow_queue(name: str, say: Callable[[str], None]) -> None:
    """Say again and again, in the words of Slurm, what a job waits for."""
    await trio.sleep(limits.PROGRESS_SECONDS)
    while True:
        try:
            job = queued_job(await ask("squeue", "--noheader", f"--name={name}", f"--format={QUEUE_FORMAT}"))
            if job is not None:
                waiting = ["--states=PENDING", f"--partition={job.partition}", "--sort=-p,i", "--format=%i"]
                say(job.text(ahead_of(await ask("squeue", "--noheader", *waiting), job.number)))
        except SpawnError as error:
            say(f"the queue of Slurm: {error}")
        await trio.sleep(limits.SLURM_QUEUE_LOOK_SECONDS)


def _nodes_of(groups: Sequence[Sequence[str]]) -> Sequence[_Node]:
    """Return all nodes of an allocation, by components."""
    is_one = len(groups) == 1
    return [_Node(name, None if is_one else group) for group, names in enumerate(groups) for name in names]


def _nodes_around(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of each component of the allocation around the program, as Slurm lists them."""
    size = environ.get("SLURM_HET_SIZE", "")
    if not size.isdecimal():
        return (environ.get("SLURM_JOB_NODELIST", ""),)
    return tuple(environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in range(int(size)))


class _Holder(ChildAgent):
    """The shell around salloc, with a process group of their own."""

    async def end(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)  # it is not reaped, so the number is its own


# ---- an agent in a step of Slurm, and how it has ended in the words of Slurm -----------------------------------------


class SlurmAgent(FarAgent):
    """A step of Slurm that carries an agent; see `StartedAgent`."""

    def __init__(self, process: trio.Process, node: str, job: str, srun: Sequence[str]) -> None:
        super().__init__(process, (*srun, "sh", "-c"), own_environment())
        self._node = node
        self._job = job

    async def exit_of(self, code: int) -> AgentExit:
        """See `ChildAgent.exit_of`: what Slurm says, where that is why."""
        ended = await super().exit_of(code)
        try:
            said = job_state(await ask("scontrol", "-o", "show", "job", self._job))
        except SpawnError:
            said = JobState("")
        node = await self._node_words(said)
        if said.is_alive:
            if self.number is None:
                return AgentExit(f"srun: {ended.text}{node}", ended.last_words, "refused")
            return AgentExit(f"{ended.text}{node}", ended.last_words, "node failed" if node else ended.reason)
        return AgentExit(f"{said.text}{node}; srun: {ended.text}", ended.last_words, said.reason)

    async def _node_words(self, said: JobState) -> str:
        """Return what Slurm says of the node, where that may be why; else ""."""
        if not said.is_alive and said.reason != "node failed":
            return ""
        try:
            words = node_words(await ask("scontrol", "-o", "show", "node", self._node))
        except SpawnError:
            return ""
        return f"; Slurm says that {self._node} is {words}" if words.startswith(("DOWN", "FAIL", "NOT")) else ""


# ---- the commands of Slurm, asked once, and the environment that they get --------------------------------------------

_OF_OTHERS: Final = re.compile(
    r"SLURM_(NTASKS|NPROCS|NNODES|JOB_NUM_NODES|NTASKS_PER_NODE|CPUS_PER_TASK|TASKS_PER_NODE|DISTRIBUTION|EXCLUSIVE"
    r"|EXACT|MEM_PER_(NODE|CPU|GPU)|CPU_BIND|TRES_PER_TASK|HET_SIZE|PACK_SIZE|\w+_(HET|PACK)_GROUP_\d+)"
)
"""Variables of the batch script around the program, which srun would take for options of ours."""

_OF_TEXT: Final = re.compile(r"(SQUEUE|SCONTROL|SINFO)_\w+|SLURM_(TIME_FORMAT|JSON|YAML)")
"""Variables by which users change what the commands write."""


def own_environment() -> dict[str, str]:
    """Return the environment of srun."""
    return {name: value for name, value in os.environ.items() if not _OF_OTHERS.fullmatch(name)}


async def ask(*command: str) -> str:
    """Run a command of Slurm, and return what it writes.

    Raises:
        SpawnError: It failed; with its words.
    """
    env = {name: value for name, value in os.environ.items() if not _OF_TEXT.fullmatch(name)}
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, env=env)
    if done.returncode != 0:
        words = last_words(done.stderr.decode(errors="replace").splitlines())
        raise SpawnError(f"{' '.join(command)} failed: {words}")
    return done.stdout.decode(errors="replace")
