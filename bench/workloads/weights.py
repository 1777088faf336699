"""Weight update: 1 GiB over 4 ranks, rows of each tensor, to 4 generators, which have columns of them.

The floor is what the same generators take, all at once, to copy as many bytes within memory that they have used before.
"""

from __future__ import annotations

import time
from typing import Any

from bench.scale import Metric, Samples, Scale

RANKS = 4
TENSORS = 16

METRICS = [
    Metric("weights_pulled", "1 GiB of rows over 4 ranks, read as columns by 4 generators", "ms"),
    Metric("weights_copied", "the floor: the generators copy as many bytes of their own", "ms"),
    Metric("weights_pulled_beside_floor", "the first beside the second", "x", goals=(1.5,)),
    Metric("weights_pulled_cpu_beside_floor", "the same in processor time", "x"),
    Metric("weights_pulled_cast", "the same read into bfloat16", "ms"),
    Metric("weights_published", "until the ranks have published it", "ms"),
    Metric("weights_published_beside_floor", "that beside the floor", "x"),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "it has no versions that readers of another layout read")


async def trimesh_side(scale: Scale) -> Samples:
    from bench.workloads.weight_actors import WeightGenerator, WeightTrainer
    from trimesh import this_host
    from trimesh.service.weights import publication_of

    side = max(RANKS, int((scale.model_mebibytes * (1 << 20) / 4 / TENSORS) ** 0.5) // RANKS * RANKS)
    found: Samples = {metric.name: [] for metric in METRICS}
    async with this_host().spawn_procs({"procs": 2 * RANKS}, preload=("torch",)) as procs:
        trainers = await procs.slice(procs=slice(0, RANKS)).spawn("trainers", WeightTrainer, RANKS, TENSORS, side)
        readers = procs.slice(procs=slice(RANKS, None))
        generators = await readers.spawn("generators", WeightGenerator, RANKS, TENSORS, side)
        weights = publication_of(await trainers.publication.call())
        for version in range(1, max(4, scale.transfers // 2)):
            published, _ = await _timed(trainers.publish, version)
            copied, copied_cpu = await _timed(generators.copy)
            pulled, pulled_cpu = await _timed(generators.pull, weights)
            cast, _ = await _timed(generators.pull_cast, weights)
            if version <= 2:
                continue  # only then have both slots pages, and the readers have them mapped
            found["weights_pulled"].append(pulled)
            found["weights_copied"].append(copied)
            found["weights_pulled_beside_floor"].append(pulled / copied)
            found["weights_pulled_cpu_beside_floor"].append(pulled_cpu / copied_cpu)
            found["weights_pulled_cast"].append(cast)
            found["weights_published"].append(published)
            found["weights_published_beside_floor"].append(published / copied)
    return found


async def _timed(endpoint: Any, *args: Any) -> tuple[float, float]:
    """Return the milliseconds that a call of all members takes, and those of their processors."""
    start = time.perf_counter()
    spent = await endpoint.call(*args)
    return (time.perf_counter() - start) * 1e3, sum(spent.values()) * 1e3
