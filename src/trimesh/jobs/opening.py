"""A job from its first agent to its last: started together, joined, watched, ended together.

    open_job: body in the block of the hosts
    JobRun.run, a task of the runtime:
        relay, door
        for each host: agent started --> joined --> RemoteHost ready --> kept until the block is left, or it is lost

JR-1 Either all hosts are ready, or nothing of any is left and the error names those that failed.
JR-2 The end of an agent, of its session or of its spawner is the loss of its host, told once, by whichever comes first.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from trimesh import limits
from trimesh._runtime.hosts import (
    HostSessions,
    ManyHosts,
    RemoteHost,
    SessionPipe,
    open_hosts_proc,
    open_remote_host,
    own_hosts,
)
from trimesh._runtime.life import JobHosts, Proc
from trimesh._runtime.tasks import run_to_end
from trimesh._transport.relay.base import HostConnection, Relay, SessionDown
from trimesh._transport.relay.native import open_relay
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import reread
from trimesh.errors import HostRefused, MeshErrorGroup, Origin, SpawnError, leaves, set_origin
from trimesh.ids import ProcId
from trimesh.jobs.door import Door, door_context, open_door_at
from trimesh.jobs.identity import Authority
from trimesh.jobs.job import Job
from trimesh.jobs.launcher import AgentExit, AgentOrder, Launcher, StartedAgent
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


@asynccontextmanager
async def open_job(job: Job) -> AsyncGenerator[HostMesh, None]:
    """Enter a job; see `Job`."""
    async with open_hosts_proc(pickled=None if job.pickle is None else job.pickle == "on") as proc:
        run = JobRun(proc, job)
        proc.nursery.start_soon(run.run)
        try:
            await run.ready.wait()
            if run.errors:
                raise MeshErrorGroup(f"{job!r} could not be started", run.errors, mesh="hosts")
            async with own_hosts(proc, "hosts", run.hosts, reread().grace) as owned:
                group = ManyHosts(tuple(run.hosts))
                yield HostMesh(owned, JobHosts(run.whole, run.whole, _parts(job), group))
        finally:
            run.release.set()
            _, interrupt = await run_to_end(run.closed.wait)
            if interrupt is not None:
                raise interrupt


def _parts(job: Job) -> dict[str, tuple[int, int]]:
    parts, start = dict[str, tuple[int, int]](), 0
    if isinstance(job.hosts, int):
        return parts
    for name, count in job.parts.items():
        parts[name] = (start, start + count)
        start += count
    return parts


class JobRun:
    """One run of a job.

    Attributes:
        whole: The mesh of its hosts.
        hosts: In order, once they are ready.
        errors: Why it could not be started.
        ready: Set when all hosts are ready, or it is known that they will not be.
        release: To be set when they are not used any more.
        closed: Set when nothing of it is left.
    """

    def __init__(self, proc: Proc, job: Job) -> None:
        self.launcher: Launcher = job.launcher()
        self.whole = Region(Extent(hosts=len(self.launcher.hosts)))
        self.hosts: list[RemoteHost] = []
        self.errors: list[Exception] = []
        self.ready = trio.Event()
        self.release = trio.Event()
        self.closed = trio.Event()
        self.scope = trio.CancelScope()
        self._proc = proc
        self.job = job
        self._slots = [HostSlot(self, rank) for rank in range(len(self.whole))]
        self.sessions = HostSessions()
        self.relay: Relay
        self.door: Door

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Run it from start to end; what goes wrong until it is ready is in `errors`."""
        try:
            with self.scope:
                authority = Authority(time.time())
                with door_context(self._proc.proc_id, authority) as context:
                    self.sessions.on_down = self._session_down
                    async with (
                        open_relay(self.sessions.take) as self.relay,
                        open_door_at(self.launcher.interface, self._proc.proc_id, authority, context) as self.door,
                        trio.open_nursery() as nursery,
                    ):
                        nursery.start_soon(self._time_out)
                        for slot in self._slots:
                            nursery.start_soon(slot.run, self._proc)
        except Exception as error:
            if self.ready.is_set():
                raise
            self.errors += [one for one in leaves(error) if isinstance(one, Exception)]
        finally:
            self.ready.set()
            self.closed.set()

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
            self.scope.cancel(reason="a host cannot be had")

    def became_ready(self) -> None:
        """Learn that one more host is ready."""
        if all(slot.is_ready for slot in self._slots):
            self.hosts = [slot.host for slot in self._slots if slot.host is not None]
            self.ready.set()

    def _session_down(self, down: SessionDown) -> None:
        for slot in self._slots:
            if slot.pipe is not None and slot.pipe.session is down.session:
                slot.session_down(down)


