"""`open_door` accepts hosts started by something else (mpirun, a scheduler, by hand), each by a token.

open_door: DoorRun.run, a task of the runtime, owns the links
door.token() --> trimesh host join ... --> DoorHost: joined, ready, waits in `DoorRun.waiting`
door.expect(2): takes two of them, in order of arrival
"""

from __future__ import annotations

import os
import shlex
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import NoReturn

import trio

from trimesh import limits
from trimesh._runtime.hosts import JobHost, RemoteHost, open_hosts_proc
from trimesh._runtime.life import Proc
from trimesh._runtime.tasks import run_to_end
from trimesh.actor.host_mesh import HostMesh
from trimesh.actor.spawning import Spawning
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import HostRefused, MeshErrorGroup, SpawnError
from trimesh.jobs.addresses import address_of, address_towards, checked_address, with_port
from trimesh.jobs.connections import ListenAddress
from trimesh.jobs.door import HostLinks, JoinedHost, open_host_links, own_credentials
from trimesh.jobs.job import Pickle, checked_hosts, checked_pki
from trimesh.jobs.opening import REPLACED, HostsRun, own_job_hosts
from trimesh.jobs.pki import OwnPKI, checked_insecure
from trimesh.plain_numbers import plain_whole, whole_number
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


class OpenDoor:
    """Door for hosts that other programs start. Made by `open_door`; used while its block is open."""

    def __init__(self, run: DoorRun) -> None:
        self._run = run

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that hosts dial, `host:port`, in order."""
        return self._run.links.door.addresses

    @property
    def command(self) -> str:
        """Command line that starts an agent on a host; it reads a token from its standard input."""
        pki = () if self._run.pki is None else self._run.pki.arguments
        return shlex.join(("trimesh", "host", "join", *self.addresses, "--token-file", "-", *pki))

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the hosts that have joined and that no block has taken, in order of arrival."""
        return tuple(one.name for one in self._run.waiting)

    @property
    def refusals(self) -> tuple[HostRefused, ...]:
        """The last `limits.DOOR_REFUSALS_KEPT` refusals of hosts, with details that the hosts do not get."""
        return tuple(self._run.refusals)

    def token(self) -> str:
        """Return a new token, one line: a secret that admits one host within `limits.JOIN_TOKEN_SECONDS`.

        Pass it by the standard input of `trimesh host join`, a file of mode 0600, or a Secret; never by arguments or
        the environment.

        Raises:
            LimitExceeded: `limits.JOIN_TOKENS_MAX` tokens are unused.
        """
        return self._run.links.door.expect(DoorHost(self._run)).text

    def write_tokens(self, path: str | os.PathLike[str], count: int) -> None:
        """Write tokens for some hosts into a new file of mode 0600, one a line.

        `trimesh host join ... --token-file PATH` takes the line of its rank, as mpirun, srun or torchrun number it.

        Args:
            path: Path of the file, which must not exist.
            count: Number of hosts.

        Raises:
            LimitExceeded: `limits.JOIN_TOKENS_MAX` tokens are unused.
            OSError: The file exists, or cannot be written.
        """
        lines = "".join(f"{self.token()}\n" for _ in range(count))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(lines)

    def expect(self, hosts: int | Mapping[str, int], *, shared: bool = False) -> Spawning[HostMesh]:
        """Wait for hosts: `async with door.expect(2) as hosts:`.

        The block takes hosts in the order in which they joined, and owns them: leaving it ends their agents. Concurrent
        blocks are served in turn. There is no time limit: write `with trio.fail_after(...)` around it.

        Args:
            hosts: Number of hosts, or a mapping of mesh names to numbers, see `LocalJob`.
            shared: Let actors that get the hosts as an argument spawn on them.

        Raises:
            TypeError, ValueError: `hosts` is neither.
            MeshErrorGroup: On entering, if a host with a token was refused (`HostRefused`) or failed to start.
        """
        checked = checked_hosts(hosts)
        return Spawning(f"expect({hosts!r})", partial(self._run.taken, checked, shared=shared), _adopt)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            TypeError: Always.
        """
        del protocol
        raise TypeError("a door can only be used by the program that opened it: send `door.addresses` instead")

    def __repr__(self) -> str:
        return f"<door at {', '.join(self.addresses)}, {len(self._run.waiting)} hosts wait>"


def open_door(
    interface: str | None = None,
    *,
    port: int = 0,
    advertise: str | Sequence[str] = (),
    pickle: Pickle | None = None,
    pki: OwnPKI | None = None,
    insecure: str = "",
) -> Spawning[OpenDoor]:
    """Accept hosts that other programs start: `async with jobs.open_door() as door:`.

    Entering only opens a port, which listens while the block is open. Pass `door.command` and `door.token()` to the
    program that starts the hosts; `door.expect(2)` returns them as a mesh.

    Args:
        interface: Listening address: an address of this machine, its name, or the name of an interface; None takes
            the address of the default route.
        port: 0 lets the system choose.
        advertise: Addresses that hosts dial, `host` or `host:port`, if they reach this machine by other ones.
        pickle: "off" unpickles nothing in this program and its processes, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files; None makes certificates for this door. Hosts name their files
            by options of `trimesh host join`, as `door.command` shows.
        insecure: "I understand" turns TLS off, see `LocalJob`; hosts learn this from their tokens.

    Raises:
        TypeError, ValueError: An argument is invalid.
        MeshErrorGroup: On entering, if the door cannot listen there, or cannot read a file of `pki`.
    """
    checked_pki(None, None, pki)
    checked_insecure(insecure, pki)
    if pickle not in (None, "on", "off"):
        raise ValueError(f'pickle must be "on" or "off", or left out, got {pickle!r}')
    number = whole_number(port)
    if number is None or not 0 <= number < 1 << 16:
        raise ValueError(f"port must be a number from 0 (the system chooses) to 65535, got {port!r}")
    advertised = (advertise,) if isinstance(advertise, str) else tuple(advertise)
    for one in advertised:
        checked_address(with_port(one, port or 1))

    @asynccontextmanager
    async def open_() -> AsyncGenerator[OpenDoor, None]:
        async with open_hosts_proc(pickled=None if pickle is None else pickle == "on") as proc:
            run = DoorRun(proc, interface, port, advertised, pki, insecure)
            async with run.begun():
                await run.wait_ready("the door could not be opened")
                yield OpenDoor(run)

    return Spawning("open_door()", open_, _adopt_door)


async def _adopt() -> HostMesh:
    raise RuntimeError("hosts that are expected need a block: write `async with door.expect(2) as hosts:`")


async def _adopt_door() -> OpenDoor:
    raise RuntimeError("a door needs a block: write `async with open_door() as door:`")


class DoorRun(HostsRun):
    """Open door and its hosts.

    Attributes:
        waiting: Hosts that are ready and not taken, in order.
        refusals: Refusals of other hosts.
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
        """Close the door; end the agents of waiting hosts."""
        super().leave()
        for host in self._hosts:
            host.leave()

    async def run(self) -> None:
        """Admit hosts until it is released, and keep them until they are released or lost."""
        own = await own_credentials(self.pki, self._insecure, "open_door()")
        number = await (address_towards() if self._interface is None else address_of(self._interface))
        place = ListenAddress(number, self._port, self._advertised)
        async with open_host_links(self._proc, place, own) as self.links:
            self.links.door.on_stranger = self._stranger
            self.links.door.on_refused = lambda text: self.refusals.append(HostRefused(text))
            async with trio.open_nursery() as self._nursery:
                self.ready.set()
                await self.release.wait()

    # ---- events of hosts -------------------------------------------------------------------------------------

    def came(self, host: DoorHost) -> bool:
        """Keep a host that has joined; return False when the door is being closed."""
        if self.release.is_set():
            return False
        self._hosts.add(host)
        self._nursery.start_soon(host.run, self._proc)
        return True

    def became_ready(self, host: DoorHost) -> None:
        """Queue a host for `expect`."""
        self.waiting.append(host)
        self._serve_claims()

    def went(self, host: DoorHost) -> None:
        """Remove a host that can no longer be taken."""
        self._hosts.discard(host)
        if host in self.waiting:
            self.waiting.remove(host)

    def failed(self, error: Exception) -> None:
        """Report a host that was refused to the blocks that wait for hosts."""
        if isinstance(error, HostRefused):
            self.refusals.append(error)
        for claim in self._claims:
            claim.error = error
            claim.settled.set()

    def _stranger(self, text: str) -> None:
        self.refusals.append(HostRefused(f"a host came to the door with an invalid token: {text}"))

    # ---- requests of the program -----------------------------------------------------------------------------

    @asynccontextmanager
    async def taken(self, hosts: int | Mapping[str, int], *, shared: bool) -> AsyncGenerator[HostMesh, None]:
        """Take hosts, and own their processes while the body runs; their agents end with it."""
        hosts = plain_whole(hosts)
        named: Mapping[str, int] = {} if isinstance(hosts, int) else hosts
        count = hosts if isinstance(hosts, int) else sum(hosts.values())
        async with self.owned(list(await self.claim(count)), named, shared=shared) as mesh:
            yield mesh

    @asynccontextmanager
    async def owned(
        self, found: list[DoorHost], named: Mapping[str, int], *, shared: bool = False
    ) -> AsyncGenerator[HostMesh, None]:
        """Own the processes on claimed hosts while the body runs; their agents end with it."""
        try:
            whole = Region(Extent(hosts=len(found)))
            for rank, one in enumerate(found):
                one.remote.point = whole.point(rank)
            successors = DoorSuccessors(self, found, whole)
            remotes = [one.remote for one in found]
            async with own_job_hosts(self._proc, remotes, named, successors, shared=shared) as mesh:
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
                raise MeshErrorGroup(f"{count} hosts were expected, and one of those that came failed", [claim.error])
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
    """Replaces a block's lost hosts by hosts that wait at the door or arrive later; see `Successors`.

    Such hosts are appended to `taken`, the list of the block, which releases them at its end.
    """

    def __init__(self, run: DoorRun, taken: list[DoorHost], whole: Region) -> None:
        self._run = run
        self._taken = taken
        self._whole = whole

    @property
    def spares(self) -> int:
        return len(self._run.waiting)

    def give_up(self, host: JobHost) -> None:
        [one] = [one for one in self._taken if one.host is host]
        one.lose("replaced", REPLACED)

    async def succeed(self, lost: JobHost) -> JobHost:
        """Take the first waiting host, or the next to arrive; see `Successors.succeed`."""
        [before] = [one for one in self._taken if one.host is lost]
        with trio.move_on_after(limits.HOST_JOIN_SECONDS):
            [one] = await self._run.claim(1)
            one.remote.point = before.remote.point
            self._taken.append(one)
            return one.remote
        seconds = f"limits.HOST_JOIN_SECONDS ({limits.HOST_JOIN_SECONDS:g} s)"
        raise SpawnError(f"the lost host {lost.name} is not replaced: no other host joined within {seconds}")

    async def grow(self, count: int, first: int) -> Sequence[JobHost]:
        """Take waiting hosts, and wait for the rest; see `Successors.grow`."""
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
        release: Set when it is no longer used.
        over: Set when nothing of it is left in this process.
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
        """The host, once it is ready, to start processes on."""
        assert self.host is not None
        return self.host

    def came(self) -> bool:
        return self._run.came(self)

    def became_ready(self) -> None:
        self._run.became_ready(self)

    def failed(self, error: Exception) -> None:
        self._run.failed(error)

    def lose(self, reason: str, text: str) -> None:
        self._run.went(self)
        super().lose(reason, text)

    def leave(self) -> None:
        """Release it, even if it is not ready yet."""
        self.release.set()
        if not self.is_ready:
            self._scope.cancel(reason="the door is closed")

    @trio.lowlevel.enable_ki_protection
    async def run(self, proc: Proc) -> None:
        """Keep it from its join until it is released or lost."""
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
