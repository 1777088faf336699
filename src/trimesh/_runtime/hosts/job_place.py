r"""A place among the hosts of a job: the host that is there, and the one that comes after its loss.

    launch --> place --> host, alive
                    \--> host, lost --replace--> the job starts another agent there --> launch

HP-1 A process is started on the host that is at the place when that is asked for. Where that is lost, the launch waits
     for the next one, and fails if that cannot be had.
HP-2 One replacement is under way at a time; all launches that wait for it get the same host.
HP-3 What ran on a lost host stays its own: its reports and links are not looked for on the next one.
HP-4 When `replace` returns, each process of the old host is known to be gone: none of them answers a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import trio

from trimesh._runtime.hosts.job_host import JobHost, OnExit
from trimesh._runtime.life.job_hosts import HostCode
from trimesh._runtime.meshes.member import Member
from trimesh._runtime.peers.host import HostChild, LaunchRequest
from trimesh._runtime.peers.losses import HostLoss
from trimesh._runtime.system.exits import ExitReport
from trimesh._transport.interface import Link
from trimesh.errors import SpawnError
from trimesh.ids import ProcId


class Successors(Protocol):
    """What starts the hosts that come after lost ones, and beside those that there are."""

    @property
    def spares(self) -> int:
        """How many hosts wait for that; an agent that is started again on the lost one is none."""
        ...

    async def succeed(self, lost: JobHost) -> JobHost:
        """Start the next host of the place of a lost one; a cancel leaves nothing of it.

        Raises:
            SpawnError: It cannot be had.
        """
        ...

    def give_up(self, host: JobHost) -> None:
        """Lose a host that lives, with all that runs there."""
        ...

    async def grow(self, count: int, first: int) -> Sequence[JobHost]:
        """Start more hosts, all or none; it may take for as long as a queue does, and a cancel leaves nothing of it.

        Args:
            first: The place of the first of them; the others follow.

        Raises:
            SpawnError: The job has no more.
            MeshErrorGroup: Some of them cannot be had.
        """
        ...


class JobPlace:
    """Where a host of a job is, and is replaced; see `JobHost`.

    Args:
        host: The first one.
        successors: What starts the next ones.
        members: Child processes of the program, by id.
        on_lost: Called for each loss that no mesh has taken, and that nothing will make good.
    """

    def __init__(
        self,
        host: JobHost,
        successors: Successors,
        members: Mapping[ProcId, Member],
        on_lost: Callable[[HostLoss], None],
    ) -> None:
        self.host = host
        self._members = members
        self._started = set[ProcId]()
        self._successors = successors
        self._on_lost = on_lost
        self._replacing = trio.Lock()
        self._is_given_up = False
        self._codes = dict[str, HostCode]()
        self._watch()

    @property
    def name(self) -> str:
        return self.host.name

    def code_of(self, kind: str) -> HostCode | None:
        """Return what a method of hosts has brought to the host that is there, or None."""
        return self._codes.get(kind)

    def set_code(self, kind: str, code: HostCode | None) -> None:
        """Set it; what is started from now on has it, and what other methods have brought."""
        self._codes.pop(kind, None)
        if code is not None:
            self._codes[kind] = code
        found = list(self._codes.values())
        self.host.code = None
        if found:
            paths = tuple(path for one in found for path in one.paths)
            packages = tuple(path for one in found for path in one.packages)
            env = {name: value for one in found for name, value in one.env.items()}
            self.host.code = HostCode(paths, env, packages)

    def _watch(self) -> None:
        host = self.host
        host.on_lost = self._lost
        if host.loss is not None:
            self._lost(host.loss)

    def _lost(self, loss: HostLoss) -> None:
        is_made_good = self._is_given_up or self._successors.spares > 0
        if not self.host.is_loss_taken and not is_made_good:
            self._on_lost(loss)

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        host = await self._living()
        try:
            return await self._launch(request, on_exit)
        except SpawnError:
            if host.loss is None:
                raise
        await self._living()  # it was lost meanwhile, with all that was begun
        return await self._launch(request, on_exit)

    async def _launch(self, request: LaunchRequest, on_exit: OnExit) -> HostChild:
        started = self._started
        started.intersection_update(self._members)
        child = await self.host.launch(request, on_exit)
        started.add(request.proc_id)
        return child

    async def _living(self) -> JobHost:
        while self.host.loss is not None:
            before = self.host
            async with self._replacing:
                if self.host is before:
                    await self._succeed()
        return self.host

    async def replace(self) -> None:
        """Have another host here; the one that is here is lost then, with all that runs there.

        Raises:
            SpawnError: The job has none, or it cannot be had.
        """
        async with self._replacing:
            if self.host.loss is None:
                self._is_given_up = True
                self._successors.give_up(self.host)
            for member in [self._members[one] for one in self._started if one in self._members]:
                await member.gone.wait()
            await self._succeed()

    async def _succeed(self) -> None:
        self.host = await self._successors.succeed(self.host)
        self._is_given_up = False
        self._codes.clear()
        self._watch()

    async def connect(self, target: ProcId) -> Link:
        return await self.host.connect(target)

    async def exit_of(self, target: ProcId) -> ExitReport:
        return await self.host.exit_of(target)

    async def flush_output(self) -> None:
        """Wait until what was written there is shown; see `Host.flush_output`."""
        await self.host.flush_output()
