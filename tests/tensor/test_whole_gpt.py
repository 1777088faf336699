"""The short form of `make tensor-training`: two steps of a whole GPT under two plans of several kinds."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.whole_gpt import DROPOUT, TOLERANCE, cases, largest_difference, trained_here  # noqa: E402

STEPS = 2


@pytest.mark.real
@pytest.mark.torch
@pytest.mark.timeout(600)  # half a minute beside much other load
@pytest.mark.parametrize(
    "name",
    [
        "pipeline, fully sharded",
        *(pytest.param(name, marks=pytest.mark.stress) for name in ("data, sequence", "fully sharded, context")),
    ],
)
async def test_a_whole_gpt_trains_as_plain_torch_does(name: str) -> None:
    [case] = [one for one in cases(4) if one.name == name]
    expected = trained_here(STEPS, 0.0 if case.stages else DROPOUT, case.stages)

    assert await largest_difference(case, STEPS, expected) <= TOLERANCE