class HostSlot:
    """One host of a job, from its token to its end.

    Attributes:
        name: Of the host.
        pipe: To its agent, once that has joined.
        host: What processes are started on.
        is_ready: Whether they can be.
    """

    def __init__(self, run: JobRun, rank: int) -> None:
        self.name = run.launcher.hosts[rank] or f"host {rank}"
        self.pipe: SessionPipe | None = None
        self.host: RemoteHost | None = None
        self.is_ready = False
        self._run = run
        self._rank = rank
        self._incarnation = ProcId(0)
        self._joined = trio.Event()
        self._is_lost = trio.Event()
        self._agent_ended = trio.Event()
        self._is_over = False

    # ---- as a guest of the door ------------------------------------------------------------------------------

    def refused(self, error: Exception) -> None:
        """See `DoorGuest.refused`."""
        self._fail(HostRefused(f"the host {self.name} may not join: {error}"))

    def connected(self, incarnation: ProcId, connection: HostConnection) -> bool:
        """See `DoorGuest.connected`."""
        if self._is_over:
            return False
        if self.pipe is None:
            self._incarnation = incarnation
            self.pipe = self._run.sessions.begin(
                self._run.relay, incarnation, is_dialler=False, lease_seconds=limits.HOST_LEASE_SECONDS
            )
            self._joined.set()
        self.pipe.session.attach(connection)
        return True

    # ---- its life --------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def run(self, proc: Proc) -> None:
        """Start the agent, keep the host, end the agent."""
        run = self._run
        token = run.door.expect(self)
        order = AgentOrder(token.text, (run.door.address,), run.job.host_id(self._rank))
        try:
            agent = await run.launcher.start(self._rank, order)
        except SpawnError as error:
            self._fail(error)
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, agent)
                await self._joined.wait()
                assert self.pipe is not None
                await self._keep(proc, self.pipe)
                if not self._is_lost.is_set():
                    with trio.CancelScope(shield=True), trio.move_on_after(limits.HOST_STOP_SECONDS):
                        await self._agent_ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._is_over = True
            run.door.forget(self._incarnation)
            if self.pipe is not None:
                self.pipe.session.abort()
                self.pipe.close()
            await agent.stop()

    async def _keep(self, proc: Proc, pipe: SessionPipe) -> None:
        async with open_remote_host(proc, pipe, self.name, self._run.whole.point(self._rank)) as host:
            self.host = host
            try:
                await host.wait_ready()
            except SpawnError as error:
                self._fail(error)
                return
            self.is_ready = True
            self._run.became_ready()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_then_cancel, self._is_lost, nursery.cancel_scope)
                await self._run.release.wait()
                nursery.cancel_scope.cancel()

    async def _watch(self, agent: StartedAgent) -> None:
        ended = await agent.wait()
        self._agent_ended.set()
        self._lose(ended.reason, _text_of(ended))

    def session_down(self, down: SessionDown) -> None:
        """Learn that the session is over."""
        text = down.reason
        if down.ending.value == "lease":
            text = f"nothing was heard of its agent for limits.HOST_LEASE_SECONDS ({limits.HOST_LEASE_SECONDS:g} s)"
        self._lose(down.ending.value, text)

    def _lose(self, reason: str, text: str) -> None:
        self._is_over = True
        if not self.is_ready:
            self._fail(SpawnError(f"the host {self.name} was lost before it was ready: {text}"))
        elif self.host is not None:
            self.host.lose(reason, text)
        self._is_lost.set()

    def _fail(self, error: Exception) -> None:
        set_origin(error, Origin(self._run.whole.point(self._rank), "hosts", host=self.name))
        self._run.failed(error)


def _text_of(ended: AgentExit) -> str:
    words = f"; its last words: {ended.last_words}" if ended.last_words else ""
    return f"its agent has ended ({ended.text}){words}"


async def _then_cancel(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
