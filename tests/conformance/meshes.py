"""The two back ends of the mesh suite: simulated processes under a virtual clock, and real ones.

A test takes `backend` and opens its meshes as a user would. What is the same on both is in the test; faults, and
whatever needs to be known about time, go through the back end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import attrs
import pytest
import trio
import trio.testing
from tests.lifetime.programs.guest import run_as_guest
from tests.patience import HANG_SECONDS

from trimesh import ProcMesh, leaves, limits, this_host
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.current import current_proc, find_proc
from trimesh._runtime.life.proc import Proc
from trimesh._transport.in_memory.transport import Delivery, MemoryNetwork
from trimesh._transport.interface import Lane
from trimesh.errors import TrimeshInternalError
from trimesh.ids import AGENT, ProcId
from trimesh.rdma.publications.publisher import publications_of
from trimesh.testing.plans.determinism import scheduled_by
from trimesh.testing.simulated.host import World, open_world

SIM_SECONDS = 100_000.0
"""A simulated test that has not ended by then, in virtual time, hangs."""

DEAD_SECONDS = 60.0
"""A simulated process that was killed unwinds all the same: it waits in vain for acknowledgements and its grace."""


PATIENT = ("EXIT_REPORT_SECONDS", "STOPPING_LOG_SECONDS")
"""Limits of the controller that end no wait for ever, and that a machine which stands still for a second reaches: a
death is told without how it was, and that a block is slow to stop is logged."""


class Backend(ABC):
    """Where the processes of a test come from.

    Attributes:
        is_sim: Whether time is virtual, and so can be asserted.
        pickle: As `spawn_procs` takes it.
        is_guest: Whether Trio is the guest of an asyncio loop.
    """

    is_sim: bool
    is_guest: bool = False
    pickle: Literal["on", "off"] = "on"

    def run(self, main: Callable[[], Awaitable[None]], **options: Any) -> None:
        """Run `main`; options are those of `trio.run`."""
        (run_as_guest if self.is_guest else trio.run)(main, **options)

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[None]:
        """Surround the test."""

    def procs(self, per_host: Mapping[str, int] | None = None, **options: Any) -> AbstractAsyncContextManager[ProcMesh]:
        """Spawn processes; two of them unless told otherwise."""
        options.setdefault("pickle", self.pickle)
        return this_host().spawn_procs({"gpus": 2} if per_host is None else per_host, **options)

    @abstractmethod
    def kill(self, mesh: Any, rank: int) -> None:
        """Let the process of a rank of a mesh die by SIGKILL."""

    @abstractmethod
    async def check_clean(self) -> None:
        """Fail when the controller still knows of anything that has ended."""


class Lag(Delivery):
    """Delays of the simulated network, which a test may change at any moment.

    Attributes:
        control, data: Seconds that a message of the lane is under way, except on links that are in `links`.
        links: The same by (source, target).
    """

    def __init__(self) -> None:
        self.control = 0.0
        self.data = 0.0
        self.links: dict[tuple[ProcId, ProcId], tuple[float, float]] = {}

    def delay(self, source: ProcId, target: ProcId, lane: Lane, size: int) -> float:
        del size
        control, data = self.links.get((source, target), (self.control, self.data))
        return control if lane is Lane.CONTROL else data


class SimBackend(Backend):
    """Every process is a task tree of this one.

    Attributes:
        seed: Of the order of tasks and of all ids.
        world: The simulated family.
        lag: Delays of its network.
    """

    is_sim = True
    world: World

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.clock = trio.testing.MockClock(autojump_threshold=0)
        self.lag = Lag()

    def run(self, main: Callable[[], Awaitable[None]], **options: Any) -> None:
        """Run `main` under the clock, and in the order of tasks that the seed says."""
        with scheduled_by(self.seed):
            super().run(main, clock=self.clock, **options)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        async with open_world(seed=self.seed, pickled=self.pickle == "on") as self.world:
            self.world.network.delivery = self.lag
            with trio.fail_after(SIM_SECONDS):
                yield

    @property
    def network(self) -> MemoryNetwork:
        return self.world.network

    def kill(self, mesh: Any, rank: int) -> None:
        self.world.children[member(mesh, rank).proc_id].die(signum=signal.SIGKILL, last_words="simulated")

    async def check_clean(self) -> None:
        if any(child.report is not None and child.report.signal for child in self.world.children.values()):
            await trio.sleep(DEAD_SECONDS)
        await trio.testing.wait_all_tasks_blocked()
        await drop_ports()
        assert not [child.pid for child in self.world.children.values() if child.report is None], "a process is left"
        assert len(self.world.nursery.child_tasks) == 1, "tasks of a process are left"
        check_tables(current_proc())


async def drop_ports() -> None:
    """Let go of ports that only the traceback of a caught error holds."""
    if list(current_proc().channels.left()):
        gc.collect()
        await trio.testing.wait_all_tasks_blocked()


class RealBackend(Backend):
    """Real processes of this machine."""

    is_sim = False

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        with pytest.MonkeyPatch.context() as patch, trio.fail_after(HANG_SECONDS):
            for name in PATIENT:
                patch.setattr(limits, name, HANG_SECONDS)
            yield

    def kill(self, mesh: Any, rank: int) -> None:
        os.kill(member(mesh, rank).pid, signal.SIGKILL)

    async def check_clean(self) -> None:
        assert find_proc() is None, "no block is open, but the runtime of this process is still there"


class TypedSimBackend(SimBackend):
    """The same, and nothing is pickled."""

    pickle = "off"


class TypedRealBackend(RealBackend):
    """The same, and nothing is pickled: the family is there before the test, which may begin with this process."""

    pickle = "off"

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        with contextlib.suppress(TrimeshInternalError):  # a test that breaks the runtime has looked for it
            async with lease_proc(pickled=False), super().open():
                yield

    async def check_clean(self) -> None:
        await drop_ports()
        check_tables(current_proc())


class GuestSimBackend(SimBackend):
    """Simulated processes in a Trio that is a guest."""

    is_guest = True


class GuestRealBackend(RealBackend):
    """Real processes of a Trio that is a guest."""

    is_guest = True


BACKENDS: dict[str, type[Backend]] = {
    "sim": SimBackend,
    "real": RealBackend,
    "sim-typed": TypedSimBackend,
    "real-typed": TypedRealBackend,
    "sim-guest": GuestSimBackend,
    "real-guest": GuestRealBackend,
}


def params(*names: str) -> list[Any]:
    """Return back ends as parameters of a test, those with real processes marked."""
    return [pytest.param(name, marks=pytest.mark.real if name.startswith("real") else ()) for name in names]


@attrs.frozen
class Place:
    """Where a member of a mesh lives."""

    proc_id: ProcId
    pid: int


def member(mesh: Any, rank: int) -> Place:
    """Return the process of a rank of an actor mesh or of a process mesh that is owned here."""
    info = mesh._owned.info if isinstance(mesh, ProcMesh) else mesh._view.current
    found = info.members[rank]
    return Place(found.proc_id, found.pid)


def check_tables(proc: Proc) -> None:
    """Fail when a process remembers calls, messages, actors or members that are over."""
    left = {
        "cells": [cell.spec.name for mesh, cell in proc.cells.items() if mesh != AGENT],
        "owners": list(proc.owners),
        "members": list(proc.members),
        "groups": list(proc._groups.groups),
        "channels": list(proc.channels.left()),
        "buffers of actors": [one.origin for one in proc.bulk.registrations() if one.cell is not None],
        "publications": publications_of(proc).left(),
    }
    if proc.family is not None:
        left["leases"] = [*proc.family._leases, *proc.family._ending]
        left["connections"] = list(proc.family._connecting)
    left = {what: things for what, things in left.items() if things}
    assert not left, f"the process still has {left}"
    check_calls(proc)


def check_calls(proc: Proc) -> None:
    """Fail when a process remembers calls or messages that are over."""
    left: dict[str, list[Any]] = {"calls": [call.what for call in proc.unended_calls()]}
    for peer in proc._peers.values():
        left[f"calls of {peer.proc_id}"] = [*peer.calls, *peer.inbound, *peer.early_cancels]
        left[f"queues of {peer.proc_id}"] = [box for box in peer.boxes.values() if box._queue]
        left[f"loads of {peer.proc_id}"] = [box.load for box in peer.boxes.values() if box.load]
    left = {what: things for what, things in left.items() if things}
    assert not left, f"the process still has {left}"


@attrs.define(eq=False)
class Attempt:
    """What a call that runs in a task of its own has come to.

    Attributes:
        value, error: One of the two, once it is over.
        cancelled: Whether `cancel` ended it.
        over: Set then.
        scope: Around it.
    """

    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    over: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def cancel(self, reason: str | None = None) -> None:
        self.scope.cancel(reason=reason)

    async def result(self) -> Any:
        """Wait for the value, or raise the error."""
        await self.over.wait()
        if self.error is not None:
            raise self.error
        return self.value


def attempt(nursery: trio.Nursery, function: Any, *args: Any) -> Attempt:
    """Call an async function in a task of its own, which keeps whatever comes of it."""
    made = Attempt()

    async def run() -> None:
        try:
            with made.scope:
                made.value = await function(*args)
        except Exception as error:  # noqa: BLE001 - the test asks for it by `result`
            made.error = error
        finally:
            made.cancelled = made.scope.cancelled_caught
            made.over.set()

    nursery.start_soon(run)
    return made


def fill(endpoint: Any, *args: Any) -> int:
    """Broadcast to one busy actor until its mailbox is full; return how many messages went out."""
    count = 0
    with contextlib.suppress(trio.WouldBlock):
        while True:
            endpoint.broadcast_nowait(*args)
            count += 1
    assert count > limits.MAILBOX_MESSAGES // 2
    return count


async def tick(count: int) -> None:
    """Let every task run that many times."""
    for _ in range(count):
        await trio.lowlevel.checkpoint()


def kinds(error: BaseException) -> list[type[BaseException]]:
    """Return the types of the leaves, in order."""
    return [type(leaf) for leaf in leaves(error)]


only_sim = pytest.mark.parametrize("backend", params("sim", "sim-typed", "sim-guest"), indirect=True)
only_real = pytest.mark.parametrize("backend", params("real", "real-typed", "real-guest"), indirect=True)
