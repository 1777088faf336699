"""Data parallel training with the averaging of gradients written out, beside the same training in this process.

    python examples/ddp_training.py                 4 ranks, 20 steps
    python examples/ddp_training.py --ranks 2 --steps 100 --device cpu

Every rank has the weights and reads its own share of each batch. This script, which is the only program, computes the
loss of all shares, differentiates it, averages the gradients over the ranks and lets the optimizer step: five lines
that say what a wrapper around the model would hide. At the end the weights of all ranks are compared.
"""

from __future__ import annotations

import argparse

import torch
import trio
from device_option import add_device_option, use_device
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

import trimesh
from trimesh import ProcMesh, this_host

SHARE = 16  # examples that one rank reads in a step
TOLERANCE = 1e-5
TOLERANCE_CUDA = 1e-3  # a device adds up in another order, which each step magnifies


def network() -> nn.Module:
    """Return a small network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))


def batches(ranks: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of each step."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, ranks * SHARE, 8, generator=draw)
    return [(one, one.sin().sum(-1, keepdim=True)) for one in inputs]


def train_here(ranks: int, steps: int) -> list[float]:
    """Train in this process on whole batches; return the losses."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for inputs, targets in batches(ranks, steps):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on(procs: ProcMesh, ranks: int, steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train on a mesh; return the losses and the weights, which are still there: nothing here waits for a rank."""
    model = network()
    start = {name: trimesh.replicate(weight.detach(), procs) for name, weight in model.named_parameters()}
    weights = {name: weight.local([None] * weight.ndim).requires_grad_() for name, weight in start.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2)
    losses: list[Tensor] = []
    for batch in batches(ranks, steps):
        inputs, targets = (trimesh.distribute(part, procs, ["ranks", None]).local(["ranks", None]) for part in batch)
        optimizer.zero_grad()
        assert len(inputs) == SHARE  # of the own rank
        loss = mse_loss(functional_call(model, weights, inputs), targets)
        loss.backward()
        trimesh.reduce_([weight.grad for weight in weights.values()], "ranks", "avg")
        optimizer.step()
        losses.append(trimesh.reduce(loss.detach(), "ranks", "avg"))
    return losses, weights


async def main() -> None:
    """Train both ways and compare."""
    options = argparse.ArgumentParser()
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--steps", type=int, default=20)
    add_device_option(options)
    chosen = options.parse_args()
    use_device(chosen.device)
    expected = train_here(chosen.ranks, chosen.steps)
    async with this_host().spawn_procs({"ranks": chosen.ranks}, preload=("torch",)) as procs:
        losses, weights = train_on(procs, chosen.ranks, chosen.steps)
        found = [loss.item() for loss in losses]
        copies = [await trimesh.fetch(weight.detach()) for weight in weights.values()]
    for step, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        print(f"step {step:3}  loss {one:.6f}  in one process {other:.6f}")
    furthest = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    most = TOLERANCE_CUDA if torch.cuda.is_available() else TOLERANCE
    print(f"losses differ by {furthest:.1e} at most, {'less' if furthest < most else 'MORE'} than {most:.0e}")
    is_equal = all(torch.equal(one, values.values()[0]) for values in copies for one in values.values())
    print(f"the ranks have {'the same weights' if is_equal else 'DIFFERENT weights'}")


if __name__ == "__main__":
    trio.run(main)
