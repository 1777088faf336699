"""Figures of trimesh on a CUDA device, each beside plain torch on the same device, measured in turn.

    python -m tests.cuda.figures PART ROWS --device cuda

PART is one of `PARTS`; each figure is a line of JSON that is added to the file ROWS at once. With `--device cpu` sizes
are small: that shows that a part runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import attrs
import torch
import trio
from tests.tensor.gpt import GPT
from torch import Tensor, nn

import trimesh
from trimesh import Actor, RDMABuffer, endpoint, this_host
from trimesh.tensor import ParallelPlan

PRELOAD: Final = ("torch", "torch.distributed.tensor")
MIB: Final = 1 << 20


@attrs.frozen
class Sizes:
    """How much is measured.

    Attributes:
        mebibytes: Of buffers.
        rounds: How often each copy is timed, after one that is not.
        operators: Of one turn.
        steps: Of one turn of a training.
        turns: Of operators, and of a training, after one that is not timed.
        models: Name, layers, width, vocabulary, length and rows of the batch of each GPT.
    """

    mebibytes: Sequence[int]
    rounds: int
    operators: int
    steps: int
    turns: int
    models: dict[str, tuple[int, int, int, int, int]]


SIZES: Final = {
    "cuda": Sizes(
        mebibytes=(64, 1024),
        rounds=9,
        operators=2000,
        steps=10,
        turns=5,
        models={"GPT of 0.6 M parameters": (4, 128, 256, 64, 16), "GPT of 93 M parameters": (8, 1024, 8192, 512, 8)},
    ),
    "cpu": Sizes(mebibytes=(1, 4), rounds=2, operators=50, steps=2, turns=2, models={"tiny GPT": (2, 16, 32, 8, 4)}),
}


class Rows:
    """Where figures go.

    Args:
        file: Gets a line of JSON for each.
        part: That they belong to.
    """

    def __init__(self, file: Path, part: str) -> None:
        self._file, self._part = file, part

    def put(self, name: str, seconds: float, plain: float, **more: Any) -> None:
        """Add a time beside that of plain torch."""
        ratio = seconds / plain
        row = {"part": self._part, "name": name, "ms": seconds * 1e3, "plain_ms": plain * 1e3, "ratio": ratio, **more}
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        with self._file.open("a") as file:
            file.write(json.dumps(rounded) + "\n")
        print(f"{name}: {seconds * 1e3:.3f} ms, plain torch {plain * 1e3:.3f} ms, ratio {ratio:.3f} {more or ''}")


def finish(device: str) -> None:
    """Wait until a device has done what was queued."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# ---- copies ----------------------------------------------------------------------------------------------------------


class Owner(Actor):
    """Has memory on a device."""

    @endpoint
    async def make(self, nbytes: int, device: str) -> RDMABuffer:
        self.memory = torch.full((nbytes,), 3, dtype=torch.uint8, device=device)
        finish(device)
        return RDMABuffer(self.memory)


class Reader(Actor):
    """Reads one-sided, and copies by plain torch, in turn."""

    @endpoint
    async def compare(self, handle: RDMABuffer, owned: str, local: str, rounds: int) -> tuple[float, float, str]:
        """Return the median seconds of a read and of a plain copy between the same kinds of memory, and the carrier."""
        source = torch.full((handle.nbytes,), 4, dtype=torch.uint8, device=owned)
        target = torch.zeros(handle.nbytes, dtype=torch.uint8, device=local)

        async def plain() -> None:
            target.copy_(source)

        reads: list[float] = []
        copies: list[float] = []
        for number in range(rounds + 1):
            for seconds, work in ((copies, plain), (reads, partial(handle.read_into, target))):
                spent = await timed(work, (owned, local))
                if number:
                    seconds.append(spent)
        if not bool((target == 3).all()):
            raise RuntimeError("a read has brought other bytes than the owner has")
        return median(reads), median(copies), handle.backend


async def timed(work: Callable[[], Awaitable[None]], devices: Sequence[str]) -> float:
    """Return the seconds that some work takes, until the devices have done it."""
    for device in devices:
        finish(device)
    before = time.perf_counter()
    await work()
    for device in devices:
        finish(device)
    return time.perf_counter() - before


async def copies(device: str, rows: Rows) -> None:
    """Read memory of a device into memory of a device, in another process and in its own."""
    await reads(device, rows, ((device, device),), (1, 2))


async def host(device: str, rows: Rows) -> None:
    """Read memory of a device into memory of the host, and the other way round, in another process."""
    await reads(device, rows, ((device, "cpu"), ("cpu", device)), (2,))


