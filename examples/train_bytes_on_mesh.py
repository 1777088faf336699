"""Train the byte-level model of `train_bytes.py` on the tensor engine: one model, cut over four processes.

Run it: python examples/train_bytes_on_mesh.py [--steps 60] [--seed 0] [--plain] [--device cpu]

There is no actor and no message here: batches are cut over the dimension "dp" of the mesh, the widest weights over
"tp", and the loop is the one for a single process. `--plain` runs it on this process alone, to the same losses.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import trio
from device_option import add_device_option, use_device
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_bytes import PIECE, PROMPT, ByteModel

import trimesh
from trimesh import this_host

BATCH = 16
TEXT_BYTES = 1 << 20  # of the standard library
PLAN = {
    "embed.weight": [None, "tp"],
    "predict.weight": ["tp", None],
    "predict.bias": ["tp"],
}


def read_text() -> Tensor:
    """Return source code, without the white space that teaches little."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files).replace(b" " * 20, b"").replace(b"    ", b"\t")
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


def train(model: ByteModel, options: argparse.Namespace, to_mesh: Callable[[Tensor], Tensor]) -> None:
    """Train as one does; `to_mesh` says where the data go."""
    text, dice = read_text(), random.Random(options.seed)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 15e-3, options.steps, pct_start=0.15)
    every = max(1, options.steps // 20)
    for step in range(1, options.steps + 1):
        starts = dice.sample(range(len(text) - PIECE), BATCH)
        pieces = torch.stack([text[start : start + PIECE + 1] for start in starts]).long()
        scores = model(to_mesh(pieces[:, :-1].contiguous()))
        loss = cross_entropy(scores.flatten(0, 1), to_mesh(pieces[:, 1:].contiguous()).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % every == 0:  # whoever asks for a number waits for the ranks
            print(f"step {step:4}  loss {loss.item():.6f}")


@torch.no_grad()
def write(model: ByteModel, length: int) -> str:
    """Return the prompt and what the model writes after it."""
    dice = torch.Generator().manual_seed(0)
    text = list(PROMPT)
    for _ in range(length):
        scores = model(torch.tensor([text[-PIECE:]]))[0, -1]
        text.append(int(torch.multinomial((scores / 0.5).softmax(0), 1, generator=dice)))
    return bytes(text).decode(errors="replace").expandtabs(4)


async def main(options: argparse.Namespace) -> None:
    use_device(options.device)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    model = ByteModel()
    if options.plain:
        train(model, options, lambda tensor: tensor)
    else:
        async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
            there = trimesh.module_to_mesh(ByteModel(), procs, PLAN)
            there.load_state_dict(model.state_dict())
            train(there, options, lambda tensor: trimesh.distribute(tensor, procs, ["dp", None]))
            model.load_state_dict(await trimesh.fetch(there.state_dict()))
    print(f"\nWhat the model writes:\n\n{write(model, 200)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="how long to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="train in this process alone")
    add_device_option(parser)
    trio.run(main, parser.parse_args())
