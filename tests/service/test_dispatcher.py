"""The state machine of pools, without tasks."""

from __future__ import annotations

from typing import Any

import pytest

from trimesh.service.dispatch import (
    Adaptive,
    Affinity,
    ByFunction,
    Dispatcher,
    LeastLoaded,
    PoolRequest,
    Replica,
    RoundRobin,
    Sessions,
)


def dispatcher(replicas: int = 2, concurrency: int = 1, **options: Any) -> Dispatcher:
    given: dict[str, Any] = {"route": LeastLoaded(), "queue": 100, "queue_bytes": 1_000, "sessions": 4, **options}
    return Dispatcher(replicas, concurrency=concurrency, **given)


def submitted(machine: Dispatcher, **options: Any) -> PoolRequest:
    request = PoolRequest(**options)
    machine.submit(request)
    return request


def test_load_goes_to_zero_when_all_have_ended():
    """The counter of verl's router is never lowered, so its least loaded replica is the one that was used least."""
    machine = dispatcher(concurrency=3)
    requests = [submitted(machine, cost=0.1 * number) for number in range(1, 7)]
    machine.take()
    for number, request in enumerate(requests):
        machine.end(request, 1.0 if number % 2 else None)
    assert [(one.running, one.cost) for one in machine.replicas] == [(0, 0.0), (0, 0.0)]


def test_a_request_that_finds_room_goes_where_it_would_go_from_the_queue():
    at_once, queued = dispatcher(replicas=3, concurrency=2), dispatcher(replicas=3, concurrency=2)
    for number in range(6):
        request = PoolRequest(cost=1 + number % 3)
        assert at_once.grant(request)
        other = submitted(queued, cost=1 + number % 3)
        queued.take()
        assert (request.state, request.replica, request.number) == ("running", other.replica, other.number)
    last = PoolRequest()
    assert not at_once.grant(last)  # no replica has room
    assert (last.state, at_once.submitted) == ("new", 6)


def test_a_request_goes_past_nothing_that_waits():
    machine = dispatcher(replicas=1, concurrency=2)
    machine.pauses = 1
    assert not machine.grant(PoolRequest())
    first = submitted(machine)
    machine.pauses = 0
    assert not machine.grant(PoolRequest(priority=1))
    assert [request for request, _ in machine.take()] == [first]
    assert not machine.grant(PoolRequest(session="chat"))  # whose place may be another one
    assert machine.grant(PoolRequest())


def test_replicas_that_come_and_go_are_known_at_the_next_request():
    machine = dispatcher(replicas=2, concurrency=10)

    def serving() -> list[int]:
        return [one.index for one in machine.serving()]

    assert serving() == [0, 1]
    machine.add()
    assert serving() == [0, 1, 2]
    machine.set_up(0, is_up=False)
    assert serving() == [1, 2]
    machine.set_drained(1, is_drained=True)
    assert serving() == [2]
    machine.set_absent(2, is_absent=True)
    assert serving() == [0]
    machine.set_absent(2, is_absent=False)
    machine.set_drained(1, is_drained=False)
    machine.set_up(0, is_up=True)
    assert serving() == [0, 1, 2]


def test_request_that_is_made_again_keeps_its_place():
    machine = dispatcher(replicas=1)
    first, second = submitted(machine), submitted(machine)
    machine.take()
    machine.retry(first)
    assert [request for request, _ in machine.take()] == [first]
    machine.end(first, 1.0)
    assert [request for request, _ in machine.take()] == [second]


def test_session_that_waits_holds_no_other_request_back():
    machine = dispatcher()
    submitted(machine, session="a")
    [(_, replica)] = machine.take()
    waiting = [submitted(machine, session="a") for _ in range(3)]
    other = submitted(machine)
    [(found, elsewhere)] = machine.take()
    assert found is other
    assert elsewhere is not replica
    machine.set_up(replica.index, is_up=False)
    machine.end(other, 1.0)
    assert [request for request, _ in machine.take()] == waiting[:1]
    assert machine.sessions.find("a").moves == 1


def test_no_replica_up_means_that_each_may_come_back():
    machine = dispatcher()
    for index in range(2):
        machine.set_up(index, is_up=False)
    submitted(machine)
    assert len(machine.take()) == 1


