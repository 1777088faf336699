"""Armed process: a real process that accepts faults of a test, which shows the token of its spawn.

`ArmedSetup` is the `setup=` of such processes. Any other process refuses the messages of this file with a
`ProtocolError`, and its sites stay empty.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.actors.context import context_of_code, execution_context
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.values.codec import take_payload
from trimesh._runtime.values.endpoint_spec import EndpointSpec
from trimesh._transport.interface import Link
from trimesh._transport.native.fault_table import TableKey
from trimesh._transport.native.transport import NativeTransport
from trimesh._wire import messages
from trimesh.errors import PayloadError, ProtocolError, place_name
from trimesh.ids import AGENT, ProcId
from trimesh.shape.extent import Point
from trimesh.testing.plans.disk_faults import FaultyDisk
from trimesh.testing.plans.endpoint_faults import lose_link, watched
from trimesh.testing.plans.fault import REAL, ActiveFaults, Fault, Heal, Place, healed
from trimesh.testing.plans.name_faults import FaultyResolver
from trimesh.testing.plans.process_faults import ProcClock

ARMED = -1
"""Index of a `Fired` message by which a process reports that it is armed, not that a fault fired."""

REPORT_SECONDS: Final = 1.0
"""Longest wait for the report of a fault that ends its process or a link: milliseconds, unless Trio's thread blocks."""


@attrs.frozen
class ArmedSetup:
    """The `setup` of a process that accepts faults.

    Attributes:
        token: Token that messages of the test must have.
        setup: The user's own `setup`, which runs afterwards.
        table: Key of the fault table of its links; None without one.
    """

    token: str
    setup: Callable[[], Any] | None = None
    table: TableKey | None = None

    async def __call__(self) -> None:
        """Arm this process; a simulated one needs no arming."""
        proc = current_proc()
        if not proc.is_simulated and proc.sites is None:
            assert isinstance(proc.transport, NativeTransport)
            if self.table is not None:
                self.table.arm(proc.transport)
            here = execution_context()
            Armed(proc, self.token, here.mesh, here.point).serve()
        result = None if self.setup is None else self.setup()
        if inspect.isawaitable(result):
            await result


