"""Programs over global tensors compute what plain torch computes: those that are listed, and random ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.judge.expected import FAILING, cause_of  # noqa: E402 - after the skip
from tests.tensor.judge.generator import generate  # noqa: E402
from tests.tensor.judge.interpreter import LaterRun  # noqa: E402
from tests.tensor.judge.listed import LISTED  # noqa: E402
from tests.tensor.judge.program import Program, short  # noqa: E402
from tests.tensor.judge.session import Verdict, session  # noqa: E402

# One worker runs them all: each that ran some would start processes for all of them.
pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.timeout(600)]

FIXED = range(15)
"""Seeds that are run each time."""

FRESH_SECONDS = float(os.environ.get("JUDGE_FRESH_SECONDS", "0"))
"""What seeds that nobody has run may take. One program of some hundred still finds something, and a change that has
nothing to do with it must not fail for that: `make tensor-fuzz` looks for them."""


class Judged(msgspec.Struct):
    """The verdicts on listed and fresh programs, of the same processes: each mesh that starts costs seconds.

    Attributes:
        listed: By name.
        fresh: On those from `first` on.
        first: A seed that follows the clock.
    """

    listed: dict[str, Verdict]
    fresh: list[Verdict]
    first: int


def told(verdict: Verdict) -> str:
    """Return a failure in words, with the line that repeats it."""
    found = [f"{one.kind} {one.name} {one.text} by {one.operation}" for one in verdict.findings]
    again = f"python -m tests.tensor.judge --seed {verdict.program.seed}"
    return "\n".join([*found, again, short(verdict.program)])


async def _run() -> Judged:
    first = time.time_ns() // 1_000_000 % 1_000_000_000

    def fresh() -> Iterator[Program]:
        end, seeds = time.monotonic() + FRESH_SECONDS, count(first)
        while time.monotonic() < end:
            yield generate(next(seeds))

    async with session(LaterRun) as found:
        return Judged(
            {name: await (await found.bench(program.extent)).judge_one(program) for name, program in LISTED.items()},
            [one async for one in found.judge(fresh())],
            first,
        )


@pytest.fixture(scope="module")
def judged() -> Judged:
    return trio.run(_run)


@pytest.mark.parametrize("name", LISTED)
def test_listed_programs_compute_what_plain_torch_computes(
    judged: Judged, name: str, request: pytest.FixtureRequest
) -> None:
    if name in FAILING:  # strict: one that passes is to be taken off the list
        request.applymarker(pytest.mark.xfail(reason="in the list of expected failures", strict=True))
    verdict = judged.listed[name]
    assert not verdict.is_ill_posed
    assert verdict.kind != "wrong", told(verdict)


def new(verdicts: list[Verdict]) -> list[str]:
    """Return the failures that are not known, in words."""
    return [told(one) for one in verdicts if one.kind == "wrong" and cause_of(one) is None]


@pytest.mark.daily
async def test_programs_of_fixed_seeds_compute_what_plain_torch_computes() -> None:
    async with session(LaterRun) as found:
        verdicts = [one async for one in found.judge(generate(seed) for seed in FIXED)]
    assert len(verdicts) == len(FIXED)
    assert not new(verdicts), "\n\n".join(new(verdicts))


@pytest.mark.skipif(not FRESH_SECONDS, reason="fresh seeds are asked for by JUDGE_FRESH_SECONDS=20")
def test_programs_of_fresh_seeds_compute_what_plain_torch_computes(judged: Judged) -> None:
    assert not new(judged.fresh), f"from seed {judged.first} on\n" + "\n\n".join(new(judged.fresh))
