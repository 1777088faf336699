"""Weight sync: from `publish` of a state dict of 300 tensors until four readers have copied it."""

from __future__ import annotations

import time

from bench.scale import Metric, Samples, Scale

TENSORS = 300
READERS = 4

METRICS = [
    Metric("visible", "1 GiB published to 4 readers", "ms", goals=(1000,)),
    Metric("published", "of that, until it is published", "ms"),
]


LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "it has no publishing of weights in place")


async def trimesh_side(scale: Scale) -> Samples:
    import trio

    from bench.workloads.trimesh_actors import Model
    from trimesh import this_host

    found: Samples = {"visible": [], "published": []}
    async with this_host().spawn_procs({"procs": 1 + READERS}) as procs:
        trainer = await procs.slice(procs=0).spawn("trainer", Model, TENSORS, scale.model_mebibytes)
        readers = await procs.slice(procs=slice(1, None)).spawn("readers", Model, TENSORS, scale.model_mebibytes)
        weights = await trainer.publication.call_one()
        for version in range(1, max(4, scale.transfers // 2)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(readers.take.call, weights, version)
                await readers.is_waiting.call()
                start = time.perf_counter()
                await trainer.publish.call_one()
                published = time.perf_counter() - start
            if version > 2:  # both slots have pages, and the readers have them mapped
                found["visible"].append((time.perf_counter() - start) * 1e3)
                found["published"].append(published * 1e3)
    return found
