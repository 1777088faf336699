"""A program on the hosts of a kept job: agents that its keeper gives their orders."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import attrs
import trio

from trimesh import limits
from trimesh._runtime.life import HostsNotice
from trimesh._runtime.tasks import run_to_end
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ProtocolError, SpawnError
from trimesh.jobs.job import Job, Pickle
from trimesh.jobs.kept.kept_job import asked, reached
from trimesh.jobs.kept.state import (
    AgentEnded,
    Answer,
    Attach,
    BeginAgent,
    EndAgent,
    HostReplaced,
    HostsGranted,
    HostsNoticed,
    Lines,
    ReplaceHost,
    checked_kept_name,
)
from trimesh.jobs.launcher import AgentExit, AgentOrder, Launcher
from trimesh.jobs.opening import open_job
from trimesh.jobs.pki import OwnPKI

_log = logging.getLogger("trimesh")


def _checked_name(_: object, __: object, name: Any) -> None:
    checked_kept_name(name)


@attrs.frozen
class AttachedJob(Job):
    """The hosts of a kept job, made by `attach`. Entered, it has them; leaving leaves them clean, for the next one.

    Attributes:
        name: Of the kept job.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes what the kept job says.
        pki: Certificates of your own authority; None takes what the kept job says.
    """

    name: str = attrs.field(validator=_checked_name)
    hosts: Any = attrs.field(default=None, init=False, repr=False, eq=False)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[HostMesh, None]:
        async with _open_attachment(self.name) as attachment:
            granted = attachment.granted
            hosts = dict(granted.parts) if granted.is_named else sum(granted.parts.values())
            pickled, pki = self.pickle or granted.pickle, self.pki or granted.pki
            insecure = "" if pki is not None else granted.insecure
            job = _GrantedJob(hosts, pickle=pickled, pki=pki, insecure=insecure, name=self.name, attachment=attachment)
            async with open_job(job) as mesh:
                yield mesh


def attach(name: str, *, pickle: Pickle | None = None, pki: OwnPKI | None = None) -> AttachedJob:
    """Return the hosts of a kept job, to be entered: `async with jobs.attach("exp7") as hosts:`.

    They are this program's until the block is left, then clean and another program's. What `Job` says holds.

    Args:
        name: Of the kept job, see `keep`.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes what the kept job says.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None takes what the kept job says.

    Raises:
        TypeError, ValueError: The name is none.
        ConnectError: On entering: nothing is kept by that name, or another program is attached; the text says which.
    """
    return AttachedJob(name, pickle=pickle, pki=pki)


@attrs.frozen
class _GrantedJob(Job):
    """A kept job, as its keeper has granted it to this program."""

    name: str = attrs.field(kw_only=True)
    attachment: HostAttachment = attrs.field(kw_only=True, repr=False, eq=False)

    def launcher(self) -> KeptLauncher:
        return KeptLauncher(self.attachment)

    def host_id(self, rank: int) -> str:
        return self.attachment.granted.host_ids[rank]


class KeptLauncher(Launcher):
    """Starts agents by the keeper."""

    def __init__(self, attachment: HostAttachment) -> None:
        self.hosts = attachment.granted.hosts
        self.interface = attachment.granted.interface
        self._attachment = attachment

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attachment.read)
            yield
            nursery.cancel_scope.cancel(reason="the block is left")

    async def start(self, rank: int, order: AgentOrder) -> KeptAgent:
        return await self._attachment.start(rank, order)

    async def replace(self, rank: int) -> None:
        """See `Launcher.replace`: a spare host of the job that is kept, where it has one."""
        if self._attachment.granted.replaces:
            name = await self._attachment.replace(rank)
            self.hosts = [name if one == rank else before for one, before in enumerate(self.hosts)]

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        del say
        await trio.lowlevel.checkpoint()
        raise SpawnError(
            f"{count} more hosts cannot be had: a kept job has those that it was kept with, {len(self.hosts)}; keep "
            "one that has more"
        )

    async def wait_notice(self) -> str:
        return await self._attachment.notice.wait()

    async def wait_end(self, ahead: float = 0.0) -> str:
        """See `Launcher.wait_end`; the keeper knows what leaving takes."""
        del ahead
        return await self._attachment.ending.wait()


class KeptAgent:
    """An agent that the keeper has given its order; see `StartedAgent`."""

    def __init__(self, attachment: HostAttachment, number: int) -> None:
        self.ended = trio.Event()
        self.exit = AgentExit("the keeper of the job has ended, or was killed")
        self._attachment = attachment
        self._number = number

    async def wait(self) -> AgentExit:
        await self.ended.wait()
        return self.exit

    async def stop(self) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
            if not self.ended.is_set():
                await self._attachment.tell(EndAgent(self._number))
                await self.ended.wait()


class HostAttachment:
    """A connection to a keeper that has granted its hosts.

    Attributes:
        granted: What it has said of them.
        notice: Told that they are about to end.
        ending: Told that the program has to leave them.
    """

    def __init__(self, lines: Lines, granted: HostsGranted) -> None:
        self.granted = granted
        self.notice, self.ending = HostsNotice(), HostsNotice()
        self._replacing = trio.Lock()
        self._replaced: HostReplaced | None = None
        self._has_replaced = trio.Event()
        self._lines = lines
        self._agents: dict[int, KeptAgent] = {}
        self._number = 0
        self._is_over = False

    async def start(self, rank: int, order: AgentOrder) -> KeptAgent:
        """Have an agent started.

        Raises:
            SpawnError: The keeper is gone.
        """
        self._number += 1
        agent = self._agents[self._number] = KeptAgent(self, self._number)
        if self._is_over or not await self.tell(BeginAgent(self._number, rank, order.line.decode())):
            raise SpawnError(f"the host {self.granted.hosts[rank]} cannot be had: the keeper of the job has ended")
        return agent

    async def replace(self, rank: int) -> str:
        """Have another machine at a place, and return its name.

        Raises:
            SpawnError: It cannot be had, or the keeper is gone.
        """
        async with self._replacing:
            self._replaced, self._has_replaced = None, trio.Event()
            if not self._is_over and await self.tell(ReplaceHost(rank)):
                await self._has_replaced.wait()
            answer: HostReplaced | None = self._replaced
        if answer is None:
            raise SpawnError(f"the host {self.granted.hosts[rank]} cannot be replaced: the keeper of the job has ended")
        if answer.failure:
            raise SpawnError(f"the keeper of the job has no other host in the place of {answer.name}: {answer.failure}")
        return answer.name

    async def tell(self, record: BeginAgent | EndAgent | ReplaceHost) -> bool:
        """Tell the keeper, and return whether it is there."""
        try:
            await self._lines.send(record)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def leave(self, name: str) -> None:
        """Give the hosts back; returns when the keeper has them, so that the next program is not refused.

        Where an agent has not ended within `limits.KEPT_CLEAN_SECONDS`, or the keeper does not answer for as long, the
        keeper frees them alone, as after a program that has died.
        """
        if not self._agents:
            with trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
                await self._lines.wait_closed()
                return
        _log.warning(
            "the keeper of %s has not confirmed within limits.KEPT_CLEAN_SECONDS (%g s) that its hosts are free; "
            "`trimesh job list` says when they are",
            name,
            limits.KEPT_CLEAN_SECONDS,
        )

    async def read(self) -> None:
        """Learn what the keeper says, until it has gone."""
        try:
            while self._take(await self._lines.receive(Answer)):
                pass
        except ProtocolError:
            pass
        self._is_over = True
        self._has_replaced.set()
        for agent in self._agents.values():
            agent.ended.set()

    def _take(self, record: object) -> bool:
        match record:
            case AgentEnded(number=number):
                if (agent := self._agents.pop(number, None)) is not None:
                    agent.exit = AgentExit(record.text, record.last_words, record.reason)
                    agent.ended.set()
            case HostsNoticed(text=text, is_end=is_end):
                (self.ending if is_end else self.notice).tell(text)
            case HostReplaced():
                self._replaced = record
                self._has_replaced.set()
            case _:
                return False
        return True


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _open_attachment(name: str) -> AsyncGenerator[HostAttachment, None]:
    """Have the hosts of a kept job while the body runs.

    Raises:
        ConnectError: They cannot be had.
    """
    _, lines = await reached(name)
    grace = reread().grace
    grace = grace if math.isfinite(grace) else 0.0  # such a block has no end that could be waited for
    async with lines.stream:
        granted: HostsGranted = await asked(lines, Attach(os.getpid(), grace), name, seconds=limits.KEPT_CLEAN_SECONDS)
        attachment = HostAttachment(lines, granted)
        try:
            yield attachment
        finally:
            # Shielded as the end of agents is; of Ctrl-C, too, which Trio raises inside of a shield.
            _, interrupt = await run_to_end(partial(attachment.leave, name))
            if interrupt is not None:
                raise interrupt
