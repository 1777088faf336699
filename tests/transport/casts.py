"""One sender of casts, and a host that keeps them, for tests: what is carried when is theirs to say."""

from __future__ import annotations

import random

import pytest

from trimesh import limits
from trimesh._transport.messages.casts import CastBody, CastLeaf, HostCaster


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Have casts of some hundred bytes."""
    patch.setattr(limits, "HOST_CAST_BYTES_MIN", 128)
    patch.setattr(limits, "HOST_CAST_BYTES", 2048)
    patch.setattr(limits, "HOST_CASTS_MAX", 4)


class Host:
    """A caster and its host.

    Attributes:
        entered: What was carried there.
        kept: Numbers of what is kept there.
        refuses: Whether it can keep nothing.
    """

    def __init__(self) -> None:
        self.caster = HostCaster(lambda: None)
        self.entered: list[bytes] = []
        self.kept: set[int] = set()
        self.refuses = False
        self._unanswered: list[int] = []

    def cast(self, leaves: int, *bodies: bytes, begun: int | None = None) -> Cast:
        """Begin a cast; `begun` of its leaves have their turn now."""
        one = Cast(self.caster, leaves, bodies)
        for leaf in range(leaves if begun is None else begun):
            one.begin(leaf)
        return one

    def carry(self, *, answer: bool = True) -> None:
        """Carry what waits, and the answers back."""
        while self.caster.let_go or self.caster.bodies:
            if self.caster.let_go:
                self.kept.remove(self.caster.let_go.popleft())
                continue
            body = self.caster.bodies.popleft()
            data = b"".join(body.pieces())
            assert len(data) == body.size
            self.entered.append(data)
            self.kept.add(body.number)
            self._unanswered.append(body.number)
        if answer:
            for number in self._unanswered:
                self.caster.answered(number, b"" if self.refuses else b"in %d" % number)
            self._unanswered.clear()
            if self.caster.let_go:
                self.carry()


class NoRoomError(Exception):
    """There is no cast now."""


class Cast:
    """One cast, and the links of its leaves.

    Attributes:
        offers: What each leaf was offered.
        in_chunks: Leaves that go in chunks, in order.
        told: How many leaves have said that they have left.
    """

    def __init__(
        self, caster: HostCaster, leaves: int, bodies: tuple[bytes, ...], begun: CastBody | None = None
    ) -> None:
        body = caster.begin(bodies, leaves) if begun is None else begun
        if body is None:
            raise NoRoomError
        self.offers: list[list[bytes]] = [[] for _ in range(leaves)]
        self.in_chunks: list[int] = []
        self.told = 0
        self._leaves = [CastLeaf(b"head", bodies, 1, self, body) for _ in range(leaves)]

    def chunk_done(self) -> None:
        """See `Told`."""
        self.told += 1

    def begin(self, leaf: int) -> None:
        """Let a leaf have its turn."""
        self._leaves[leaf].begin(_Link(self, leaf))

    def take(self, leaf: int) -> None:
        """Have the process of a leaf take what it was offered."""
        assert self.offers[leaf], "a leaf of a cast was offered nothing"
        self._leaves[leaf].finish()

    def refuse(self, leaf: int) -> None:
        """Have it say that it cannot."""
        assert self.offers[leaf]
        _Link(self, leaf).send_chunks(self._leaves[leaf])

    def end(self, leaf: int) -> None:
        """Have the link of a leaf end."""
        self._leaves[leaf].finish()


class _Link:
    def __init__(self, cast: Cast, index: int) -> None:
        self._cast = cast
        self._index = index

    def offer(self, leaf: CastLeaf, where: bytes) -> None:
        table, head, there = leaf.offer(where)
        assert len(bytes(table)) % 8 == 0
        assert head == b"head"
        self._cast.offers[self._index].append(bytes(there))

    def send_chunks(self, leaf: CastLeaf) -> None:
        leaf.leave()
        assert not leaf.is_apart
        self._cast.in_chunks.append(self._index)


def run(drawn: random.Random) -> None:
    """Cast, carry, answer and end links in a drawn order; then all of it must be settled, once, and nothing kept."""
    one = _Run(drawn)
    for _ in range(200):
        one.step()
        assert one.host.caster.kept <= limits.HOST_CAST_BYTES
    one.finish()
    assert one.host.kept == set(), "what no leaf needs is let go"
    assert one.host.caster.kept == 0


class _Run:
    def __init__(self, drawn: random.Random) -> None:
        self.host = Host()
        self._drawn = drawn
        self._casts: list[Cast] = []
        self._unbegun: list[tuple[Cast, int]] = []
        self._begun: list[tuple[Cast, int]] = []  # and not settled

    def step(self) -> None:
        drawn = self._drawn
        match drawn.randrange(6):
            case 0:
                self._cast()
            case 1 if self._unbegun:
                self._begin()
            case 2 | 3:
                self.host.refuses = drawn.random() < 0.2
                self.host.carry(answer=drawn.random() < 0.7)
            case _ if self._begun:
                self._settle(*self._begun.pop(drawn.randrange(len(self._begun))))
            case _:
                pass

    def _cast(self) -> None:
        leaves, size = self._drawn.randrange(2, 5), self._drawn.randrange(128, 900)
        try:
            one = Cast(self.host.caster, leaves, (bytes(size),))
        except NoRoomError:
            return
        self._casts.append(one)
        self._unbegun.extend((one, leaf) for leaf in range(leaves))

    def _begin(self) -> None:
        one, leaf = self._unbegun.pop(self._drawn.randrange(len(self._unbegun)))
        self._begun.append((one, leaf))
        one.begin(leaf)

    def _settle(self, one: Cast, leaf: int) -> None:
        if leaf in one.in_chunks:
            return
        if self._drawn.random() < 0.1:
            one.end(leaf)
        elif not one.offers[leaf]:
            self._begun.append((one, leaf))
        elif self._drawn.random() < 0.2:
            one.refuse(leaf)
        else:
            one.take(leaf)

    def finish(self) -> None:
        """Let all that is left come to its end."""
        while self._unbegun:
            self._begin()
        self.host.refuses = False
        self.host.carry()
        for one, leaf in self._begun:
            if leaf not in one.in_chunks:
                one.take(leaf)
        self.host.carry()
        for one in self._casts:
            assert all(len(offers) <= 1 for offers in one.offers)
            assert len(set(one.in_chunks)) == len(one.in_chunks)
