"""Train a module on a mesh with the usual loop: two lines say where the module and the data are.

Run it: python examples/train_module.py [--steps 20] [--seed 0] [--plain] [--sharded] [--device cpu]

Each of four processes computes on a quarter of every batch; torch adds their gradients up. `--plain` runs the very same
loop on this process alone, and prints the same losses. With `--sharded` each process keeps a quarter of the parameters
and of what the optimizer knows of them, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import trio
from device_option import add_device_option, use_device
from torch import Tensor, nn

import trimesh
from trimesh import this_host
from trimesh.tensor import ParallelPlan

BATCH = 64


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield points and the length of each, which is what the module learns."""
    for _ in range(steps):
        points = torch.randn(BATCH, 16)
        yield points, points.norm(dim=1, keepdim=True)


def train(model: nn.Module, steps: int, to_mesh: Callable[[Tensor], Tensor]) -> None:
    """Train as one does; `to_mesh` says where the data go."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of = nn.MSELoss()
    for step, (points, lengths) in enumerate(batches(steps), 1):
        x, y = to_mesh(points), to_mesh(lengths)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step:4}  loss {loss.item():.6f}")


async def main(options: argparse.Namespace) -> None:
    use_device(options.device)
    torch.manual_seed(options.seed)
    model = network()
    if options.plain:
        train(model, options.steps, lambda tensor: tensor)
        print(f"length of ones: {model(torch.ones(1, 16)).item():.5f}")
        return
    async with this_host().spawn_procs({"gpus": 4}, preload=("torch", "torch.distributed.tensor")) as procs:
        plan = ParallelPlan.fully_sharded("gpus") if options.sharded else ParallelPlan.data("gpus")
        print(plan.explain(model, procs))
        model = trimesh.module_to_mesh(model, procs, plan)
        train(model, options.steps, lambda tensor: trimesh.distribute(tensor, procs, ["gpus", None]))
        trained = network()
        trained.load_state_dict(await trimesh.fetch(model.state_dict()))  # what `torch.save` takes
        print(f"length of ones: {trained(torch.ones(1, 16)).item():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="how long to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="train in this process alone")
    parser.add_argument("--sharded", action="store_true", help="keep a part of each parameter on each process")
    add_device_option(parser)
    trio.run(main, parser.parse_args())
