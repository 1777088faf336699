"""The listing of errors of the public API's description (API 4), as it stands there; it needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend

import trimesh
from trimesh import Actor, endpoint, this_host

torch = pytest.importorskip("torch")

# fmt: off
# ruff: noqa: E501 - the listing's own line lengths


class Trainer(Actor):
    @endpoint
    async def step(self, batch: Any) -> int:
        what = batch.get(trimesh.current_rank())
        if what == "out of memory":
            raise torch.OutOfMemoryError("injected")
        if what == "hold":
            await trio.sleep_forever()
        return trimesh.current_rank()

    @endpoint(concurrency=2)
    async def ready(self) -> None: ...


@pytest.mark.torch
async def test_listing_of_errors(backend: Backend):
    """API 4: two ranks run out of memory and are excluded, one dies, and the block says which."""
    logged: list[Any] = []
    sizes: list[int] = []
    owned: list[Any] = []

    def log(*args: Any) -> None:
        logged.append(args)

    async with trio.open_nursery() as nursery:

        async def kill() -> None:
            await trio.sleep(0.2)
            backend.kill(owned[0], 3)

        def feed() -> Iterator[dict[int, str]]:
            yield from ({}, {2: "out of memory"}, {5: "out of memory"})
            nursery.start_soon(kill)
            yield dict.fromkeys(range(8), "hold")

        batches = feed()
        try:
            async with this_host().spawn_procs({"gpus": 8}, preload=("torch",)) as procs:
                owned.append(procs)
                trainers = await procs.spawn("trainers", Trainer)
                healthy = trainers
                for batch in batches:
                    sizes.append(len(healthy))
                    try:
                        await healthy.step.call(batch)
                    except* torch.OutOfMemoryError as group:        # the type that was raised there; the actors live on
                        healthy = healthy.exclude(trimesh.coords(group))
        except* trimesh.ProcDied as group:                          # a death is the block's failure (FailFast, the default)
            for error in trimesh.leaves(group):
                where = trimesh.origin(error)                       # .point .mesh .actor .endpoint .host .pid .incarnation
                log(where.point, error.signal, error.exit_code, error.oom_killed, error.stderr_tail)
    assert sizes == [8, 8, 7, 6]
    ((point, signal, exit_code, oom_killed, tail),) = logged
    assert point == {"gpus": 3}
    assert (signal, exit_code, oom_killed) == (9, None, False)
    assert isinstance(tail, str)
