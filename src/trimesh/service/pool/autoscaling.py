"""Autoscaling of a pool: samples its load, and resizes it as `service/scaling.py` decides."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trimesh.errors import MeshErrorGroup, text_of
from trimesh.plain_numbers import positive_real, real_number
from trimesh.service.scaling import LatencyTarget, Requests, ScaleBy, Scaler

if TYPE_CHECKING:
    from trimesh.service.pool.engine import PoolEngine
    from trimesh.service.pool.pool import PoolStatistics

_log = logging.getLogger("trimesh")


class Autoscaling:
    """Resizes a pool in the background.

    Args:
        engine: The pool.
        scaler: Decides.
        by: Rule for the number of replicas that a load needs.
        every: Seconds between two samples.
        statistics: Reads the statistics of the pool.

    Raises:
        ValueError: The pool cannot be resized, or `every` is not above 0.
        TypeError: `by` is no rule.
    """

    def __init__(
        self,
        engine: PoolEngine,
        scaler: Scaler,
        by: ScaleBy,
        every: float,
        statistics: Callable[[], PoolStatistics],
    ) -> None:
        seconds = positive_real(every)
        if seconds is None:
            raise ValueError(f"autoscale needs every > 0 seconds, got {every!r}")
        if not isinstance(by, Requests | LatencyTarget) and not callable(by):
            raise TypeError(
                f"autoscale needs by=Requests(n), LatencyTarget(seconds) or a function of statistics, got {by!r}"
            )
        if engine.change_size is None:
            raise ValueError(
                f"autoscale needs a pool that starts and ends processes, and that of {engine.mesh.name} was opened "
                "without them: write open_pool(..., along=, procs=)"
            )
        self._engine = engine
        self._scaler = scaler
        self._by = by
        self._every = seconds
        self._statistics = statistics
        self._target: int | None = None  # size of the resize under way
        self._shrinking: trio.CancelScope | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Autoscale while the body runs; leaving it ends a resize under way and keeps the size."""
        engine = self._engine
        assert engine.check_size is not None
        engine.check_size(self._scaler.most)
        await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, nursery)
            yield
            nursery.cancel_scope.cancel(reason="the block of autoscale is being left")

    async def _run(self, nursery: trio.Nursery) -> None:
        while True:
            await trio.sleep(self._every)
            statistics = self._statistics()
            if statistics.is_paused:
                continue
            size = self._size() if self._target is None else self._target
            wanted = self._scaler.step(trio.current_time(), size, self._demand(statistics, size))
            if wanted == size or (self._target is not None and self._shrinking is None):
                continue  # a growth ends soon by itself
            if self._shrinking is not None:
                if wanted < size:
                    continue
                self._shrinking.cancel(reason="the load needs the replicas that were to leave")
            _log.info("the pool of %s is resized from %d to %d replicas", self._engine.mesh.name, size, wanted)
            await nursery.start(self._resize, wanted, wanted < size)

    def _size(self) -> int:
        return sum(not replica.is_absent for replica in self._engine.dispatcher.replicas)

    def _demand(self, statistics: PoolStatistics, size: int) -> float:
        if isinstance(self._by, Requests | LatencyTarget):
            return self._by.demand(statistics, size)
        wanted = self._by(statistics)
        found = real_number(wanted)
        if found is None or math.isnan(found):
            raise TypeError(f"the function by= of autoscale must return a number of replicas, got {wanted!r}")
        return found

    async def _resize(self, size: int, is_shrinking: bool, task_status: trio.TaskStatus[None]) -> None:  # noqa: FBT001 - of a task
        engine = self._engine
        with trio.CancelScope() as scope:
            self._target, self._shrinking = size, scope if is_shrinking else None
            task_status.started()
            try:
                await engine.resize(size)
                engine.latencies.clear()
            except MeshErrorGroup as group:
                self._scaler.failed(trio.current_time())
                text = "the pool of %s could not be resized to %d replicas, and keeps its size: %s"
                _log.warning(text, engine.mesh.name, size, text_of(group))
            finally:
                if self._shrinking is scope or not is_shrinking:
                    self._target = self._shrinking = None