async def reads(device: str, rows: Rows, pairs: Sequence[tuple[str, str]], numbers: Sequence[int]) -> None:
    """Measure reads between pairs of memory, by so many processes each."""
    sizes = SIZES[device]
    for processes in numbers:
        async with this_host().spawn_procs({"gpus": processes}, preload=("torch",)) as procs:
            owner = await procs.slice(gpus=0).spawn("owner", Owner)
            reader = await procs.slice(gpus=processes - 1).spawn("reader", Reader)
            for owned, local in pairs:
                for mebibytes in sizes.mebibytes:
                    handle = await owner.make.call_one(mebibytes * MIB, owned)
                    read, plain, carrier = await reader.compare.call_one(handle, owned, local, sizes.rounds)
                    where = "in one process" if processes == 1 else "between two processes"
                    gigabytes = mebibytes * MIB / read / 1e9
                    rows.put(
                        f"{mebibytes} MiB {owned} to {local} {where}", read, plain, carrier=carrier, gb_s=gigabytes
                    )


# ---- the tensor engine -----------------------------------------------------------------------------------------------


async def operators(device: str, rows: Rows) -> None:
    """Issue many small operators, eager, on one rank."""
    sizes = SIZES[device]
    count = sizes.operators

    def chain(start: Tensor) -> Tensor:
        for _ in range(count):
            start = start + 1
        return start

    async with this_host().spawn_procs({"gpus": 1}, preload=PRELOAD) as procs:
        with procs.activate():
            there = torch.ones(8)
        here = torch.ones(8, device=device)
        spent: dict[str, list[float]] = {"mesh": [], "plain": []}
        for turn in range(sizes.turns + 1):
            for name, start in (("mesh", there), ("plain", here)):
                before = time.perf_counter()
                chain(start).sum().item()
                if turn:
                    spent[name].append((time.perf_counter() - before) / count)
    seconds = median(spent["mesh"])
    rows.put("one eager operator", seconds, median(spent["plain"]), per_second=round(1 / seconds))


class Training:
    """A GPT, its optimizer and one batch, by plain torch or on a mesh."""

    def __init__(self, model: nn.Module, batch: Sequence[Any]) -> None:
        self.model, self.batch = model, batch
        # Fused, it counts its steps in tensors: it can be recorded.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self) -> Any:
        """Train by the batch; return the loss."""
        text, goal = self.batch
        loss = nn.functional.cross_entropy(self.model(text).flatten(0, 1), goal.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


async def training(device: str, rows: Rows) -> None:
    """Train GPTs on one rank, eager and recorded, beside plain torch on the same device."""
    for name in SIZES[device].models:
        await train(device, rows, name)


async def train(device: str, rows: Rows, name: str) -> None:
    """Train one GPT in three ways, in turn."""
    sizes = SIZES[device]
    layers, width, vocabulary, length, batch_rows = sizes.models[name]

    def made() -> GPT:
        torch.manual_seed(0)
        return GPT(layers, vocabulary=vocabulary, width=width, length=length)

    text = torch.randint(0, vocabulary, (batch_rows, length + 1), generator=torch.Generator().manual_seed(0))
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    plain = Training(made().to(device), [one.to(device) for one in batch])
    async with this_host().spawn_procs({"dp": 1}, preload=PRELOAD) as procs:
        there = [trimesh.distribute(one, procs, ["dp", None]) for one in batch]
        eager, recorded = (
            Training(trimesh.module_to_mesh(made(), procs, ParallelPlan.data("dp")), there) for _ in range(2)
        )
        ways = {"plain": plain.step, "eager": eager.step, "recorded": trimesh.compile(recorded.step)}
        spent: dict[str, list[float]] = {way: [] for way in ways}
        losses: dict[str, float] = {}
        for turn in range(sizes.turns + 1):
            for way, step in ways.items():
                before = time.perf_counter()
                if way == "plain":
                    losses[way] = steps_of(step, sizes.steps)
                else:
                    with procs.activate(global_tensors=True):  # for what the optimizer makes
                        losses[way] = steps_of(step, sizes.steps)
                if turn:
                    spent[way].append((time.perf_counter() - before) / sizes.steps)
    for way in ("eager", "recorded"):
        rows.put(f"{way} step of a {name}", median(spent[way]), median(spent["plain"]), losses=losses)


def steps_of(step: Callable[[], Any], count: int) -> float:
    """Train so many steps and return the last loss."""
    for _ in range(count):
        loss = step()
    return float(loss.item())


PARTS: Final[dict[str, Callable[[str, Rows], Awaitable[None]]]] = {
    "copies": copies,
    "training": training,
    "operators": operators,
    "host": host,
}
"""By name; those that matter most are first."""


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.figures", description="Measure on a CUDA device.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("rows", type=Path, help="file that gets a line of JSON for each figure")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    options = parser.parse_args()
    trio.run(PARTS[options.part], options.device, Rows(options.rows, options.part))


if __name__ == "__main__":
    main()
