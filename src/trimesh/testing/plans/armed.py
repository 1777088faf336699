"""Armed process: a real process that accepts faults of a test, by a token that it got when it was spawned.

`ArmedSetup` is the `setup=` of its processes. A process without it refuses the messages of this file as a breach of
the protocol, and its sites stay empty.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.actors.context import execution_context
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
from trimesh.testing.plans.endpoint_faults import lose_link, watched
from trimesh.testing.plans.fault import REAL, ActiveFaults, Fault, Heal, Place, healed
from trimesh.testing.plans.process_faults import ProcClock

ARMED = -1
"""Index of the `Fired` message by which a process reports that it is armed."""


@attrs.frozen
class ArmedSetup:
    """The `setup` of a process that takes faults.

    Attributes:
        token: What the messages of the test must show.
        setup: The user's own, which runs afterwards.
        table: What opens the table of faults of its links; None without one.
    """

    token: str
    setup: Callable[[], Any] | None = None
    table: TableKey | None = None

    async def __call__(self) -> None:
        """Arm the process that this runs in; simulated ones need no arms."""
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
        faults: Those that have begun here.
        clock: What Python code here reads as the time.
    """

    proc: Proc
    token: str
    mesh: str
    point: Point
    faults: ActiveFaults = attrs.field(init=False)
    clock: ProcClock = attrs.field(factory=ProcClock)
    _planner: Peer | None = None
    _heals: dict[int, Heal] = attrs.field(factory=dict[int, Heal])

    def __attrs_post_init__(self) -> None:
        self.faults = ActiveFaults(self._fired, lambda _: place_name(self.mesh, self.point))

    def serve(self) -> None:
        """Accept faults from now on, and report that to the owner of this process."""
        self.proc.sites = self
        self.proc.routes[messages.Arm] = self._arm
        self.proc.routes[messages.Heal] = self._heal
        agent = self.proc.cells[AGENT]
        _tell(agent.owner, ARMED, "spawn", "")

    @property
    def _place(self) -> Place:
        return (REAL, self.proc.proc_id)

    # ---- sites -----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, link: Link, message: messages.Message) -> bool:
        """Lose the message that a fault targets, and its link."""
        if self.faults.received(self._place, proc, peer, message):
            return True
        lose_link(proc, link)
        return False

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        return self.faults.launching(request)

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        spec = call.spec
        if call.mesh == AGENT or not self.faults.active:
            return spec
        return watched(spec, lambda: self._begin(cell, call, spec))

    def _begin(self, cell: Cell, call: IncomingCall, spec: EndpointSpec) -> EndpointSpec:
        time.sleep(self.faults.computing(self._place))  # as computing does: nothing else runs
        return self.faults.dispatch(self._place, cell, call, spec)

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Disturb a transfer; see `Sites.moving`."""
        del proc_id
        return self.faults.moving(self._place)

    def _fired(self, index: int, site: str, where: str) -> None:
        assert self._planner is not None
        _tell(self._planner, index, site, where)

    # ---- messages --------------------------------------------------------------------------------------------

    def _check(self, token: str) -> None:
        if token != self.token:
            raise ProtocolError("a fault must show the token that this process was armed with")

    def _arm(self, peer: Peer, message: messages.Arm, bodies: list[memoryview]) -> None:
        self._check(message.token)
        try:
            (fault,), _ = self.proc.values.decode(*take_payload(message.payload, bodies), what="a planned fault")
        except PayloadError as error:
            raise ProtocolError(f"a planned fault cannot be rebuilt here: {error}") from error
        if not isinstance(fault, Fault):
            raise ProtocolError(f"a process is armed with a fault, got {type(fault).__name__}")
        self._planner = peer
        self._heals[message.index] = fault.armed(self, message.index)

    def _heal(self, peer: Peer, message: messages.Heal, bodies: list[memoryview]) -> None:
        del peer, bodies
        self._check(message.token)
        self._heals.pop(message.index, healed)()


def _tell(peer: Peer, index: int, site: str, where: str) -> None:
    if peer.link is not None:
        peer.link.send(messages.encode(messages.Fired(index, site, where)))
