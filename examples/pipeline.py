"""Train a network in three stages, each in a process of its own: `to_mesh` takes a tensor to the next, and back.

Run it: python examples/pipeline.py [--steps 20] [--seed 0] [--plain] [--device cpu]

A batch goes through in four parts, so that the stages compute at the same time, each on another part: nothing here
waits for one before the next is issued. The activations, and later their gradients, go from process to process.
`--plain` runs the very same loop on this process alone, and prints the same losses.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext

import torch
import trio
from device_option import add_device_option, use_device
from torch import Tensor, nn

from trimesh import ProcMesh, this_host

BATCH = 32
PARTS = 4

Place = ProcMesh | None
"""Where a stage is; None for this process."""


def stages_of_network() -> list[nn.Module]:
    first = nn.Sequential(nn.Linear(16, 64), nn.GELU())
    second = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())
    return [first, second, nn.Linear(64, 1)]


def active(place: Place) -> AbstractContextManager[None]:
    return nullcontext() if place is None else place.activate()


def put(tensor: Tensor, place: Place) -> Tensor:
    """Return a copy of a tensor of this process on the ranks of a stage."""
    with active(place):
        return torch.tensor(tensor.tolist())


def put_module(module: nn.Module, place: Place) -> nn.Module:
    """Let the parameters of a stage be where it is."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(put(parameter.detach(), place)))
    return module


def move(tensor: Tensor, place: Place) -> Tensor:
    return tensor if place is None else tensor.to_mesh(place)


def train(places: list[Place], steps: int) -> None:
    """Train as one does, but for `move`."""
    stages = [put_module(module, place) for module, place in zip(stages_of_network(), places, strict=True)]
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=3e-3) for stage in stages]
    loss_of = nn.MSELoss()
    for step in range(1, steps + 1):
        points = torch.randn(BATCH, 16)
        losses: list[Tensor] = []
        for part in points.chunk(PARTS):
            x = put(part, places[0])
            lengths = put(part.norm(dim=1, keepdim=True), places[-1])
            for stage, place in zip(stages, places, strict=True):
                x = stage(move(x, place))
            losses.append(loss_of(x, lengths))
        loss = torch.stack(losses).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step:4}  loss {loss.item():.6f}")


async def main(options: argparse.Namespace) -> None:
    use_device(options.device)
    torch.manual_seed(options.seed)
    if options.plain:
        train([None, None, None], options.steps)
        return
    async with this_host().spawn_procs({"stage": 3}, preload=("torch",)) as procs:
        train([procs.slice(stage=index) for index in range(3)], options.steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="how long to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="train in this process alone")
    add_device_option(parser)
    trio.run(main, parser.parse_args())
