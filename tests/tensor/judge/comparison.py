"""What plain torch and the mesh computed, side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from tests.tensor.judge.interpreter import FINE, PlainRun, Run, TwinRun, is_fine, seed
from tests.tensor.judge.program import Program, Step
from torch.utils._python_dispatch import TorchDispatchMode

import trimesh

LOOSE_MOST = 1e-2
"""A result that disturbed roundings change by more than this, in units of its largest number, is not compared."""


class Finding(msgspec.Struct, frozen=True):
    """A difference.

    Attributes:
        kind: "value", "gradient", "shape", "dtype", "stride", "requires_grad", "none", "error", "refusal", "hang" or
            "death".
        name: Of the tensor, or "" for an error.
        text: The difference in words.
        operation: The line of the table that it appeared in.
    """

    kind: str
    name: str
    text: str
    operation: str


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Looks at what torch does, and does nothing to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Expected:
    """What plain torch computes for a program, and how near the mesh must come.

    Attributes:
        program: The program.
        runs: One, or one for each rank where each has tensors of its own.
        is_well_posed: Whether no result is decided by rounding.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        ranks = range(program.ranks if program.per_rank else 1)
        self.runs: list[Run] = [PlainRun(program, rank) for rank in ranks]
        twins: list[Run] = [TwinRun(program, rank) for rank in ranks]
        others: list[Run] = [TwinRun(program, rank, -1) for rank in ranks]
        for runs in (self.runs, twins, others):
            for rank, run in enumerate(runs):
                seed(program.seed + (rank if program.per_rank else 0))  # each in turn draws from the same generator
                run.run()
        self._watched: dict[str, Any] = {}
        self._narrow = narrow_names(program)
        self._leaves = [(run.leaves(), twin.leaves()) for run, twin in zip(self.runs, twins, strict=True)]
        ends = {-1 if run.failure is None else run.failure.step for run in self.runs}
        self.is_well_posed = len(ends) == 1 and all(
            posed(run, twin) and posed(run, other) for run, twin, other in zip(self.runs, twins, others, strict=True)
        )

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn."""
        return self.runs[0].draws

    def failure(self) -> BaseException | None:
        """Return what the last step raises, or None."""
        found = self.runs[0].failure
        return None if found is None else found.error

    def compare(self, there: Run, fetched: dict[str, Any]) -> Iterator[Finding]:
        """Yield the differences of what the mesh computed.

        Args:
            there: The run on the mesh.
            fetched: The values of its tensors; missing are those that could not be computed.
        """
        handles = there.leaves()
        for name, plain in self._leaves[0][0].items():
            if name not in handles or (isinstance(plain, torch.Tensor) and name not in fetched):
                continue
            operation = operation_of(self.program, name)
            for kind, text in self._differences(name, plain, handles[name], fetched.get(name)):
                if kind == "requires_grad" and there.is_detached:
                    continue
                yield Finding(kind, name, text, operation)

    def _eps_of(self, name: str) -> float:
        """Return to what a number was rounded before it became one: by the coarsest of the tensors that it is of."""
        plain = self._leaves[0][0]
        used = re.findall(r"\b[vx]\d+\b", operation_code(self.program, name))
        found = [plain[one].dtype for one in used if isinstance(plain.get(one), torch.Tensor)]
        return max((torch.finfo(one).eps for one in found if one in FINE), default=1e-7)

    def _stride_of_watched(self, name: str) -> tuple[int, ...] | None:
        """Return the strides that torch gives a tensor where a mode looks at what it does.

        Where torch adds up gradients it writes to one of them if nothing looks, and makes a new one if something may.
        That lies as the one that was written to, or as the first. Tensors of a mesh are always looked at.
        """
        if not self._watched:
            run = PlainRun(self.program)
            seed(self.program.seed)
            with _Watching():
                run.run()
            self._watched = run.leaves()
        found = self._watched.get(name)
        return _strides(found) if isinstance(found, torch.Tensor) else None

    def _differences(self, name: str, plain: Any, handle: Any, value: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(plain, torch.Tensor):
            if not _same_number(plain, handle, self._leaves[0][1].get(name), self._eps_of(name)):
                yield "none" if plain is None else "value", f"{handle!r}, should be {plain!r}"
            return
        if not isinstance(handle, torch.Tensor):
            yield "none", f"{handle!r}, should be a tensor"
            return
        for kind, here, found in (
            ("shape", tuple(plain.shape), tuple(handle.shape)),
            ("dtype", plain.dtype, handle.dtype),
            ("requires_grad", plain.requires_grad, handle.requires_grad),
            ("stride", _strides(plain), _strides(handle)),
        ):
            if here != found and (kind != "stride" or found != self._stride_of_watched(name)):
                yield kind, f"{found}, should be {here}"
                if kind == "shape":
                    return
        kind = "gradient" if ".grad" in name or "grad(" in operation_code(self.program, name) else "value"
        is_narrow = name.partition("[")[0].partition(".")[0] in self._narrow or (".grad" in name and self._narrow)
        each = list(value.values()) if isinstance(value, trimesh.ValueMesh) else [value]
        if len(each) != len(self.runs):
            yield "value", f"{len(each)} values, should be {len(self.runs)}"
            return
        for (plain_leaves, twin_leaves), one in zip(self._leaves, each, strict=True):
            if plain_leaves.get(name) is None:
                continue
            here, near = plain_leaves[name].detach(), twin_leaves.get(name)
            rounded = torch.bfloat16 if is_narrow else here.dtype
            difference = values_differ(here, None if near is None else near.detach(), one, rounded)
            if difference:
                yield kind, difference
                return


def posed(plain: Run, twin: Run, *, after: Step | None = None) -> bool:
    """Whether disturbed roundings leave a run as it is.

    Args:
        plain: The run.
        twin: The other one.
        after: The step that they have just done, if all was well before it; None to compare everything.
    """
    if (plain.failure is None) != (twin.failure is None):
        return False
    results = {after.result} if after is not None and after.result and "_(" not in after.code else None
    here, others = (plain.leaves(), twin.leaves()) if results is None else (plain.made(results), twin.made(results))
    for name, one in here.items():
        other = others.get(name)
        if isinstance(one, torch.Tensor):
            if not isinstance(other, torch.Tensor) or one.shape != other.shape:
                return False
            if one.dtype not in FINE:
                if not torch.equal(one, other):
                    return False
            elif one.numel() and not _is_near(one.detach(), other.detach()):
                return False
        elif isinstance(one, bool | int) and one != other:
            return False
    return True


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not torch.equal(one.isfinite(), other.isfinite()) or not torch.equal(one.isnan(), other.isnan()):
        return False
    finite = one.isfinite()
    if not finite.any():
        return True
    a, b = one[finite].double(), other[finite].double()
    most = LOOSE_MOST if one.dtype != torch.bfloat16 else 0.2
    return bool((a - b).abs().max() <= most * max(1.0, float(a.abs().max())))


def values_differ(
    plain: torch.Tensor, twin: torch.Tensor | None, value: Any, rounded: torch.dtype | None = None
) -> str:
    """Return how a value differs from plain torch's, "" for not at all.

    Exact are integers and truth values. Numbers which no order of additions changes, of a run that disturbed roundings
    do not change, are so but for some units in the last place; the rest is close by what the disturbance did, too.

    Args:
        plain: What it is to be.
        twin: What it is where roundings are disturbed; None for the same.
        value: What it is.
        rounded: The narrowest dtype that it was rounded to on the way; None for its own.
    """
    if not isinstance(value, torch.Tensor):
        return f"{value!r} is no tensor"
    if value.dtype != plain.dtype or value.shape != plain.shape:
        return f"fetched {value.dtype}{list(value.shape)}, should be {plain.dtype}{list(plain.shape)}"
    if plain.dtype not in FINE:
        return "" if torch.equal(plain, value) else _shown(plain, value)
    if plain.numel() == 0:
        return ""
    if not torch.equal(plain.isnan(), value.isnan()) or not torch.equal(plain.isinf(), value.isinf()):
        return _shown(plain, value)
    finite = plain.isfinite()
    if bool((plain.isinf() & (plain != value)).any()):
        return _shown(plain, value)
    if not finite.any():
        return ""
    a, b = plain[finite].double(), value[finite].double()
    eps = torch.finfo(rounded or plain.dtype).eps
    limit = 8 * eps * max(1.0, float(a.abs().max()))  # terms of a sum are rounded each
    moved = 0.0 if twin is None else float((a - twin[finite].double()).abs().nan_to_num(torch.inf).max())
    if moved or not is_fine(plain).all():
        limit = 64 * eps * max(1.0, float(a.abs().max())) + 32 * moved
    return "" if bool((a - b).abs().max() <= limit) else _shown(plain, value)


def _shown(plain: torch.Tensor, value: torch.Tensor) -> str:
    place = ((plain != value) & ~(plain.isnan() & value.isnan())) if plain.dtype.is_floating_point else (plain != value)
    wrong = place.nonzero()
    if len(wrong) == 0:
        return "differ"
    first = tuple(wrong[0].tolist())
    share = f"({len(wrong)} of {plain.numel()} differ)"
    return f"{value[first].item()!r} at {list(first)}, should be {plain[first].item()!r} {share}"


def _same_number(plain: Any, handle: Any, twin: Any, eps: float) -> bool:
    if isinstance(plain, float) and isinstance(handle, float):
        moved = abs(plain - twin) if isinstance(twin, float) and math.isfinite(plain) else 0.0
        near = math.isclose(plain, handle, rel_tol=max(1e-6, 8 * eps), abs_tol=max(1e-6, 8 * eps) + 32 * moved)
        return near or (math.isnan(plain) and math.isnan(handle))
    return type(plain) is type(handle) and bool(plain == handle)


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions that have more than one place."""
    if value.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)


def narrow_names(program: Program) -> set[str]:
    """Return the names of what comes of products that autocast computes in bfloat16, whatever dtype it has.

    Ranks round their parts of a product each, so what is added up of them is as near as bfloat16 is.
    """
    found: set[str] = set()
    for step in program.steps:
        names = re.findall(r"\b[vx]\d+\b", step.code)
        if "autocast(" in step.code or not found.isdisjoint(names):
            found.update([step.result] if step.result else names[:1])
    return found


def operation_of(program: Program, name: str) -> str:
    """Return the line of the table of operations that has made a tensor."""
    head = name.partition("[")[0].partition(".")[0]
    for step in program.steps:
        if step.result == head:
            return step.operation
    writing = [step.operation for step in program.steps if not step.result and head in step.code]
    return writing[-1] if writing else "input"


def operation_code(program: Program, name: str) -> str:
    """Return the code that has made a tensor, "" for an input."""
    head = name.partition("[")[0]
    return next((step.code for step in program.steps if step.result == head), "")
