"""Train a small language model on four processes, lose one to SIGKILL half-way, and carry on.

Run it: python examples/train_bytes.py [--steps 250] [--seed 0] [--no-kill]

The model reads bytes of the Python standard library's own source and learns to say which byte comes next. Each of four
actors computes gradients on its share of the text; this process averages them and keeps the weights. When an actor's
process dies, the block that owns the processes ends with `ProcDied`. The weights are still here, so training goes on
with a fresh mesh at the very step that was lost, and ends with the loss that it would have had without the accident.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import sysconfig
import time
from pathlib import Path
from typing import Self

import torch
import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, glu, pad

import trimesh
from trimesh import Actor, HostMesh, ValueMesh, endpoint, this_host

REPLICAS = 4
BATCH = 16  # pieces of text that one actor reads in a step
PIECE = 48  # bytes to predict in each
SHARE_BYTES = 1 << 20  # of the standard library, for one actor
PROMPT = b"class Reader:\n"

Weights = dict[str, Tensor]
Gradients = list[Tensor]


class ByteModel(nn.Module):
    """Predicts the next byte from the last 32: five causal convolutions, each looking twice as far back."""

    def __init__(self, width: int = 96, depth: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(depth))
        self.predict = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return, for each place in `text`, scores of the 256 candidates for the byte after it."""
        hidden = self.embed(text).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            hidden = hidden + glu(layer(pad(hidden, (2**i, 0))), dim=1)
        return self.predict(hidden.transpose(1, 2))


