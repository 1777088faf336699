"""Hosts of a simulated job: each has its processes, and is lost or cut off as a whole.

This module models a session between hosts and its two leases. While a host is cut off, messages are held; if it is
healed in time, they arrive. After `AGENT_LEASE_SECONDS` of silence from the controller everything on the host ends;
after `HOST_LEASE_SECONDS` of silence from the host the controller gives it up.

SJ-1 Messages of a host that was given up are not delivered when it is healed.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from trimesh import limits
from trimesh._runtime.hosts import JobHost, own_hosts
from trimesh._runtime.life import HostCode, JobHosts
from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface import DownReason, Link, LinkDown
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import current
from trimesh.errors import SpawnError
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region
from trimesh.testing.plans.fault import Direction, Heal, Place
from trimesh.testing.simulated.host import SimChild, SimHost

if TYPE_CHECKING:
    from trimesh.testing.simulated.simulation import Simulation


@attrs.frozen(eq=False)
class HostCut:
    """Holds messages between one host and everything else, in one or both directions; see `Hold`."""

    host: SimJobHost
    direction: Direction
    ends_lease: bool = False

    def covers(self, source: Place, target: Place) -> bool:
        """Return whether messages from `source` to `target` are held."""
        leaves, comes = self.host.has(source), self.host.has(target)
        return leaves != comes and (self.holds_from_it if leaves else self.holds_to_it)

    @property
    def holds_to_it(self) -> bool:
        """True if messages to the host are held."""
        return self.direction != "b_to_a"

    @property
    def holds_from_it(self) -> bool:
        """True if messages from the host are held."""
        return self.direction != "a_to_b"


class SimJobHost:
    """One host of a simulated job; see `JobHost`.

    Attributes:
        name: Name of the machine.
        rank, point: Its place among the hosts of the job.
        loss: Its loss; None while it is not lost.
        is_loss_taken: Whether processes ran there, so that their meshes report the loss.
        on_lost: Called once, when it is lost, after the exits of its processes were reported.
        code: None: hosts of a simulation are this process, which has its own code.
    """

    def __init__(self, simulation: Simulation, inner: SimHost, rank: int, point: Point) -> None:
        self.name = f"simulated/{rank}"
        self.rank = rank
        self.point = point
        self.loss: HostLoss | None = None
        self.is_loss_taken = False
        self.on_lost: Callable[[HostLoss], None] = lambda _: None
        self.code: HostCode | None = None
        self._simulation = simulation
        self._inner = inner
        self._hooks: dict[ProcId, Callable[[ExitReport], None]] = {}
        self._has_agent = True
        self._cuts: list[HostCut] = []
        self._reachable = trio.Event()
        self._reachable.set()
        self._healed = trio.Event()
        self._healed.set()

    def has(self, place: Place) -> bool:
        return self._simulation.world.host_of.get(place) is self

    # ---- as a host -------------------------------------------------------------------------------------------

    async def launch(self, request: LaunchRequest, on_exit: Callable[[ExitReport], None]) -> SimChild:
        """Start a process; see `Host.launch`. It waits while the host is cut off."""
        await self._reachable.wait()
        self._check(f"cannot start a process on {self.name}")

        def told(report: ExitReport) -> None:
            if self._has_agent:  # only an agent reports exits
                hook = self._hooks.pop(request.proc_id, None)
                if hook is not None:
                    hook(report)

        self._hooks[request.proc_id] = on_exit
        try:
            return await self._inner.launch(request, told, self)
        except BaseException:
            self._hooks.pop(request.proc_id, None)
            raise

    async def connect(self, target: ProcId) -> Link:
        await self._reachable.wait()
        self._check(f"cannot connect to process {target} on {self.name}")
        return await self._inner.connect(target)

    def _check(self, what: str) -> None:
        if self.loss is not None:
            raise SpawnError(f"{what}: {self.loss.text}")

    async def exit_of(self, target: ProcId) -> ExitReport:
        return await self._inner.exit_of(target)

    def retire(self) -> None:
        """Do nothing: the host stays as long as its job."""

    async def flush_output(self) -> None:
        """Do nothing: a simulated process writes to the streams of the test itself."""

    # ---- the end ---------------------------------------------------------------------------------------------

    def lose(self, reason: str, text: str) -> None:
        """Record and report that the host is lost; see `RemoteHost.lose`."""
        if self.loss is not None:
            return
        if self._has_agent and all(cut.holds_to_it for cut in self._cuts):
            self._look_for_living(reason)
        self.loss = HostLoss(self.name, reason, text, self.point)
        self._reachable.set()
        hooks, self._hooks = self._hooks, {}
        self.is_loss_taken = bool(hooks)
        self.end_agent()
        for proc_id, hook in hooks.items():
            hook(ExitReport.unknown(proc_id, ended_at=0))
        self._end_links()
        self.on_lost(self.loss)

    def _end_links(self) -> None:
        """End all links of others to processes here, as the end of the session does; drop messages in flight (SJ-1)."""
        world = self._simulation.world
        for owner, link in world.links_to({child.proc_id for child in self._children()}):
            link.abort()
            world.proc(owner).link_down(link, LinkDown(DownReason.EOF))

    def _look_for_living(self, reason: str) -> None:
        if reason == "lease" and any(child.report is None for child in self._children()):
            self._simulation.oracles.breach("OR-9", f"{self.name} was given up while its processes were alive")

    def end_agent(self) -> None:
        """End everything here, without further messages."""
        self._has_agent = False
        for child in self._children():
            self._simulation.fell(child)
            child.die(signum=signal.SIGKILL)

    def _children(self) -> list[SimChild]:
        return [child for child in self._simulation.world.children.values() if child.host is self]

    async def succeeded(self) -> SimJobHost:
        """Return the host of an agent that is started again here; wait while the host is cut off.

        Raises:
            SpawnError: The host stays cut off for too long.
        """
        with trio.move_on_after(limits.HOST_JOIN_SECONDS):
            await self._healed.wait()
            return SimJobHost(self._simulation, self._inner, self.rank, self.point)
        seconds = f"limits.HOST_JOIN_SECONDS ({limits.HOST_JOIN_SECONDS:g} s)"
        raise SpawnError(f"cannot start the agent of {self.name}: it did not join within {seconds}")

    # ---- faults ----------------------------------------------------------------------------------------------

    def cut(self, direction: Direction) -> Heal:
        """Cut the host off in one or both directions; return a function that heals it."""
        cut = HostCut(self, direction)
        self._cuts.append(cut)
        self._healed = trio.Event()
        self._reachable = trio.Event()
        release = self._simulation.wire.hold(cut)
        scope = trio.CancelScope()
        if self.loss is None:
            self._simulation.start_soon(self._run_leases, cut, scope)

        def heal() -> None:
            if cut not in self._cuts:
                return
            self._cuts.remove(cut)
            scope.cancel(reason="the cut is healed")
            if not self._has_agent:
                self.lose("agent exit", "its agent ended: it heard nothing from the program for its lease")
            if not self._cuts:
                self._reachable.set()
                self._healed.set()
            release()

        return heal

    async def _run_leases(self, cut: HostCut, scope: trio.CancelScope) -> None:
        """Run the two leases while a cut lasts; a side that has given up is silent, too."""
        began = trio.current_time()
        agent_ends = began + limits.AGENT_LEASE_SECONDS
        given_up = began + limits.HOST_LEASE_SECONDS
        if not cut.holds_to_it:
            agent_ends = given_up + limits.AGENT_LEASE_SECONDS
        if not cut.holds_from_it:
            given_up = agent_ends + limits.HOST_LEASE_SECONDS
        with scope:
            ends = [(agent_ends, self._agent_lease_ends), (given_up, self._give_up)]
            for at, end in sorted(ends, key=lambda one: one[0]):
                await trio.sleep_until(at)
                end()

    def _agent_lease_ends(self) -> None:
        if self._has_agent:
            self.end_agent()

    def _give_up(self) -> None:
        self.lose("lease", f"nothing was heard of its agent for {limits.HOST_LEASE_SECONDS:g} s")


class SimSuccessors:
    """Starts agents again where simulated hosts were lost; see `Successors`."""

    spares = 0

    def __init__(self, hosts: list[SimJobHost], make: Callable[[int, Point], SimJobHost]) -> None:
        self._hosts = hosts
        self._make = make

    async def succeed(self, lost: JobHost) -> JobHost:
        [before] = [host for host in self._hosts if host is lost]
        after = await before.succeeded()
        self._hosts[before.rank] = after
        return after

    def give_up(self, host: JobHost) -> None:
        [before] = [one for one in self._hosts if one is host]
        before.lose("replaced", "the program requested another host in its place")

    async def grow(self, count: int, first: int) -> Sequence[JobHost]:
        await trio.lowlevel.checkpoint()
        whole = Region(Extent(hosts=first + count))
        more = [self._make(rank, whole.point(rank)) for rank in range(first, first + count)]
        self._hosts += more
        return more


@asynccontextmanager
async def open_simulated_hosts(simulation: Simulation, count: int) -> AsyncGenerator[HostMesh, None]:
    """Enter a job of some simulated hosts.

    Args:
        simulation: The run.
        count: Number of hosts.
    """
    world = simulation.world
    proc = world.proc(simulation.controller)
    inner = SimHost(world, proc)
    whole = Region(Extent(hosts=count))

    def make(rank: int, point: Point) -> SimJobHost:
        return SimJobHost(simulation, inner, rank, point)

    hosts = [make(rank, whole.point(rank)) for rank in range(count)]
    simulation.hosts = hosts
    successors = SimSuccessors(hosts, make)
    async with own_hosts(proc, "hosts", hosts, current().grace, successors, shared=True) as (owned, group):
        yield HostMesh(owned, JobHosts(whole, whole, {}, group))