@attrs.define(eq=False)
class Armed:
    """The sites of one real process.

    Attributes:
        faults: Faults that have begun here.
        clock: Clock that Python code of this process reads.
        disk: Disk that Python code of its actors writes to.
        resolver: Resolver that Python code asks for names.
    """

    proc: Proc
    token: str
    mesh: str
    point: Point
    faults: ActiveFaults = attrs.field(init=False)
    clock: ProcClock = attrs.field(factory=ProcClock)
    disk: FaultyDisk = attrs.field(init=False)
    resolver: FaultyResolver = attrs.field(init=False)
    _planner: Peer | None = None
    _heals: dict[int, Heal] = attrs.field(factory=dict[int, Heal])
    _reports: dict[int, trio.Event] = attrs.field(factory=dict[int, trio.Event])
    _last_fired: int = ARMED
    _lost: list[Link] = attrs.field(factory=list[Link])
    _thread: int = attrs.field(factory=threading.get_ident)
    _trio: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)

    def __attrs_post_init__(self) -> None:
        self.faults = ActiveFaults(
            self._fired,
            lambda _: place_name(self.mesh, self.point),
            lambda _: self._kill(),
            is_reported=self._is_reported,
        )
        self.disk = FaultyDisk(_is_in_actor, partial(self.faults.touching, self.place), time.sleep, self._kill)
        resolving = partial(self.faults.resolving, self.place)
        self.resolver = FaultyResolver(lambda: bool(self.faults.active), resolving, time.sleep)

    def serve(self) -> None:
        """Accept faults from now on, and report that to the owner of this process."""
        self.proc.sites = self
        for owner, name, value in (*self.disk.changes(), *self.resolver.changes()):
            setattr(owner, name, value)
        self.proc.routes[messages.Arm] = self._arm
        self.proc.routes[messages.Heal] = self._heal
        agent = self.proc.cells[AGENT]
        _tell(agent.owner, ARMED, "spawn", "")

    @property
    def place(self) -> Place:
        return (REAL, self.proc.proc_id)

    # ---- sites -----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, link: Link, message: messages.Message) -> bool:
        """Return False, and end the link, if a fault loses this message."""
        if link in self._lost and not isinstance(message, messages.Heal):
            return False
        if self.faults.received(self.place, proc, peer, message):
            return True
        self._lost.append(link)
        trio.lowlevel.spawn_system_task(self._lose, link)
        return False

    async def _lose(self, link: Link) -> None:
        await self._is_reported(self._last_fired)
        lose_link(self.proc, link)

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        return self.faults.launching(request)

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        spec = call.spec
        if call.mesh == AGENT or not self.faults.active:
            return spec
        return watched(spec, lambda: self._begin(cell, call, spec))

    def _begin(self, cell: Cell, call: IncomingCall, spec: EndpointSpec) -> EndpointSpec:
        time.sleep(self.faults.computing(self.place))  # blocks the loop, as computing does
        return self.faults.dispatch(self.place, cell, call, spec)

    def answered(self, call: IncomingCall) -> None:
        if call.mesh != AGENT and self.faults.active:
            self.faults.answered(self.place)

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Disturb a transfer; see `Sites.moving`."""
        del proc_id
        return self.faults.moving(self.place)

    def operating(self, proc_id: ProcId) -> AbstractContextManager[Any] | None:
        """Disturb operators of a rank; see `Sites.operating`."""
        del proc_id
        return self.faults.operating(self.place)

    async def _is_reported(self, index: int) -> None:
        with trio.move_on_after(REPORT_SECONDS):
            await self._reports.setdefault(index, trio.Event()).wait()

    def _fired(self, index: int, site: str, where: str) -> None:
        assert self._planner is not None
        self._last_fired = index
        self._in_trio(partial(_tell, self._planner, index, site, where))

    def _in_trio(self, function: Callable[[], None]) -> None:
        """Call a function in Trio's thread, which owns the links: now, or as soon as it runs."""
        if threading.get_ident() == self._thread:
            function()
            return
        with suppress(trio.RunFinishedError):  # the process is ending
            self._trio.run_sync_soon(function)

    def _kill(self) -> None:
        """Kill this process once the faults that have fired are reported."""
        reported = threading.Event()
        self._in_trio(reported.set)
        reported.wait(REPORT_SECONDS)  # Trio's thread may wait for this one
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- messages --------------------------------------------------------------------------------------------

    def _check(self, token: str) -> None:
        if token != self.token:
            raise ProtocolError("a fault must have the token that this process was armed with, got another one")

    def _arm(self, peer: Peer, message: messages.Arm, bodies: list[memoryview]) -> None:
        self._check(message.token)
        try:
            (fault,), _ = self.proc.values.decode(*take_payload(message.payload, bodies), what="a planned fault")
        except PayloadError as error:
            raise ProtocolError(f"a planned fault cannot be rebuilt here: {error}") from error
        if not isinstance(fault, Fault):
            raise ProtocolError(f"a process must be armed with a Fault, got a {type(fault).__name__}")
        self._planner = peer
        self._heals[message.index] = fault.armed(self, message.index)

    def _heal(self, peer: Peer, message: messages.Heal, bodies: list[memoryview]) -> None:
        del peer, bodies
        self._check(message.token)
        self._heals.pop(message.index, healed)()
        self._reports.setdefault(message.index, trio.Event()).set()


def _is_in_actor() -> bool:
    """Return whether the running code is called by an actor, or by a `setup`."""
    return context_of_code.get() is not None


def _tell(peer: Peer, index: int, site: str, where: str) -> None:
    if peer.link is not None:
        peer.link.send(messages.encode(messages.Fired(index, site, where)))
