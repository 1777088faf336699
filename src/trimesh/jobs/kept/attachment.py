"""The hosts of a kept job in its keeper, and the program that has them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

from trimesh import limits
from trimesh._runtime.system import host_name
from trimesh.errors import HostLost, SpawnError, leaves
from trimesh.jobs.job import Job
from trimesh.jobs.kept.foreseen import ForeseenEnd
from trimesh.jobs.kept.messages import (
    AgentEnded,
    Attached,
    BeginAgent,
    EndAgent,
    HostReplaced,
    HostsGranted,
    HostsNoticed,
    KeeperRefused,
    Lines,
    ReplaceHost,
)


class HeldHosts:
    """The hosts, and who is attached.

    Args:
        seats: Actors, one on each host.
        interface: Where programs that attach listen.
        has_spares: Tells whether the job has a host to replace another one by.

    Attributes:
        attached: Who has them; None while they are free.
    """

    def __init__(
        self,
        job: Job,
        seats: Any,
        hosts: Any,
        host_ids: Sequence[str],
        interface: str,
        foreseen: ForeseenEnd,
        has_spares: Callable[[], bool],
    ) -> None:
        self.attached: Attached | None = None
        self._job = job
        self._seats = seats
        self._hosts = hosts
        self._host_ids = tuple(host_ids)
        self._interface = interface
        self._foreseen = foreseen
        self._has_spares = has_spares
        self._leaving = trio.Event()
        self._free = trio.Event()
        self._ending: tuple[str, str] | None = None
        self._scopes: dict[int, trio.CancelScope] = {}
        self._has_ended = trio.Event()

    async def serve(self, lines: Lines, pid: int, grace: float | None) -> None:
        """Let a program have the hosts until its connection ends, or refuse it."""
        refusal = await self._wait_turn()
        if refusal is not None:
            await lines.send(KeeperRefused(refusal))
            return
        self.attached = Attached(host_name(), pid, time.time())
        self._leaving = trio.Event()
        self._free = trio.Event()
        try:
            parts = dict(self._job.parts)
            await lines.send(
                HostsGranted(
                    tuple(self._hosts.names),
                    parts,
                    self._job.is_named,
                    self._host_ids,
                    self._interface,
                    self._job.pickle,
                    self._job.pki,
                    replaces=True,
                    insecure=self._job.insecure,
                )
            )
            async with trio.open_nursery() as nursery:
                if grace is not None:
                    nursery.start_soon(_tell, lines, self._foreseen.wait_notice, False)  # noqa: FBT003
                    nursery.start_soon(_tell, lines, partial(self._foreseen.wait_end, grace), True)  # noqa: FBT003
                await self._take_orders(lines, nursery)
                self._leaving.set()
                nursery.cancel_scope.cancel(reason="the program that was attached has left")
        finally:
            self.attached = None
            self._free.set()

    async def _wait_turn(self) -> str | None:
        """Wait while the hosts are being cleaned; return why they cannot be had."""
        if self.attached is not None:
            with trio.move_on_after(limits.KEPT_PATIENCE_SECONDS):
                await self._leaving.wait()
        with trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
            while self.attached is not None and self._leaving.is_set():
                await self._free.wait()
        if self._ending is not None:
            return self._ending[1]
        if self.attached is None:
            return None
        who = self.attached
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(who.since))
        if self._leaving.is_set():
            seconds = f"limits.KEPT_CLEAN_SECONDS ({limits.KEPT_CLEAN_SECONDS:g} s)"
            return f"its hosts are not yet clean, after {seconds}, of process {who.pid}, which was attached: try again"
        return (
            f"one program at a time has the hosts of a kept job, and process {who.pid} on {who.host} has had them "
            f"since {at}: end that, or wait for it"
        )

    async def _take_orders(self, lines: Lines, nursery: trio.Nursery) -> None:
        while (record := await lines.receive(BeginAgent | EndAgent | ReplaceHost)) is not None:
            match record:
                case BeginAgent(number=number, rank=rank, order=order) if 0 <= rank < len(self._host_ids):
                    scope = self._scopes[number] = trio.CancelScope()
                    nursery.start_soon(self._run_agent, lines, number, rank, order, scope)
                case EndAgent(number=number) if number in self._scopes:
                    self._scopes[number].cancel(reason="the program has told its agent to end")
                case ReplaceHost(rank=rank) if 0 <= rank < len(self._host_ids):
                    nursery.start_soon(self._replace, lines, rank)
                case _:
                    pass

    async def _replace(self, lines: Lines, rank: int) -> None:
        """Have another machine at a place, if there is a spare one; else the seat there gives a new agent anyway."""
        failure = ""
        if self._has_spares():
            failure = f"it is not there after limits.KEPT_REPLACE_SECONDS ({limits.KEPT_REPLACE_SECONDS:g} s)"
            with trio.move_on_after(limits.KEPT_REPLACE_SECONDS):
                try:
                    await self._hosts.replace({"hosts": rank})
                    failure = ""
                except SpawnError as error:
                    failure = str(error)
        await _send(lines, HostReplaced(rank, self._hosts.names[rank], failure))

    async def _run_agent(self, lines: Lines, number: int, rank: int, order: str, scope: trio.CancelScope) -> None:
        ended = AgentEnded(number, "it was told to end", "", "agent exit")
        with scope:
            seat = self._seats.slice(hosts=rank).serve.options(abandon_after=limits.KEPT_CLEAN_SECONDS)
            try:
                ended = AgentEnded(number, *(await seat.call_one(order)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the program has lost this host
                ended = AgentEnded(number, *_words_of(error))
        if self._ending is not None:
            reason, text = self._ending
            ended = AgentEnded(number, text, "", reason)
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KEPT_ANSWER_SECONDS):
            await _send(lines, ended)
        del self._scopes[number]
        self._has_ended.set()

    async def end(self, reason: str, text: str) -> None:
        """End all agents of the program that is attached, for a reason, and let no other in; wait until none is left.

        `reason` is that of `HostLost.reason`, `text` the same in words.
        """
        self._ending = (reason, text)
        for scope in self._scopes.values():
            scope.cancel(reason=text)
        with trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
            while self._scopes:
                self._has_ended = trio.Event()
                await self._has_ended.wait()


async def _tell(lines: Lines, wait: Callable[[], Awaitable[str]], is_end: bool) -> None:  # noqa: FBT001
    await _send(lines, HostsNoticed(await wait(), is_end))


async def _send(lines: Lines, record: AgentEnded | HostsNoticed | HostReplaced) -> None:
    """Send a record to a program that may have gone."""
    try:
        await lines.send(record)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


def _words_of(error: Exception) -> tuple[str, str, str]:
    first = next(iter(leaves(error)))
    reason = first.reason if isinstance(first, HostLost) else "agent exit"
    return f"{type(first).__name__}: {first}", "", reason or "agent exit"
