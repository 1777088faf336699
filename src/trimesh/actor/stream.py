"""`stream`: the results of all members as they come, one or, from a generator endpoint, many of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import trio

from trimesh._routing.collector import Outcome
from trimesh._runtime.calls import (
    Err,
    Ok,
    OutgoingStream,
    Request,
    encode_request,
    remaining_budget,
    results_of,
    value_of,
)
from trimesh._runtime.life import Proc
from trimesh._runtime.values import EndpointKind, EndpointSpec
from trimesh.actor import verbs
from trimesh.actor.options import Options
from trimesh.actor.results import Results
from trimesh.actor.view import MeshView
from trimesh.config import current
from trimesh.shape.extent import Point

R = TypeVar("R")


class Stream(Results[tuple[Point, R]]):
    """See `Endpoint.stream`.

    Args:
        takes_items: Whether the endpoint may be a generator.

    Raises:
        TypeError: The arguments do not fit the endpoint.
    """

    _proc: Proc
    _request: Request
    _stream: OutgoingStream | None

    def __init__(
        self,
        mesh: MeshView,
        spec: EndpointSpec,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        takes_items: bool = True,
    ) -> None:
        super().__init__(mesh, spec)
        self._bound = verbs.bind(mesh, spec, args, kwargs, streams=takes_items)
        self._is_fail_fast = options.is_fail_fast
        self._window = (options.window or current().stream_window) if spec.kind is EndpointKind.GENERATOR else 0
        self._options = options
        self._is_chosen = bool(options.choose)
        self._points = tuple(mesh.region.points())
        self._broken: list[Exception] = []
        self._stream = None

    async def _open(self) -> None:
        await trio.lowlevel.checkpoint()
        ranks = self._mesh.ranks()
        if not ranks and not self._is_chosen:
            return
        if not self._mesh.is_open:
            verbs.raise_group(self._mesh, self._spec, verbs.refusals(self._mesh, self._spec, ranks))
        if self._is_chosen:
            chosen = verbs.pick(self._mesh, "stream")
            self._points = (self._points[ranks.index(chosen)],)
            ranks = [chosen]
        proc, targets, request = await verbs.prepare(self._mesh, self._spec, self._bound, ranks)
        request = self._options.patient(request)
        budget = remaining_budget(proc)
        call_id = proc.new_call_id()
        parcel = encode_request(proc, request, call_id, targets[0].mesh, budget, window=self._window)
        self._proc, self._request = proc, request
        self._stream = OutgoingStream(
            proc,
            call_id,
            request,
            targets,
            fail_fast=self._is_fail_fast,
            budget=budget,
            window=self._window,
        )
        proc.begin(self._stream, parcel)

    def _take(self) -> tuple[Point, R] | None:
        if self._stream is None or self._broken:
            return None
        item = self._stream.take()
        if item is None:
            return None
        result = value_of(self._proc, item, self._request, item.index)
        if isinstance(result, Ok):
            return self._points[item.index], result.value
        self._note_broken(result)
        return None

    async def _next(self) -> tuple[Point, R] | None:
        if self._stream is None:
            await trio.lowlevel.checkpoint()
            return None
        while True:
            item = await self._stream.next()
            if item is None:
                return None
            if self._broken and self._is_fail_fast:
                continue  # what failed to be rebuilt was the last item
            result = value_of(self._proc, item, self._request, item.index)
            if isinstance(result, Ok):
                return self._points[item.index], result.value
            self._note_broken(result)

    def _note_broken(self, result: Err) -> None:
        self._broken.append(result.error)
        if self._is_fail_fast and self._stream is not None:
            self._stream.cancel_rest(f"an item of {self.what} could not be rebuilt")

    async def _close(self, reason: str) -> None:
        if self._stream is not None:
            await self._stream.close(reason)

    def _failed(self) -> Sequence[Outcome]:
        return [] if self._stream is None else list(self._stream.collector.failed())

    def _failures(self, *, cancelled: bool) -> list[Exception]:
        if self._stream is None:
            return []
        results = results_of(self._proc, self._stream, self._request, cancelled=cancelled)
        return self._broken + [result.error for result in results if isinstance(result, Err)]
