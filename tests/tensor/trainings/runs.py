"""A random training run: by plain torch, by plain torch with other roundings, and on meshes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import msgspec
import torch
from tests.tensor.trainings.model import batch_of, loss_of, made, stages_of
from tests.tensor.trainings.training import OPTIMIZERS, Phase, Step, Training
from torch import Tensor, nn

import trimesh
from trimesh import ProcMesh, this_host
from trimesh.tensor import ParallelPlan, Pipeline, load_checkpoint, save_checkpoint

PRELOAD: Final = ("torch", "torch.distributed.tensor")
DISTURBED: Final = 1e-12
"""By how much parameters of the twin differ: what that changes much is decided by rounding."""
LOOSE_MOST: Final = 1e-6
"""A value that the twin has further away than this, in units of the largest number, is not compared."""
NEAR: Final = 1e-10

Put = Callable[[Tensor], Any]
Get = Callable[[Any], Awaitable[Any]]


class Finding(msgspec.Struct, frozen=True):
    """A difference: of a value that has a name, or an error, whose name is that of its class."""

    name: str
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """What came of a training.

    Attributes:
        compared: How many tensors were.
        loose: How many were not, since rounding decides them.
    """

    training: Training
    findings: tuple[Finding, ...]
    compared: int = 0
    loose: int = 0


@attrs.define(eq=False)
class Side:
    """A training in one place: the model, or its stages, with all that trains it."""

    training: Training
    modules: Sequence[nn.Module]
    put: Put
    get: Get
    pipeline: Pipeline | None = None
    is_one_model: bool = False
    seen: list[tuple[str, Any]] = attrs.field(factory=list)
    optimizers: list[torch.optim.Optimizer] = attrs.field(init=False)
    schedules: list[Any] = attrs.field(init=False)
    averages: list[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        taken: set[int] = set()
        self.optimizers = [_optimizer(self.training, one, taken) for one in self.modules]
        for one in self.optimizers:
            trimesh.optimizer_to_mesh(one)
        self.schedules, self.averages = [], []
        if self.training.has_schedule:
            self.schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.8) for one in self.optimizers]
        if self.training.has_average:
            average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)
            self.averages = [torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=average) for one in self.modules]

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once."""
        return list({id(one): one for module in self.modules for one in module.parameters()}.values())

    async def step(self, number: int, step: Step) -> None:
        """Do one step."""
        for passed in range(step.passes):
            batch, goal = batch_of(self.training, number, passed)
            self.seen.append((f"loss {number}.{passed}", self._pass(batch, goal).detach()))
        await self._event(number, step)
        if self.training.clip:
            self.seen.append((f"norm {number}", self._clip()))
        if step.event == "skip":
            return
        for optimizer in self.optimizers:
            if step.event == "fail" and not (self.training.is_tied and len(self.modules) > 1):  # optimizers of copies
                _failing_step(optimizer)
            else:
                optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        for average, module in zip(self.averages, self.modules, strict=True) if self.averages else ():
            average.update_parameters(module)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=step.event != "keep zeros")

    def _pass(self, batch: Tensor, goal: Tensor) -> Tensor:
        if self.pipeline is not None:
            return self.pipeline.step(batch, goal, lambda made, goal: loss_of(self.training, made, goal))
        loss = self._loss(batch, goal)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _loss(self, batch: Tensor, goal: Tensor) -> Tensor:
        made = self.put(batch)
        for one in self.modules:  # stages, by plain torch
            made = one(made)
        return loss_of(self.training, made, self.put(goal))

    def _clip(self) -> Tensor:
        if self.pipeline is not None:
            return self.pipeline.clip_grad_norm_(self.training.clip)
        return nn.utils.clip_grad_norm_(self.parameters(), self.training.clip)

    async def _event(self, number: int, step: Step) -> None:
        is_staged = any(one.stages for one in self.training.phases)
        if step.event in {"write", "write data"}:
            self._write(step.event)
        elif step.event == "reload":
            await self._reload()
        elif step.event == "look" and not (is_staged and self.training.is_tied):
            for place, one in enumerate(self.parameters()):
                if one.grad is not None:
                    self.seen.append((f"gradient {number}.{place}", await self.get(one.grad)))
        elif step.event in {"evaluate", "ask"} and not is_staged:
            self._compute(number, step.event)

    def _write(self, event: str) -> None:
        for parameter in self.parameters():
            if event == "write data":
                parameter.data.add_(0.0625)
                continue
            with torch.no_grad():
                parameter.mul_(0.75)

    async def _reload(self) -> None:
        for module in self.modules:
            state = await self.get(module.state_dict())
            module.load_state_dict(
                {name: one * 1.25 if one.is_floating_point() else one for name, one in state.items()}
            )

    def _compute(self, number: int, event: str) -> None:
        batch, goal = batch_of(self.training, number, 99)
        if event == "ask":
            asked = [one for one in self.parameters() if one.requires_grad]
            found = torch.autograd.grad(self._loss(batch, goal), asked, allow_unused=True)
            self.seen += [(f"asked {number}.{place}", one) for place, one in enumerate(found) if one is not None]
            return
        for one in self.modules:
            one.eval()
        with torch.no_grad():
            self.seen.append((f"evaluated {number}", self._loss(batch, goal)))
        for one in self.modules:
            one.train()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        found: dict[str, Any] = {}
        several = {"module": self.modules, "optimizer": self.optimizers, "schedule": self.schedules}
        for name, every in {**several, "average": self.averages}.items():
            for index, one in enumerate(every):
                found[f"{name}{index}"] = one
        return found

    async def finished(self) -> dict[str, Tensor]:
        """Return all values by name, here."""
        named: dict[str, Any] = dict(self.seen)
        for module in self.modules:
            named |= {f"state {name}": one for name, one in module.state_dict().items()}
        for average in self.averages:
            named |= {f"average {name}": one for name, one in average.module.state_dict().items()}
        is_cut_otherwise = self.training.is_tied and any(one.stages for one in self.training.phases)
        for place, optimizer in enumerate(() if is_cut_otherwise else self.optimizers):
            for number, kept in optimizer.state_dict()["state"].items():
                named |= {f"kept {place}.{number} {name}": one for name, one in kept.items() if one is not None}
        found = await self.get(named)
        return {name: torch.as_tensor(one).detach().clone() for name, one in found.items()}


