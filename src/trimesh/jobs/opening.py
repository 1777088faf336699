"""A job from its first agent to its last: started together, joined, watched, ended together.

    open_job: body in the block of the hosts
    JobRun.run, a task of the runtime:
        launcher, links
        for each host: agent started --> joined --> RemoteHost ready --> kept until the block is left, or it is lost

JR-1 Either all hosts are ready, or nothing of any is left and the error names those that failed.
JR-2 The end of an agent, of its session or of its spawner is the loss of its host, told once, by whichever comes first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import trio

from trimesh import limits
from trimesh._runtime.hosts import ManyHosts, RemoteHost, open_hosts_proc, own_hosts
from trimesh._runtime.life import JobHosts, Proc
from trimesh._runtime.tasks import run_to_end
from trimesh._runtime.watch import ShownProgress, showing
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import reread
from trimesh.errors import MeshErrorGroup, Origin, SpawnError, leaves, set_origin
from trimesh.jobs.door import DoorPlace
from trimesh.jobs.host_links import HostLinks, open_host_links
from trimesh.jobs.job import Job
from trimesh.jobs.joined_host import JoinedHost
from trimesh.jobs.launcher import AgentExit, AgentOrder, Launcher, StartedAgent
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


@asynccontextmanager
async def open_job(job: Job) -> AsyncGenerator[HostMesh, None]:
    """Enter a job; see `Job`."""
    async with open_hosts_proc(pickled=None if job.pickle is None else job.pickle == "on") as proc:
        run = JobRun(proc, job)
        async with run.begun():
            with showing(proc, f"starting the hosts of {job!r}", len(run.whole)) as run.progress:
                await run.wait_ready(f"{job!r} could not be started")
            async with own_job_hosts(proc, run.hosts, job.parts if job.is_named else {}) as hosts:
                yield hosts


@asynccontextmanager
async def own_job_hosts(
    proc: Proc, hosts: list[RemoteHost], named: Mapping[str, int]
) -> AsyncGenerator[HostMesh, None]:
    """Own what is spawned on hosts while the body runs; their mesh is `{"hosts": n}`.

    Args:
        proc: The controller.
        hosts: In the order of the mesh.
        named: Numbers of hosts by the names of their parts, in this order; or none.
    """
    parts, start = dict[str, tuple[int, int]](), 0
    for name, count in named.items():
        parts[name] = (start, start + count)
        start += count
    whole = Region(Extent(hosts=len(hosts)))
    async with own_hosts(proc, "hosts", hosts, reread().grace) as owned:
        yield HostMesh(owned, JobHosts(whole, whole, parts, ManyHosts(tuple(hosts))))


class HostsRun(ABC):
    """What owns links to hosts, in a task of the runtime: it becomes ready or fails, is left, and is closed.

    Attributes:
        errors: Why it could not be had.
        ready: Set when it can be used, or it is known that it never can.
        release: Set when it is not used any more.
        closed: Set when nothing of it is left.
    """

    def __init__(self, proc: Proc) -> None:
        self.errors: list[Exception] = []
        self.ready = trio.Event()
        self.release = trio.Event()
        self.closed = trio.Event()
        self._proc = proc
        self._scope = trio.CancelScope()

    @asynccontextmanager
    async def begun(self) -> AsyncGenerator[None, None]:
        """Run it beside the body; after that nothing of it is left."""
        self._proc.nursery.start_soon(self._run_to_end)
        try:
            yield
        finally:
            self.leave()
            _, interrupt = await run_to_end(self.closed.wait)
            if interrupt is not None:
                raise interrupt

    async def wait_ready(self, failure: str) -> None:
        """Wait until it can be used.

        Raises:
            MeshErrorGroup: With the text `failure` and `errors`, when it never can.
        """
        await self.ready.wait()
        if self.errors:
            raise MeshErrorGroup(failure, self.errors, mesh="hosts")

    def leave(self) -> None:
        """Leave it; if it is not ready yet, start no more of it."""
        if not self.ready.is_set():
            self._scope.cancel(reason="the block of the hosts is left before it has begun")
        self.release.set()

    @trio.lowlevel.enable_ki_protection
    async def _run_to_end(self) -> None:
        try:
            with self._scope:
                await self.run()
        except Exception as error:
            if self.ready.is_set():
                raise
            self.errors += [one for one in leaves(error) if isinstance(one, Exception)]
        finally:
            self.ready.set()
            self.closed.set()

    @abstractmethod
    async def run(self) -> None:
        """Set `ready` in time, and return when nothing is left after `release`; it is cancelled until it is ready."""


class JobRun(HostsRun):
    """One run of a job.

    Attributes:
        whole: The mesh of its hosts.
        hosts: In order, once they are ready.
        progress: How many hosts are ready, while it is waited for.
    """

    def __init__(self, proc: Proc, job: Job) -> None:
        super().__init__(proc)
        self.job = job
        self.launcher: Launcher = job.launcher()
        self.whole = Region(Extent(hosts=sum(job.parts.values())))
        self.hosts: list[RemoteHost] = []
        self.progress: ShownProgress | None = None
        self._slots = list[HostSlot]()

    async def run(self) -> None:
        """Start the agents, and keep their hosts until they are released or lost."""
        async with self.launcher.open():
            place = DoorPlace(self.launcher.interface)
            async with open_host_links(self._proc, place) as links, trio.open_nursery() as nursery:
                nursery.start_soon(self._time_out)
                self._slots = [HostSlot(self, links, rank) for rank in range(len(self.whole))]
                for slot in self._slots:
                    nursery.start_soon(slot.run, self._proc)

    async def _time_out(self) -> None:
        with trio.move_on_after(limits.HOST_JOIN_SECONDS):
            await self.ready.wait()
            return
        late = [slot.name for slot in self._slots if not slot.is_ready]
        seconds = f"limits.HOST_JOIN_SECONDS ({limits.HOST_JOIN_SECONDS:g} s)"
        self.failed(SpawnError(f"the hosts {', '.join(late)} must be ready within {seconds}"))

    def failed(self, error: Exception) -> None:
        """Learn that a host cannot be had."""
        if not self.ready.is_set():
            self.errors.append(error)
            self._scope.cancel(reason="a host cannot be had")

    def became_ready(self) -> None:
        """Learn that one more host is ready."""
        if self.progress is not None:
            self.progress.done += 1
        if all(slot.is_ready for slot in self._slots):
            self.hosts = [slot.host for slot in self._slots if slot.host is not None]
            self.ready.set()


class HostSlot(JoinedHost):
    """One host of a job, with the agent that the job's launcher starts there."""

    def __init__(self, run: JobRun, links: HostLinks, rank: int) -> None:
        super().__init__(run.launcher.hosts[rank] or f"host {rank}")
        self._links = links
        self._run = run
        self._rank = rank
        self._agent_ended = trio.Event()

    def became_ready(self) -> None:
        """See `JoinedHost.became_ready`."""
        self._run.became_ready()

    def failed(self, error: Exception) -> None:
        """See `JoinedHost.failed`."""
        set_origin(error, Origin(self._run.whole.point(self._rank), "hosts", host=self.name))
        self._run.failed(error)

    @trio.lowlevel.enable_ki_protection
    async def run(self, proc: Proc) -> None:
        """Start the agent, keep the host, end the agent."""
        run, door = self._run, self._links.door
        order = AgentOrder(door.expect(self).text, door.addresses, run.job.host_id(self._rank), dict(run.job.agent_env))
        try:
            agent = await run.launcher.start(self._rank, order)
        except SpawnError as error:
            self.failed(error)
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, agent)
                await self.keep(proc, run.whole.point(self._rank), run.release)
                if not self.lost.is_set():
                    with trio.CancelScope(shield=True), trio.move_on_after(limits.HOST_STOP_SECONDS):
                        await self._agent_ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.close()
            await agent.stop()

    async def _watch(self, agent: StartedAgent) -> None:
        ended = await agent.wait()
        self._agent_ended.set()
        if ended.reason == "refused" and not self.is_ready:
            words = f"; its words: {ended.last_words}" if ended.last_words else ""
            self.failed(SpawnError(f"cannot start the agent of {self.name}: {ended.text}{words}"))
        self.lose(ended.reason, _text_of(ended))


def _text_of(ended: AgentExit) -> str:
    words = f"; its last words: {ended.last_words}" if ended.last_words else ""
    return f"its agent has ended ({ended.text}){words}"
