"""Run of a job: starts its agents together, joins and watches their hosts, ends them together.

    open_job: body in the block of the hosts
    JobRun.run, a task of the runtime:
        launcher, links
        for each host: agent started --> joined --> RemoteHost ready --> kept until the block is left, or it is lost
        for the replacement of a lost host: the same, on a spare host or again where it was
        for hosts of `grow`: the same, all or none

JR-1 Either all hosts are ready, or nothing of any is left and the error names those that failed.
JR-2 The end of an agent, of its session or of its spawner is the loss of its host, reported once, by the first of them.
JR-3 A lost host is replaced by a spare host. Without one, an agent is started again where the lost one was; or, if the
     launcher starts no second agent on a host, on a host that the launcher gets.
JR-4 Resources granted for a host that could not be started are given back when nothing of its agent is left.
JR-5 The reason of a loss is decided once: the launcher reports why the agent has ended; the agent's last message is the
     reason only if the launcher reports nothing within `limits.AGENT_EXIT_SECONDS`.

Before a known end of its hosts (a time limit), `LimitWatch` gives one notice, and then ends the block while they live.

    launcher.wait_notice --> `HostMesh.wait_notice` returns
    launcher.wait_end    --> the block fails, and is cancelled
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Final

import trio

from trimesh import limits
from trimesh._runtime.hosts import JobHost, RemoteHost, Successors, open_hosts_proc, own_hosts
from trimesh._runtime.life import HostsNotice, JobHosts, OwnedHost, Proc
from trimesh._runtime.tasks import run_to_end
from trimesh._runtime.watch import ShownProgress, showing
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import HostLost, MeshErrorGroup, Origin, SpawnError, leaves, set_origin
from trimesh.jobs.connections import ListenAddress
from trimesh.jobs.door import HostLinks, JoinedHost, open_host_links, own_credentials
from trimesh.jobs.job import Job
from trimesh.jobs.launcher import AgentExit, AgentOrder, Launcher, StartedAgent
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region


@asynccontextmanager
async def open_job(job: Job) -> AsyncGenerator[HostMesh, None]:
    """Enter a job; see `Job`."""
    async with open_job_run(job) as (hosts, _):
        yield hosts


@asynccontextmanager
async def open_job_run(job: Job) -> AsyncGenerator[tuple[HostMesh, JobRun], None]:
    """Enter a job; yields also its run, for callers that use its launcher."""
    async with open_hosts_proc(pickled=None if job.pickle is None else job.pickle == "on") as proc:
        run = JobRun(proc, job)
        async with run.begun():
            with showing(proc, f"starting the hosts of {job!r}", len(run.whole)) as run.progress:
                await run.wait_ready(f"{job!r} could not be started")
            named: Mapping[str, int] = job.parts if job.is_named else {}
            async with own_job_hosts(proc, run.hosts, named, run, run.limit, shared=job.shared) as hosts:
                yield hosts, run


@asynccontextmanager
async def own_job_hosts(
    proc: Proc,
    hosts: list[RemoteHost],
    named: Mapping[str, int],
    successors: Successors,
    limit: LimitWatch | None = None,
    *,
    shared: bool = False,
) -> AsyncGenerator[HostMesh, None]:
    """Own the processes on hosts while the body runs; the mesh of hosts has the extent `{"hosts": n}`.

    Args:
        proc: This process.
        hosts: The hosts, in the order of their ranks.
        named: Numbers of hosts by the names of the parts, in order of rank; empty if parts have no names.
        successors: Replaces lost hosts and adds further ones.
        limit: Ends the block before the hosts end.
        shared: Whether actors that get the hosts as an argument may spawn on them.
    """
    parts, start = dict[str, tuple[int, int]](), 0
    for name, count in named.items():
        parts[name] = (start, start + count)
        start += count
    whole = Region(Extent(hosts=len(hosts)))
    async with own_hosts(proc, "hosts", hosts, reread().grace, successors, shared=shared) as (owned, group):
        notice = None if limit is None else limit.notice
        mesh = HostMesh(owned, JobHosts(whole, whole, parts, group, notice))
        scope = trio.CancelScope()
        if limit is not None:
            proc.nursery.start_soon(_watch_limit, limit, owned, scope)
        try:
            yield mesh
        finally:
            scope.cancel(reason="the block of the hosts is left")


async def _watch_limit(limit: LimitWatch, owned: OwnedHost, scope: trio.CancelScope) -> None:
    def fail(error: Exception) -> None:
        if not owned.block.is_stopping:
            owned.block.fail(error)

    with scope:
        await limit.run(fail)


REPLACED: Final = "the program requested another host in its place"


class HostsRun(ABC):
    """Owner of links to hosts, in a task of the runtime: it becomes ready or fails, is left, and is closed.

    Attributes:
        errors: Why it failed before it was ready.
        ready: Set when it can be used, or has failed with `errors`.
        release: Set when it is no longer used.
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
        """Run it beside the body; when the block is left, nothing of it remains."""
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
            MeshErrorGroup: It failed; with the text `failure` and `errors`.
        """
        await self.ready.wait()
        if self.errors:
            raise MeshErrorGroup(failure, self.errors, mesh="hosts")

    def leave(self) -> None:
        """Leave it; cancel it if it is not ready yet."""
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
        """Set `ready`, wait for `release`, and return when nothing is left. May be cancelled until it is ready."""


class JobRun(HostsRun):
    """One run of a job.

    Attributes:
        whole: Region of the hosts that it starts with.
        hosts: Those hosts, once all are ready.
        progress: Progress display, while hosts are awaited.
    """

    def __init__(self, proc: Proc, job: Job) -> None:
        super().__init__(proc)
        self.job = job
        self.launcher = _launcher_of(job)
        self.whole = Region(Extent(hosts=sum(job.parts.values())))
        self.hosts: list[RemoteHost] = []
        self.progress: ShownProgress | None = None
        self.limit = LimitWatch(self.launcher)
        self._slots = list[HostSlot]()
        self._spares = deque[int]()
        self._own = 0
        self._links: HostLinks
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Start the agents, and keep their hosts until they are released or lost."""
        own = await own_credentials(self.job.pki, self.job.insecure, repr(self.job))  # before any queue
        launcher = self.launcher
        launcher.tell_by(self._say)
        async with launcher.open():
            place = ListenAddress(launcher.interface, launcher.port, launcher.advertised)
            async with open_host_links(self._proc, place, own) as self._links:
                await launcher.allocate(self._links.door.addresses, self._say)
                self._own = len(launcher.hosts)
                self._spares.extend(range(len(self.whole), self._own))
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._time_out)
                    places = [self.whole.point(rank) for rank in range(len(self.whole))]
                    self._slots = [HostSlot(self, self._links, point, rank) for rank, point in enumerate(places)]
                    for slot in self._slots:
                        self._nursery.start_soon(slot.run, self._proc)
                    await self.release.wait()

    def _say(self, text: str) -> None:
        """Show the reason for waiting."""
        if self.progress is not None:
            self.progress.title = f"starting hosts: {text}"

    # ---- as `Successors` -------------------------------------------------------------------------------------

    @property
    def spares(self) -> int:
        return len(self._spares)

    def give_up(self, host: JobHost) -> None:
        [slot] = [slot for slot in self._slots if slot.host is host]
        slot.is_given_up = True
        slot.lose("replaced", REPLACED)

    async def succeed(self, lost: JobHost) -> JobHost:
        """Start an agent on a spare host, or again where the lost one was; see `Successors.succeed`."""
        [before] = [slot for slot in self._slots if slot.host is lost]
        indices: Sequence[int] = (before.index,)
        is_got = bool(self._spares) or not self.launcher.starts_again
        if is_got:
            with showing(self._proc, f"getting a host in the place of {lost.name}", 1) as self.progress:
                indices = await self._got(1)
        elif before.is_given_up:
            await before.over.wait()
            await self.launcher.replace(before.index)
        [slot] = [HostSlot(self, self._links, before.point, index) for index in indices]
        failed = await self._start([slot], got=indices if is_got else ())
        if failed:
            raise SpawnError(f"the lost host {lost.name} cannot be replaced by {slot.name}: {failed[0]}")
        assert slot.host is not None
        self._slots[self._slots.index(before)] = slot
        return slot.host

    async def grow(self, count: int, first: int) -> Sequence[JobHost]:
        """Start agents on hosts that the launcher gets, or on spare ones; see `Successors.grow`."""
        whole = Region(Extent(hosts=first + count))
        with showing(self._proc, f"starting {count} more hosts of {self.job!r}", count) as self.progress:
            can_grow = self.launcher.can_grow
            if not can_grow and count > len(self._spares):
                raise SpawnError(
                    f"cannot add {count} hosts: {self.job!r} has {len(self._spares)} spare hosts, and its launcher "
                    "gets no others"
                )
            indices = await self._got(count, spares=not can_grow)
            slots = [HostSlot(self, self._links, whole.point(first + one), at) for one, at in enumerate(indices)]
            failed = await self._start(slots, got=indices)
        if failed:
            raise MeshErrorGroup(f"{count} more hosts of {self.job!r} could not be started", failed, mesh="hosts")
        self._slots += slots
        return [slot.host for slot in slots if slot.host is not None]

    async def _got(self, count: int, *, spares: bool = True) -> Sequence[int]:
        """Return indices of the launcher's hosts on which nothing runs yet: spare ones, or new ones from `grow`."""
        if spares and self._spares:
            return [self._spares.popleft() for _ in range(count)]
        return await self.launcher.grow(count, self._say)

    async def _start(self, slots: Sequence[HostSlot], *, got: Sequence[int]) -> Sequence[Exception]:
        """Start agents, and return the errors; if there are any, nothing of any agent is left (JR-4).

        Then `got`, indices of the launcher's hosts, are given back, except spare hosts that failed.
        """
        for slot in slots:
            self._nursery.start_soon(slot.run, self._proc)
        failed: Sequence[Exception] | None = None
        try:
            with trio.move_on_after(limits.HOST_JOIN_SECONDS):
                async with trio.open_nursery() as nursery:
                    for slot in slots:
                        nursery.start_soon(slot.wait_settled, nursery.cancel_scope)
            failed = [slot.error for slot in slots if slot.error is not None]
            late = [slot for slot in slots if not slot.settled.is_set()]
            if late and not failed:
                seconds = f"limits.HOST_JOIN_SECONDS ({limits.HOST_JOIN_SECONDS:g} s)"
                failed = [SpawnError(f"the host {one.name} must be ready within {seconds}") for one in late]
        finally:
            if failed is None or failed:
                with trio.CancelScope(shield=True):
                    for slot in slots:
                        slot.scope.cancel(reason="it is no longer awaited")
                    for slot in slots:
                        await slot.over.wait()
                    bad = [slot.index for slot in slots if failed and (slot.error is not None or len(slots) == 1)]
                    await self._give_back(got, bad)
        return failed or ()

    async def _give_back(self, got: Sequence[int], bad: Sequence[int]) -> None:
        spares = [index for index in got if index < self._own]
        self._spares.extendleft(index for index in reversed(spares) if index not in bad)
        if len(spares) < len(got):
            await self.launcher.give_back(got)

    async def _time_out(self) -> None:
        with trio.move_on_after(limits.HOST_JOIN_SECONDS):
            await self.ready.wait()
            return
        late = [slot.name for slot in self._slots if not slot.is_ready]
        seconds = f"limits.HOST_JOIN_SECONDS ({limits.HOST_JOIN_SECONDS:g} s)"
        self.failed(SpawnError(f"the hosts {', '.join(late)} must be ready within {seconds}"))

    def failed(self, error: Exception) -> None:
        """Handle the failure of a host to start: it fails the run, unless that is ready already."""
        if not self.ready.is_set():
            self.errors.append(error)
            self._scope.cancel(reason="a host could not be started")

    def became_ready(self) -> None:
        """Handle that one more host is ready."""
        if self.progress is not None:
            self.progress.done += 1
        if not self.ready.is_set() and all(slot.is_ready for slot in self._slots):
            self.hosts = [slot.host for slot in self._slots if slot.host is not None]
            self.ready.set()


