"""The model of casts agrees with the simulator where that is small, and bench/scaling/README.md with its data."""

from __future__ import annotations

import json

import pytest
import trio
from bench.scaling import document, measure, tree
from bench.scaling.costs import Costs
from bench.scaling.simulate import simulate
from bench.scaling.tree import Shape

from trimesh import limits

COSTS = Costs(
    call=50,
    send=4,
    take=6,
    work=60,
    work_cold=300,
    warm_ranks=64,
    relay=150,
    hop=5,
    tcp_hop=25,
    tcp_send=3,
    tcp_take=2,
    byte=0.01,
    copy=0.0001,
    tcp_copy=0.0005,
)
SHAPES = [
    Shape(1, 1),
    Shape(3, 4),
    Shape(1, 2, 1),
    Shape(2, 3, 2),
    Shape(5, 2, 2),
    Shape(9, 1, 3),
    Shape(4, 2, 1),
    Shape(20, 2, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_remote", [False, True])
def test_model_counts_what_the_simulator_counts(shape: Shape, *, is_remote: bool) -> None:
    network = document.network_of(COSTS, is_remote=is_remote)

    seen = simulate(shape, network)

    expected = tree.counts(shape)
    assert (seen.messages, seen.caller_messages, seen.links_max, seen.hops) == (
        expected.messages,
        expected.caller_messages,
        expected.links_max,
        expected.hops,
    )
    assert seen.caller_bytes == pytest.approx(tree.caller_bytes(shape), rel=0.05)
    assert seen.seconds == pytest.approx(tree.seconds(shape, network), rel=0.01)


def test_shares_are_even_and_whole() -> None:
    assert tree.shares(0, 4) == []
    assert tree.shares(3, 4) == [1, 1, 1]
    assert tree.shares(11, 4) == [3, 3, 3, 2]


def test_a_tree_bounds_links_where_a_flat_cast_does_not() -> None:
    assert tree.counts(Shape(4096, 8)).links_max == 32768
    assert tree.counts(Shape(4096, 8, 16)) == tree.Counts(
        messages=2 * 4096 * 9, caller_messages=32, links_max=25, hops=4
    )


def test_large_argument_takes_the_depth_of_a_tree_not_its_width() -> None:
    def spread(hosts: int, fan_out: int) -> float:
        return tree.bulk_seconds(Shape(hosts, 8, fan_out), COSTS, 10**6)

    assert spread(64, 0) == pytest.approx(64 * 8 * 5e-4)  # bytes * tcp_copy for each rank
    assert spread(2, 1) == pytest.approx(2 * 5e-4 + 1e-4)  # from leader to leader, then one copy for the host
    assert spread(64, 2) < spread(64, 16) < spread(64, 64) < spread(64, 0)


def test_caches_are_cold_for_those_they_cannot_hold() -> None:
    assert COSTS.work_of(64) == 60
    assert COSTS.work_of(128) == pytest.approx(180)


def test_shared_cores_divide_what_all_compute() -> None:
    alone = tree.shared_seconds(Shape(4, 8), COSTS, 1)

    assert tree.shared_seconds(Shape(4, 8), COSTS, 2) < alone < 2 * tree.shared_seconds(Shape(4, 8), COSTS, 2)


def test_bounds_of_the_document_are_those_of_the_library() -> None:
    assert document.LINKS_MAX == limits.LINKS_MAX
    assert document.RING_BYTES == 2 * limits.RING_BYTES


def test_tables_and_picture_are_made_of_the_data() -> None:
    data = json.loads(document.DATA.read_text())
    text = document.DOCUMENT.read_text()

    assert document.render(text, data) == text, "run `python -m bench.scaling render`"
    assert document.draw(data) == document.PICTURE.read_text(), "run `python -m bench.scaling render`"
    with pytest.raises(ValueError, match="needs its place"):
        document.render("no table", data)


def test_data_reach_what_they_are_to_show() -> None:
    data = json.loads(document.DATA.read_text())

    assert max(row["hosts"] * row["per_host"] for row in data["real"]) >= 128
    assert {10, 100, 1000} <= {row["hosts"] for row in data["simulated"]}
    for row in data["simulated"]:
        shape = document.shape_of(row)
        expected = tree.counts(shape)
        assert (row["messages"], row["links_max"], row["hops"]) == (
            expected.messages,
            expected.links_max,
            expected.hops,
        )
        model = tree.seconds(shape, document.network_of(Costs(**data["costs"])))
        assert row["seconds"] == pytest.approx(model, rel=0.02)


@pytest.mark.real
@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(2, 1, 1)], ids=str)
def test_casts_over_real_processes_are_measured(shape: Shape) -> None:
    seen = trio.run(measure.see_shape, shape, 10)

    assert 0 < seen.own < seen.whole
    assert seen.work > 0
    assert seen.first > 0
