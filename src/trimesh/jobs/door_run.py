"""One open door, and the hosts that have come to it: they join by a token each, wait, and are taken by a block.

open_door_run: DoorRun.run, a task of the runtime, owns the links
new_token() --> trimesh host join ... --> DoorHost: joined, ready, waits in `DoorRun.waiting`
taken(2): takes two of them, in the order in which they have come
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence

import trio

from trimesh import limits
from trimesh._runtime.hosts import JobHost, RemoteHost, open_hosts_proc
from trimesh._runtime.life import Proc
from trimesh._runtime.tasks import run_to_end
from trimesh.actor.host_mesh import HostMesh
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import HostRefused, MeshErrorGroup, SpawnError
from trimesh.jobs.addresses import address_of, address_towards
from trimesh.jobs.door import DoorPlace
from trimesh.jobs.host_links import HostLinks, open_host_links, own_credentials
from trimesh.jobs.joined_host import JoinedHost
from trimesh.jobs.opening import REPLACED, HostsRun, own_job_hosts
from trimesh.jobs.pki import OwnPKI
from trimesh.plain_numbers import plain_whole
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


@asynccontextmanager
async def open_door_run(
    interface: str | None,
    port: int,
    advertised: tuple[str, ...],
    *,
    pickled: bool | None,
    pki: OwnPKI | None,
    insecure: str,
) -> AsyncGenerator[DoorRun, None]:
    """Open a door while the body runs; see `trimesh.jobs.open_door`."""
    async with open_hosts_proc(pickled=pickled) as proc:
        run = DoorRun(proc, interface, port, advertised, pki, insecure)
        async with run.begun():
            await run.wait_ready("the door could not be opened")
            yield run


class DoorRun(HostsRun):
    """One open door, and the hosts that have come.

    Attributes:
        links: Of its hosts; once it is ready.
        waiting: Hosts that are ready and not taken, in order.
        refusals: Why others were not let in.
        pki: Certificates of the user's, or None.
    """

    links: HostLinks

    def __init__(
        self,
        proc: Proc,
        interface: str | None,
        port: int,
        advertised: tuple[str, ...],
        pki: OwnPKI | None,
        insecure: str,
    ) -> None:
        super().__init__(proc)
        self.waiting: list[DoorHost] = []
        self.refusals = deque[HostRefused](maxlen=limits.DOOR_REFUSALS_KEPT)
        self.pki = pki
        self._insecure = insecure
        self._interface = interface
        self._port = port
        self._advertised = advertised
        self._nursery: trio.Nursery
        self._hosts = set[DoorHost]()
        self._claims: list[_Claim] = []

    def leave(self) -> None:
        """Close it; agents of hosts that wait are told to end."""
        super().leave()
        for host in self._hosts:
            host.leave()

    async def run(self) -> None:
        """Let hosts in until it is released, and keep them until they are released or lost."""
        own = await own_credentials(self.pki, self._insecure, "open_door()")
        number = await (address_towards() if self._interface is None else address_of(self._interface))
        place = DoorPlace(number, self._port, self._advertised)
        async with open_host_links(self._proc, place, own) as self.links:
            self.links.door.on_stranger = self._stranger
            self.links.door.on_refused = lambda text: self.refusals.append(HostRefused(text))
            async with trio.open_nursery() as self._nursery:
                self.ready.set()
                await self.release.wait()

    @property
    def addresses(self) -> tuple[str, ...]:
        """What hosts dial."""
        return self.links.door.addresses

    def new_token(self) -> str:
        """Return a token that lets in one host."""
        return self.links.door.expect(DoorHost(self)).text

    # ---- what hosts do ---------------------------------------------------------------------------------------

    def came(self, host: DoorHost) -> bool:
        """Keep a host that has joined; False when the door is being closed."""
        if self.release.is_set():
            return False
        self._hosts.add(host)
        self._nursery.start_soon(host.run, self._proc)
        return True

    def became_ready(self, host: DoorHost) -> None:
        """Let a host wait to be taken."""
        self.waiting.append(host)
        self._serve_claims()

    def went(self, host: DoorHost) -> None:
        """Learn that a host cannot be taken any more."""
        self._hosts.discard(host)
        if host in self.waiting:
            self.waiting.remove(host)

    def failed(self, error: Exception) -> None:
        """Learn that a host came and cannot be had: who waits for hosts is told."""
        if isinstance(error, HostRefused):
            self.refusals.append(error)
        for claim in self._claims:
            claim.error = error
            claim.settled.set()

    def _stranger(self, text: str) -> None:
        self.refusals.append(HostRefused(f"a host came to the door with a token that is worth nothing: {text}"))

    # ---- what the program does -------------------------------------------------------------------------------

    @asynccontextmanager
    async def taken(self, hosts: int | Mapping[str, int]) -> AsyncGenerator[HostMesh, None]:
        """Take hosts, and own what is spawned on them while the body runs; their agents end with it."""
        hosts = plain_whole(hosts)
        named: Mapping[str, int] = {} if isinstance(hosts, int) else hosts
        count = hosts if isinstance(hosts, int) else sum(hosts.values())
        found = list(await self.claim(count))
        try:
            whole = Region(Extent(hosts=count))
            for rank, one in enumerate(found):
                one.remote.point = whole.point(rank)
            successors = DoorSuccessors(self, found, whole)
            async with own_job_hosts(self._proc, [one.remote for one in found], named, successors) as mesh:
                yield mesh
        finally:
            for one in found:
                one.release.set()

            async def wait_over() -> None:
                for one in found:
                    await one.over.wait()

            _, interrupt = await run_to_end(wait_over)
            if interrupt is not None:
                raise interrupt

    async def claim(self, count: int) -> Sequence[DoorHost]:
        """Wait for hosts, and take them."""
        claim = _Claim(count)
        self._claims.append(claim)
        try:
            self._serve_claims()
            await claim.settled.wait()
            if claim.error is not None:
                raise MeshErrorGroup(f"{count} hosts were expected, and one that came cannot be had", [claim.error])
        except BaseException:
            self.waiting[:0] = [host for host in claim.hosts if not host.lost.is_set()]
            raise
        finally:
            if claim in self._claims:
                self._claims.remove(claim)
            if not claim.settled.is_set() or claim.error is not None:
                self._serve_claims()
        return claim.hosts

    def _serve_claims(self) -> None:
        while self._claims and self._claims[0].count <= len(self.waiting):
            claim = self._claims.pop(0)
            claim.hosts, self.waiting = self.waiting[: claim.count], self.waiting[claim.count :]
            claim.settled.set()


class DoorSuccessors:
    """Hosts that wait at the door, or come to it, in the place of lost ones of a block; see `Successors`.

    Args:
        run: The door.
        taken: All hosts of the block, to which it adds.
        whole: The mesh of its hosts.
    """

    def __init__(self, run: DoorRun, taken: list[DoorHost], whole: Region) -> None:
        self._run = run
        self._taken = taken
        self._whole = whole

    @property
    def spares(self) -> int:
        """See `Successors.spares`."""
        return len(self._run.waiting)

    def give_up(self, host: JobHost) -> None:
        """See `Successors.give_up`."""
        [one] = [one for one in self._taken if one.host is host]
        one.lose("replaced", REPLACED)

    async def succeed(self, lost: JobHost) -> JobHost:
        """Take the host that has come first, or the next one that comes; see `Successors.succeed`."""
        [before] = [one for one in self._taken if one.host is lost]
        with trio.move_on_after(limits.HOST_JOIN_SECONDS):
            [one] = await self._run.claim(1)
            one.remote.point = before.remote.point
            self._taken.append(one)
            return one.remote
        seconds = f"limits.HOST_JOIN_SECONDS ({limits.HOST_JOIN_SECONDS:g} s)"
        raise SpawnError(f"{lost.name} is lost, and no other host has come to the door within {seconds}")

    async def grow(self, count: int, first: int) -> Sequence[JobHost]:
        """Take hosts that have come, and wait for those that will; see `Successors.grow`."""
        found = await self._run.claim(count)
        whole = Region(Extent(hosts=first + count))
        for place, one in enumerate(found, first):
            one.remote.point = whole.point(place)
        self._taken += found
        return [one.remote for one in found]


class _Claim:
    """A block that waits for hosts."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.hosts: list[DoorHost] = []
        self.error: Exception | None = None
        self.settled = trio.Event()


