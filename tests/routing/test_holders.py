"""Who holds a port (T2): the receiver never ends while a port is left or under way, and always ends after that."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import attrs
import pytest
from tests.rows import rows

from trimesh import limits
from trimesh._routing.channel_accounts import Holders, Share
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

HOME, A, B, C = (ProcId(number) for number in (1, 2, 3, 4))


def open_at_home() -> Holders:
    holders = Holders()
    holders.begin(HOME)
    return holders


def send(holders: Holders, sender: ProcId, transit: int, holder: ProcId) -> None:
    holders.sent(sender, transit, holder, is_gone=False)


def take(holders: Holders, sender: ProcId, transit: int, holder: ProcId) -> bool:
    return holders.taken(sender, transit, holder, is_gone=False)


def test_opener_holds_until_it_drops():
    holders = open_at_home()
    assert not holders.is_over
    assert set(holders.holding()) == {HOME}
    holders.dropped(HOME, 1)
    assert holders.is_over


def test_undelivered_message_holds():
    holders = open_at_home()
    send(holders, HOME, 1, A)
    holders.dropped(HOME, 1)
    assert not holders.is_over
    assert take(holders, HOME, 1, A)
    assert not holders.is_over
    holders.dropped(A, 1)
    assert holders.is_over


def test_transit_may_be_taken_before_it_is_told():
    holders = open_at_home()
    take(holders, HOME, 1, A)
    take(holders, A, 9, B)
    holders.dropped(B, 1)
    send(holders, A, 9, B)
    holders.dropped(A, 1)
    send(holders, HOME, 1, A)
    assert not holders.is_over
    holders.dropped(HOME, 1)
    assert holders.is_over


def test_cast_is_a_transit_for_each():
    holders = open_at_home()
    for holder in (A, B, C):
        send(holders, HOME, 1, holder)
    holders.dropped(HOME, 1)
    for holder in (A, B, C):
        assert not holders.is_over
        take(holders, HOME, 1, holder)
        holders.dropped(holder, 1)
    assert holders.is_over


def test_dead_holder_releases():
    holders = open_at_home()
    send(holders, HOME, 1, A)
    take(holders, HOME, 1, A)
    send(holders, HOME, 2, A)
    holders.dropped(HOME, 1)
    assert holders.gone(A) == []
    assert holders.is_over


def test_transit_to_a_dead_process_is_none():
    holders = open_at_home()
    holders.sent(HOME, 1, A, is_gone=True)
    holders.dropped(HOME, 1)
    assert holders.is_over


def test_message_of_a_dead_lender_holds_until_its_receiver_has_settled():
    holders = open_at_home()
    send(holders, HOME, 1, A)
    take(holders, HOME, 1, A)
    for transit, holder in ((1, B), (2, B), (3, C)):
        send(holders, A, transit, holder)
    holders.dropped(HOME, 1)
    assert holders.gone(A) == [B, C]
    holders.taken(A, 1, B, is_gone=True)
    holders.settled(A, B)
    holders.settled(A, C)
    assert not holders.is_over
    holders.dropped(B, 1)
    assert holders.is_over


def test_receiver_that_dies_before_it_has_settled_releases():
    holders = open_at_home()
    send(holders, HOME, 1, A)
    take(holders, HOME, 1, A)
    send(holders, A, 1, B)
    holders.dropped(HOME, 1)
    assert holders.gone(A) == [B]
    assert not holders.is_over
    assert holders.gone(B) == []
    assert holders.is_over


def test_over_is_over():
    """HO-4: whoever comes late is told."""
    holders = open_at_home()
    holders.dropped(HOME, 1)
    assert not take(holders, HOME, 1, A)
    send(holders, HOME, 1, A)
    holders.dropped(A, 1)
    assert holders.gone(A) == []
    assert holders.is_over


@pytest.mark.parametrize("units", [-1, 0, 2, 2**70])
def test_units_that_nobody_took_break_the_protocol(units: int):
    holders = open_at_home()
    with pytest.raises(ProtocolError, match="give back"):
        holders.dropped(HOME, units)
    with pytest.raises(ProtocolError, match="give back"):
        holders.dropped(A, 1)


def test_transit_of_a_stranger_breaks_the_protocol():
    holders = open_at_home()
    with pytest.raises(ProtocolError, match="only a holder"):
        send(holders, A, 1, B)


def test_transit_that_is_told_twice_breaks_the_protocol():
    holders = open_at_home()
    send(holders, HOME, 1, A)
    with pytest.raises(ProtocolError, match="new number"):
        send(holders, HOME, 1, A)


def test_transit_that_is_taken_twice_breaks_the_protocol():
    holders = open_at_home()
    take(holders, HOME, 1, A)
    with pytest.raises(ProtocolError, match="once"):
        take(holders, HOME, 1, A)


def test_transits_that_nobody_tells_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "EARLY_TRANSITS", 10)
    holders = open_at_home()
    for transit in range(10):
        take(holders, HOME, transit, A)
    with pytest.raises(ProtocolError, match="EARLY_TRANSITS"):
        take(holders, HOME, 10, A)


def test_share_gives_back_with_its_last_reference():
    share = Share()
    share.take()
    share.refer()
    share.take()
    assert share.release() == 0
    assert share.release() == 0
    assert share.release() == 2
    share.take()
    assert share.release() == 1


# ---- every order -----------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Process:
    """What one process of the model has: its own count of references, and the transits it asked to be told of."""

    proc_id: ProcId
    share: Share = attrs.field(factory=Share)
    is_alive: bool = True
    gone: set[ProcId] = attrs.field(factory=set)  # whose links it has read to their end
    settling: set[ProcId] = attrs.field(factory=set)


@attrs.define(eq=False)
class Model:
    """A family that passes ports on, over links that are first in, first out, each at a pace of its own.

    Attributes:
        links: By (source, target), what is under way; `None` is the end of the source.
    """

    seed: int
    random: random.Random = attrs.field(init=False)
    holders: Holders = attrs.field(factory=open_at_home)
    processes: dict[ProcId, Process] = attrs.field(init=False)
    links: dict[tuple[ProcId, ProcId], deque[Callable[[], None] | None]] = attrs.field(factory=dict)
    transits: int = 0
    early_end: str = ""

    def __attrs_post_init__(self) -> None:
        self.random = random.Random(self.seed)
        count = self.random.randint(2, 5)
        self.processes = {ProcId(number): Process(ProcId(number)) for number in range(1, count + 1)}
        self.processes[HOME].share.take()

    # ---- what a process does ----

    def put(self, source: ProcId, target: ProcId, what: Callable[[], None] | None) -> None:
        self.links.setdefault((source, target), deque()).append(what)

    def tell_home(self, source: ProcId, what: Callable[[], None]) -> None:
        self.put(source, HOME, what)

    def send(self, sender: ProcId, holder: ProcId) -> None:
        self.transits += 1
        transit = self.transits
        self.tell_home(sender, lambda: self.home_sent(sender, transit, holder))
        self.put(sender, holder, lambda: self.take(sender, transit, holder))

    def take(self, sender: ProcId, transit: int, holder: ProcId) -> None:
        self.processes[holder].share.take()
        self.tell_home(holder, lambda: self.home_taken(sender, transit, holder))

    def release(self, holder: ProcId) -> None:
        units = self.processes[holder].share.release()
        if units:
            self.tell_home(holder, lambda: self.home_dropped(holder, units))

    def die(self, process: ProcId) -> None:
        """Nothing is sent any more; what was sent is read, then the end is seen."""
        self.processes[process].is_alive = False
        self.processes[process].share = Share()
        for other in self.processes:
            if other != process:
                self.put(process, other, None)

    def see_end(self, process: ProcId, by: ProcId) -> None:
        self.processes[by].gone.add(process)
        if process in self.processes[by].settling:
            self.settle(process, by)
        if by == HOME:
            for holder in self.holders.gone(process):
                self.put(HOME, holder, lambda holder=holder: self.asked(process, holder))

    def asked(self, sender: ProcId, holder: ProcId) -> None:
        if sender in self.processes[holder].gone:
            self.settle(sender, holder)
        else:
            self.processes[holder].settling.add(sender)

    def settle(self, sender: ProcId, holder: ProcId) -> None:
        self.tell_home(holder, lambda: self.holders.settled(sender, holder))

    # ---- what the home does ----

    def home_sent(self, sender: ProcId, transit: int, holder: ProcId) -> None:
        self.holders.sent(sender, transit, holder, is_gone=holder in self.processes[HOME].gone)

    def home_taken(self, sender: ProcId, transit: int, holder: ProcId) -> None:
        if not self.holders.taken(sender, transit, holder, is_gone=sender in self.processes[HOME].gone):
            self.early_end = f"process {holder} took a port after the end"

    def home_dropped(self, holder: ProcId, units: int) -> None:
        self.holders.dropped(holder, units)

    # ---- steps ----

    def deliver(self) -> bool:
        """Let one link hand over what is next on it."""
        busy = [key for key, queue in sorted(self.links.items()) if queue]
        if not busy:
            return False
        source, target = self.random.choice(busy)
        what = self.links[source, target].popleft()
        if self.processes[target].is_alive:
            if what is None:
                self.see_end(source, target)
            else:
                what()
        self.check()
        return True

    def holding(self) -> list[ProcId]:
        return [found.proc_id for found in self.processes.values() if found.share.references]

    def check(self) -> None:
        if self.holders.is_over and (self.holding() or self.early_end):
            raise AssertionError(f"seed {self.seed}: it has ended, but {self.holding()} hold; {self.early_end}")

    def act(self) -> None:
        """Let one process pass a port on, drop one, or die."""
        holding = self.holding()
        if not holding:
            return
        process = self.random.choice(holding)
        chance = self.random.random()
        if chance < 0.5:
            self.send(process, self.random.choice(list(self.processes)))
        elif chance < 0.93:
            self.release(process)
        elif process != HOME:
            self.die(process)

    def run(self) -> None:
        for _ in range(self.random.randint(1, 60)):
            if self.random.random() < 0.5:
                self.act()
            else:
                self.deliver()
        while True:  # from here on ports are only dropped
            if self.random.random() < 0.5 and self.holding():
                self.release(self.random.choice(self.holding()))
            elif not self.deliver() and not self.holding():
                break
        assert self.holders.is_over, f"seed {self.seed}: nobody holds a port, and it has not ended: {self.holders}"


@rows("block", range(10))
def test_channel_ends_with_its_last_port_in_every_order(block: int):
    """T2: with links of any pace, casts of any number, and processes that die at any moment."""
    for seed in range(block * 1_000, block * 1_000 + 1_000):
        Model(seed).run()


def test_units_are_given_back_in_any_portions():
    holders = open_at_home()
    for transit in (1, 2):
        send(holders, HOME, transit, A)
        take(holders, HOME, transit, A)
    holders.dropped(HOME, 1)
    holders.dropped(A, 1)
    assert holders.holds(A)
    assert not holders.holds(HOME)
    holders.dropped(A, 1)
    assert not holders.holds(A)
    assert holders.is_over
    assert take(holders, A, 3, B) is False


def test_what_is_gone_and_settled_holds_no_more():
    holders = open_at_home()
    send(holders, HOME, 1, A)
    assert list(holders.gone(HOME)) == [A]
    assert not holders.is_over
    holders.settled(HOME, A)
    assert holders.is_over


def test_transits_that_are_told_or_never_will_be_make_room_for_others(monkeypatch: pytest.MonkeyPatch):
    """Only those count that may still be told."""
    monkeypatch.setattr(limits, "EARLY_TRANSITS", 2)
    holders = open_at_home()
    for transit in range(6):
        take(holders, HOME, transit, A)
        send(holders, HOME, transit, A)
    for transit in range(2):
        take(holders, A, transit, B)
    holders.gone(A)
    take(holders, B, 1, C)
    take(holders, B, 2, C)
    with pytest.raises(ProtocolError, match="EARLY_TRANSITS"):
        take(holders, B, 3, C)
