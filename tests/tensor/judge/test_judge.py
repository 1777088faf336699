"""Programs over global tensors compute what plain torch computes: those that are listed, and random ones."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.judge.expected import EXPECTED, FAILING, cause_of  # noqa: E402 - after the skip
from tests.tensor.judge.generator import generate  # noqa: E402
from tests.tensor.judge.listed import LISTED  # noqa: E402
from tests.tensor.judge.program import short  # noqa: E402
from tests.tensor.judge.session import Verdict, session  # noqa: E402

# One worker runs them all: each that ran some would start processes for all of them.
pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.timeout(600), pytest.mark.xdist_group("judge")]

FIXED = range(40)
"""Seeds that are run each time."""

FRESH_SECONDS = 10.0
"""What seeds that nobody has run may take."""


def told(verdict: Verdict) -> str:
    """Return a failure in words, with the line that repeats it."""
    found = [f"{one.kind} {one.name} {one.text} by {one.operation}" for one in verdict.findings]
    again = f"python -m tests.tensor.judge --seed {verdict.program.seed}"
    return "\n".join([*found, again, short(verdict.program)])


async def _run_listed() -> dict[str, Verdict]:
    async with session() as found:
        return {name: await (await found.bench(program.extent)).judge_one(program) for name, program in LISTED.items()}


@pytest.fixture(scope="module")
def listed() -> Any:
    """The verdicts on all listed programs, of the same processes."""
    return trio.run(_run_listed)


@pytest.mark.parametrize("name", LISTED)
def test_listed_programs_compute_what_plain_torch_computes(
    listed: Any, name: str, request: pytest.FixtureRequest
) -> None:
    if name in FAILING:  # strict: one that passes is to be taken off the list
        request.applymarker(pytest.mark.xfail(reason="in the list of expected failures", strict=True))
    verdict = listed[name]
    assert not verdict.is_ill_posed
    assert verdict.kind != "wrong", told(verdict)


async def _run_seeds(seeds: Any) -> list[Verdict]:
    async with session() as found:
        return [one async for one in found.judge(generate(seed) for seed in seeds)]


def new(verdicts: list[Verdict]) -> list[str]:
    """Return the failures that are not known, in words."""
    return [told(one) for one in verdicts if one.kind == "wrong" and cause_of(one) is None]


def test_programs_of_fixed_seeds_compute_what_plain_torch_computes() -> None:
    verdicts = trio.run(_run_seeds, FIXED)
    assert len(verdicts) == len(FIXED)
    assert not new(verdicts), "\n\n".join(new(verdicts))


@pytest.mark.skipif(bool(EXPECTED), reason="fresh seeds find what is known to fail: they wait for an empty list")
def test_programs_of_fresh_seeds_compute_what_plain_torch_computes() -> None:
    first = time.time_ns() // 1_000_000 % 1_000_000_000

    def seeds() -> Any:
        end = time.monotonic() + FRESH_SECONDS
        seed = first
        while time.monotonic() < end:
            yield seed
            seed += 1

    verdicts = trio.run(_run_seeds, seeds())
    assert not new(verdicts), f"from seed {first} on\n" + "\n\n".join(new(verdicts))
