"""Pairs of movers that the tests of transfers run over: who reads, who has granted, and which way the bytes go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import pytest
from tests.native.mover import ALL, CMA, LOCAL, SHM, TCP, Mover, Other

_epochs = itertools.count(1000)


class Owner(Protocol):
    """Whoever has granted: this process, or another one."""

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of its mover."""


@attrs.frozen
class Here:
    """An owner that is the reader itself."""

    mover: Mover

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of its mover."""
        return getattr(self.mover, name)(*arguments, **options)


@attrs.frozen
class Road:
    """A carrier, and the kind of memory that it is tried with."""

    name: str
    carrier: int
    block: bool


LOCAL_ROAD = Road("local", LOCAL, block=False)
LOOPBACK = bytes([127, 0, 0, 1])
TCP_ROAD = Road("tcp", TCP, block=False)
HOST_ROADS = [Road("shm", SHM, block=True), Road("cma", CMA, block=False)]
MORE_ROADS = [Road("local-block", LOCAL, block=True), Road("cma-block", CMA, block=True)]


@attrs.define(eq=False)
class Pair:
    """A reader that attaches to an owner, by one road only."""

    road: Road
    reader: Mover
    owner: Owner
    attachment: int
    others: list[Other] = attrs.field(factory=list)

    def grant(self, size: int, **options: Any) -> dict[str, Any]:
        """Have the owner grant new memory."""
        granted: dict[str, Any] = self.owner.call("grant", size, block=self.road.block, **options)
        return granted

    def other(self) -> Other:
        """Return the owner's process, if it is another one."""
        assert isinstance(self.owner, Other)
        return self.owner

    def third(self, carriers: int = ALL) -> tuple[Other, int]:
        """Start one more process that attaches to the owner."""
        third = Other(next(_epochs), carriers)
        self.others.append(third)
        return third, third.call("attach", self.owner.call("home"))

    def close(self) -> None:
        """End everything."""
        self.reader.close()
        for one in self.others:
            one.close()


def open_pair(road: Road) -> Pair:
    """Make a reader, an owner and an attachment."""
    if road.carrier == LOCAL:
        reader = Mover(next(_epochs))
        return Pair(road, reader, Here(reader), reader.attach(reader.home()))
    owner = Other(next(_epochs), address=LOOPBACK if road is TCP_ROAD else b"")
    reader = Mover(next(_epochs), road.carrier)
    return Pair(road, reader, owner, reader.attach(owner.call("home")), [owner])


def run_pair(road: Road) -> Iterator[Pair]:
    """Yield a pair, as a fixture does."""
    pair = open_pair(road)
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module")
def lasting_owner() -> Iterator[Other]:
    """A process whose tests leave it as it is."""
    owner = Other(next(_epochs), address=LOOPBACK)
    yield owner
    owner.close()


@pytest.fixture(params=[LOCAL_ROAD, *HOST_ROADS, TCP_ROAD], ids=lambda road: road.name)
def pair(request: pytest.FixtureRequest, lasting_owner: Other) -> Iterator[Pair]:
    """Every road, to this process or to one that is not to be harmed."""
    road: Road = request.param
    if road.carrier == LOCAL:
        yield from run_pair(road)
        return
    reader = Mover(next(_epochs), road.carrier)
    yield Pair(road, reader, lasting_owner, reader.attach(lasting_owner.call("home")))
    reader.close()
    lasting_owner.call("clean")


@pytest.fixture(params=[*HOST_ROADS, TCP_ROAD], ids=lambda road: road.name)
def far_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Every road to another process, which may be harmed."""
    yield from run_pair(request.param)


@pytest.fixture(params=HOST_ROADS, ids=lambda road: road.name)
def host_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Every road to another process on which that takes no part."""
    yield from run_pair(request.param)


@pytest.fixture(params=MORE_ROADS, ids=lambda road: road.name)
def odd_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Roads that another one would be better than."""
    yield from run_pair(request.param)
