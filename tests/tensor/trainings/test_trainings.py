"""Random trainings under plans, pipelines and checkpoints end where plain torch ends: the short form of the search."""

from __future__ import annotations

import pytest
import trio

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.trainings.runs import Finding, Verdict, difference, in_words, judge, meshes  # noqa: E402 - after the skip
from tests.tensor.trainings.training import CUT_LINEAR, EVENTS, PARTS, generate  # noqa: E402

pytestmark = pytest.mark.torch

SEEDS = range(1)
"""Of the trainings that are run each time: some five seconds. `make trainings-fuzz` runs as many as one likes."""


def test_a_seed_is_the_same_training_each_time() -> None:
    assert [generate(seed) for seed in range(20)] == [generate(seed) for seed in range(20)]


def test_all_that_trainings_are_made_of_is_drawn() -> None:
    every = [generate(seed) for seed in range(400)]
    kinds = {kind for one in every for phase in one.phases for kind in phase.kinds.values()}
    assert {"whole", "data", "sharded", "optimizer", "gradients", "tensor", "sequence", "experts", "context"} <= kinds
    assert {step.event for one in every for phase in one.phases for step in phase.steps} == {"", *EVENTS}
    drawn = {part for one in every for part in one.parts}
    assert all(any(one.endswith(part) for one in drawn) for part in PARTS)
    assert any(phase.stages for one in every for phase in one.phases)
    assert any(len(one.phases) > 1 and one.phases[0].mesh != one.phases[1].mesh for one in every)
    for one in every:
        cut = {kind for phase in one.phases for kind in phase.kinds.values()} & {"tensor", "sequence"}
        assert not cut or any(part.endswith(CUT_LINEAR) for part in one.parts)


@pytest.mark.parametrize(
    ("there", "twin", "text"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0 + 1e-8], [1.0, 2.0], "1e-08 apart of 2"),
        ([1.0, float("nan")], [1.0, 2.0], "nan apart of 2"),
        ([1.0, 3.0], [1.0, 2.5], ""),
        ([1.0, 2.0 + 1e-8], [1.0, 2.0 + 1e-9], None),
    ],
)
def test_values_differ_by_more_than_rounding(there: list[float], twin: list[float], text: str | None) -> None:
    here = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found, disturbed = (torch.tensor(one, dtype=torch.float64) for one in (there, twin))
    assert difference(here, found, disturbed, here) == text


def test_values_differ_by_size_and_dtype() -> None:
    here = torch.zeros(2, dtype=torch.float64)
    assert difference(here, here.float(), here, here)
    assert difference(here, here[:1], here, here)


async def _run() -> list[Verdict]:
    async with meshes() as found:
        return [await judge(one, found) for one in map(generate, SEEDS)]


@pytest.mark.real
@pytest.mark.timeout(600)  # beside much other load
def test_trainings_end_where_plain_torch_ends() -> None:
    verdicts = trio.run(_run)
    assert not in_words(verdicts), in_words(verdicts)
    assert sum(one.loose for one in verdicts) < sum(one.compared for one in verdicts) / 10


def test_what_differs_is_told_with_the_line_that_repeats_it() -> None:
    right, wrong = Verdict(generate(2), ()), Verdict(generate(3), (Finding("loss 0.0", "1 apart of 2"),))
    text = in_words([right, wrong])
    assert "seed 3:" in text
    assert "loss 0.0: 1 apart of 2" in text
    assert "--first-seed 3 --trainings 1" in text
    assert "seed 2:" not in text
