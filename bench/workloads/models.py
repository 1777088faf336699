"""Training steps of a Llama, a ViT and a UNet of two layers on two ranks, beside plain torch in one process.

The models are those of transformers and diffusers, unchanged, with SGD with momentum. Plain torch has all cores, a rank
has its share of them and of the batch. `DistributedDataParallel` on two other ranks shows what any data parallel
training can reach here. All ways run in turn.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.scale import Metric, Samples, Scale

RANKS = 2
WIDTHS = (64, 512)
TURNS = 2
WARM_UP_STEPS = 5
"""The fourth is the first one that is replayed."""
STEPS = {64: 20, 512: 4}
"""In a turn; the last one is waited for, so too few would show how long a step takes to come back."""

REQUIREMENTS = ("transformers==5.24.0", "diffusers==0.42.1")

NAMES = {"llama": "Llama", "vit": "ViT", "unet": "UNet"}
GOALS = {("eager", 64): 6.0, ("eager", 512): 1.5, ("recorded", 64): 2.0, ("recorded", 512): 1.15}

METRICS = [
    metric
    for model, name in NAMES.items()
    for width in WIDTHS
    for metric in (
        Metric(f"{model}_{width}_plain", f"step of {name}, width {width}, one process", "ms"),
        Metric(f"{model}_{width}_ddp", f"{name} {width} by DistributedDataParallel / one process", "x"),
        Metric(f"{model}_{width}_eager", f"{name} {width} eager / one process", "x", goals=(GOALS["eager", width],)),
        Metric(
            f"{model}_{width}_recorded",
            f"{name} {width} recorded / one process",
            "x",
            goals=(GOALS["recorded", width],),
        ),
    )
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "it has no modules on a mesh of processes")


async def trimesh_side(scale: Scale) -> Samples:
    import trimesh
    from bench.workloads.model_ranks import ModelRank, Training
    from bench.workloads.plain_ranks import step_milliseconds
    from trimesh import this_host
    from trimesh.tensor import ParallelPlan

    found: Samples = {metric.name: [] for metric in METRICS}
    preload = ("torch", "torch.distributed.tensor")
    async with (
        this_host().spawn_procs({"dp": RANKS}, preload=preload) as procs,
        this_host().spawn_procs({"dp": RANKS}, preload=preload) as plain_procs,
    ):
        ranks = await plain_procs.spawn("ranks", ModelRank)
        with tempfile.TemporaryDirectory() as folder:
            await ranks.begin.call(str(Path(folder, "meeting")), RANKS)
            for name, width in ((name, width) for name in NAMES for width in WIDTHS[: 1 if scale.is_smoke else None]):
                here = Training(name, width)
                eager, recorded = (
                    Training(name, width, lambda model: trimesh.module_to_mesh(model, procs, ParallelPlan.data("dp")))
                    for _ in range(2)
                )
                batch = [trimesh.distribute(one, procs, ["dp", *[None] * (one.ndim - 1)]) for one in here.batch]
                await ranks.make.call(name, width)

                ways = {"eager": eager.step, "recorded": trimesh.compile(recorded.step)}
                for turn in range(1 + (1 if scale.is_smoke else TURNS)):
                    steps = WARM_UP_STEPS if not turn else 1 if scale.is_smoke else STEPS[width]
                    milliseconds = {"plain": step_milliseconds(here.step, here.batch, steps)}
                    milliseconds["ddp"] = max((await ranks.run.call(steps)).values())
                    with procs.activate(global_tensors=True):  # for what models and the optimizer make
                        milliseconds |= {way: step_milliseconds(step, batch, steps) for way, step in ways.items()}
                    if turn:
                        found[f"{name}_{width}_plain"].append(milliseconds["plain"])
                        for way in ("ddp", *ways):
                            found[f"{name}_{width}_{way}"].append(milliseconds[way] / milliseconds["plain"])
            await ranks.end.call()
    return found