def _optimizer(training: Training, module: nn.Module, taken: set[int]) -> torch.optim.Optimizer:
    name, options = OPTIMIZERS[training.optimizer]
    every = [one for one in module.parameters() if id(one) not in taken]
    taken |= {id(one) for one in every}
    groups: list[Any] = [{"params": every}]
    if training.has_groups:
        groups = [
            {"params": [one for one in every if (one.ndim > 1) == is_matrix], "weight_decay": 0.05 * is_matrix}
            for is_matrix in (True, False)
        ]
    made: torch.optim.Optimizer = getattr(torch.optim, name)([one for one in groups if one["params"]], **options)
    return made


def _failing_step(optimizer: torch.optim.Optimizer) -> None:
    """Let a step fail on its way, as one with a wrong rate does."""
    if isinstance(optimizer, torch.optim.ASGD) and not optimizer.state:
        return  # it would have made half of its state, without which torch's own fails ever after
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = None
    try:
        optimizer.step()
    except TypeError:
        pass
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


async def run_here(training: Training, *, disturbed: int = 0) -> dict[str, Tensor]:
    """Train by plain torch.

    Args:
        training: What is trained.
        disturbed: 0, or the seed of small changes to the parameters.
    """
    model = made(training)
    if disturbed:
        generator = torch.Generator().manual_seed(disturbed)
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(1 + DISTURBED * torch.randn(one.size(), generator=generator, dtype=one.dtype))
    stages = training.phases[0].stages
    modules = stages_of(training, model, stages) if stages else [model]

    async def get(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: one.detach().clone() if isinstance(one, Tensor) else one for name, one in values.items()}
        return values.detach().clone()

    side = Side(training, modules, lambda one: one, get)
    torch.manual_seed(training.seed)
    number = 0
    for index, phase in enumerate(training.phases):
        for one in side.optimizers if index else ():
            one.load_state_dict(one.state_dict())  # torch gives some numbers another dtype then
        for step in phase.steps:
            await side.step(number, step)
            number += 1
    return await side.finished()


def plan_of(training: Training, phase: Phase) -> ParallelPlan:
    """Return the plan of a phase."""
    names = [name for name, _ in made(training).named_modules()]

    def fitting(*patterns: str) -> list[str]:
        return [one for one in patterns if any(fnmatchcase(name, one) for name in names)]

    plan = ParallelPlan()
    for label, kind in phase.kinds.items():
        match kind:
            case "data":
                plan |= ParallelPlan.data(label)
            case "sharded":
                plan |= ParallelPlan.fully_sharded(label)
            case "optimizer" | "gradients":
                plan |= ParallelPlan.optimizer_sharded(label, gradients=kind == "gradients")
            case "tensor" | "sequence":
                more = ("parts.embed", "parts.head") if training.seed % 2 or training.is_tied else ()
                columns = fitting("*.up", "*.gate", "*.q", "*.k", "*.v", *more)
                rows = fitting("*.down", "*.out")
                plan |= ParallelPlan.tensor(label, columns=columns, rows=rows, sequence=kind == "sequence")
            case "context":
                plan |= ParallelPlan.context(label)
            case "experts":
                plan |= ParallelPlan.expert(label, fitting("*.experts"))
            case _:
                pass
    return plan


