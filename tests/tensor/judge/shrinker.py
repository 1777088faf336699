"""From a program that fails to the shortest one that fails alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from msgspec.structs import replace
from tests.tensor.judge.comparison import Expected
from tests.tensor.judge.program import WHOLE, Program, used_names
from tests.tensor.judge.session import Verdict

ATTEMPTS: Final = 150
"""Programs that are tried for one failure."""

Judge = Callable[[Program], Awaitable[Verdict]]


async def shrink(verdict: Verdict, judge: Judge, attempts: int = ATTEMPTS) -> Verdict:
    """Return the verdict on the shortest program found that fails as the one of `verdict` does.

    Args:
        verdict: Of a program that failed.
        judge: What judges a program.
        attempts: How many are judged at most.
    """
    best = verdict
    left = attempts
    has_shrunk = True
    while has_shrunk and left > 0:
        has_shrunk = False
        for candidate in shorter(best.program):
            if not _is_sound(candidate, best.program):
                continue
            left -= 1
            found = await judge(candidate)
            if fails_alike(found, verdict):
                best, has_shrunk = found, True
                break
            if left <= 0:
                break
    return best


def fails_alike(found: Verdict, wanted: Verdict) -> bool:
    """Whether two programs fail in the same way: the same kind of difference, or the same class of error."""
    return bool({signature(one) for one in found.findings} & {signature(wanted.findings[0])})


def signature(finding: object) -> str:
    """Return what findings of one cause have in common."""
    kind: str = finding.kind  # type: ignore[attr-defined]
    text: str = finding.text  # type: ignore[attr-defined]
    return kind if kind not in {"error", "refusal"} else f"{kind} {text.partition(':')[0]} {text[-30:]}"


def _is_sound(candidate: Program, original: Program) -> bool:
    """Whether plain torch does with a program what it does with the longer one: all of it, or all but the last step."""
    failure = Expected(candidate).runs[0].failure
    before = Expected(original).runs[0].failure
    if failure is None or before is None:
        return failure is None and before is None
    return type(failure.error) is type(before.error) and failure.step == len(candidate.steps) - 1


def shorter(program: Program) -> Iterator[Program]:
    """Yield programs that are a little simpler, the simplest first."""
    steps = program.steps
    size = len(steps) // 2
    while size:
        for start in range(len(steps) - size, -1, -size):
            yield _pruned(replace(program, steps=steps[:start] + steps[start + size :]))
        size //= 2
    yield from _simpler_meshes(program)
    for place, one in enumerate(program.inputs):
        simpler = []
        for at, lies in enumerate(one.layout):
            if lies != WHOLE:
                simpler.append(replace(one, layout=(*one.layout[:at], WHOLE, *one.layout[at + 1 :])))
        if one.needs_grad:
            simpler.append(replace(one, needs_grad=False))
        if one.kind not in {"quarters", "index"}:
            simpler.append(replace(one, kind="quarters"))
        if one.seed:
            simpler.append(replace(one, seed=0))
        for made in simpler:
            yield replace(program, inputs=(*program.inputs[:place], made, *program.inputs[place + 1 :]))
    for dtype in {one.dtype for one in program.inputs} & {"float32", "bfloat16"}:
        yield replace(
            program,
            inputs=tuple(replace(one, dtype="float64") if one.dtype == dtype else one for one in program.inputs),
        )
    yield from _smaller(program)


def _pruned(program: Program) -> Program:
    """Leave out inputs that no step uses."""
    used = {name for step in program.steps for name in used_names(step.code)}
    return replace(program, inputs=tuple(one for one in program.inputs if one.name in used) or program.inputs[:1])


def _simpler_meshes(program: Program) -> Iterator[Program]:
    if len(program.extent) > 1:
        for at in range(len(program.extent)):
            inputs = tuple(replace(one, layout=(one.layout[at],)) for one in program.inputs)
            yield replace(program, extent=(program.extent[at],), inputs=inputs)
    if program.extent != (("a", 2),) and len(program.extent) == 1:
        yield replace(program, extent=(("a", 2),))


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one length of tensors shortened everywhere."""
    for length in sorted({size for one in program.inputs for size in one.shape if size > 1}, reverse=True):
        for other in sorted({2, length - 1}):
            if 1 < other < length:
                yield replace(
                    program,
                    inputs=tuple(
                        replace(
                            one,
                            shape=tuple(other if size == length else size for size in one.shape),
                            bound=min(one.bound, other) if one.bound == length else one.bound,
                        )
                        for one in program.inputs
                    ),
                )
