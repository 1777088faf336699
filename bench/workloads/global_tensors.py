"""Global tensors: what an operator costs by a rule and without one, and how many of the examples' have one."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.scale import Metric, Samples, Scale

PRELOAD = ("torch", "torch.distributed.tensor")
RANKS = 2
TURNS = 5
SIDE = 64
"""Of the square matrix that is computed with: the time is that of finding the way, not of the numbers."""

METRICS = [
    Metric("operator", "operator on a global tensor cut in two, processor time of a rank", "us"),
    Metric("fallback", "one without a rule: gathered, computed whole, cut", "us"),
    Metric("computed", "the same one on a tensor on each rank", "us"),
    Metric("parts", "operators of three training examples that run by a rule", "%"),
]

LACKS = dict.fromkeys(("ray", "xoscar", "monarch"), "it has no global tensors")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


async def trimesh_side(scale: Scale) -> Samples:
    import torch
    import trio

    import trimesh
    from trimesh import this_host
    from trimesh.tensor import fallbacks

    found: Samples = {metric.name: [] for metric in METRICS}
    operations = max(10, scale.calls // 4)
    torch.set_num_threads(1)
    async with this_host().spawn_procs({"procs": RANKS}, preload=PRELOAD) as procs:
        cut = trimesh.distribute(torch.ones(SIDE, SIDE), procs, ["procs", None])
        each = trimesh.replicate(torch.ones(SIDE, SIDE), procs).local()
        cases: list[tuple[str, Any, Callable[[Any], Any]]] = [
            ("operator", cut, lambda t: t * t),
            ("fallback", cut, lambda t: t.renorm(2, 0, 1.0)),
            ("computed", each, lambda t: t.renorm(2, 0, 1.0)),
        ]
        for name, tensor, function in cases:
            function(tensor).sum().item()
            for _ in range(min(TURNS, scale.rates)):
                before = _processor_seconds(procs)
                for _ in range(operations):
                    last = function(tensor)
                last.sum().item()
                found[name].append((_processor_seconds(procs) - before) / operations / RANKS * 1e6)
                await trio.lowlevel.checkpoint()
        if "aten::renorm" not in await fallbacks(procs):
            raise RuntimeError("renorm has a rule now: measure another operator that has none")
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=PRELOAD) as procs:
        with contextlib.redirect_stdout(io.StringIO()):  # they print their losses
            _train_examples(procs, max(1, scale.calls // 400))
        counted = await fallbacks(procs)
        found["parts"].append(100 * (1 - sum(counted.values()) / counted.operators))
    return found


def _processor_seconds(procs: Any) -> float:
    """Return what the ranks have used: unlike time by the clock, it is little more beside other load."""
    found = [Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split() for one in procs.statistics().members]
    return sum(int(fields[11]) + int(fields[12]) for fields in found) / os.sysconf("SC_CLK_TCK")


def _train_examples(procs: Any, steps: int) -> None:
    """Train the models of the examples that have global ones, by their own loops."""
    import trimesh

    sys.path.insert(0, str(EXAMPLES))  # they are scripts, and import each other so
    try:
        import tensor_parallel
        import train_bytes_on_mesh
        import train_module
    finally:
        sys.path.remove(str(EXAMPLES))

    def cut(tensor: Any) -> Any:
        return trimesh.distribute(tensor, procs, ["dp", None][: tensor.ndim])

    model = trimesh.module_to_mesh(train_bytes_on_mesh.ByteModel(), procs, train_bytes_on_mesh.PLAN)
    train_bytes_on_mesh.train(model, argparse.Namespace(steps=steps, seed=0), cut)
    tensor_parallel.train(trimesh.module_to_mesh(tensor_parallel.Classifier(), procs, tensor_parallel.PLAN), steps, cut)
    train_module.train(trimesh.module_to_mesh(train_module.network(), procs), steps, cut)
