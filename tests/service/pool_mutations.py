"""Bugs to plant in pools, each as some library has had it, which the workload must find."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
from tests.service.pool_workload import run_schedule
from tests.soak import mutations
from tests.soak.mutations import Finding, Mutation

from trimesh.service.dispatch import Dispatcher, RequestQueue
from trimesh.service.pool.engine import PoolEngine
from trimesh.service.pool.streams import PoolItems
from trimesh.service.pool.updates import Updates

_RULE: Final = re.compile(r"\b(OR|PW)-\d+")


def find(mutation: Mutation, seeds: Iterable[int], rule: str | None = None) -> Finding | None:
    """Return what the workload of pools finds; see `tests.soak.mutations.find`."""
    return mutations.find(mutation, seeds, rule, run=run_schedule, rules=_RULE)


def _always(value: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda real: lambda *args, **kwargs: value


def _never_lower(real: Callable[..., Any]) -> Callable[..., Any]:
    def give_up(self: Dispatcher, request: Any) -> None:
        cost = self.replicas[request.replica].cost
        real(self, request)
        self.replicas[request.replica].cost = cost

    return give_up


def _swallow(real: Callable[..., Any]) -> Callable[..., Any]:
    async def run(self: PoolEngine, *args: Any) -> Any:
        try:
            return await real(self, *args)
        except ValueError:
            return None

    return run


def _take_while_paused(real: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: Dispatcher) -> Any:
        held, self.pauses = self.pauses, 0
        try:
            return real(self)
        finally:
            self.pauses = held

    return take


def _pause_at_once(real: Callable[..., Any]) -> Callable[..., Any]:
    @asynccontextmanager
    async def paused(self: PoolEngine, mode: Any) -> Any:
        async with real(self, "keep"):
            yield

    return paused


def _stay_down(real: Callable[..., Any]) -> Callable[..., Any]:
    def set_up(self: Dispatcher, index: int, *, is_up: bool) -> None:
        if not is_up:
            real(self, index, is_up=is_up)

    return set_up


def _stay_drained(real: Callable[..., Any]) -> Callable[..., Any]:
    def set_drained(self: Dispatcher, index: int, *, is_drained: bool) -> None:
        if is_drained or index != 1:
            real(self, index, is_drained=is_drained)

    return set_drained


def _forget_sessions(real: Callable[..., Any]) -> Callable[..., Any]:
    def put(self: Dispatcher, request: Any) -> None:
        name, request.session = request.session, None
        real(self, request)
        request.session = name
        if request.session is not None:
            self.sessions.end(request.session)

    return put


def _cancel_running(real: Callable[..., Any]) -> Callable[..., Any]:
    def cancel_for(self: PoolEngine, reason: str, wanted: Callable[[Any], bool]) -> int:
        return real(self, reason, lambda call: wanted(call) and call.state == "running")

    return cancel_for


def _last_come_first(real: Callable[..., Any]) -> Callable[..., Any]:
    del real

    def submit(self: Dispatcher, request: Any) -> None:
        request.number = -self.submitted
        self.submitted += 1
        self._put(request)

    return submit


# ---- bugs of streams -------------------------------------------------------------------------------------------------


def _leave_running(real: Callable[..., Any]) -> Callable[..., Any]:
    async def close(self: PoolItems[Any], reason: str) -> None:
        if self._stream is None or self._ended is not None or self._call.state != "running":
            await real(self, reason)
            return
        self._stream.on_over = None
        self._stream.forget()
        await trio.lowlevel.checkpoint()

    return close


def _nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: None


def _drop_item(real: Callable[..., Any]) -> Callable[..., Any]:
    def take(self: PoolItems[Any]) -> Any:
        return real(self) and real(self)

    return take


def _free_too_early(real: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: PoolItems[Any], reason: str) -> None:
        assert self._stream is not None
        self._stream.on_over = None
        self._engine.release(self._call, None)
        real(self, reason)

    return end


def _count_twice(real: Callable[..., Any]) -> Callable[..., Any]:
    def conclude(self: PoolItems[Any]) -> None:
        real(self)
        self._engine.counts.cancelled += self._call.error is not None

    return conclude


def _end_without_error(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *, cancelled: []


def _go_ahead(real: Callable[..., Any]) -> Callable[..., Any]:
    async def send_to(self: PoolItems[Any], index: int) -> None:
        self._window = 64
        await real(self, index)

    return send_to


_TABLE: Final[dict[str, tuple[Any, ...]]] = {
    "counter": ("the load of a replica is never lowered", Dispatcher, "_give_up", _never_lower, "PW-5", 0),
    "swallowed": ("an error of an endpoint is a value", PoolEngine, "run", _swallow, "PW-1", 0),
    "twice": ("all requests of a dead replica are repeated", PoolEngine, "may_try_again", _always(True), "PW-2", 1),
    "not-again": (
        "no request of a dead replica is repeated",
        PoolEngine,
        "may_try_again",
        _always(False),
        "PW-6",
        2,
    ),
    "not-paused": ("requests are given to replicas in a pause", Dispatcher, "take", _take_while_paused, "PW-3", 16),
    "not-drained": ("a pause does not wait", PoolEngine, "paused", _pause_at_once, "PW-3", 0),
    "unbounded": ("the queue has no bound", RequestQueue, "has_room", _always(True), "PW-4", 0),
    "stays-down": ("a replica that has come back gets no requests", Dispatcher, "set_up", _stay_down, "PW-9", 2),
    "stays-out": ("a replica is not put back after a roll", Dispatcher, "set_drained", _stay_drained, "PW-9", 2),
    "forgotten": ("sessions have no replica", Dispatcher, "_put", _forget_sessions, "PW-7", 0),
    "half-cancelled": (
        "what waits of a group is not cancelled",
        PoolEngine,
        "cancel_for",
        _cancel_running,
        "PW-8",
        8,
    ),
    "outdated": (
        "a replica that came back serves without its update",
        Updates,
        "holds_back",
        _always(False),
        "PW-15",
        0,
    ),
    "left-running": ("leaving a stream lets its generator go on", PoolItems, "_close", _leave_running, "PW-12", 0),
    "anew": ("a stream that has given items is made again", PoolItems, "_note_first", _nothing, "PW-13", 1),
    "dropped": ("items of streams are lost", PoolItems, "_take", _drop_item, "PW-11", 0),
    "early": ("a place is free before its generator has ended", PoolItems, "_end", _free_too_early, "PW-3", 0),
    "twice-counted": ("a stream that the pool ends is counted twice", PoolItems, "_conclude", _count_twice, "PW-5", 0),
    "cut-short": ("a death ends a stream as if it were whole", PoolItems, "_failures", _end_without_error, "PW-11", 0),
    "far-ahead": ("generators do not wait for consumers", PoolItems, "_send_to", _go_ahead, "PW-14", 2),
    "stack": ("who comes last is served first", Dispatcher, "submit", _last_come_first, "PW-10", 0),
}

MUTATIONS: Final = {
    name: Mutation(text, ((owner, function, make),), rule, seed)
    for name, (text, owner, function, make, rule, seed) in _TABLE.items()
}
"""By name."""
