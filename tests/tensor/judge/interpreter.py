"""Programs at work: on plain tensors, on those of a mesh, and on a twin whose roundings are disturbed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from copy import copy
from functools import lru_cache
from types import CodeType
from typing import Any, ClassVar, Final

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documents call it
from tests.tensor.judge.both_sides import mesh_names, plain_names
from tests.tensor.judge.placements import put
from tests.tensor.judge.program import Input, Program, Step, numbers, varied
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import trimesh
from trimesh import limits

FINE: Final = {
    torch.float64: (4096.0, 65536.0),
    torch.float32: (64.0, 256.0),
    torch.bfloat16: (8.0, 16.0),
    torch.float16: (16.0, 32.0),
}
"""For each dtype: numbers that are multiples of 1 over the first and at most the second are sums of quarters and
products of few of them, and so the same in whatever order they were added up."""


DIVIDED: Final = re.compile(r"mean|_loss|cross_entropy|var|std|cov\(|_norm\(|avg_pool")
"""Operations that divide a sum: ranks divide parts of it, so that not even the mean of 5 numbers that is 2 is exact."""

NORMED: Final = re.compile(r"(batch|layer|group|instance)_norm\(")
"""Of those, the ones that take numbers off their mean: where these are all the same, what rounding leaves of the
difference is divided by next to nothing."""
SPREAD_MOST: Final = 512
"""By how much that makes it larger at most: one over the root of torch's 1e-5 beside the variance is 316."""


class Failure(msgspec.Struct, frozen=True):
    """The step that raised, and what it raised."""

    step: int
    error: BaseException


@lru_cache(maxsize=4096)
def _compiled(statement: str, number: int) -> CodeType:
    return compile(statement, f"<step {number}>", "exec")


def seed(number: int) -> None:
    """Seed the generator of this process; `torch.manual_seed` does the same in a hundred times the time."""
    torch.default_generator.manual_seed(number)


def ramp(like: torch.Tensor) -> torch.Tensor:
    """Return weights for a loss, other ones for each place, as a plain tensor."""
    made = torch.arange(like.numel(), dtype=torch.float64).remainder(7).sub(3).div(4)
    return made.reshape(like.shape).to(like.dtype)


def repeat(function: Callable[..., Any], times: int, *args: Any) -> Any:
    """Run a function often; return what the last run did."""
    made = None
    for _ in range(times):
        made = function(*args)
    return made


class Run:
    """A program that is run: the tensors it has, and where it ended.

    Attributes:
        names: What each name of the program is.
        failure: Why it ended before its last step was done, or None.
        draws: Whether it drew random numbers in this process.
    """

    def __init__(self, program: Program) -> None:
        self.draws = False
        self.program = program
        self.names: dict[str, Any] = {
            "torch": torch, "F": F, "checkpoint": checkpoint, "ramp": ramp, "repeat": repeat, "inf": torch.inf,
            "nan": torch.nan, **plain_names(program.extent),
        }  # fmt: skip
        self.failure: Failure | None = None

    @property
    def is_detached(self) -> bool:
        """Whether its tensors have no history, whatever they were made of."""
        return False

    def step(self, number: int, step: Step) -> bool:
        """Run one step; return whether it went well."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(_compiled(step.statement, number), self.names)
        except Exception as error:  # noqa: BLE001 - of any kind: that is what is compared
            self.failure = Failure(number, error.with_traceback(None))
            return False
        return True

    def run(self) -> None:
        """Run all steps until one raises."""
        before = torch.default_generator.get_state()
        for number, step in enumerate(self.program.steps):
            if not self.step(number, step):
                break
        self.draws = not torch.equal(before, torch.default_generator.get_state())

    def leaves(self) -> dict[str, Any]:
        """Return what is compared: each tensor and each number, by the expression for it; gradients of leaves, too."""
        names = [*(one for one in self.names if one[0] == "x"), *(one for one in self.names if one[0] == "v")]
        found = self.made(names)
        for name in names:
            value = self.names[name]
            if name[0] == "x" and value.is_leaf and value.requires_grad:
                found[f"{name}.grad"] = value.grad
        return found

    def made(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the tensors and numbers of some names, each by the expression for it."""
        found: dict[str, Any] = {}
        for name in names:
            value = self.names[name]
            if isinstance(value, torch.Tensor):
                found[name] = value
                continue
            for path, leaf in pytree.tree_leaves_with_path(value, is_leaf=lambda one: one is None):
                found[name + pytree.keystr(path)] = leaf
        return found


class PlainRun(Run):
    """On plain tensors, in this process."""

    def __init__(self, program: Program, rank: int = 0) -> None:
        super().__init__(program)
        self._rank = rank
        seed(program.seed + (rank if program.per_rank else 0))
        for one in program.inputs:
            self.add(one)

    def add(self, one: Input) -> None:
        """Make an input."""
        self.names[one.name] = numbers(one, self._rank).requires_grad_(one.needs_grad)