async def _begun(training: Training, phase: Phase, procs: ProcMesh) -> Side:
    plan, placements = plan_of(training, phase), phase.placements
    model = made(training)
    if phase.stages:
        pipeline = Pipeline(
            stages_of(training, model, phase.stages),
            procs,
            "pp",
            microbatches=training.microbatches,
            schedule=phase.schedule,  # type: ignore[arg-type]
            plan=plan,
            inputs=placements,
        )
        return Side(training, pipeline.stages, lambda one: one, trimesh.fetch, pipeline)
    module = trimesh.module_to_mesh(model, procs, plan)

    def put(one: Tensor) -> Any:
        return trimesh.distribute(one, procs, [*placements, None][: one.ndim])

    return Side(training, [module], put, trimesh.fetch)


class Meshes:
    """Processes, kept for several trainings."""

    def __init__(self) -> None:
        self._open: dict[tuple[tuple[str, int], ...], tuple[AsyncExitStack, ProcMesh]] = {}

    async def get(self, extent: dict[str, int]) -> ProcMesh:
        """Return the processes of an extent."""
        key = tuple(extent.items())
        if key not in self._open:
            if len(self._open) >= 3:
                await self.aclose()
            stack = AsyncExitStack()
            procs = await stack.enter_async_context(this_host().spawn_procs(dict(key), preload=PRELOAD))
            self._open[key] = stack, procs
        return self._open[key][1]

    async def aclose(self) -> None:
        """End all of them."""
        while self._open:
            _, (stack, _) = self._open.popitem()  # the last one first
            await stack.aclose()


@asynccontextmanager
async def meshes() -> Any:
    """Yield `Meshes`, and end them."""
    found = Meshes()
    try:
        yield found
    finally:
        await found.aclose()


async def run_there(training: Training, found: Meshes) -> dict[str, Tensor]:
    """Train on meshes, from one to the next by checkpoints."""
    seen: list[tuple[str, Any]] = []
    number = 0
    with TemporaryDirectory() as directory:
        for index, phase in enumerate(training.phases):
            procs = await found.get(phase.mesh)
            side = await _begun(training, phase, procs)
            if index:
                await load_checkpoint(Path(directory) / str(index - 1), side.state(), procs)
            else:
                trimesh.manual_seed(training.seed, procs)
            for step in phase.steps:
                await side.step(number, step)
                number += 1
            if index + 1 < len(training.phases):
                await save_checkpoint(Path(directory) / str(index), side.state(), procs)
                seen += list((await trimesh.fetch(dict(side.seen))).items())
        return {**dict(seen), **await side.finished()}


async def judge(training: Training, found: Meshes) -> Verdict:
    """Compare a training on meshes with plain torch."""
    expected, twin, other = [await run_here(training, disturbed=seed) for seed in (0, 1, 2)]
    try:
        there = await run_there(training, found)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        await found.aclose()
        return Verdict(training, (Finding(type(error).__name__, _words(error)),))
    findings: list[Finding] = []
    loose = 0
    if set(there) != set(expected):
        findings.append(Finding("names", f"{sorted(set(there) ^ set(expected))}"))
    for name in [one for one in expected if one in there]:
        text = difference(expected[name], there[name], twin[name], other[name])
        loose += text == ""
        if text:
            findings.append(Finding(name, text))
    return Verdict(training, tuple(findings), len(expected) - loose, loose)


def difference(here: Tensor, there: Tensor, twin: Tensor, other: Tensor) -> str | None:
    """Return how two values differ: None for not at all, "" for one that rounding decides."""
    if here.size() != there.size() or here.dtype != there.dtype:
        return f"{here.dtype}{list(here.size())} here, {there.dtype}{list(there.size())} there"
    if not here.is_floating_point():
        return None if torch.equal(here, there) else f"{here.tolist()} here, {there.tolist()} there"
    if not here.numel():
        return None
    largest = max(here.abs().max().item(), 1e-6)
    loose = max((here - twin).abs().max().item(), (here - other).abs().max().item())
    if not loose <= LOOSE_MOST * largest:
        return ""
    apart = (here - there).abs().max().item()
    return None if apart <= NEAR * largest + 100 * loose else f"{apart:.2g} apart of {largest:.2g}"


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_words(one) for one in error.exceptions[:1])
    notes = [one for one in getattr(error, "__notes__", ()) if "issued at" in one]
    return f"{type(error).__name__}: {error}"[:400] + "".join(f" | {one}"[:300] for one in notes[:1])


def in_words(verdicts: Iterable[Verdict]) -> str:
    """Return what was found, with the lines that repeat it."""
    found = []
    for one in verdicts:
        if one.findings:
            lines = [one.training.text(), *(f"  {finding.name}: {finding.text}" for finding in one.findings[:6])]
            again = f"  again: python -m tests.tensor.trainings --first-seed {one.training.seed} --trainings 1"
            found.append("\n".join([*lines, again]))
    return "\n\n".join(found)
