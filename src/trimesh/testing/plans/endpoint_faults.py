"""Faults of endpoints: starts that raise or are late, calls that lose a frame."""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs
import msgspec
import trio

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec
from trimesh._transport.interface import DownReason, Link, LinkDown
from trimesh._wire.messages import Call, Message
from trimesh.errors import place_name
from trimesh.ids import MeshId
from trimesh.testing.plans.fault import (
    ActiveFault,
    Heal,
    MemberFault,
    OfMembers,
    Place,
    checked_amount,
    checked_count,
    checked_error,
    checked_one_of,
    healed,
    raise_after,
)

if TYPE_CHECKING:
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation

Loss = Literal["request", "reply", "in_flight"]


@attrs.frozen
class _OfEndpoint(MemberFault):
    """A fault of an endpoint, counted for each member since it was planned; it ends by itself.

    Attributes:
        mesh, ranks: The actor mesh, and its members with the fault.
    """

    mesh: int
    ranks: tuple[int, ...]
    endpoint: str

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        super().simulated(run, planned)
        return healed

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        super().real(run, planned)
        return healed

    def _hits(self, active: ActiveFault, cell: Cell, mesh: MeshId, endpoint: str, nth: int, times: int) -> bool:
        rank = cell.spec.point.rank
        is_meant = (self.mesh, self.endpoint) == (mesh, endpoint) and rank in self.ranks
        return is_meant and active.hits(rank, nth, times)


@attrs.frozen
class EndpointFault(_OfEndpoint):
    """From the `nth` start on, `times` starts misbehave.

    Attributes:
        error: Exception raised instead of running the endpoint, or None.
        seconds: Delay of the start.
    """

    nth: int = 1
    times: int = 1
    error: BaseException | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"at {self.where.text}.{self.endpoint} nth={self.nth}: {effect_text(self.seconds, self.error)}"

    @property
    def fails_call(self) -> bool:
        return self.error is not None

    def dispatch(
        self, active: ActiveFault, place: Place, cell: Cell, call: IncomingCall, spec: EndpointSpec
    ) -> EndpointSpec:
        del place
        if not self._hits(active, cell, call.mesh, spec.name, self.nth, self.times):
            return spec
        active.fire("dispatch", place_name(cell.spec.name, cell.spec.point))
        return preceded(spec, partial(raise_after, self.seconds, self.error))


@attrs.frozen
class LostCall(_OfEndpoint):
    """The nth call of an endpoint loses a frame, and its process the link to the caller: links are reliable.

    Attributes:
        what: "request" (the endpoint does not run), "in_flight" (it is running), "reply" (it has run).
    """

    what: Loss
    nth: int = 1

    def __str__(self) -> str:
        return f"call {self.where.text}.{self.endpoint} nth={self.nth}: lose({self.what})"

    @property
    def loses_link(self) -> bool:
        return True

    def received(self, active: ActiveFault, place: Place, proc: Proc, peer: Peer, message: Message) -> bool:
        del place, peer
        if self.what != "request" or not isinstance(message, Call):
            return True
        cell = proc.cells.get(message.mesh)
        if cell is None or not self._hits(active, cell, message.mesh, message.endpoint, self.nth, 1):
            return True
        active.fire("receive", place_name(cell.spec.name, cell.spec.point))
        return False

    def dispatch(
        self, active: ActiveFault, place: Place, cell: Cell, call: IncomingCall, spec: EndpointSpec
    ) -> EndpointSpec:
        del place
        if self.what == "request" or not self._hits(active, cell, call.mesh, spec.name, self.nth, 1):
            return spec
        active.fire("dispatch", place_name(cell.spec.name, cell.spec.point))
        return self._losing(active, spec, call)

    def _losing(self, active: ActiveFault, spec: EndpointSpec, call: IncomingCall) -> EndpointSpec:
        async def losing(*args: Any, **kwargs: Any) -> Any:
            await active.faults.is_reported(active.index)
            if self.what == "in_flight":
                lose_link(current_proc(), call.link)
            result = await run(spec, *args, **kwargs)
            if self.what == "reply":
                lose_link(current_proc(), call.link)
            return result

        return msgspec.structs.replace(spec, fn=losing, kind=EndpointKind.ASYNC)


