"""The parts of the judge that need no mesh: programs, their generator, their comparison, the shrinker."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
from tests.rows import rows

torch = pytest.importorskip("torch", reason="torch is an extra")

from msgspec.structs import replace  # noqa: E402 - after the skip
from tests.tensor.judge.comparison import Expected, Finding, values_differ  # noqa: E402
from tests.tensor.judge.expected import FAILING  # noqa: E402
from tests.tensor.judge.generator import LENGTH_MOST, extent_of, generate  # noqa: E402
from tests.tensor.judge.interpreter import PlainRun, Run, is_fine  # noqa: E402
from tests.tensor.judge.listed import LISTED  # noqa: E402
from tests.tensor.judge.metadata import wrong_metadata  # noqa: E402
from tests.tensor.judge.placements import shares  # noqa: E402
from tests.tensor.judge.program import Input, Program, Step, numbers, short, source, varied  # noqa: E402
from tests.tensor.judge.session import Verdict  # noqa: E402
from tests.tensor.judge.shrinker import shrink  # noqa: E402
from tests.tensor.judge.table import GROUPS, LINES  # noqa: E402

pytestmark = pytest.mark.torch

SEEDS = range(60)


def matrix(kind: str = "quarters", dtype: str = "float64") -> Input:
    return Input("x0", (2, 3), dtype, kind, 1, ("whole",))


def program(*steps: str, one: Input | None = None) -> Program:
    made = tuple(Step(code, code, f"v{number}") for number, code in enumerate(steps))
    return Program(1, (("a", 2),), False, (one or matrix(),), made)


def test_a_seed_is_the_same_program_each_time() -> None:
    assert [generate(seed) for seed in range(5)] == [generate(seed) for seed in range(5)]


def test_programs_are_as_long_as_is_allowed_and_of_lines_of_the_table() -> None:
    programs = [generate(seed) for seed in SEEDS]
    assert max(len(one.steps) for one in programs) <= LENGTH_MOST
    assert {step.operation for one in programs for step in one.steps} <= LINES


def test_plain_torch_takes_all_steps_of_a_program_but_the_last() -> None:
    for seed in SEEDS:
        run = PlainRun(generate(seed))
        run.run()
        assert run.failure is None or run.failure.step == len(run.program.steps) - 1, short(run.program)


def test_few_programs_raise_and_few_are_decided_by_rounding() -> None:
    expected = [Expected(generate(seed)) for seed in SEEDS]
    assert sum(one.failure() is not None for one in expected) <= len(SEEDS) // 10
    assert sum(not one.is_well_posed for one in expected) <= len(SEEDS) // 10


def test_programs_do_without_lines_that_are_excluded() -> None:
    views = {line for group in GROUPS if group.name == "views" for line in group.lines}
    found = {step.operation for seed in SEEDS for step in generate(seed, excluded=views).steps}
    assert found
    assert not found & views


def test_a_program_is_printed_as_python() -> None:
    for seed in SEEDS:
        text = source(generate(seed))
        ast.parse(text)
        assert "nan" not in text.replace("float('nan')", "").replace("nan_to_num", "").replace("nansum", "").replace(
            "nanmean", ""
        ).replace("isnan", "")


@pytest.mark.parametrize("kind", ["quarters", "distinct", "normal", "special", "positive"])
def test_numbers_of_an_input_are_the_same_each_time(kind: str) -> None:
    one = matrix(kind)
    assert torch.equal(numbers(one).nan_to_num(99), numbers(one).nan_to_num(99))
    assert (len(numbers(one).unique()) == 6) or kind != "distinct"
    assert not numbers(one).isfinite().all() or kind != "special"


def test_ranks_with_tensors_of_their_own_have_other_numbers() -> None:
    assert not torch.equal(numbers(matrix(), 0), numbers(matrix(), 1))


@rows("count", [1, 2, 3])
@rows("dtype", ["float64", "bfloat16", "int64"])
def test_shares_of_a_sum_add_up_exactly(count: int, dtype: str) -> None:
    values = numbers(matrix(dtype=dtype))
    terms = shares(values, count)
    assert len(terms) == count
    assert torch.equal(terms.sum(0, dtype=terms.dtype), values)


def test_sums_of_quarters_are_the_same_in_any_order() -> None:
    assert is_fine(numbers(matrix())).all()
    assert not is_fine(numbers(matrix("normal"))).all()


@pytest.mark.parametrize(
    ("plain", "found"),
    [
        ([1.0, 2.0], [1.0, 2.5]),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, 2.0], [1.0, 2.0 + 1e-12]),
    ],
)
def test_values_that_differ_are_seen(plain: list[float], found: list[float]) -> None:
    here, there = torch.tensor(plain, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    assert values_differ(here, here.clone(), there)
    assert not values_differ(here, here.clone(), here.clone())


def test_roundings_of_another_order_are_no_difference() -> None:
    here = torch.tensor([0.1, 0.7], dtype=torch.float64)
    assert not values_differ(here, here * (1 + 4e-16), here * (1 + 4e-16))
    assert values_differ(here, here.clone(), here * (1 + 1e-9))


def test_what_is_decided_by_rounding_is_not_compared() -> None:
    assert not Expected(program("x0.exp().sum()", "v0 > x0.exp().sum()", one=matrix("normal"))).is_well_posed
    assert Expected(program("x0.sum()", "v0 > x0.sum()")).is_well_posed


def test_a_run_that_differs_is_told_by_the_operation_that_made_the_difference() -> None:
    expected = Expected(program("x0 * 2", "v0.sum()"))
    other = PlainRun(program("x0 * 3", "v0.sum()"))
    other.run()
    findings = list(expected.compare(other, other.leaves()))
    assert [(one.kind, one.operation) for one in findings] == [("value", "x0 * 2"), ("value", "v0.sum()")]


def test_sizes_dtypes_strides_and_gradients_are_compared() -> None:
    expected = Expected(program("x0.t()", "x0 > 0", "x0 * 2", "x0.sum(0)"))
    other = PlainRun(program("x0.t().contiguous()", "(x0 > 0).long()", "(x0 * 2).requires_grad_()", "x0.sum()"))
    other.run()
    found = {(one.kind, one.name) for one in expected.compare(other, other.leaves())}
    assert {("stride", "v0"), ("dtype", "v1"), ("requires_grad", "v2"), ("shape", "v3")} <= found


async def test_a_failure_is_shrunk_to_the_step_that_fails() -> None:
    long = replace(
        program("x0 * 2", "v0.exp()", "v0.cumsum(-1)", "v2 + v1", "x0.t()"),
        inputs=(replace(matrix("normal"), layout=(1,), needs_grad=True),),
    )

    async def judge(one: Program) -> Verdict:
        wrong = [step for step in one.steps if "cumsum" in step.code and one.inputs[0].layout == (1,)]
        findings = tuple(Finding("value", step.result, "wrong", step.operation) for step in wrong)
        return Verdict(one, findings, 0)

    found = await shrink(await judge(long), judge)
    assert [step.code for step in found.program.steps] == ["x0 * 2", "v0.cumsum(-1)"]
    [one] = found.program.inputs
    assert (one.kind, one.layout, one.needs_grad, one.shape) == ("quarters", (1,), False, (2, 2))


def test_a_step_that_raises_ends_a_run() -> None:
    run: Run = PlainRun(program("x0.sum(0)", "x0.sum(5)", "x0 * 2"))
    run.run()
    assert run.failure is not None
    assert (run.failure.step, type(run.failure.error)) == (1, IndexError)
    made: Any = run.leaves()
    assert set(made) == {"x0", "v0"}


def test_the_mesh_of_a_seed_is_known_without_its_program() -> None:
    assert [extent_of(seed) for seed in range(20)] == [generate(seed).extent for seed in range(20)]


def test_the_lines_that_are_asked_for_are_drawn_most() -> None:
    steps = [step.operation for seed in range(12) for step in generate(seed, lines=r"cumsum").steps]
    assert sum("cumsum" in one for one in steps) > len(steps) / 5


def test_listed_programs_are_taken_by_plain_torch_and_the_failing_ones_are_listed() -> None:
    assert set(LISTED) >= FAILING
    raising = {name for name, one in LISTED.items() if Expected(one).failure() is not None}
    assert raising == {
        "ids out of range of a table cut by rows",
        "a slice of a tensor without dimensions",
        "a view that strides do not allow",
        "the first of no rows",
        "the smallest of no rows",
        "classes of errors of masks that are divided",
        "classes of errors of masks that are divided by a number",
        "classes of errors of masks that are shifted",
        "classes of errors of numbers that are shifted",
        "classes of errors of fractions of masks",
        "classes of errors of too many places",
        "one of classes that are too few",
        "one of classes below 0",
        "one of the classes of nothing",
        "an index out of range in a write through a view that is copied",
        "a row that is taken from the rows",
        "the transpose of what is written to",
        "rows that are added to rows of them",
        "a row that is copied to all",
        "an element that is taken from its row",
    }


@pytest.mark.slow
def test_metadata_that_is_found_without_data_is_that_of_torchs_kernels() -> None:
    """Also of bfloat16 that was expanded, and of windows that overlap."""
    lines = "unfold|expand|index|isin|<<|None"
    programs = [*LISTED.values(), *(generate(seed) for seed in SEEDS), *(generate(seed, lines=lines) for seed in SEEDS)]
    found = [f"{short(one)}\n{text}" for one in programs for text in wrong_metadata(one).values()]
    assert not found, "\n\n".join(found)


def test_rounds_of_a_program_differ_in_the_numbers_of_their_inputs_only() -> None:
    program = generate(3)
    assert varied(program, 0) == program
    other = varied(program, 1)
    assert [(one.shape, one.dtype, one.layout) for one in other.inputs] == [
        (one.shape, one.dtype, one.layout) for one in program.inputs
    ]
    assert other.steps == program.steps
    assert any(
        not torch.equal(numbers(one), numbers(again)) for one, again in zip(program.inputs, other.inputs, strict=True)
    )
