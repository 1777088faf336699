"""A whole training of a GPT of 4 layers under each plan, beside the same by plain torch in one process.

Tied embeddings, rotary positions, causal attention, SwiGLU, dropout, gradients of two passes, clipping, AdamW with
groups, a schedule, a running average; in float64, so that what differs is wrong rather than rounded.

    python -m tests.tensor.whole_gpt --steps 30 --ranks 2 4
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import torch
import trio
from tests.tensor.gpt import GPT, LENGTH, VOCABULARY, Stage, optimizer_of
from torch import nn

import trimesh
from trimesh import Actor, MeshErrorGroup, ProcDied, ProcMesh, endpoint, this_host
from trimesh.tensor import ParallelPlan, Pipeline, load_checkpoint, save_checkpoint

PRELOAD: Final = ("torch", "torch.distributed.tensor")
COLUMNS: Final = ["*.q", "*.k", "*.v", "*.gate", "*.up", "embed", "head"]
ROWS: Final = ["*.out", "*.down"]
ROWS_OF_BATCH, PASSES, CLIPPED, DROPOUT = 8, 2, 0.5, 0.1
TOLERANCE: Final = 1e-5
"""Of losses, norms, parameters and averages. The largest difference that was seen is printed."""


@attrs.frozen
class Case:
    """One way to train.

    Attributes:
        name: For people.
        extent: Of the mesh.
        plan: Of the module, or of each stage.
        inputs: How batches are cut.
        stages: How many, along "pp"; 0 for no pipeline.
    """

    name: str
    extent: dict[str, int]
    plan: ParallelPlan
    inputs: Sequence[Any] | None
    stages: int = 0


def cases(ranks: int) -> list[Case]:
    """Return all ways for some ranks."""
    tensor = ParallelPlan.tensor("tp", columns=COLUMNS, rows=ROWS)
    sequence = ParallelPlan.tensor("tp", columns=COLUMNS, rows=ROWS, sequence=True)
    one, rows = {"dp": ranks}, ["dp", None]
    found = [
        Case("data", one, ParallelPlan.data("dp"), rows),
        Case("fully sharded", one, ParallelPlan.fully_sharded("dp"), rows),
        Case("optimizer sharded", one, ParallelPlan.optimizer_sharded("dp"), rows),
        Case("optimizer and gradients sharded", one, ParallelPlan.optimizer_sharded("dp", gradients=True), rows),
        Case("tensor", {"tp": ranks}, tensor, None),
        Case("sequence", {"tp": ranks}, sequence, None),
        Case("context", {"cp": ranks}, ParallelPlan.context("cp"), [None, "cp"]),
        Case("pipeline", {"pp": ranks}, ParallelPlan(), [], ranks),
    ]
    if ranks % 2 == 0 and ranks > 2:
        both = {"dp": ranks // 2, "tp": 2}
        found += [
            Case("fully sharded, tensor", both, tensor | ParallelPlan.fully_sharded("dp"), rows),
            Case("data, sequence", both, sequence | ParallelPlan.data("dp"), rows),
            Case("fully sharded, context", *_sharded_in_context(ranks)),
            Case("pipeline, fully sharded", {"pp": 2, "dp": ranks // 2}, ParallelPlan.fully_sharded("dp"), ["dp"], 2),
        ]
    return found


def _sharded_in_context(ranks: int) -> tuple[dict[str, int], ParallelPlan, list[str]]:
    plan = ParallelPlan.fully_sharded("dp") | ParallelPlan.context("cp")
    return {"dp": ranks // 2, "cp": 2}, plan, ["dp", "cp"]


def cross_entropy(logits: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten())


def warmed_up(step: int) -> float:
    """Return the factor of the learning rate: up for five steps, then down as a cosine."""
    return min(1.0, (step + 1) / 5) * (0.55 + 0.45 * math.cos(math.pi * step / 40))


class Side:
    """One training: optimizers, schedules and averages of modules, which are the model or its stages."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.optimizers = [optimizer_of(one) for one in modules]
        for one in self.optimizers:
            trimesh.optimizer_to_mesh(one)
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(one, warmed_up) for one in self.optimizers]
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.averages = [torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=average) for one in modules]
        self.seen: list[torch.Tensor] = []

    def step(self, passes: Callable[[], Sequence[torch.Tensor]], clip: Callable[[], torch.Tensor]) -> None:
        """Do one step, of several backward passes, and remember losses and the norm."""
        self.seen += [loss.detach() for loss in passes()]
        self.seen.append(clip())
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        for average, module in zip(self.averages, self.modules, strict=True):
            average.update_parameters(module)

    def clip(self) -> torch.Tensor:
        """Clip the gradients of the one module."""
        return nn.utils.clip_grad_norm_(self.modules[0].parameters(), CLIPPED)

    def states(self) -> list[list[dict[str, torch.Tensor]]]:
        """Return the parameters and averages of all modules."""
        return [[one.state_dict() for one in self.modules], [one.module.state_dict() for one in self.averages]]


def made(dropout: float) -> GPT:
    torch.manual_seed(0)
    model: GPT = GPT(dropout=dropout).double()
    return model


def batches(step: int) -> list[torch.Tensor]:
    """Return the inputs and goals of the passes of a step."""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(0, VOCABULARY, (PASSES, 2, ROWS_OF_BATCH, LENGTH), generator=generator))


def passes_of(model: nn.Module, step: int, put: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    losses = []
    for text, goal in batches(step):
        loss = cross_entropy(model(put(text)), put(goal)) / PASSES
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss)
    return losses


