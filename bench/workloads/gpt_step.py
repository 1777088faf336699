"""A training step of a GPT whose batch is cut over two ranks, beside the same by plain torch (SPMD) on two others.

Through the controller, eager and recorded; with AdamW and gradients added up over the ranks on both sides. And a large
tensor that is fetched from a rank, beside a copy of as many bytes to new memory.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.scale import Metric, Samples, Scale

RANKS = 2
TURNS = 5
FETCHED_BYTES = 64 << 20

METRICS = [
    Metric("gpt_plain", "training step of a GPT, 2 ranks, SPMD by plain torch", "ms"),
    Metric("gpt_eager", "the same through the controller, eager", "ms"),
    Metric("gpt_recorded", "the same, recorded", "ms"),
    Metric("gpt_eager_ratio", "eager / plain", "x", goals=(1.5,)),
    Metric("gpt_recorded_ratio", "recorded / plain, the GPT", "x", goals=(1.1,)),
    Metric("fetch", "64 MiB fetched from a rank", "ms"),
    Metric("fetch_ratio", "fetched / copied to new memory", "x", goals=(2.0,)),
]

LACKS = {
    "monarch": "its tensor engine has no data parallel modules",
    "ray": "it has no tensors on a mesh",
    "xoscar": "it has no tensors on a mesh",
}


async def trimesh_side(scale: Scale) -> Samples:
    import torch

    import trimesh
    from bench.workloads import gpt
    from bench.workloads.gpt_ranks import GPTRank
    from bench.workloads.plain_ranks import step_milliseconds
    from trimesh import this_host
    from trimesh.tensor import ParallelPlan

    found: Samples = {metric.name: [] for metric in METRICS}
    steps, turns = max(1, scale.calls // 200), min(TURNS, scale.rates)
    preload = ("torch", "torch.distributed.tensor")
    async with (
        this_host().spawn_procs({"dp": RANKS}, preload=preload) as procs,
        this_host().spawn_procs({"dp": RANKS}, preload=preload) as plain_procs,
    ):
        eager = gpt.Training(trimesh.module_to_mesh(gpt.made(), procs, ParallelPlan.data("dp")))
        other = gpt.Training(trimesh.module_to_mesh(gpt.made(), procs, ParallelPlan.data("dp")))
        recorded = trimesh.compile(other.step)
        text, goal = (trimesh.distribute(one, procs, ["dp", None]) for one in gpt.batch())
        with tempfile.TemporaryDirectory() as folder:
            plain = await plain_procs.spawn("plain", GPTRank)
            await plain.begin.call(str(Path(folder) / "meeting"), RANKS)
            await plain.make.call()
            for turn in range(turns + 1):
                for name, step in (("gpt_eager", eager.step), ("gpt_recorded", recorded)):
                    with procs.activate(global_tensors=True):  # for what the optimizer makes
                        found[name].append(step_milliseconds(step, (text, goal), steps))
                found["gpt_plain"].append(max((await plain.run.call(steps)).values()))
                if not turn:  # all is made, recorded and connected now
                    for name in found:
                        found[name].clear()
            await plain.end.call()
        for name in ("eager", "recorded"):
            pairs = zip(found[f"gpt_{name}"], found["gpt_plain"], strict=True)
            found[f"gpt_{name}_ratio"] = [theirs / own for theirs, own in pairs]
        with procs.activate():
            large = torch.ones(FETCHED_BYTES // 4)
        here = torch.ones(FETCHED_BYTES // 4)
        for _ in range(scale.transfers):
            start = time.perf_counter()
            await trimesh.fetch_shard(large, dp=0)
            fetched = time.perf_counter() - start
            start = time.perf_counter()
            here.clone()
            found["fetch"].append(fetched * 1e3)
            found["fetch_ratio"].append(fetched / (time.perf_counter() - start))
    return found
