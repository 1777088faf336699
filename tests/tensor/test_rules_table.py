"""The table of rules: its page in docs/reference, and what torch itself says of its operators."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.rows import rows

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.protocol.tracing import NAMESPACE  # noqa: E402 - after the skip
from trimesh.tensor.rules.composed import COMPOSED, draw_of  # noqa: E402
from trimesh.tensor.rules.cuts import SUM, dense_strides, has_empty_part, local_part  # noqa: E402
from trimesh.tensor.rules.operators.view import groups_of  # noqa: E402
from trimesh.tensor.rules.table import ROWS, written_into  # noqa: E402

pytestmark = pytest.mark.torch

DOCUMENT = Path(__file__).parents[2] / "docs/reference/tensor-operators.md"


def _overloads(name: str) -> list[object]:
    aten, ours = torch.ops.aten, getattr(torch.ops, NAMESPACE)
    packet = getattr(aten, name, None) or getattr(ours, name, None) or getattr(aten, f"{name}_")
    return [getattr(packet, overload) for overload in packet.overloads()]


def test_the_document_has_the_table() -> None:
    text = DOCUMENT.read_text()
    assert written_into(text) == text, f"write it anew: python -m trimesh.tensor.rules {DOCUMENT}"


@rows("row", ROWS)
def test_every_operator_of_the_table_is_one_of_torch_that_draws_no_random_numbers(row: object) -> None:
    if "attention" in row.kind:  # type: ignore[attr-defined]
        return  # its rule is for calls without dropout
    for name in row.names:  # type: ignore[attr-defined]
        assert name not in COMPOSED or name.startswith("nll"), f"{name} has two ways"
        for operator in _overloads(name):
            assert torch.Tag.nondeterministic_seeded not in operator.tags, name  # type: ignore[attr-defined]
            assert draw_of(operator) is None, name


@pytest.mark.parametrize(
    ("length", "ranks", "parts"),
    [(7, 2, [(0, 4), (4, 3)]), (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]), (0, 2, [(0, 0), (0, 0)])],
)
def test_parts_are_those_of_torch(length: int, ranks: int, parts: list[tuple[int, int]]) -> None:
    for index, (start, size) in enumerate(parts):
        assert local_part((length, 3), (0,), (ranks,), (index,)) == ([start, 0], [size, 3])
    assert has_empty_part((length, 3), (0,), (ranks,)) is any(size == 0 for _, size in parts)


def test_a_dimension_is_cut_by_one_label_after_the_other() -> None:
    found = [local_part((7,), (0, 0), (2, 2), place) for place in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert found == [([0], [2]), ([2], [2]), ([4], [2]), ([6], [1])]
    assert local_part((7,), (SUM, 0), (2, 2), (1, 1)) == ([4], [3])


def test_a_part_lies_in_the_order_of_its_whole() -> None:
    assert dense_strides((2, 3), (4, 3), (1, 4)) == (1, 2)
    assert dense_strides((4, 0), (4, 3), (3, 1)) == (1, 1)
    assert dense_strides((4, 3), (4, 3), (6, 1)) is None


def test_views_join_the_dimensions_that_belong_together() -> None:
    assert groups_of((4, 6), (24,)) == [([0, 1], [0])]
    assert groups_of((2, 12, 5), (24, 5)) == [([0, 1], [0]), ([2], [1])]
    assert groups_of((6, 4), (2, 3, 4)) == [([0], [0, 1]), ([1], [2])]
    assert groups_of((0, 4), (4, 0)) is None
