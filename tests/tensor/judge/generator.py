"""From a seed to a program, nearly all of whose steps plain torch takes."""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from typing import Any, Final

import torch
from tests.tensor.judge.comparison import posed
from tests.tensor.judge.interpreter import PlainRun, TwinRun
from tests.tensor.judge.interpreter import seed as seed_all
from tests.tensor.judge.operands import FLOATS, NUMEL_MOST, Operands, Unfit
from tests.tensor.judge.placements import draw_extent, draw_layout
from tests.tensor.judge.program import Extent, Input, Program, Step
from tests.tensor.judge.table import GROUPS, Group
from torch.utils import _pytree as pytree

LENGTH_MOST: Final = 30
"""Steps of a program."""

LARGEST: Final = 1e5
"""A number beyond it ends up as infinity, or hides others."""

SHAPES: Final = (
    ((4, 6), (4, 6), (6,)), ((5, 3), (5, 3), (3,)), ((2, 4, 6), (4, 6)), ((3, 2, 4), (2, 4), (4,)), ((1, 4), (3, 4)),
    ((8,), (8,), ()), ((7,), (1,)), ((2, 4), (2, 4), ()), ((1, 1), (2, 1)), ((2, 2, 2), (2, 2)), ((0, 3), (3,)),
    ((3,), (3, 1)),
    ((6, 4), (4, 4), (6, 4)), ((2, 3), (3, 2)), ((4, 4), (4, 4)), ((3, 3), (3,)), ((2, 3, 3), (3, 3)),
)  # fmt: skip
"""Sizes of the tensors that a program begins with."""

OTHERS: Final = ("int32", "int16", "int8", "uint8", "uint16", "float16")
"""Dtypes of few tensors."""

KINDS: Final = ("quarters", "quarters", "distinct", "normal", "positive", "special")


class _Writing:
    """A program in the making: its plain run and the run's twin keep step with it."""

    def __init__(self, seed: int, excluded: Collection[str]) -> None:
        self.drawn = random.Random(seed)
        self.excluded = excluded
        drawn = self.drawn
        self.seed = seed
        self.extent = draw_extent(drawn)
        self.per_rank = drawn.random() < 0.1
        self.dtype = drawn.choice(FLOATS)
        self.steps: list[Step] = []
        self.inputs: list[Input] = []
        learns = drawn.random() < 0.55
        for shape in drawn.choice(SHAPES):
            way = drawn.random()
            dtype = self.dtype if way < 0.75 else drawn.choice(("int64", "bool", *OTHERS, *FLOATS))
            kind = drawn.choice(KINDS)
            grad = learns and drawn.random() < 0.7 and dtype in FLOATS
            self.inputs.append(
                Input(
                    name=f"x{len(self.inputs)}",
                    shape=shape,
                    dtype=dtype,
                    kind=kind if dtype in FLOATS else "quarters",
                    seed=drawn.randrange(10_000),
                    layout=draw_layout(drawn, shape, self.extent, dtype),
                    needs_grad=grad,
                )
            )
        self.restart()

    def program(self) -> Program:
        return Program(self.seed, self.extent, self.per_rank, tuple(self.inputs), tuple(self.steps))

    def restart(self) -> None:
        """Run all steps so far anew."""
        self.plain, self.twin = PlainRun(self.program()), TwinRun(self.program())
        for run in (self.twin, self.plain):
            seed_all(self.seed)
            run.run()
        self.operands = Operands(self.drawn, self.extent, self.plain, self.inputs, self.dtype)

    def try_step(self, group: Group, line: str) -> str:
        """Draw one step and run it; return "done", "left" if it does not serve, or "raises"."""
        known = len(self.inputs)
        try:
            code = self.operands.fill(line)
        except (Unfit, IndexError, ValueError, RuntimeError):
            self._forget(known)
            return "left"
        step = Step(code, line, f"v{len(self.steps)}" if group.has_result else "")
        for one in self.inputs[known:]:
            self.twin.add(one)
        before = torch.default_generator.get_state()
        done = self.plain.step(len(self.steps), step)
        after = torch.default_generator.get_state()
        if not done:
            self.steps.append(step)
            return "raises"
        torch.default_generator.set_state(before)
        self.twin.step(len(self.steps), step)
        torch.default_generator.set_state(after)
        self.steps.append(step)
        if _serves(self.plain, step) and posed(self.plain, self.twin, after=step):
            return "done"
        self.drop(known)
        return "left"

    def _forget(self, known: int) -> None:
        for one in self.inputs[known:]:
            del self.plain.names[one.name]
        del self.inputs[known:]

    def drop(self, known: int) -> None:
        """Take the last step back, with the inputs that it brought."""
        step = self.steps.pop()
        if not step.result or "_(" in step.code:  # it has written
            del self.inputs[known:]
            self.restart()
            return
        for run in (self.plain, self.twin):
            run.names.pop(step.result, None)
            run.failure = None
            for one in self.inputs[known:]:
                del run.names[one.name]
        del self.inputs[known:]


def _serves(run: PlainRun, step: Step) -> bool:
    """Whether a result is small, and mostly of numbers."""
    values: list[Any] = [run.names[step.result]] if step.result else list(run.names.values())
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            if value.numel() > NUMEL_MOST or value.is_complex():
                return False
            if value.numel() and not value.is_floating_point() and value.dtype != torch.bool:
                if int(value.long().abs().max()) > LARGEST:
                    return False
            elif value.is_floating_point() and value.numel():
                data = value.detach()
                finite = data[data.isfinite()]
                if step.result and value.numel() >= 4 and 2 * finite.numel() < value.numel():
                    return False
                if finite.numel() and float(finite.abs().max()) > LARGEST:
                    return False
    return True


def extent_of(seed: int) -> Extent:
    """Return the mesh of the program of a seed, which is drawn first."""
    return draw_extent(random.Random(seed))


def generate(seed: int, excluded: Collection[str] = (), lines: str = "") -> Program:
    """Return the program of a seed.

    Args:
        seed: The seed; the same program each time.
        excluded: Lines of the table that it does without.
        lines: A pattern of lines that are drawn half of the time.
    """
    writing = _Writing(seed, excluded)
    drawn = writing.drawn
    length = min(LENGTH_MOST, drawn.choice((1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 30)))
    groups = [one for one in GROUPS if one.own is None or one.own == writing.per_rank]
    weights = [one.weight for one in groups]
    wanted = [(one, line) for one in groups for line in one.lines if lines and re.search(lines, line)]
    tries = 0
    while len(writing.steps) < length and tries < 6 * length + 10:
        tries += 1
        if wanted and drawn.random() < 0.5:
            group, line = drawn.choice(wanted)
        else:
            group = drawn.choices(groups, weights)[0]
            line = drawn.choice(group.lines)
        if line in excluded or (group.ends and len(writing.steps) < length - 2):
            continue
        known = len(writing.inputs)
        outcome = writing.try_step(group, line)
        if outcome == "raises":
            if drawn.random() < 0.1:
                break
            writing.drop(known)
    return writing.program()