class DoorHost(JoinedHost):
    """A host that joins by itself.

    Attributes:
        release: Set when it is not used any more.
        over: Set when nothing of it is left here.
    """

    def __init__(self, run: DoorRun) -> None:
        super().__init__("")
        self._links = run.links
        self._run = run
        self.release = trio.Event()
        self.over = trio.Event()
        self._scope = trio.CancelScope()

    @property
    def remote(self) -> RemoteHost:
        """What processes are started on."""
        assert self.host is not None
        return self.host

    def came(self) -> bool:
        """See `JoinedHost.came`."""
        return self._run.came(self)

    def became_ready(self) -> None:
        """See `JoinedHost.became_ready`."""
        self._run.became_ready(self)

    def failed(self, error: Exception) -> None:
        """See `JoinedHost.failed`."""
        self._run.failed(error)

    def lose(self, reason: str, text: str) -> None:
        """See `JoinedHost.lose`."""
        self._run.went(self)
        super().lose(reason, text)

    def leave(self) -> None:
        """Release it, also if it is not ready yet."""
        self.release.set()
        if not self.is_ready:
            self._scope.cancel(reason="the door is closed")

    @trio.lowlevel.enable_ki_protection
    async def run(self, proc: Proc) -> None:
        """Keep it from when it has joined until it is released or lost."""
        try:
            with self._scope:
                await self.keep(proc, _NOWHERE, self.release)
            if not self.lost.is_set():
                with trio.CancelScope(shield=True), trio.move_on_after(limits.HOST_STOP_SECONDS):
                    await self.lost.wait()
        finally:
            self._run.went(self)
            self.close()
            self.over.set()


_NOWHERE = Region(Extent()).point(0)
"""The place of a host that no mesh has taken yet."""
