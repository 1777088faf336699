"""Programs over tensors as plain values: made of a seed, printed, replayed, made shorter."""

from __future__ import annotations

import math
import random
import re
from typing import Final

import msgspec
import torch

WHOLE: Final = "whole"
"""Along a label of the mesh, each rank has all of the tensor."""

PARTS: Final = "parts"
"""Along a label of the mesh, each rank has a part of a sum."""

Place = int | str
"""How a tensor lies along one label: the number of the dimension that is cut, `WHOLE` or `PARTS`."""

Extent = tuple[tuple[str, int], ...]
"""Labels of a mesh and their sizes."""


UNSIGNED: Final = frozenset({torch.uint8, torch.uint16})
"""Dtypes that have no numbers below 0."""


class Input(msgspec.Struct, frozen=True):
    """A tensor that a program begins with.

    Attributes:
        name: In the program.
        shape: Its size.
        dtype: As in `torch.float64`, without "torch.".
        kind: Of its numbers; see `numbers`.
        seed: Of its numbers.
        layout: For each label of the mesh, how it lies. Without meaning where each rank has a tensor of its own.
        needs_grad: Whether it is a leaf that has a gradient.
        bound: The numbers of an index are below it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    seed: int
    layout: tuple[Place, ...]
    needs_grad: bool = False
    bound: int = 1


class Step(msgspec.Struct, frozen=True):
    """One line of a program.

    Attributes:
        code: A statement of Python.
        operation: Its line in the table of operations, as it is written there.
        result: The name that it makes, "" for none.
    """

    code: str
    operation: str
    result: str = ""

    @property
    def statement(self) -> str:
        """What Python executes."""
        return f"{self.result} = {self.code}" if self.result else self.code


class Program(msgspec.Struct, frozen=True):
    """Some tensors and what is done with them.

    Attributes:
        seed: What it was made of; of its random numbers, too.
        extent: The mesh.
        per_rank: Whether each rank has tensors of its own, rather than parts of global ones.
        inputs: What it begins with.
        steps: What it does, in order. Only the last may raise.
    """

    seed: int
    extent: Extent
    per_rank: bool
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]

    @property
    def ranks(self) -> int:
        """How many processes the mesh has."""
        return math.prod(size for _, size in self.extent)


def varied(program: Program, number: int) -> Program:
    """Return a program with other numbers in its inputs, which lie as they did: 0 for the same ones."""
    inputs = tuple(msgspec.structs.replace(one, seed=one.seed + 10_007 * number) for one in program.inputs)
    return msgspec.structs.replace(program, inputs=inputs)


def numbers(one: Input, rank: int = 0) -> torch.Tensor:
    """Return the numbers of an input: the same each time.

    Args:
        one: The input. Its kind says what it holds: "quarters", multiples of 1/4, of which sums and products are the
            same in any order; "distinct", the same without equal ones; "normal", any; "special", quarters with NaN and
            infinities among them; "positive", quarters above 0; "index", integers from 0 to below `bound`.
        rank: Of the process, where each has a tensor of its own.
    """
    drawn = random.Random(one.seed * 1009 + rank)
    count = math.prod(one.shape)
    found: list[float]
    if one.kind == "index":
        found = [drawn.randrange(max(1, one.bound)) for _ in range(count)]
    elif one.kind == "normal":
        found = [round(drawn.gauss(0, 1), 3) for _ in range(count)]
    elif one.kind == "positive":
        found = [drawn.randint(1, 8) / 4 for _ in range(count)]
    elif one.kind == "distinct":
        found = [(place - count // 2) / 4 for place in drawn.sample(range(count), count)]
    else:
        found = [drawn.randint(-8, 8) / 4 for _ in range(count)]
        if one.kind == "special":
            for _ in range(1 + count // 6):
                if count:
                    found[drawn.randrange(count)] = drawn.choice((math.nan, math.nan, math.inf, -math.inf))
    dtype = getattr(torch, one.dtype)
    values = torch.tensor(found, dtype=torch.float64)
    if dtype == torch.bool:
        values = values > 0
    elif not dtype.is_floating_point and one.kind != "index":
        values = values.nan_to_num(1.0, 3.0, -3.0).mul(2).trunc()
        values = values.abs() if dtype in UNSIGNED else values
    return values.to(dtype).reshape(one.shape)


NAME: Final = re.compile(r"\b[vx]\d+\b")


def used_names(code: str) -> set[str]:
    """Return the names of inputs and results in a line."""
    return set(NAME.findall(code))


def literal(value: torch.Tensor) -> str:
    """Return an expression of Python that makes a tensor."""
    dtype = str(value.dtype)
    if value.numel() == 0:
        return f"torch.empty({tuple(value.shape)}, dtype={dtype})"
    text = str(value.double().tolist() if value.dtype.is_floating_point else value.tolist())
    text = re.sub(r"-?\b(?:nan|inf)\b", lambda found: f"float('{found[0]}')", text)
    return f"torch.tensor({text}, dtype={dtype})"


HEAD: Final = '''\
import torch, trio, trimesh
import torch.nn.functional as F
from tests.tensor.judge.both_sides import mesh_names, plain_names
from torch.utils.checkpoint import checkpoint

EXTENT, SEED, PER_RANK = {extent}, {seed}, {per_rank}
PRELOAD = ("torch", "torch.distributed.tensor")

def put(procs, values, layout, grad):
    """values: of all ranks where each has its own; layout: for each label a dimension, "whole" or "parts" of a sum."""
    if procs is None:
        return values.requires_grad_(grad)
    if PER_RANK:
        along = [tuple(EXTENT), *[None] * (values.ndim - 1)]
        return trimesh.distribute(values, procs, along).local(along)[0].detach().requires_grad_(grad)
    at = dict(zip(EXTENT, layout))
    cuts = [tuple(one for one in at if at[one] == dim) or None for dim in range(values.ndim)]
    summed = [one for one in at if at[one] == "parts"]
    for label in summed:
        count, rest = EXTENT[label], torch.zeros_like(values)
        share = values * 0.25 if values.dtype.is_floating_point else values // 2
        values = torch.stack([share, values * 0.75 if values.dtype.is_floating_point else values - share,
                              *[rest] * (count - 2)])
    made = trimesh.distribute(values, procs, [*reversed(summed), *cuts])
    for label in summed:
        made = made.sum(0, dtype=made.dtype)
    return made.detach().requires_grad_(grad)

def ramp(t):
    """Weights of a loss, other for each place."""
    made = torch.arange(t.numel(), dtype=torch.float64).remainder(7).sub(3).div(4).reshape(t.shape).to(t.dtype)
    return made if MESH is None or PER_RANK else trimesh.replicate(made, MESH)

def repeat(function, times, *args):
    """Run a function often, by a mesh as a recorded one."""
    run = function if MESH is None else trimesh.compile(function)
    for _ in range(times):
        made = run(*args)
    return made

def program(procs, rank=0):
    global MESH
    MESH = procs
    globals().update(plain_names(tuple(EXTENT.items())) if procs is None else mesh_names(procs))
'''

TAIL: Final = """
def active(run, procs):
    with procs.activate():
        return run(procs)