class TwinRun(PlainRun):
    """The same, but what each step rounds is disturbed by some units in the last place.

    A result that differs from that of the plain run by more than it may was decided by rounding. There are two sides,
    which disturb each number in opposite ways.
    """

    def __init__(self, program: Program, rank: int = 0, side: int = 1) -> None:
        self._side = side
        self._noise = torch.Generator().manual_seed(program.seed)
        super().__init__(program, rank)

    def add(self, one: Input) -> None:
        super().add(one)
        self._disturb(self.names[one.name])

    def step(self, number: int, step: Step) -> bool:
        done = super().step(number, step)
        if done:
            values = [self.names[step.result]] if step.result else [self.names[name] for name in _first(step.code)]
            is_divided, is_normed = (one.search(step.code) is not None for one in (DIVIDED, NORMED))
            for value in pytree.tree_leaves(values):
                if isinstance(value, torch.Tensor):
                    self._disturb(value, is_divided=is_divided, is_normed=is_normed)
        return done

    def _disturb(self, value: torch.Tensor, *, is_divided: bool = False, is_normed: bool = False) -> None:
        fine = FINE.get(value.dtype)
        if fine is None or value.numel() == 0 or any(value.stride(dim) == 0 for dim in range(value.ndim)):
            return
        data = value.data
        rounded = data.isfinite() if is_divided else ~is_fine(data)
        if rounded.any():
            sign = torch.randint(0, 2, data.shape, generator=self._noise).mul(2).sub(1).to(data.dtype) * self._side
            eps = torch.finfo(data.dtype).eps
            little = 64 * eps * (SPREAD_MOST if is_normed else 1)
            rest = (data.abs() < little) & ((data != 0) | is_normed)  # what roundings leave of 0: of either sign
            moved = torch.where(rest, data + little * sign, data * (1 + 2 * eps * sign))
            data.copy_(torch.where(rounded, moved, data))


def _first(code: str) -> list[str]:
    """Return the name that a step without a result writes to."""
    found = re.search(r"\b[vx]\d+\b", code)
    return [found[0]] if found else []


def is_fine(value: torch.Tensor) -> torch.Tensor:
    """Return where a tensor has numbers that no order of additions changes; see `FINE`."""
    grain, most = FINE[value.dtype]
    scaled = value * grain
    return (~value.isfinite()) | ((scaled == scaled.round()) & (value.abs() <= most))


class MeshRun(Run):
    """On tensors of a mesh.

    Attributes:
        setup: What its processes run before anything else.
    """

    setup: ClassVar[Callable[[], None] | None] = None

    def __init__(self, program: Program, procs: Any) -> None:
        super().__init__(program)
        self._procs = procs
        self.names["ramp"] = self._ramp
        self.names["repeat"] = self._repeat
        self.names |= mesh_names(procs)
        trimesh.manual_seed(program.seed, procs)
        for one in program.inputs:
            self.names[one.name] = put(one, program, procs)

    def run(self) -> None:
        """Run all steps until one raises; with the mesh active where each rank has tensors of its own."""
        if not self.program.per_rank:
            super().run()
            return
        with self._procs.activate():
            super().run()

    def _ramp(self, like: torch.Tensor) -> torch.Tensor:
        if self.program.per_rank:
            made = torch.arange(like.numel(), dtype=torch.float64).remainder(7).sub(3).div(4)
            return made.reshape(like.shape).to(like.dtype)
        return trimesh.replicate(ramp(like), self._procs)

    def _repeat(self, function: Callable[..., Any], times: int, *args: Any) -> Any:
        return repeat(trimesh.compile(function), times, *args)


def know_short_sequences() -> None:
    """Let a rank know sequences again that are as short as those of a program of some lines."""
    limits.TENSOR_SEQUENCE_COMMANDS_MIN = 2  # type: ignore[misc]


ROUNDS: Final = 5
"""Of a program on the same ranks: they keep a sequence that comes again, learn from its next run, and run by that."""


def fails_at_first(program: Program) -> bool:
    """Return whether plain torch raises on the numbers of an earlier round, but not on those of the last."""
    runs = [PlainRun(varied(program, number)) for number in range(ROUNDS)]
    for run in runs:
        run.run()
    return runs[0].failure is None and any(run.failure is not None for run in runs)


class LaterRun(MeshRun):
    """On tensors of a mesh, after the same program has run there on other numbers: by what ranks have learnt of it."""

    setup = staticmethod(know_short_sequences)

    def __init__(self, program: Program, procs: Any) -> None:
        for number in range(1, ROUNDS):
            earlier = MeshRun(varied(program, number), procs)
            earlier.run()
            teams = {one._held.team for one in earlier.names.values() if isinstance(one, trimesh.tensor.MeshTensor)}
            del earlier
            for team in teams:  # as whoever fetches something in each round
                team.engine.flush()
        super().__init__(program, procs)


class RecordedRun(MeshRun):
    """On tensors of a mesh, as one recorded function of copies of the inputs; the last of several calls counts.

    One may set something up, two are recorded, one runs by the rules, and one by what ranks have learnt of it.
    """

    def __init__(self, program: Program, procs: Any) -> None:
        earlier = [MeshRun(varied(program, number), procs).names for number in range(1, ROUNDS)]
        super().__init__(program, procs)
        self._rounds = [{one.name: names[one.name] for one in program.inputs} for names in (*earlier, self.names)]
        self._last: dict[str, Any] = {}

    @property
    def is_detached(self) -> bool:
        return True

    def run(self) -> None:
        recorded = trimesh.compile(self._once)
        for inputs in self._rounds:
            try:
                self._last = recorded(inputs)
            except Exception as error:  # noqa: BLE001 - of any kind: that is what is compared
                self.failure, self._last = Failure(len(self.program.steps) - 1, error.with_traceback(None)), {}
                break

    def _once(self, inputs: dict[str, Any]) -> dict[str, Any]:
        run = copy(self)  # what a recorded function reads it does not change
        copies = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in inputs.items()}
        run.names = {**self.names, **copies}
        super(RecordedRun, run).run()
        if run.failure is not None:
            raise run.failure.error
        return super(RecordedRun, run).leaves()

    def leaves(self) -> dict[str, Any]:
        return self._last
