"""What a training step would take on hosts of eight devices, by each of three plans, without any of them.

    python examples/simulate_training.py --hosts 64 --width 4096 --layers 8

The module is built on torch's device "meta", so nothing of it is in memory; bytes are exact, seconds an estimate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trimesh
from trimesh.tensor import ParallelPlan, SimulatedMesh, simulate

TOKENS = 512


class Block(nn.Module):
    """Attention without positions, and a wide layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations after this block."""
        normed = self.norm1(x)
        q, k, v = (one(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


def step(mesh: SimulatedMesh, net: nn.Module, plan: ParallelPlan, batch: Tensor, cuts: Sequence[Any]) -> None:
    """Run one step of training: the same lines train on a mesh with processes, but for that which begins to count."""
    model = trimesh.module_to_mesh(net, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = trimesh.distribute(batch, mesh, cuts)
    mesh.begin_anew()  # moving the module is no part of a step
    model(x).square().mean().backward()
    optimizer.step()


def main() -> None:
    """Compare plans."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hosts", type=int, default=64)
    options.add_argument("--width", type=int, default=2048)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--device", default="h100", help="the name of one that trimesh.tensor.simulate knows")
    options.add_argument("--trace", type=Path, help="where a trace of the last plan is written, for Perfetto")
    given = options.parse_args()

    columns, rows = ["*.q", "*.k", "*.v", "*.up"], ["*.out", "*.down"]
    plans = {
        "data": (ParallelPlan.data("hosts") | ParallelPlan.data("gpus"), [("hosts", "gpus"), None, None]),
        "fully sharded": (
            ParallelPlan.fully_sharded("hosts") | ParallelPlan.data("gpus"), [("hosts", "gpus"), None, None]
        ),
        "tensor in a host": (
            ParallelPlan.tensor("gpus", columns=columns, rows=rows) | ParallelPlan.data("hosts"), ["hosts", None, None]
        ),
    }  # fmt: skip
    for name, (plan, cuts) in plans.items():
        with simulate({"hosts": given.hosts, "gpus": 8}, device=given.device) as mesh:
            with torch.device("meta"):
                net = nn.Sequential(*(Block(given.width, given.width // 64) for _ in range(given.layers)))
                text = torch.empty(8 * given.hosts, TOKENS, given.width)
            step(mesh, net, plan, text, cuts)
            report = mesh.report()
            sent = ", ".join(f"{report.traffic.sent(label):,} along {label}" for label in ("hosts", "gpus"))
            print(f"{name}: {report.seconds * 1e3:.1f} ms, at most {report.peak_bytes / 1e9:.2f} GB, sends {sent}")
            if given.trace is not None:
                mesh.write_trace(given.trace)


if __name__ == "__main__":
    main()
