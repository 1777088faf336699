"""The verbs with `options(retry=...)`: what failed is called again, as a new call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import trio

from trimesh._runtime.life import current_proc
from trimesh._runtime.meshes import DEATHS, fold_into_deaths, says_peer_is_gone
from trimesh._runtime.values import EndpointSpec
from trimesh._runtime.watch import ShownProgress
from trimesh.actor import verbs
from trimesh.actor.calling.item_map import ItemMap, Items, Unit, with_earlier
from trimesh.actor.options import Options
from trimesh.actor.per_rank import Spread
from trimesh.actor.view import MeshView
from trimesh.errors import MeshErrorGroup, leaves
from trimesh.shape.value_mesh import ValueMesh


async def call_one(mesh: MeshView, spec: EndpointSpec, options: Options, args: verbs.Args, kwargs: verbs.Kwargs) -> Any:
    [rank] = verbs.one_rank(mesh)
    return await _try(mesh, spec, options, verbs.bind(mesh, spec, args, kwargs), lambda tried: rank)


async def choose(mesh: MeshView, spec: EndpointSpec, options: Options, args: verbs.Args, kwargs: verbs.Kwargs) -> Any:
    """See `Endpoint.choose`; another attempt goes to another member, if one lives."""
    bound = verbs.bind(mesh, spec, args, kwargs)
    return await _try(mesh, spec, options, bound, lambda tried: verbs.pick(mesh, "choose", tried))


async def _try(
    mesh: MeshView,
    spec: EndpointSpec,
    options: Options,
    bound: verbs.Bound,
    pick: Callable[[Sequence[int]], int],
) -> Any:
    retry = options.retry
    assert retry is not None
    errors: list[Exception] = []
    tried: list[int] = []
    while True:
        try:
            tried.append(pick(tried))
            return verbs.bare(await verbs.invoke_on(mesh, spec, bound, tried[-1:], fail_fast=False, options=options))
        except Exception as error:
            if not retry.wants(error, len(tried)):
                with_earlier(error, errors)
                raise
            errors.append(error)
        await trio.sleep(retry.delay(len(errors), current_proc().chance()))


async def call(
    mesh: MeshView, spec: EndpointSpec, options: Options, args: verbs.Args, kwargs: verbs.Kwargs
) -> ValueMesh[Any]:
    """See `Endpoint.call`; only the ranks that failed are called again, or all of them (`Retry.whole`)."""
    retry = options.retry
    assert retry is not None
    if mesh.info.replaces_all if retry.whole is None else retry.whole:
        return await _call_whole(mesh, spec, options, args, kwargs)
    calls = RankCalls(mesh, spec, options, verbs.bind(mesh, spec, args, kwargs))
    async with calls as results:
        async for _ in results:
            pass
    return ValueMesh(mesh.region, tuple(value for _, value in sorted(calls.values.items())))


async def _call_whole(
    mesh: MeshView, spec: EndpointSpec, options: Options, args: verbs.Args, kwargs: verbs.Kwargs
) -> ValueMesh[Any]:
    retry = options.retry
    assert retry is not None
    errors: list[Exception] = []
    while True:
        try:
            return await verbs.call(mesh, spec, args, kwargs, options)
        except MeshErrorGroup as group:
            failures = [failure for failure in leaves(group) if isinstance(failure, Exception)]
            if not all(retry.wants(failure, len(errors) + 1) for failure in failures):
                with_earlier(group, errors)
                raise
            errors.append(group)
        await trio.sleep(retry.delay(len(errors), current_proc().chance()))


class RankCalls(ItemMap[Any]):
    """A map over the ranks of a view: each is called with the same arguments.

    Attributes:
        values: What has come back, by the place of the rank in the view.
    """

    def __init__(self, mesh: MeshView, spec: EndpointSpec, options: Options, bound: verbs.Bound) -> None:
        ranks = mesh.ranks()
        super().__init__(mesh, spec, options, ranks, max(1, len(ranks)))
        self._bound = bound
        self.values: dict[int, Any] = {}

    def _check(self, items: Items) -> None:
        """Every set of ranks will do."""

    def _showing(self) -> AbstractContextManager[ShownProgress]:
        """It is a call, and no map."""
        return nullcontext(ShownProgress(self.what, 0))

    def _pick(self, unit: Unit) -> int:
        rank: int = unit.item
        return rank

    def _arguments(self, unit: Unit) -> tuple[verbs.Args, verbs.Kwargs]:
        return self._bound.of_rank[unit.item] if isinstance(self._bound, Spread) else self._bound

    def _describe(self, unit: Unit, error: Exception) -> None:
        """The coordinates say which rank it is."""

    def _would_retry(self, unit: Unit, error: Exception) -> bool:
        """Try again, too, where a survivor reports the death of a peer that the retry is for."""
        if super()._would_retry(unit, error):
            return True
        retry, attempt = self._retry, len(unit.errors) + 1
        is_for_deaths = retry is not None and any(issubclass(death, retry.on) for death in DEATHS)
        return retry is not None and attempt <= retry.max and is_for_deaths and says_peer_is_gone(error)

    def _came(self, unit: Unit, value: Any) -> None:
        self.values[unit.index] = value

    def _group(self, failures: Sequence[Exception]) -> MeshErrorGroup:
        ranks = self._mesh.ranks()
        missing = [rank for index, rank in enumerate(ranks) if index not in self.values]
        partial = ValueMesh(
            self._mesh.region.exclude_ranks(missing), tuple(value for _, value in sorted(self.values.items()))
        )
        text = f"{self.what} failed on {len(failures)} of {len(ranks)}"
        return MeshErrorGroup(
            text, fold_into_deaths(failures), partial=partial, mesh=self._mesh.name, endpoint=self._spec.name
        )
