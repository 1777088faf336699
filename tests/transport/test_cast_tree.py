"""Casts to several hosts: which of them is fed by which, and what becomes of it when one is not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.rows import rows
from tests.transport import casts
from tests.transport.casts import Cast

from trimesh import limits
from trimesh._transport.messages.casts import CastBody, HostCaster, begin_casts, depth, fan_out


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    casts.make_small(monkeypatch)
    monkeypatch.setattr(limits, "HOST_CAST_HOP_BYTES", 1)


@pytest.mark.parametrize(("hosts", "width", "hops"), [(1, 1, 1), (8, 1, 8), (8, 2, 3), (6, 2, 2), (8, 8, 1), (9, 8, 2)])
def test_depth_of_a_tree(hosts, width, hops):
    assert depth(hosts, width) == hops


@pytest.mark.parametrize(
    ("hosts", "size", "width"),
    [(8, 1 << 18, 8), (8, 1 << 26, 1), (32, 1 << 26, 2), (1000, 1 << 18, 16), (3, 1 << 26, 1)],
)
def test_large_bodies_go_from_host_to_host_and_small_ones_to_many_at_once(monkeypatch, hosts, size, width):
    """H6."""
    monkeypatch.undo()

    assert fan_out(hosts, size) == width


def sources(found: dict[HostCaster, CastBody]) -> dict[int, int]:
    return {body.owner.agent: 0 if body.source is None else body.source.owner.agent for body in found.values()}


def casters(count: int, circle: object = "one") -> list[HostCaster]:
    return [HostCaster(lambda: None, agent, circle) for agent in range(1, count + 1)]


def begin(hosts: Sequence[HostCaster], *, leaves: int = 2, size: int = 200) -> dict[int, int]:
    return sources(begin_casts([bytes(size)], dict.fromkeys(hosts, leaves)))


def test_each_host_is_fed_by_one_before_it():
    assert begin(casters(4)) == {1: 0, 2: 1, 3: 2, 4: 3}


def test_each_host_feeds_as_many_as_the_program(monkeypatch):
    monkeypatch.setattr(limits, "HOST_CAST_HOP_BYTES", 200)

    assert begin(casters(7)) == {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2, 7: 3}


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_hosts_are_sent_to(count):
    assert set(begin(casters(count)).values()) == {0}


def test_hosts_whose_agents_may_not_talk_feed_nobody():
    assert set(begin(casters(4, None)).values()) == {0}
    assert set(begin([*casters(2, "a"), *casters(2, "b")]).values()) == {0}


def test_single_processes_take_part_in_a_tree_only():
    assert begin(casters(3), leaves=1) == {1: 0, 2: 1, 3: 2}
    assert begin(casters(2), leaves=1) == {}


def test_host_without_room_is_left_out_and_what_it_would_feed_is_sent_to():
    hosts = casters(3)
    assert hosts[1].begin([bytes(limits.HOST_CAST_BYTES)], 2) is not None

    assert begin(hosts) == {1: 0, 3: 0}


def test_host_that_could_not_be_fed_is_sent_to_then_and_later():
    """HB-4."""
    hosts = casters(3)
    begin(hosts)
    for host in hosts:
        host.bodies.clear()  # carried

    hosts[0].could_not_feed(2, 1)

    assert list(hosts[1].let_go) == [1]
    assert [(body.number, body.source) for body in hosts[1].bodies] == [(2, None)]
    assert [(body.number, body.source) for body in hosts[2].bodies] == [(2, None)], "it was to be fed by that one"
    assert begin(hosts) == {1: 0, 2: 0, 3: 2}


@rows("seed", range(60))
def test_each_leaf_is_settled_once_whatever_happens_in_a_tree(seed):
    """HB-1 to HB-4."""
    _Run(random.Random(seed)).run()


class _Host:
    """A host: what was sent to its agent is carried out when the test lets it."""

    def __init__(self, agent: int) -> None:
        self.caster = HostCaster(lambda: None, agent, "one")
        self.kept: dict[int, bool] = {}  # whether the bytes are there
        self.expected: dict[int, int] = {}  # by which agent
        self.feeds: list[tuple[int, int, int]] = []  # by our number: agent and number there
        self.is_closed = False

    def carry(self) -> None:
        """Send the next thing."""
        caster = self.caster
        if self.is_closed:
            return
        if caster.let_go:
            number = caster.let_go.popleft()
            del self.kept[number]
            self.expected.pop(number, None)
            self.feeds = [one for one in self.feeds if one[0] != number]
        elif caster.bodies:
            body = caster.bodies.popleft()
            assert body.number > max(self.kept, default=0)
            self.feeds += [(body.number, other.owner.agent, other.number) for other in body.fed]
            self.kept[body.number] = body.source is None
            if body.source is not None:
                self.expected[body.number] = body.source.owner.agent
            else:
                self.caster.answered(body.number, b"here")


class _Run:
    def __init__(self, drawn: random.Random) -> None:
        self.drawn = drawn
        self.hosts = [_Host(agent) for agent in range(1, drawn.randrange(3, 7))]
        self.casts: list[Cast] = []
        self.open: list[tuple[Cast, int]] = []

    def run(self) -> None:
        for _ in range(150):
            self.step(self.drawn.randrange(8))
        for _ in range(200):
            for host in self.hosts:
                host.carry()
            self.feed(fails=False)
            self.settle_all()
        assert self.open == []
        for host in self.hosts:
            assert host.caster.kept == 0
            assert host.kept == {} or host.is_closed
        for one in self.casts:
            assert all(len(offers) <= 1 for offers in one.offers)
            assert len(set(one.in_chunks)) == len(one.in_chunks)

    def step(self, what: int) -> None:
        drawn = self.drawn
        match what:
            case 0:
                self.cast()
            case 1 | 2 | 3:
                drawn.choice(self.hosts).carry()
            case 4 | 5:
                self.feed(fails=drawn.random() < 0.2)
            case 6 if drawn.random() < 0.03:
                host = drawn.choice(self.hosts)
                host.is_closed = True
                host.caster.close()
            case _:
                self.settle(drawn.randrange(len(self.open))) if self.open else None

    def cast(self) -> None:
        bodies = (bytes(self.drawn.randrange(128, 600)),)
        found = begin_casts(bodies, {host.caster: self.drawn.randrange(1, 3) for host in self.hosts})
        for body in found.values():
            one = Cast(body.owner, body.leaves - len(body.fed), bodies, body)
            self.casts.append(one)
            for leaf in range(len(one.offers)):
                one.begin(leaf)
                self.open.append((one, leaf))

    def feed(self, *, fails: bool) -> None:
        """Let each feed that is due come to its end, or one fail."""
        for host in self.hosts:
            for number, agent, there in host.feeds.copy():
                other = self.hosts[agent - 1]
                if fails:
                    host.feeds.remove((number, agent, there))
                    host.caster.could_not_feed(agent, there)
                    return
                if host.kept.get(number) and other.expected.get(there) == host.caster.agent:
                    host.feeds.remove((number, agent, there))
                    del other.expected[there]
                    other.kept[there] = True
                    other.caster.answered(there, b"here")

    def settle(self, index: int) -> None:
        one, leaf = self.open[index]
        if leaf in one.in_chunks:
            self.open.pop(index)
        elif one.offers[leaf] or self.drawn.random() < 0.1:
            self.open.pop(index)
            one.end(leaf)

    def settle_all(self) -> None:
        for one, leaf in self.open:
            if leaf not in one.in_chunks and one.offers[leaf]:
                one.end(leaf)
        self.open = [(one, leaf) for one, leaf in self.open if leaf not in one.in_chunks and not one.offers[leaf]]
