"""Makes endpoints misbehave as planned: counts their starts and replaces the ones that are hit.

It lives in the process of the actors, simulated or real.
"""

from __future__ import annotations

import contextvars
import copy
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import attrs
import trio

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec
from trimesh._transport.interface import DownReason, LinkDown
from trimesh._wire.messages import Call, Message
from trimesh.ids import MeshId
from trimesh.testing.plans.vocabulary import EndpointFault, LostCall

OnFired = Callable[["Rule", Cell], None]

Run = Callable[..., Awaitable[Any]]
"""Runs a plain endpoint: `run(spec, actor, ...)`."""


@attrs.define(eq=False)
class Rule:
    """A planned fault of an endpoint.

    Attributes:
        index: Its number in the plan.
        fault: What is planned.
        counts: Starts (for a lost request: arrivals) so far, by rank.
    """

    index: int
    fault: EndpointFault | LostCall
    counts: dict[int, int] = attrs.field(factory=dict[int, int])

    def hits(self, mesh: int, rank: int, endpoint: str) -> bool:
        """Count one start, and tell whether it is one of those that are meant."""
        fault = self.fault
        if (fault.mesh, fault.endpoint) != (mesh, endpoint) or rank not in fault.ranks:
            return False
        count = self.counts[rank] = self.counts.get(rank, 0) + 1
        times = fault.times if isinstance(fault, EndpointFault) else 1
        return fault.nth <= count < fault.nth + times


@attrs.define(eq=False)
class Injector:
    """The faults that are planned for endpoints.

    Attributes:
        on_fired: Told of each that happens, before it does.
        rules: What is planned.
    """

    on_fired: OnFired
    rules: list[Rule] = attrs.field(factory=list[Rule])

    def loses_request(self, cells: Mapping[MeshId, Cell], message: Message) -> bool:
        """Tell whether a request that has just come is to be lost."""
        if not self.rules or not isinstance(message, Call):
            return False
        cell = cells.get(message.mesh)
        if cell is None:
            return False
        for rule in self.rules:
            fault = rule.fault
            if not isinstance(fault, LostCall) or fault.what != "request":
                continue
            if rule.hits(message.mesh, cell.spec.point.rank, message.endpoint):
                self.on_fired(rule, cell)
                return True
        return False

    def spec_for(self, cell: Cell, call: IncomingCall, spec: EndpointSpec) -> EndpointSpec:
        """Return what runs for `call`: its endpoint `spec`, or what the plan makes of it."""
        for rule in self.rules:
            fault = rule.fault
            if isinstance(fault, LostCall) and fault.what == "request":
                continue
            if not rule.hits(call.mesh, cell.spec.point.rank, spec.name):
                continue
            self.on_fired(rule, cell)
            if isinstance(fault, LostCall):
                spec = _losing(spec, call, fault.what == "reply")
            elif fault.error is not None:
                spec = _raising(spec, fault.error)
            else:
                spec = delayed(spec, fault.seconds)
        return spec


def watched(spec: EndpointSpec, begin: Callable[[], EndpointSpec], run: Run) -> EndpointSpec:
    """Return an endpoint that asks `begin` what it is when it starts, and then is that."""
    if spec.kind in (EndpointKind.ASYNC, EndpointKind.INLINE, EndpointKind.THREAD):

        async def started(*args: Any, **kwargs: Any) -> Any:
            return await run(begin(), *args, **kwargs)

        return attrs.evolve(spec, fn=started, kind=EndpointKind.ASYNC)

    async def started_items(*args: Any, **kwargs: Any) -> Any:
        async with aclosing(begin().fn(*args, **kwargs)) as items:
            async for item in items:
                yield item

    return attrs.evolve(spec, fn=started_items)


def lose_link(call: IncomingCall) -> None:
    """End, in the task of a call, the link that it came by, as the loss of a wire does: both sides see its end."""
    call.link.abort()
    current_proc().link_down(call.link, LinkDown(DownReason.EOF, "lost by a planned fault"))


def _raising(spec: EndpointSpec, error: BaseException) -> EndpointSpec:
    if spec.kind not in (EndpointKind.ASYNC, EndpointKind.INLINE, EndpointKind.THREAD):
        return attrs.evolve(spec, fn=partial(_raise_in_generator, error))

    async def raising(*_args: Any, **_kwargs: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise copy.copy(error)  # an exception that is raised twice would carry the traceback of the first time

    return attrs.evolve(spec, fn=raising, kind=EndpointKind.ASYNC)


async def _raise_in_generator(error: BaseException, *_args: Any, **_kwargs: Any) -> Any:
    await trio.lowlevel.checkpoint()
    raise copy.copy(error)
    yield  # what makes it a generator


def dying(spec: EndpointSpec, *, at_end: bool) -> EndpointSpec:
    """Return an endpoint that ends its real process: at its start, or when it has run and not replied yet."""
    if not at_end or spec.kind not in (EndpointKind.ASYNC, EndpointKind.INLINE, EndpointKind.THREAD):
        os.kill(os.getpid(), signal.SIGKILL)

    async def last(*args: Any, **kwargs: Any) -> Any:
        try:
            return await run(spec, *args, **kwargs)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    return attrs.evolve(spec, fn=last, kind=EndpointKind.ASYNC)


def delayed(spec: EndpointSpec, seconds: float) -> EndpointSpec:
    """Return an endpoint that starts `seconds` late."""
    if spec.kind not in (EndpointKind.ASYNC, EndpointKind.INLINE, EndpointKind.THREAD):
        return attrs.evolve(spec, fn=partial(_late_generator, spec.fn, seconds))

    async def late(*args: Any, **kwargs: Any) -> Any:
        await trio.sleep(seconds)
        return await run(spec, *args, **kwargs)

    return attrs.evolve(spec, fn=late, kind=EndpointKind.ASYNC)


async def _late_generator(function: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
    await trio.sleep(seconds)
    async for item in function(*args, **kwargs):
        yield item


def _losing(spec: EndpointSpec, call: IncomingCall, runs: bool) -> EndpointSpec:  # noqa: FBT001
    async def losing(*args: Any, **kwargs: Any) -> Any:
        if not runs:
            lose_link(call)
        result = await run(spec, *args, **kwargs)
        if runs:
            lose_link(call)
        return result

    return attrs.evolve(spec, fn=losing, kind=EndpointKind.ASYNC)


async def run(spec: EndpointSpec, *args: Any, **kwargs: Any) -> Any:
    """Run what an endpoint runs, in the context that it would have."""
    if spec.kind is EndpointKind.ASYNC:
        return await spec.fn(*args, **kwargs)
    if spec.kind is EndpointKind.INLINE:
        return spec.fn(*args, **kwargs)
    context = contextvars.copy_context()
    function = partial(context.run, spec.fn, *args, **kwargs)
    return await trio.to_thread.run_sync(function, limiter=trio.CapacityLimiter(1))
