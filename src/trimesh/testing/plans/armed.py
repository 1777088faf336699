"""A real process that takes faults of a test: it was armed when it was spawned, by a token that only the test has.

`ArmedSetup` is the `setup=` of its processes. A process without it refuses the messages of this file as a breach of
the protocol, and has nothing at its sites.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
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
from trimesh._transport.interface import DownReason, Link, LinkDown
from trimesh._transport.native.fault_table import TableKey
from trimesh._transport.native.transport import NativeTransport
from trimesh._wire import messages
from trimesh.errors import PayloadError, ProtocolError, place_name
from trimesh.ids import AGENT, ProcId
from trimesh.shape.extent import Point
from trimesh.testing.plans.disturbances import FailingTransfers, ProcClock, SlowProcessors
from trimesh.testing.plans.injector import Injector, Rule, dying, run, watched
from trimesh.testing.plans.vocabulary import EndpointFault, LostCall, ProcessorFault, TransferFault

ARMED = -1
"""Index of the `Fired` message by which a process says that it is armed."""


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
            _Armed(proc, self.token, here.mesh, here.point).serve()
        result = None if self.setup is None else self.setup()
        if inspect.isawaitable(result):
            await result


@attrs.define(eq=False)
class _Armed:
    """The sites of one real process."""

    proc: Proc
    token: str
    mesh: str
    point: Point
    _injector: Injector = attrs.field(init=False)
    _transfers: FailingTransfers = attrs.field(init=False)
    _processors: SlowProcessors = attrs.field(init=False)
    _clock: ProcClock = attrs.field(factory=ProcClock)
    _planner: Peer | None = None
    _dies_at_end: bool | None = None

    def __attrs_post_init__(self) -> None:
        self._injector = Injector(self._fired)
        self._transfers = FailingTransfers(partial(self._fired_here, "transfer"))
        self._processors = SlowProcessors(partial(self._fired_here, "processor"))

    def serve(self) -> None:
        """Take faults from now on, and say so to the owner of this process."""
        self.proc.sites = self
        self.proc.routes[messages.Arm] = self._arm
        self.proc.routes[messages.Misbehave] = self._misbehave
        agent = self.proc.cells[AGENT]
        _tell(agent.owner, ARMED, "spawn", "")

    # ---- sites -----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, link: Link, message: messages.Message) -> bool:
        """Lose the requests that are to be lost."""
        del peer
        if not self._injector.loses_request(proc.cells, message):
            return True
        link.abort()
        proc.link_down(link, LinkDown(DownReason.EOF))
        return False

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        """Start it: failing starts are planned for the process of the test alone."""
        return request

    def dispatch(self, cell: Cell, call: IncomingCall) -> EndpointSpec:
        spec = call.spec
        if call.mesh == AGENT:
            return spec
        seconds = self._processors.seconds(self.proc.proc_id)
        if seconds:
            time.sleep(seconds)  # as computing does: nothing else runs
        if not self._injector.rules and self._dies_at_end is None:
            return spec
        return watched(spec, lambda: self._begin(cell, call, spec), run)

    def _begin(self, cell: Cell, call: IncomingCall, spec: EndpointSpec) -> EndpointSpec:
        chosen = self._injector.spec_for(cell, call, spec)
        return chosen if self._dies_at_end is None else dying(chosen, at_end=self._dies_at_end)

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Disturb a transfer; see `Sites.moving`."""
        return self._transfers.moving(proc_id)

    def _fired_here(self, site: str, index: int, _: object) -> None:
        assert self._planner is not None
        _tell(self._planner, index, site, place_name(self.mesh, self.point))

    def _fired(self, rule: Rule, cell: Cell) -> None:
        assert self._planner is not None
        site = "receive" if isinstance(rule.fault, LostCall) and rule.fault.what == "request" else "dispatch"
        _tell(self._planner, rule.index, site, place_name(cell.spec.name, cell.spec.point))

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
        self._planner = peer
        match fault:
            case EndpointFault() | LostCall():
                self._injector.rules.append(Rule(message.index, fault))
            case TransferFault():
                self._transfers.plan(message.index, fault, (self.proc.proc_id,))
            case ProcessorFault():
                self._processors.plan(message.index, fault, (self.proc.proc_id,))
            case _:
                raise ProtocolError(
                    f"a process takes faults of endpoints, processors, transfers; got {type(fault).__name__}"
                )

    def _misbehave(self, peer: Peer, message: messages.Misbehave, bodies: list[memoryview]) -> None:
        del peer, bodies
        self._check(message.token)
        if message.kind == "exit":
            os._exit(int(message.number))
        elif message.kind == "hold_gil":
            # A PyDLL keeps the GIL while the function runs.
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(message.number * 1e6)))
        elif message.kind == "lag":
            time.sleep(message.number)
        elif message.kind == "jump":
            self._clock.jump(message.number)
        elif message.kind == "drift":
            self._clock.drift(message.number)
        elif message.kind == "quicken":
            self._processors.end(int(message.number))
        elif message.kind == "die":
            self._dies_at_end = bool(message.number)
        else:
            raise ProtocolError(
                f"a process misbehaves by exit, hold_gil, lag, jump, drift, quicken, die; got {message.kind!r}"
            )


def _tell(peer: Peer, index: int, site: str, where: str) -> None:
    if peer.link is not None:
        peer.link.send(messages.encode(messages.Fired(index, site, where)))
