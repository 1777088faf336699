"""Train an MLP whose weights are cut over one dimension of the mesh, and its batches over the other.

Run it: python examples/tensor_parallel.py [--steps 10] [--seed 0] [--plain] [--device cpu]

Of four processes, `{"dp": 2, "tp": 2}`, each holds half of the wide layer and sees half of every batch. A plan says
which weights are cut, and how; the module itself knows nothing of it. `--plain` trains in this process alone, to the
same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import trio
from device_option import add_device_option, use_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import trimesh
from trimesh import this_host

PLAN = {
    "layers.*.up.weight": ["tp", None],  # each rank computes some of the wide layer's features ...
    "layers.*.up.bias": ["tp"],
    "layers.*.down.weight": [None, "tp"],  # ... and their share of the result, which torch adds up
}


class Layer(nn.Module):
    """Widens, bends, narrows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and what the layer adds to it."""
        return x + self.down(gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Says which of eight sectors of the plane a point is in."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.widen = nn.Linear(2, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.predict = nn.Linear(width, 8)

    def forward(self, points: Tensor) -> Tensor:
        """Return, for each point, scores of the sectors."""
        hidden = self.widen(points)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.predict(hidden)


def train(model: nn.Module, steps: int, to_mesh: Callable[[Tensor], Tensor]) -> None:
    """Train as one does; `to_mesh` says where the data go."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for step in range(1, steps + 1):
        points = torch.randn(256, 2)
        sectors = (torch.atan2(points[:, 1], points[:, 0]) / torch.pi * 4 + 4).long().clamp(0, 7)
        loss = cross_entropy(model(to_mesh(points)), to_mesh(sectors))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step:4}  loss {loss.item():.6f}")


async def main(options: argparse.Namespace) -> None:
    use_device(options.device)
    torch.manual_seed(options.seed)
    model = Classifier()
    if options.plain:
        train(model, options.steps, lambda tensor: tensor)
        return
    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        model = trimesh.module_to_mesh(model, procs, PLAN)
        train(model, options.steps, lambda tensor: trimesh.distribute(tensor, procs, ["dp", None][: tensor.ndim]))
        for name, parameter in model.layers[0].named_parameters():
            part = await trimesh.fetch_shard(parameter, dp=0, tp=1)
            lies = list(await trimesh.placements(parameter))
            print(f"{name:12} {tuple(parameter.shape)!s:10} lies {lies!s:14} a rank has {tuple(part.shape)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="how long to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="train in this process alone")
    add_device_option(parser)
    trio.run(main, parser.parse_args())