def test_drained_replica_gets_nothing_even_if_it_is_the_last():
    machine = dispatcher(replicas=1)
    machine.set_drained(0, is_drained=True)
    submitted(machine)
    assert machine.take() == []
    machine.set_drained(0, is_drained=False)
    assert len(machine.take()) == 1


def test_sessions_of_a_drained_replica_move_whether_they_wait_or_come_later():
    machine = dispatcher(replicas=2)
    running = submitted(machine, session="a")
    [(_, replica)] = machine.take()
    other = submitted(machine)
    machine.take()
    waiting = submitted(machine, session="a")
    assert machine.take() == []
    machine.set_drained(replica.index, is_drained=True)
    machine.end(running, 1.0)
    machine.end(other, 1.0)
    assert [request for request, _ in machine.take()] == [waiting]
    assert waiting.replica == 1 - replica.index
    machine.end(waiting, 1.0)
    machine.set_drained(replica.index, is_drained=False)
    later = submitted(machine, session="a")  # it stays where its session is now
    assert [request for request, _ in machine.take()] == [later]
    assert (later.replica, machine.sessions.find("a").moves) == (1 - replica.index, 1)
    machine.sessions.end("a")
    assert machine.sessions.find("a").replica is None


def test_request_of_a_session_that_is_made_again_leaves_a_drained_replica():
    machine = dispatcher(replicas=2)
    request = submitted(machine, session="a")
    [(_, replica)] = machine.take()
    machine.set_drained(replica.index, is_drained=True)
    machine.retry(request)
    assert [(one, found.index) for one, found in machine.take()] == [(request, 1 - replica.index)]
    assert replica.running == 0


def test_order_is_by_priority_then_arrival_for_bound_and_other_requests():
    machine = dispatcher(replicas=1)
    submitted(machine, session="a")
    [(running, _)] = machine.take()
    late, bound = submitted(machine), submitted(machine, session="a")
    urgent, urgent_bound = submitted(machine, priority=1), submitted(machine, session="a", priority=1)
    order = []
    for _ in range(4):
        machine.end(running, 1.0)
        [(running, _)] = machine.take()
        order.append(running)
    assert order == [urgent, urgent_bound, late, bound]


def test_withdrawn_requests_leave_their_bytes_and_places():
    machine = dispatcher(replicas=1, queue=4)
    machine.pauses = 1
    waiting = [submitted(machine, size=200, priority=number % 2) for number in range(4)]
    assert not machine.waiting.has_room(0)  # of four requests
    for request in (waiting[2], waiting[1]):  # of a heap neither the first, and then the first
        machine.withdraw(request)
    assert machine.waiting.has_room(600)
    assert not machine.waiting.has_room(601)
    machine.pauses = 0
    assert [request for request, _ in machine.take()] == [waiting[3]]
    machine.end(waiting[3], 1.0)
    assert [request for request, _ in machine.take()] == [waiting[0]]


def test_second_run_goes_to_the_least_loaded_other_replica_that_is_up():
    machine = dispatcher(replicas=4, concurrency=2)
    machine.set_up(1, is_up=False)
    assert machine.grant(PoolRequest(cost=2.0))
    assert machine.grant(PoolRequest(cost=3.0))
    second = PoolRequest()
    machine.pauses = 1
    assert not machine.grant_beside(second, 0)
    machine.pauses = 0
    assert machine.grant_beside(second, 0)
    assert second.replica == 3
    machine.set_drained(3, is_drained=True)
    machine.set_drained(2, is_drained=True)
    assert not machine.grant_beside(PoolRequest(), 0)


def test_bytes_bound_the_queue_but_one_large_request_passes():
    machine = dispatcher(replicas=1)
    assert machine.waiting.has_room(5_000)
    submitted(machine, size=5_000)
    assert not machine.waiting.has_room(1)
    machine.take()
    assert machine.waiting.has_room(1)


def test_least_recently_used_session_is_forgotten():
    sessions = Sessions(2)
    for name in ("a", "b", "a", "c"):
        sessions.settle(name, 1)
    assert len(sessions) == 2
    assert sessions.find("a").replica == 1
    assert sessions.find("b").replica is None


