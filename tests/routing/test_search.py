"""The search for deadlocks against an oracle that sees everything (C8; SE-1 to SE-3, WA-1 to WA-5)."""

from __future__ import annotations

import pytest
from tests.routing.call_graphs import World

from trimesh._routing.deadlock import Search
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport

BATCHES = 10
GRAPHS = 100
"""1,000 seeded call graphs in all. Of the first 29 bugs planted by machine in `search.py` they show 21, each within the
first nine graphs."""


@pytest.mark.parametrize("batch", range(BATCHES))
def test_search_agrees_with_the_oracle(batch: int):
    """C8: no false alarm, no miss, one victim a deadlock, the greatest of its knot."""
    victims = exact = 0
    for seed in range(batch * GRAPHS, (batch + 1) * GRAPHS):
        world = World(seed)
        try:
            world.run()
            assert not world.oracle(), "a miss: something can never end"
            left = [proc for proc, process in enumerate(world.processes) if process.calls and not process.is_dead]
            assert not left, "a call has not ended, and is in no deadlock"
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        victims += len(world.victims)
        exact += world.exact
    assert exact > GRAPHS // 10, f"too few deadlocks to show anything: {victims}, and {exact} undisturbed ones"


def answer(search: Search, waits: dict[NodeRef, NodeRef]) -> None:
    """Answer all that is asked, from one picture of who waits for whom; every caller waits, and nobody called it."""
    look = search.look
    while search.questions and search.look == look:
        question = search.questions.pop(0)
        reports = [
            NodeReport(ref, True, (waits[ref],) if ref in waits else (), can_break=ref.b == 3)
            for ref in question.refs
            if ref in waits or ref.kind is NodeKind.CALLER
        ]
        search.answered(question.proc, question.look, reports)


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_has_changed_between_the_looks_is_no_deadlock(is_changed: bool):
    """SE-1: two pictures, each of which looks like a deadlock, show none if they are not the same one."""
    one, two, three = (NodeRef(NodeKind.CALL, 1, 1, number) for number in (1, 2, 3))
    cycle = {one: three, two: one, three: two}
    search = Search(10, [one, two, three])
    answer(search, {one: two, two: one, three: two} if is_changed else cycle)
    assert search.look == 11
    answer(search, cycle)
    assert search.is_done
    assert (search.verdict is None) == is_changed


def test_search_for_nothing_is_over_at_once():
    search = Search(10, [])
    assert search.is_done
    assert search.verdict is None
    assert list(search.questions) == []


def test_search_looks_at_no_more_nodes_than_it_may():
    """SE-3: what is left out waits for nobody, so no deadlock is made of it."""
    refs = [NodeRef(NodeKind.CALL, 1, 1, number) for number in range(4)]
    search = Search(10, refs, nodes_max=2)
    assert [question.refs for question in search.questions] == [tuple(refs[:2])]


def test_first_word_about_a_node_counts():
    """A process that says two things of one node in a look is believed the first."""
    one, two, three = (NodeRef(NodeKind.CALL, 1, 1, number) for number in (1, 2, 3))
    search = Search(10, [one])
    search.questions.clear()
    search.answered(1, 10, [NodeReport(one, True, (two,)), NodeReport(one, True, (three,))])
    assert [question.refs for question in search.questions] == [(two,)]
