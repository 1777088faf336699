"""Train on one mesh, generate on another: actors there take each new version of the weights from the ranks themselves.

Run it: python examples/generate_with_trained.py [--rounds 4] [--seed 0] [--device cpu]

The trainer is a tensor program; the generators are actors that know nothing of it. Between rounds the weights move to
the generators' mesh, rank to rank, and are an argument of the call that generates. And they are published: one of the
generators follows the versions by a handle, which is how programs that do not know each other's meshes do it.
"""

from __future__ import annotations

import argparse

import torch
import trio
from device_option import add_device_option, use_device
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

import trimesh
from trimesh import Actor, endpoint, this_host
from trimesh.rdma import Published

TEXT = "she sells sea shells by the sea shore; "
SYMBOLS = sorted(set(TEXT))
CONTEXT = 8
"""Symbols that the next one is guessed from."""

STEPS = 8
"""Of training, in each round."""

Weights = dict[str, Tensor]


def logits(weights: Weights, contexts: Tensor) -> Tensor:
    """Return what the model thinks of each symbol, after each of some contexts."""
    flat = one_hot(contexts, len(SYMBOLS)).float().flatten(1)
    return torch.relu(flat @ weights["hidden"]) @ weights["out"]


def generate(weights: Weights, prompt: str, length: int) -> str:
    """Go on with a prompt, by the likeliest symbol each time."""
    text, device = prompt, weights["out"].device
    for _ in range(length):
        contexts = torch.tensor([[SYMBOLS.index(symbol) for symbol in text[-CONTEXT:]]], device=device)
        text += SYMBOLS[int(logits(weights, contexts).argmax())]
    return text


class Generator(Actor):
    """Generates with whatever weights it is given."""

    @endpoint
    async def go_on(self, weights: Weights, prompt: str, length: int) -> str:
        """Use the weights of the rank beside it."""
        return generate(weights, prompt, length)

    @endpoint
    async def read_and_go_on(self, weights: Published, prompt: str, length: int) -> tuple[int, str]:
        """Read the latest version of the weights from the memory of the trainer."""
        async with weights.pin() as snapshot:
            latest = await snapshot.read()
        return snapshot.version, generate(latest, prompt, length)


async def main(rounds: int = 4, seed: int = 0) -> None:
    """Train in rounds, and let the generators show what has been learned after each."""
    torch.manual_seed(seed)
    start = {"hidden": torch.randn(CONTEXT * len(SYMBOLS), 32) / 8, "out": torch.randn(32, len(SYMBOLS)) / 6}
    numbers = [SYMBOLS.index(symbol) for symbol in TEXT * 2]
    places = range(len(TEXT))
    prompt = TEXT[:CONTEXT]
    async with (
        this_host().spawn_procs({"gpus": 1}, name="trainers", preload=("torch",)) as trainers,
        this_host().spawn_procs({"replica": 2}, name="generators", preload=("torch",)) as generators,
    ):
        actors = await generators.spawn("generator", Generator)
        with trainers.activate():
            weights = {name: torch.tensor(tensor.tolist(), requires_grad=True) for name, tensor in start.items()}
            contexts = torch.tensor([numbers[place : place + CONTEXT] for place in places])
            wanted = torch.tensor([numbers[place + CONTEXT] for place in places])
        optimizer = torch.optim.SGD(weights.values(), lr=0.5, momentum=0.9)
        async with trimesh.publication(weights) as published:
            reader, handle = actors.slice(replica=0), published.shard(gpus=0)
            for number in range(1, rounds + 1):
                for _ in range(STEPS):
                    loss = cross_entropy(logits(weights, contexts), wanted)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                moved = {name: tensor.detach().to_mesh(generators) for name, tensor in weights.items()}
                texts = await actors.go_on.call(moved, prompt, len(TEXT))
                assert len(set(texts.values())) == 1, "both replicas have the same weights"
                print(f"round {number}  loss {loss.item():.4f}  {texts.values()[0]!r}")
                await published.publish()
                version, text = await reader.read_and_go_on.call_one(handle, prompt, len(TEXT))
                assert (version, text) == (number, texts.values()[0]), "what is read is what has moved"
        print(f"by handles             {text!r}")
        here = {name: await trimesh.fetch_shard(tensor) for name, tensor in weights.items()}
        print(f"here                   {generate(here, prompt, len(TEXT))!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="how often the weights move (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights (default: %(default)s)")
    add_device_option(parser)
    options = parser.parse_args()
    use_device(options.device)
    trio.run(main, options.rounds, options.seed)
