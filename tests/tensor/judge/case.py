"""A failure, looked into: alone or after others, made shorter, in words."""

from __future__ import annotations

from typing import Final

import msgspec
from tests.tensor.judge.program import Program, short, source
from tests.tensor.judge.session import Session, Verdict
from tests.tensor.judge.shrinker import fails_alike, shrink

HISTORY_TRIES: Final = 14
"""Sequences that are tried to find which program before is needed: each starts processes."""


class Case(msgspec.Struct, frozen=True):
    """A failure.

    Attributes:
        verdict: On the program as it was generated.
        shrunk: On the shortest program that was found.
        is_alone: Whether it fails in processes that have run nothing else.
        after: Programs that must run before it in the same processes, if it does not fail alone.
        is_repeated: Whether running it after all that ran before it showed it once more.
    """

    verdict: Verdict
    shrunk: Verdict
    is_alone: bool
    after: tuple[Program, ...] = ()
    is_repeated: bool = True

    def text(self) -> str:
        """Return the case in words, with the line that repeats it."""
        first = self.shrunk.findings[0]
        seed = self.verdict.program.seed
        lines = [f"seed {seed}: {first.kind} {first.name} {first.text}".rstrip(), f"  by {first.operation}"]
        if self.is_alone:
            lines.append("  alone: fails, too")
        elif self.is_repeated:
            lines.append(f"  alone: right; wrong after {len(self.after)} programs in the same processes")
        else:
            lines.append("  alone: right, and right in the same order of programs once more")
        lines.append(f"  again: python -m tests.tensor.judge --seed {seed}")
        for program in self.after[:3]:
            lines += ["  first:", *(f"    {line}" for line in short(program).splitlines())]
        lines += ["  program:", *(f"    {line}" for line in short(self.shrunk.program).splitlines())]
        return "\n".join(lines)

    def script(self) -> str:
        """Return the shortest program as a script."""
        return source(self.shrunk.program)


async def look_into(session: Session, verdict: Verdict, history: list[Program]) -> Case:
    """Run a program that failed alone and in sequence, and make it shorter.

    Args:
        session: Where processes come from.
        verdict: On the program.
        history: What its processes had run before it.
    """
    extent = verdict.program.extent
    async with session.fresh(extent) as bench:
        alone = await bench.judge_one(verdict.program)
    if alone.findings and fails_alike(alone, verdict):

        async def judge(program: Program) -> Verdict:
            return await (await session.spare(program.extent)).judge_one(program)

        shrunk = await shrink(alone, judge)
        async with session.fresh(shrunk.program.extent) as bench:
            once_more = await bench.judge_one(shrunk.program)
        if once_more.findings and fails_alike(once_more, verdict):
            return Case(verdict, once_more, is_alone=True)
        return Case(verdict, alone, is_alone=True)
    return await _in_sequence(session, verdict, history)


async def _in_sequence(session: Session, verdict: Verdict, history: list[Program]) -> Case:
    """Find what must run before a program for it to fail."""

    async def fails_after(before: list[Program]) -> Verdict | None:
        async with session.fresh(verdict.program.extent) as bench:
            if before:
                await bench.judge(before)
            found = await bench.judge_one(verdict.program)
        return found if found.findings and fails_alike(found, verdict) else None

    needed = list(history)
    found = await fails_after(needed)
    if found is None:
        return Case(verdict, verdict, is_alone=False, after=tuple(needed), is_repeated=False)
    best, size, tries = found, len(needed) // 2, HISTORY_TRIES
    while size and tries:
        for start in range(0, len(needed), size):
            tries -= 1
            fewer = needed[:start] + needed[start + size :]
            shorter = await fails_after(fewer)
            if shorter is not None:
                needed, best = fewer, shorter
                break
            if not tries:
                break
        else:
            size //= 2
            continue
        size = max(1, min(size, len(needed) // 2)) if needed else 0
    return Case(verdict, best, is_alone=False, after=tuple(needed))