def trained_here(steps: int, dropout: float, stages: int = 0) -> Side:
    """Train by plain torch; averages and states by stages where there are some to compare with."""
    model = made(dropout)
    side = Side([model])
    torch.manual_seed(1)
    for step in range(steps):
        side.step(partial(passes_of, model, step, lambda one: one), side.clip)
    if stages:
        averaged: Any = side.averages[0].module
        side.modules = [Stage(model, index, stages) for index in range(stages)]
        for index in range(stages):
            twin = torch.optim.swa_utils.AveragedModel(nn.Identity())
            twin.module = Stage(averaged, index, stages)
            side.averages[index:] = [twin]
    return side


def begun_on(procs: ProcMesh, case: Case) -> tuple[Side, Callable[[int], None]]:
    """Begin to train on a mesh; return what does the step of a number, and waits for nothing."""
    if case.stages:
        gpt = made(0.0)
        stages = [Stage(gpt, index, case.stages) for index in range(case.stages)]
        inputs = case.inputs or []
        pipeline = Pipeline(stages, procs, "pp", microbatches=4, plan=case.plan, inputs=inputs)
        staged = Side(pipeline.stages)

        def passes(step: int) -> list[torch.Tensor]:
            return [
                pipeline.step(text, goal, lambda logits, goal: cross_entropy(logits, goal) / PASSES)
                for text, goal in batches(step)
            ]

        return staged, lambda step: staged.step(lambda: passes(step), lambda: pipeline.clip_grad_norm_(CLIPPED))
    model = trimesh.module_to_mesh(made(DROPOUT), procs, case.plan)
    side = Side([model])
    trimesh.manual_seed(1, procs)

    def put(one: torch.Tensor) -> torch.Tensor:
        return trimesh.distribute(one, procs, case.inputs)

    return side, lambda step: side.step(lambda: passes_of(model, step, put), side.clip)


async def largest_difference(case: Case, steps: int, expected: Side) -> float:
    """Train under one plan and return the largest difference to plain torch."""
    async with this_host().spawn_procs(case.extent, preload=PRELOAD) as procs:
        side, step = begun_on(procs, case)
        for number in range(steps):
            step(number)
        found = [*await trimesh.fetch(side.seen), *_tensors(await trimesh.fetch(side.states()))]
    wanted = [*expected.seen, *_tensors(expected.states())]
    if len(found) != len(wanted):
        raise RuntimeError(f"{case.name}: {len(found)} values to compare with {len(wanted)}")
    return max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


class Process(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()


async def difference_after_kill(steps: int, saved: int, killed: int, expected: Side) -> float:
    """Save a fully sharded training on two ranks, kill one of them later, and go on from there on four, cut two ways.

    Args:
        steps: Of the whole training.
        saved: After how many it is saved.
        killed: After how many a rank is killed.
        expected: The same at one go, by plain torch.

    Returns:
        The largest difference, of what was seen after the checkpoint, and of all parameters and averages.
    """
    before, after = cases(2)[1], cases(4)[-4]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "saved"
        try:
            async with this_host().spawn_procs(before.extent, preload=PRELOAD) as procs:
                pids = await (await procs.spawn("processes", Process)).pid.call()
                side, step = begun_on(procs, before)
                for number in range(killed):
                    if number == saved:
                        await save_checkpoint(path, _state(side), procs)
                    step(number)
                os.kill(pids.item(dp=1), signal.SIGKILL)
                await trimesh.fetch(side.seen)
            raise RuntimeError("the mesh has outlived a rank that was killed")
        except MeshErrorGroup as group:
            if group.split(ProcDied)[1] is not None:
                raise
        async with this_host().spawn_procs(after.extent, preload=PRELOAD) as procs:
            side, step = begun_on(procs, after)
            await load_checkpoint(path, _state(side), procs)
            for number in range(saved, steps):
                step(number)
            seen = await trimesh.fetch(side.seen)
            found = [*seen, *_tensors(await trimesh.fetch(side.states()))]
    wanted = [*expected.seen[-len(seen) :], *_tensors(expected.states())]
    return max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


def _state(side: Side) -> dict[str, Any]:
    return {
        "model": side.modules[0],
        "average": side.averages[0],
        "optimizer": side.optimizers[0],
        "schedule": side.schedules[0],
    }


def _tensors(states: Sequence[Sequence[dict[str, torch.Tensor]]]) -> list[torch.Tensor]:
    return [value for every in states for state in every for _, value in sorted(state.items())]


async def compare_all(steps: int, ranks: Sequence[int]) -> int:
    """Print a line for each way to train; return how many are further from plain torch than `TOLERANCE`."""
    wrong = 0
    for count in ranks:
        for case in cases(count):
            expected = trained_here(steps, 0.0 if case.stages else DROPOUT, case.stages)
            began = time.monotonic()
            found = await largest_difference(case, steps, expected)
            is_right = found <= TOLERANCE
            wrong += not is_right
            took = time.monotonic() - began
            print(
                f"{case.name} on {case.extent}: {steps} steps, {found:.1e}, {took:.0f} s", "" if is_right else "WRONG"
            )
    began = time.monotonic()
    saved, killed = steps // 3, steps // 2
    found = await difference_after_kill(steps, saved, killed, trained_here(steps, DROPOUT))
    wrong += _told(f"saved after {saved}, killed after {killed}, resumed on 4 ranks", steps, found, began)
    return wrong


def _told(what: str, steps: int, found: float, began: float) -> bool:
    """Print what was found; return whether it is wrong."""
    is_wrong = not found <= TOLERANCE  # NaN is wrong
    took = time.monotonic() - began
    print(f"{what}: {steps} steps, {found:.1e}, {took:.0f} s", "WRONG" if is_wrong else "", flush=True)
    return is_wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    chosen = parser.parse_args()
    if trio.run(compare_all, chosen.steps, chosen.ranks):
        raise SystemExit("a training differs from plain torch")


if __name__ == "__main__":
    main()