class Trainer(Actor):
    """Computes gradients on its share of the text. It holds nothing whose loss would matter."""

    def __init__(self, seed: int) -> None:
        rank, size = trimesh.current_rank(), trimesh.current_size()
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[rank::size]
        text = b"\n".join(file.read_bytes() for file in files)
        text = text.replace(b" " * 20, b"").replace(b"    ", b"\t")  # white space teaches little
        self.text = torch.frombuffer(bytearray(text[:SHARE_BYTES]), dtype=torch.uint8)
        self.seed = f"{seed}/{rank}"
        self.model = ByteModel()

    @endpoint
    def pid(self) -> int:
        """Return the id of this actor's process."""
        return os.getpid()

    @endpoint
    def gradients(self, step: int, weights: Weights) -> tuple[float, Gradients]:
        """Return loss and gradients on pieces of text that depend on seed, rank and step alone."""
        print(f"pid {os.getpid()} computes the gradients of step {step}", file=sys.stderr, flush=True)
        self.model.load_state_dict(weights)
        starts = random.Random(f"{self.seed}/{step}").sample(range(len(self.text) - PIECE), BATCH)
        pieces = torch.stack([self.text[start : start + PIECE + 1] for start in starts]).long()
        loss = cross_entropy(self.model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        return loss.item(), list(torch.autograd.grad(loss, list(self.model.parameters())))

    @endpoint(thread=True)  # seconds of computing: the process answers others meanwhile
    @torch.no_grad()
    def write(self, weights: Weights, prompt: bytes, length: int) -> str:
        """Return `prompt` and what the model writes after it."""
        self.model.load_state_dict(weights)
        dice = torch.Generator().manual_seed(0)
        text = list(prompt.replace(b"    ", b"\t"))
        for _ in range(length):
            scores = self.model(torch.tensor([text[-PIECE:]]))[0, -1]
            text.append(int(torch.multinomial((scores / 0.5).softmax(0), 1, generator=dice)))
        return bytes(text).decode(errors="replace").expandtabs(4)


class Learner:
    """What must survive the death of a trainer: weights, optimizer and the number of the step."""

    def __init__(self, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.step, self.steps = 0, steps
        self.loss = 0.0
        self.model = ByteModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 15e-3, steps, pct_start=0.15)

    @property
    def weights(self) -> Weights:
        """What the trainers are sent."""
        return self.model.state_dict()

    def learn(self, results: ValueMesh[tuple[float, Gradients]]) -> None:
        """Make one step along the mean of the trainers' gradients."""
        losses, gradients = zip(*results.values(), strict=True)
        for parameter, *found in zip(self.model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(found).mean(dim=0)
        self.optimizer.step()
        self.schedule.step()
        self.loss = sum(losses) / len(losses)
        self.step += 1


class Saboteur:
    """Kills one process in the middle of a step, once."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.struck_at = 0.0

    async def strike(self, pid: int, screen: Screen) -> None:
        """Kill process `pid`, a moment from now."""
        self.step = None
        await trio.sleep(0.01)  # the trainers are at work by then
        screen.note(f"SIGKILL to process {pid}")
        self.struck_at = time.perf_counter()
        os.kill(pid, signal.SIGKILL)


async def train(host: HostMesh, learner: Learner, screen: Screen, saboteur: Saboteur) -> str:
    """Train to the last step, with processes that live no longer than this call; return a text by the model."""
    began = time.perf_counter()
    async with host.spawn_procs({"replica": REPLICAS}, output="discard") as procs, trio.open_nursery() as nursery:
        trainers = await procs.spawn("trainers", Trainer, learner.seed)
        pids = await trainers.pid.call()
        screen.note(f"{REPLICAS} processes ready after {milliseconds_since(began)} for step {learner.step}")
        while learner.step < learner.steps:
            if learner.step == saboteur.step:
                nursery.start_soon(saboteur.strike, pids.item(replica=2), screen)
            learner.learn(await trainers.gradients.call(learner.step, learner.weights))
            screen.advance(learner.step, learner.loss)
        return await trainers.write.choose(learner.weights, PROMPT, 400)


async def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the cores belong to the trainers
    learner = Learner(options.steps, options.seed)
    saboteur = Saboteur(options.steps // 2 if options.kill else None)
    with Screen(options.steps) as screen:
        async with this_host().warm(preload=("torch",)) as host:  # imports torch once, forks processes in milliseconds
            try:
                text = await train(host, learner, screen, saboteur)
            except* trimesh.ProcDied as group:
                for error in trimesh.leaves(group):
                    where = trimesh.origin(error)
                    after = milliseconds_since(saboteur.struck_at)
                    cause = signal.Signals(error.signal).name
                    name = f"{where.mesh}[replica={where.point['replica']}]"
                    screen.note(f"{type(error).__name__} at {name}: {cause}, {after} ago")
                    screen.note(f"its last words: {error.stderr_tail.splitlines()[-1]}")
                text = await train(host, learner, screen, saboteur)
        screen.note(f"{learner.steps} steps done, final loss {learner.loss:.4f}")
    screen.show_result(text)


def milliseconds_since(moment: float) -> str:
    return f"{1000 * (time.perf_counter() - moment):.0f} ms"


class Screen:
    """Shows the run: a live bar on a terminal, plain lines elsewhere, a table and the text at the end."""

    def __init__(self, steps: int) -> None:
        self.began = time.perf_counter()
        self.console = Console(highlight=False)
        self.every = max(1, steps // 20)
        self.losses: list[float] = []
        self.table = Table("seconds", "what happened", title="What happened")
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.description}"), TimeElapsedColumn()
        self.progress = Progress(*columns, console=self.console, auto_refresh=False)  # `advance` draws it
        self.bar = self.progress.add_task("", total=steps)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, step: int, loss: float) -> None:
        """Show that `step` steps are done."""
        self.losses.append(loss)
        if self.console.is_terminal:
            self.progress.update(self.bar, completed=step, description=f"{loss:.3f} {self.curve()}", refresh=True)
        elif step % self.every == 0:
            self.console.print(f"step {step:4}  loss {loss:.3f}")

    def curve(self, width: int = 24) -> str:
        """Return the losses so far as a line of blocks."""
        shown = self.losses[:: -(-len(self.losses) // width)]
        return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * loss / max(shown) * 0.999))] for loss in shown)

    def note(self, text: str) -> None:
        """Show an event, and keep it for the table."""
        now = f"{time.perf_counter() - self.began:.2f}"
        self.table.add_row(now, text)
        self.console.print(f"{now:>7} s  {text}", markup=False, soft_wrap=True)

    def show_result(self, text: str) -> None:
        """Show what the model wrote, and all events."""
        self.console.print(f"\nWhat the model writes after {PROMPT.decode().strip()!r}:\n")
        self.console.print(text, markup=False, soft_wrap=True)
        self.console.print(self.table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="how long to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="train without the accident")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps must be at least 4, got {options.steps}")
    trio.run(main, options)