def effect_text(seconds: float, error: BaseException | None) -> str:
    return f"delays({seconds:g})" if error is None else f"raises({type(error).__name__})"


def lose_link(proc: Proc, link: Link) -> None:
    """End a link as a broken connection does: both sides see its end."""
    link.abort()
    proc.link_down(link, LinkDown(DownReason.EOF, "lost by a planned fault"))


# ---- wrapped endpoints -----------------------------------------------------------------------------------------------

PLAIN: Final = (EndpointKind.ASYNC, EndpointKind.INLINE, EndpointKind.THREAD)
"""Kinds of endpoints except generators."""


def watched(spec: EndpointSpec, begin: Callable[[], EndpointSpec]) -> EndpointSpec:
    """Return an endpoint that calls `begin` at its start and runs the endpoint that it returns."""
    if spec.kind in PLAIN:

        async def started(*args: Any, **kwargs: Any) -> Any:
            return await run(begin(), *args, **kwargs)

        return msgspec.structs.replace(spec, fn=started, kind=EndpointKind.ASYNC)

    async def started_items(*args: Any, **kwargs: Any) -> Any:
        async with aclosing(begin().fn(*args, **kwargs)) as items:
            async for item in items:
                yield item

    return msgspec.structs.replace(spec, fn=started_items)


def preceded(spec: EndpointSpec, first: Callable[[], Awaitable[None]]) -> EndpointSpec:
    """Return an endpoint that awaits `first`, which may raise, and then runs."""
    if spec.kind in PLAIN:

        async def late(*args: Any, **kwargs: Any) -> Any:
            await first()
            return await run(spec, *args, **kwargs)

        return msgspec.structs.replace(spec, fn=late, kind=EndpointKind.ASYNC)

    async def late_items(*args: Any, **kwargs: Any) -> Any:
        await first()
        async for item in spec.fn(*args, **kwargs):
            yield item

    return msgspec.structs.replace(spec, fn=late_items)


async def run(spec: EndpointSpec, *args: Any, **kwargs: Any) -> Any:
    """Run the body of an endpoint in the endpoint's context."""
    if spec.kind is EndpointKind.ASYNC:
        return await spec.fn(*args, **kwargs)
    if spec.kind is EndpointKind.INLINE:
        return spec.fn(*args, **kwargs)
    context = contextvars.copy_context()
    function = partial(context.run, spec.fn, *args, **kwargs)
    return await trio.to_thread.run_sync(function, limiter=trio.CapacityLimiter(1))


# ---- planning --------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class AtEndpoint(OfMembers):
    """Starts of an endpoint; their fault is chosen next."""

    _mesh: int
    _ranks: tuple[int, ...]
    _endpoint: str
    _nth: int
    _times: int

    def raises(self, error: BaseException | type[BaseException]) -> None:
        """Make them raise `error` instead of running the endpoint."""
        self._plan(error=checked_error(error))

    def delays(self, seconds: float) -> None:
        """Delay them; the slot is taken meanwhile."""
        self._plan(seconds=checked_amount("seconds", seconds))

    def _plan(self, *, error: BaseException | None = None, seconds: float = 0.0) -> None:
        members = (self._where, self._mesh, self._ranks, self._endpoint)
        self._faults.plan(EndpointFault(*members, self._nth, self._times, error, seconds))


@attrs.frozen(eq=False)
class OfCall(OfMembers):
    """Calls of an endpoint; the frame to lose is chosen next."""

    _mesh: int
    _ranks: tuple[int, ...]
    _endpoint: str

    def lose(self, what: Loss, *, nth: int = 1) -> None:
        """Lose a frame of the nth call at each member, and so the link: links are reliable.

        Args:
            what: "request": the endpoint never runs. "in_flight": it is running. "reply": it has run.
            nth: Number of the call, counted for each member from now on.
        """
        checked_one_of("the lost frame", what, get_args(Loss))
        nth = checked_count("nth", nth)
        self._faults.plan(LostCall(self._where, self._mesh, self._ranks, self._endpoint, what, nth))
