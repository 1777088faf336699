"""Kernels of `profile` (executed commands with times), of seeding, of `fallbacks` and of `traffic`.

PF-1 Profiling costs nothing while it is off: a rank and its `TrafficCounts` change their class only while they are
     profiled.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from trimesh import limits
from trimesh._transport.native.carriers import boot_id
from trimesh.tensor.groups.group import TrafficCounts, sent_bytes
from trimesh.tensor.rank.kernel import Kernel, generator_of
from trimesh.tensor.rank.rank import Command, Rank, TeamOnRank
from trimesh.tensor.rules.engine import engine_of

OPERATION: Final = 0
COLLECTIVE: Final = 1


class ProfileEvents:
    """Profile of a rank: at most `limits.TENSOR_PROFILE_EVENTS_MAX` events.

    Attributes:
        names: Names of operations and collectives.
        rows: Kind, index of the name, team, number of the command, begin and duration in nanoseconds, bytes sent.
        missing: Number of events dropped beyond the limit.
        team, number: The command in execution.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.rows: list[tuple[int, ...]] = []
        self.missing = 0
        self.team = self.number = 0

    def add(self, kind: int, name: str, begun: int, sent: int = 0) -> None:
        """Record an event that ends now."""
        if len(self.rows) >= limits.TENSOR_PROFILE_EVENTS_MAX:
            self.missing += 1
            return
        index = self.names.setdefault(name, len(self.names))
        self.rows.append((kind, index, self.team, self.number, begun, time.monotonic_ns() - begun, sent))


class _ProfiledRank(Rank):
    """A rank that records its commands."""

    __slots__ = ()

    def execute(self, team: TeamOnRank, command: Command) -> None:
        events: ProfileEvents = self.above[ProfileEvents]
        events.team, events.number = team.number, team.done
        begun = time.monotonic_ns()
        super().execute(team, command)
        events.team, events.number = team.number, max(team.done - 1, 0)
        events.add(OPERATION, command.signature.name, begun)


class _ProfiledCounts(TrafficCounts):
    """Traffic counts that record each collective."""

    __slots__ = ()

    def count(self, labels: str, name: str, ranks: int, args: tuple[Any, ...], begun: int = 0) -> None:
        super().count(labels, name, ranks, args, begun)
        events = _looking[id(self)]
        events.add(COLLECTIVE, f"{name} along {labels}", begun, sent_bytes(name, ranks, args))


_looking: dict[int, ProfileEvents] = {}
"""Profiles, by identity of the profiled `TrafficCounts`."""


def profile_begin(rank: Rank, _: TeamOnRank) -> None:
    """Start profiling the rank."""
    events = rank.above[ProfileEvents] = ProfileEvents()
    counts = rank.above.setdefault(TrafficCounts, TrafficCounts())
    _looking[id(counts)] = events
    counts.__class__ = _ProfiledCounts
    rank.__class__ = _ProfiledRank


def profile_clock(rank: Rank, _: TeamOnRank, request: int) -> None:
    """Send the controller the clock of this rank, with the boot of the machine from which it counts."""
    rank.outside.reply(request, (boot_id(), time.monotonic_ns()))


def profile_end(rank: Rank, _: TeamOnRank, request: int) -> None:
    """Stop profiling, and send the profile to the controller."""
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


# ---- kernels of `seeding`: the generators of one rank ----------------------------------------------------------------


def seed_generators(rank: Rank, team: TeamOnRank, seed: int, step: int) -> None:
    """Seed the generators of this process; seed that of the team's global tensors equally on all ranks."""
    torch.manual_seed(seed + step * team.index)
    generator_of(rank, team).manual_seed(seed)


def tell_generator(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Send the controller the state of this rank's generator, followed by that of the team's global tensors."""
    *_, own, shared = _generators(rank, team)
    rank.outside.reply(request, torch.cat([own.get_state(), shared.get_state()]))


def set_generator(rank: Rank, team: TeamOnRank, states: list[memoryview]) -> None:
    """Restore this rank's generator, and that of the team's global tensors if the first state contains it."""
    *_, own, shared = _generators(rank, team)
    length = shared.get_state().numel()  # the rank's own generator has the same length
    mine = torch.frombuffer(bytearray(states[team.index % len(states)]), dtype=torch.uint8)
    own.set_state(mine[:length])
    if len(states[0]) > length:  # all ranks use the first state, to draw alike
        shared.set_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8)[length:].clone())


def keep_generators(rank: Rank, team: TeamOnRank) -> torch.Tensor:
    """Return the states of all generators that operations of a team may draw from on this rank."""
    return torch.cat([generator.get_state() for generator in _generators(rank, team)])


def give_generators_back(rank: Rank, team: TeamOnRank, states: torch.Tensor, known: tuple[int, ...]) -> None:
    """Restore the states of `keep_generators`; those of the process only if no other team has kept them before."""
    at = 0
    for generator in _generators(rank, team):
        length = generator.get_state().numel()
        if team.index not in known or generator is generator_of(rank, team):
            generator.set_state(states[at : at + length].clone())  # a clone: torch ignores a storage offset
        at += length


def _generators(rank: Rank, team: TeamOnRank) -> list[torch.Generator]:
    """Return the generators of the process, its device's last, then that of the team's global tensors.

    Callers use their methods: torch's functions for states also handle generators of meshes (`upload`), which in a
    simulation are those of this process.
    """
    own = [torch.default_generator]
    if rank.device.type == "cuda":
        own.append(torch.cuda.default_generators[rank.device.index or 0])
    return [*own, generator_of(rank, team)]


KERNELS_SEEDING: Final = (
    Kernel("seed", seed_generators),
    Kernel("get_generator", tell_generator),
    Kernel("set_generator", set_generator),
    Kernel("keep_generators", keep_generators),
    Kernel("give_generators_back", give_generators_back),
)


# ---- fallbacks -------------------------------------------------------------------------------------------------------

# Counts of this rank: operators that it has run on whole tensors, and bytes that it has sent in collectives.


def tell_fallbacks(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Send the controller the calls of each operator without a rule, and of all operators on global tensors."""
    counts = engine_of(rank).counts
    if team.index == 0:
        rank.outside.reply(request, (dict(counts.fallbacks), counts.all))


def tell_traffic(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Send the controller this rank's collectives and the bytes that it has sent in them."""
    counts = rank.above.get(TrafficCounts, TrafficCounts())
    if team.index == 0:
        found = [[labels, name, *both] for labels, named in counts.by_labels.items() for name, both in named.items()]
        rank.outside.reply(request, found)


KERNELS_FALLBACKS: Final = (Kernel("fallbacks", tell_fallbacks), Kernel("traffic", tell_traffic))
