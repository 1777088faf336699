"""The graph of who waits for whom (WA-1 to WA-5), and one search (SE-3)."""

from __future__ import annotations

import pytest

from trimesh._routing.deadlock import Question, Search, answer, find_verdict, is_held, steady, stuck_nodes
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport
from trimesh.errors import ProtocolError

Nodes = dict[NodeRef, NodeReport]


def call(proc: int, number: int, caller: int = 0) -> NodeRef:
    return NodeRef(NodeKind.CALL, proc, caller, number)


def running(ref: NodeRef, *edges: NodeRef) -> NodeReport:
    return NodeReport(ref, needs_all=True, waits_for=edges)


def queued(ref: NodeRef, *edges: NodeRef) -> NodeReport:
    return NodeReport(ref, needs_all=False, waits_for=edges, can_break=True)


def graph(*nodes: NodeReport) -> Nodes:
    return {node.ref: node for node in nodes}


A, B, C, D, E = (call(0, number) for number in range(1, 6))


def test_cycle_is_stuck():
    """WA-1."""
    nodes = graph(running(A, B), queued(B, A))
    assert stuck_nodes(nodes) == {A, B}


def test_what_is_unknown_can_end():
    """WA-1, SE-3: an edge to nowhere is no wait."""
    assert stuck_nodes(graph(running(A, B))) == set()
    assert stuck_nodes(graph(running(A, B)), {B}) == {A}


def test_running_call_waits_for_all():
    """WA-1: one stuck wait is enough."""
    nodes = graph(running(A, B, C), queued(B, A))
    assert stuck_nodes(nodes) == {A, B}


def test_queued_call_waits_for_any():
    """WA-1: one slot that gets free is enough, known or not."""
    assert stuck_nodes(graph(running(A, B), queued(B, A, C))) == set()
    assert stuck_nodes(graph(running(A, B), queued(B, A, C), running(C, D))) == set()
    assert stuck_nodes(graph(running(A, B), queued(B, A, C), running(C, D), queued(D, A, C))) == {A, B, C, D}


def test_victim_is_the_greatest_queued_call_of_a_knot():
    """WA-3, WA-4: not of what is stuck because of the knot, however great."""
    nodes = graph(running(A, B), queued(B, A), queued(E, A), running(C, B))
    verdict = find_verdict(nodes)
    assert verdict is not None
    assert verdict.victim == B
    assert [node.ref for node in verdict.cycle] == [A, B]
    assert set(verdict.stuck) == {A, B, C, E}


def test_first_of_two_knots_is_that_of_the_greatest_call():
    """WA-4."""
    nodes = graph(running(A, B), queued(B, A), running(C, D), queued(D, C))
    verdict = find_verdict(nodes)
    assert verdict is not None
    assert verdict.victim == D


def test_unsent_message_is_the_victim_when_no_call_is_queued():
    """WA-4."""
    unsent, room = NodeRef(NodeKind.UNSENT, 0, 1, 2), NodeRef(NodeKind.ROOM, 2, 7, 0)
    nodes = graph(running(A, unsent), queued(unsent, room), NodeReport(room, needs_all=False, waits_for=(A,)))
    verdict = find_verdict(nodes)
    assert verdict is not None
    assert verdict.victim == unsent


def test_nothing_stuck_has_no_victim():
    """WA-3."""
    assert find_verdict(graph(running(A, B), queued(B, C))) is None


@pytest.mark.parametrize(
    "second",
    [
        graph(running(A, C), queued(B, A)),  # another wait
        graph(running(A, B), queued(B, A, C)),  # another slot
        graph(running(A, B), running(B, A)),  # it has started
        graph(running(A, B)),  # it is over
    ],
)
def test_what_has_changed_between_two_looks_is_not_steady(second: Nodes):
    """SE-1."""
    first = graph(running(A, B), queued(B, A))
    assert find_verdict(steady(first, first, first)) is not None
    assert find_verdict(steady(first, second, first)) is None


def test_other_waits_of_a_running_call_may_change():
    """SE-2."""
    first = graph(running(A, B, C), queued(B, A))
    second = graph(running(A, D, B), queued(B, A))
    assert find_verdict(steady(first, second, first)) is not None


def test_call_is_held_by_all_callers_above():
    """WA-5."""
    mine, above = NodeRef(NodeKind.CALLER, 1, 5, 0), NodeRef(NodeKind.CALLER, 2, 9, 1)
    ref = call(0, 5, caller=1)
    assert not is_held(ref, {})
    assert is_held(ref, graph(running(mine)))
    assert not is_held(ref, graph(running(mine, above)))
    assert is_held(ref, graph(running(mine, above), running(above)))
    assert is_held(NodeRef(NodeKind.MESSAGE, 0, 3), {})


def ask(search: Search, nodes: Nodes) -> list[Question]:
    """Answer what a search asks now; return what was asked."""
    questions, search.questions = search.questions, []
    for question in questions:
        search.answered(question.proc, question.look, answer(question.refs, nodes.get))
    return questions


def test_search_asks_each_process_and_looks_twice():
    """SE-1."""
    here, there = call(0, 1, caller=1), call(1, 2, caller=0)
    held = [running(NodeRef(NodeKind.CALLER, 1, 1, 0)), running(NodeRef(NodeKind.CALLER, 0, 2, 1))]
    nodes = graph(running(here, there), queued(there, here), *held)
    search = Search(1, [here])
    asked = [ask(search, nodes) for _ in range(3)]
    assert [[question.proc for question in questions] for questions in asked[:2]] == [[0], [1]]
    assert {question.look for question in asked[2]} == {2}
    assert search.is_done
    assert search.verdict is not None
    assert search.verdict.victim == there


def test_search_does_without_a_process_that_is_gone():
    """SE-3."""
    here, there = call(0, 1), call(1, 2)
    search = Search(1, [here])
    ask(search, graph(running(here, there)))
    assert search.silent == [1]
    search.gone(1)
    assert search.is_done
    assert search.verdict is None


def test_answer_to_an_earlier_look_is_dropped():
    search = Search(7, [A])
    search.answered(0, 6, [running(A, B)])
    assert search.silent == [0]


def test_process_must_speak_of_its_own_nodes():
    search = Search(1, [A])
    with pytest.raises(ProtocolError, match="its own nodes"):
        search.answered(0, 1, [running(call(3, 1), A)])


def test_search_looks_at_so_many_nodes():
    """A graph without end costs a bounded time, and is no alarm."""
    search = Search(1, [call(0, 1)], nodes_max=10)
    nodes = graph(*(running(call(0, number), call(0, number + 1)) for number in range(1, 1000)))
    while not search.is_done:
        assert ask(search, nodes)
    assert search.verdict is None