async def main():
    async with trimesh.this_host().spawn_procs(EXTENT, preload=PRELOAD) as procs:
        torch.manual_seed(SEED)
        plain = program(None)
        trimesh.manual_seed(SEED, procs)
        there = program(procs) if not PER_RANK else active(program, procs)
        for name, value in plain.items():
            other = there[name]
            if hasattr(other, "detach"):
                other = await trimesh.fetch(other.detach())
            print(name, value, other, sep="\\n")

trio.run(main)
"""


def source(program: Program) -> str:
    """Return the program as a script that prints what plain torch and the mesh compute."""
    lines = []
    for one in program.inputs:
        if program.per_rank:
            values = torch.stack([numbers(one, rank) for rank in range(program.ranks)])
            lines.append(f"{one.name} = {literal(values)}")
            lines.append(
                f"{one.name} = put(procs, {one.name}[rank] if procs is None else {one.name}, (), {one.needs_grad})"
            )
        else:
            lines.append(f"{one.name} = put(procs, {literal(numbers(one))}, {one.layout!r}, {one.needs_grad})")
    names = [one.name for one in program.inputs]
    for step in program.steps:
        lines.append(step.statement)
        if step.result:
            names.append(step.result)
    lines.append("return {" + ", ".join(f'"{name}": {name}' for name in names) + "}")
    body = "".join(f"    {line}\n" for line in lines)
    head = HEAD.replace("{extent}", repr(dict(program.extent))).replace("{seed}", str(program.seed))
    return head.replace("{per_rank}", str(program.per_rank)) + body + TAIL


def short(program: Program) -> str:
    """Return the program in a few lines, to be read."""
    mesh = ",".join(f"{label}={size}" for label, size in program.extent)
    lines = [f"mesh {mesh}" + (", a tensor on each rank" if program.per_rank else "")]
    for one in program.inputs:
        lies = "" if program.per_rank else f" {list(one.layout)}"
        grad = " needs grad" if one.needs_grad else ""
        lines.append(f"{one.name}: {one.dtype}{list(one.shape)} {one.kind}{lies}{grad}")
    lines += [step.statement for step in program.steps]
    return "\n".join(lines)
