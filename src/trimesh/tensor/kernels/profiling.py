"""The kernels behind `profile`: what a rank has executed, and when.

PF-1 While nothing is profiled, nothing of this is on the way of a command: the rank and what counts its collectives
     change their class for as long as they are looked at.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from trimesh import limits
from trimesh._transport.native.host_identity import boot_id
from trimesh.tensor.groups.traffic import TrafficCounts, sent_bytes
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.rank import Command, Rank, TeamOnRank

OPERATION: Final = 0
COLLECTIVE: Final = 1


class ProfileEvents:
    """What a rank has done, at most `limits.TENSOR_PROFILE_EVENTS_MAX` of it.

    Attributes:
        names: Of operations and collectives.
        rows: Kind, index of the name, team, number of the command, begin and duration in nanoseconds, bytes sent.
        missing: Events beyond the bound.
        team, number: The command that is executed.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.rows: list[tuple[int, ...]] = []
        self.missing = 0
        self.team = self.number = 0

    def add(self, kind: int, name: str, begun: int, sent: int = 0) -> None:
        """Take one event that ends now."""
        if len(self.rows) >= limits.TENSOR_PROFILE_EVENTS_MAX:
            self.missing += 1
            return
        index = self.names.setdefault(name, len(self.names))
        self.rows.append((kind, index, self.team, self.number, begun, time.monotonic_ns() - begun, sent))


class _ProfiledRank(Rank):
    """A rank whose commands are looked at."""

    __slots__ = ()

    def execute(self, team: TeamOnRank, command: Command) -> None:
        events: ProfileEvents = self.above[ProfileEvents]
        events.team, events.number = team.number, team.done
        begun = time.monotonic_ns()
        super().execute(team, command)
        events.team, events.number = team.number, max(team.done - 1, 0)
        events.add(OPERATION, command.signature.name, begun)


class _ProfiledCounts(TrafficCounts):
    """Counts whose collectives are looked at."""

    __slots__ = ()

    def count(self, labels: str, name: str, ranks: int, args: tuple[Any, ...], begun: int = 0) -> None:
        super().count(labels, name, ranks, args, begun)
        events = _looking[id(self)]
        events.add(COLLECTIVE, f"{name} along {labels}", begun, sent_bytes(name, ranks, args))


_looking: dict[int, ProfileEvents] = {}
"""What takes the collectives of counts that are looked at, by their identity."""


def profile_begin(rank: Rank, _: TeamOnRank) -> None:
    """Look at what the rank executes from here on."""
    events = rank.above[ProfileEvents] = ProfileEvents()
    counts = rank.above.setdefault(TrafficCounts, TrafficCounts())
    _looking[id(counts)] = events
    counts.__class__ = _ProfiledCounts
    rank.__class__ = _ProfiledRank


def profile_clock(rank: Rank, _: TeamOnRank, request: int) -> None:
    """Tell the controller what time it is here, and which boot of which machine that is counted from."""
    rank.outside.reply(request, (boot_id(), time.monotonic_ns()))


def profile_end(rank: Rank, _: TeamOnRank, request: int) -> None:
    """Look no more, and tell the controller what there was."""
    events = rank.above.pop(ProfileEvents, ProfileEvents())
    counts = rank.above[TrafficCounts]
    _looking.pop(id(counts), None)
    counts.__class__ = TrafficCounts
    rank.__class__ = Rank
    rows = torch.tensor(events.rows, dtype=torch.int64).reshape(-1, 7)
    rank.outside.reply(request, (list(events.names), rows, events.missing))


KERNELS: Final = (
    Kernel("profile_begin", profile_begin),
    Kernel("profile_clock", profile_clock),
    Kernel("profile_end", profile_end),
)