def _launcher_of(job: Job) -> Launcher:
    launcher: object = job.launcher()
    if not isinstance(launcher, Launcher):
        kind = type(launcher).__name__
        raise TypeError(
            f"launcher() of a job must return a jobs.Launcher, got {launcher!r}: write class {kind}(jobs.Launcher)"
        )
    return launcher


class HostSlot(JoinedHost):
    """One host of a job, with the agent that the job's launcher starts there.

    Attributes:
        index: Its index in the launcher's hosts.
        settled: Set when it is ready, or has failed with `error`.
        over: Set when nothing of it is left in this process.
        is_given_up: Whether the program has requested another host in its place.
    """

    def __init__(self, run: JobRun, links: HostLinks, point: Point, index: int) -> None:
        super().__init__(run.launcher.hosts[index] or f"host {index}")
        self.point = point
        self.index = index
        self.settled = trio.Event()
        self.over = trio.Event()
        self.is_given_up = False
        self.error: Exception | None = None
        self.scope = trio.CancelScope()
        self._links = links
        self._run = run
        self._agent_ended = trio.Event()
        self._farewell = ""
        self._has_failed = trio.Event()

    def agent_failed(self, text: str) -> None:
        """See `JoinedHost.agent_failed`; the launcher gets some time to report the reason first (JR-5)."""
        self._farewell = self._farewell or text
        self._has_failed.set()

    async def _wait_for_reason(self) -> None:
        await self._has_failed.wait()
        with trio.move_on_after(limits.AGENT_EXIT_SECONDS):
            await self._agent_ended.wait()
        if not self._agent_ended.is_set():
            super().agent_failed(self._farewell)

    def became_ready(self) -> None:
        self.settled.set()
        self._run.became_ready()

    async def wait_settled(self, others: trio.CancelScope) -> None:
        """Wait until it is ready; if it fails or is lost again, cancel the wait for `others`."""
        await self.settled.wait()
        if self.lost.is_set() and self.error is None:
            self.error = SpawnError(f"the host {self.name} was lost as soon as it was ready")
        if self.error is not None:
            others.cancel(reason="one of them has failed")

    def failed(self, error: Exception) -> None:
        if self.error is not None:
            return  # a consequence of the first failure
        set_origin(error, Origin(self.point, "hosts", host=self.name))
        self.error = error
        self.settled.set()
        self._run.failed(error)

    @trio.lowlevel.enable_ki_protection
    async def run(self, proc: Proc) -> None:
        """Start the agent, keep the host, end the agent."""
        try:
            with self.scope:
                await self._run_agent(proc)
        finally:
            self.settled.set()
            self.over.set()

    async def _run_agent(self, proc: Proc) -> None:
        run, door = self._run, self._links.door
        job = run.job
        order = AgentOrder(
            door.expect(self).text,
            door.addresses,
            job.host_id(self.index),
            dict(job.agent_env),
            is_one_machine=job.is_one_machine,
            pki=job.pki,
        )
        try:
            agent = await run.launcher.start(self.index, order)
        except SpawnError as error:
            self.failed(error)
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, agent)
                nursery.start_soon(self._wait_for_reason)
                await self.keep(proc, self.point, run.release)
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
            words = f"; its last words: {ended.last_words}" if ended.last_words else ""
            self.failed(SpawnError(f"cannot start the agent of {self.name}: {ended.text}{words}"))
        self.lose(ended.reason, _text_of(ended, self._farewell))


def _text_of(ended: AgentExit, farewell: str) -> str:
    last = ended.last_words or farewell
    words = f"; its last words: {last}" if last else ""
    return f"its agent has ended ({ended.text}){words}"


# ---- limit watch -----------------------------------------------------------------------------------------------------

_log: Final = logging.getLogger("trimesh")
_REASON: Final = "time limit"
"""See `HostLost.reason`."""


class LimitWatch:
    """Watches the time limit of one run of a job: sets `notice`, then ends the block while the hosts live."""

    def __init__(self, launcher: Launcher) -> None:
        self.notice = HostsNotice()
        self._launcher = launcher

    async def run(self, fail: Callable[[Exception], None]) -> None:
        """Set the notice, then end the block by `fail`; runs until then, or until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell)
            text = await self._launcher.wait_end()
            self.notice.tell(text)
            fail(HostLost(f"the block of the hosts is left while they live: {text}", reason=_REASON))
            nursery.cancel_scope.cancel(reason="it is too late for a notice")

    async def _tell(self) -> None:
        text = await self._launcher.wait_notice()
        _log.warning("%s", text)
        self.notice.tell(text)