def test_limit_shrinks_once_for_the_requests_of_one_jam():
    replica = Replica(0, 8)
    rule = Adaptive(1.0, most=16, start=8, factor=0.5)
    replica.running = 4
    replica.learn(rule, 2.0)
    for _ in range(4):
        replica.learn(rule, 2.0)
    assert replica.limit == 4
    for _ in range(4 + 5):
        replica.learn(rule, 0.5)
    assert replica.limit == 6
    for _ in range(100):
        replica.learn(rule, 9.0)
        replica.running = 0
    assert replica.limit == 1


def test_limit_keeps_within_its_bounds():
    replica, rule = Replica(0, 3), Adaptive(1.0, least=2, most=4)
    assert rule.start == 2
    for _ in range(20):
        replica.learn(rule, 1.0)  # as long as it may take
    assert replica.limit == 4
    for _ in range(3):
        replica.learn(rule, 1.5)
    assert replica.limit == 2
    replica.learn(rule, 0.5)
    assert replica.limit == 2
    replica.learn(rule, 0.5)
    assert replica.limit == 3


def test_request_without_a_key_goes_to_the_least_loaded():
    machine = dispatcher(replicas=3, route=Affinity())
    assert machine.grant(PoolRequest())
    assert machine.grant(PoolRequest())
    assert [one.running for one in machine.replicas] == [1, 1, 0]
    with pytest.raises(ValueError, match=r"at least 1, the mean load, got 0\.5"):
        Affinity(bounded_load=0.5)
    Affinity(bounded_load=1)


def test_few_keys_move_when_a_replica_leaves():
    route, replicas = Affinity(lambda key: key), [Replica(index, 100) for index in range(8)]
    before = {key: route.choose(PoolRequest((key,)), replicas, replicas).index for key in range(400)}
    rest = [one for one in replicas if one.index != 3]
    after = {key: route.choose(PoolRequest((key,)), rest, rest).index for key in range(400)}
    assert {key for key in before if before[key] != after[key]} == {key for key, index in before.items() if index == 3}
    assert set(before.values()) == set(range(8))


def test_hot_key_spills_over_at_the_bound():
    machine = dispatcher(replicas=4, concurrency=100, route=Affinity(bounded_load=1.25))
    for _ in range(80):
        submitted(machine, key="hot")
    machine.take()
    assert max(one.running for one in machine.replicas) <= 26
    assert sum(one.running for one in machine.replicas) == 80


def test_round_robin_passes_over_replicas_without_room():
    machine = dispatcher(replicas=3, route=RoundRobin())
    requests = [submitted(machine) for _ in range(3)]
    assert [replica.index for _, replica in machine.take()] == [0, 1, 2]
    machine.end(requests[2], 1.0)
    machine.end(requests[1], 1.0)
    submitted(machine)
    assert [replica.index for _, replica in machine.take()] == [1]
    submitted(machine)
    assert [replica.index for _, replica in machine.take()] == [2]
    machine.end(requests[0], 1.0)
    submitted(machine)
    assert [replica.index for _, replica in machine.take()] == [0]


def test_function_must_choose_a_candidate():
    machine = dispatcher(route=ByFunction(lambda request, candidates: 7 if request.priority else 1))
    odd, good = submitted(machine, priority=1), submitted(machine)
    assert [request for request, _ in machine.take()] == [good]
    [(request, error)] = machine.unrouted
    assert (request, type(error), odd.state, machine.waiting.count) == (odd, ValueError, "over", 0)
    assert "one of the candidates" in str(error)


@pytest.mark.parametrize("chosen", [None, 0, Replica(0, 1)])
def test_route_of_a_class_must_choose_a_candidate(chosen: object):
    class Odd(LeastLoaded):
        def choose(self, *_: object) -> Any:
            return chosen

    machine = dispatcher(route=Odd())
    with pytest.raises(ValueError, match="one of the candidates"):
        machine.grant(PoolRequest())
    assert machine.submitted == 0


@pytest.mark.parametrize("options", [{"latency": 0}, {"latency": 1, "least": 0}, {"latency": 1, "factor": 1}])
def test_adaptive_refuses_numbers_out_of_bounds(options: Any):
    with pytest.raises(ValueError, match="Adaptive needs"):
        Adaptive(**options)
