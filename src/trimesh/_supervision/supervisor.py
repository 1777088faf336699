r"""Supervisor: which members to restart after a failure, when, and when to give up. Pure: times are numbers.

Members belong to *units*, which are restarted as a whole. A *round* restarts some units:

    DOWN --is_down()--> RESTING --rested()--> STARTING --started()--> over
      ^                                           |
      \-------- failed(), start_failed() ---------/      (a new round, which replaces the old one)

DOWN      living members of the units are taken down
RESTING   the backoff
STARTING  all members are started, in spawn order

SU-1 a unit is in at most one round at a time: a round that needs a unit of another round replaces that round.
SU-2 a failure while a round starts counts (R05); while it is still being taken down it is part of the failure that the
     round heals, and only its cause is kept.
SU-3 more than `intensity` failures in `period` end the supervisor: `GiveUp` has every cause, oldest first (R04, P4).
SU-4 once it has stopped or given up it decides nothing.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

import msgspec

from trimesh._supervision.policy import MeshState, Restart
from trimesh.errors import RestartLimit


class Phase(enum.Enum):
    """Phase of a round."""

    DOWN = "down"
    RESTING = "resting"
    STARTING = "starting"
    OVER = "over"


class Round:
    """The restart of some units.

    Attributes:
        units: Numbers of the units, in order.
        ranks: Their members, in spawn order; a member that another supervisor takes over leaves (`Supervisor.leave`).
        failed: Members that have failed and need not be stopped.
        delay: Seconds of backoff.
    """

    def __init__(
        self,
        units: tuple[int, ...],
        ranks: list[int],
        failed: frozenset[int],
        cause: Exception,
        delay: float,
    ) -> None:
        self.units = units
        self.ranks = ranks
        self.failed = failed
        self.cause = cause
        self.delay = delay
        self.phase: Phase = Phase.DOWN


class Begin(msgspec.Struct, frozen=True):
    """Run this round, after the rounds that it replaces have been stopped."""

    round: Round
    replaced: tuple[Round, ...]


class GiveUp(msgspec.Struct, frozen=True):
    """Stop restarting."""

    error: RestartLimit


Decision = Begin | GiveUp | None
"""None requires no action: the failure belongs to a round in progress, or arrives too late."""


class Supervisor:
    """The restarts of one mesh.

    Attributes:
        name: Name of the mesh, for errors.
        policy: Policy of the user.
        units: Members of each unit, in spawn order.
        rounds: Rounds in progress.
        absent: Members that have left the mesh and are not restarted.
        is_stopped: Whether it has stopped deciding.
    """

    def __init__(self, name: str, policy: Restart, units: Sequence[Sequence[int]]) -> None:
        self.name = name
        self.policy = policy
        self.units = units
        self.rounds: list[Round] = []
        self.absent: set[int] = set()
        self.is_stopped = False
        self._budget = Budget(self.policy.intensity, self.policy.period)
        self._unit_of: dict[int, int] = {}
        self.extend(units)

    def extend(self, units: Sequence[Sequence[int]]) -> None:
        """Add members: units keep their numbers, new ones follow."""
        self.units = units
        self._unit_of = {rank: unit for unit, ranks in enumerate(units) for rank in ranks}

    # ---- failures --------------------------------------------------------------------------------------------

    def failed(self, rank: int, cause: Exception, now: float, luck: float = 0.0) -> Decision:
        """Handle the failure of a member.

        Args:
            now: Seconds of a monotonic clock.
            luck: Random number between 0 and 1, for the jitter.
        """
        if self.is_stopped or rank in self.absent:
            return None
        unit = self._unit_of[rank]
        current = self.round_of(rank)
        if current is not None and current.phase is not Phase.STARTING:
            current.failed |= {rank}
            self._budget.add(unit, cause, now)
            return None
        return self._restart(unit, frozenset({rank}), cause, now, luck)

    def start_failed(self, round_: Round, cause: Exception, now: float, luck: float = 0.0) -> Decision:
        """Handle a failure during the start of a round (R05)."""
        if self.is_stopped or round_ not in self.rounds:
            return None
        self._end(round_)
        if not round_.ranks:  # all its members were taken over (`leave`)
            return None
        return self._restart(round_.units[0], frozenset(), cause, now, luck)

    def _restart(self, unit: int, failed: frozenset[int], cause: Exception, now: float, luck: float) -> Decision:
        self._budget.count(unit, cause, now)
        if self._budget.is_exceeded:
            self.is_stopped = True
            return GiveUp(self._limit())
        units = set(self._affected(unit))
        # A round that is starting units of this one is stopped: all its units begin anew.
        replaced = [other for other in self.rounds if units.intersection(other.units)]
        for other in replaced:
            units.update(other.units)
            self._end(other)
        delay = self.policy.backoff.delay(self._budget.attempts(unit), luck)
        found = self._round(units, failed, cause, delay)
        self.rounds.append(found)
        return Begin(found, tuple(replaced))

    def _affected(self, unit: int) -> Sequence[int]:
        match self.policy.strategy:
            case "one_for_one":
                return (unit,)
            case "one_for_all":
                return range(len(self.units))
            case "rest_for_one":
                return range(unit, len(self.units))

    def _round(self, units: set[int], failed: frozenset[int], cause: Exception, delay: float) -> Round:
        ordered = tuple(sorted(units))
        ranks = [rank for unit in ordered for rank in self.units[unit] if rank not in self.absent]
        return Round(ordered, ranks, failed, cause, delay)

    def _limit(self) -> RestartLimit:
        causes = self._budget.causes
        last = causes[-1]
        policy = self.policy
        text = (
            f"{self.name} failed more often than its policy allows (intensity={policy.intensity} in "
            f"period={policy.period:g} s), at last by {type(last).__name__}: {last}"
        )
        return RestartLimit(text, causes=causes)

    # ---- the course of a round -------------------------------------------------------------------------------

    def is_down(self, round_: Round) -> float:
        """Record that all members of the round are down; return the backoff in seconds."""
        round_.phase = Phase.RESTING
        return round_.delay

    def rested(self, round_: Round) -> None:
        """Record that the backoff is over and members are being started."""
        round_.phase = Phase.STARTING

    def started(self, round_: Round) -> None:
        """Record that every member of the round serves."""
        self._end(round_)

    def _end(self, round_: Round) -> None:
        round_.phase = Phase.OVER
        if round_ in self.rounds:
            self.rounds.remove(round_)

    def leave(self, rank: int) -> None:
        """Remove a member from its round: it is started elsewhere."""
        for round_ in self.rounds:
            if rank in round_.ranks:
                round_.ranks.remove(rank)

    def round_of(self, rank: int) -> Round | None:
        """Return the round that restarts a member, if one does."""
        return next((round_ for round_ in self.rounds if rank in round_.ranks), None)

    def state(self, rank: int, *, is_stopping: bool) -> MeshState:
        """Return the mesh state for a decision on a member's failure."""
        round_ = self.round_of(rank)
        is_ending = round_ is not None and round_.phase in (Phase.DOWN, Phase.RESTING)
        return MeshState(is_ending, self.is_stopped, is_stopping)

    def stop(self) -> None:
        """Stop deciding restarts."""
        self.is_stopped = True
        for round_ in list(self.rounds):
            self._end(round_)

    def resume(self) -> None:
        """Resume after giving up: the failures were handed up and are dropped."""
        self.is_stopped = False
        self._budget.clear()


# ---- how often a mesh has failed lately, and whether that is too often -----------------------------------------------


class _Entry(msgspec.Struct, frozen=True):
    at: float
    unit: int
    cause: Exception
    is_counted: bool


class Budget:
    """Failures of the last `period` seconds.

    BU-1 it is exceeded when more than `intensity` counted failures lie within `period`.
    BU-2 causes are kept in order of arrival, including the last one and those that were not counted (P4).

    Attributes:
        intensity: Number of failures that are healed.
        period: Seconds.
    """

    def __init__(self, intensity: int, period: float) -> None:
        self.intensity = intensity
        self.period = period
        self._entries: deque[_Entry] = deque()

    def count(self, unit: int, cause: Exception, now: float) -> None:
        """Record a failure to heal."""
        self._add(unit, cause, now, is_counted=True)

    def add(self, unit: int, cause: Exception, now: float) -> None:
        """Record a failure that belongs to a round in progress, without counting it."""
        self._add(unit, cause, now, is_counted=False)

    def _add(self, unit: int, cause: Exception, now: float, *, is_counted: bool) -> None:
        while self._entries and self._entries[0].at <= now - self.period:
            self._entries.popleft()
        self._entries.append(_Entry(now, unit, cause, is_counted))

    def clear(self) -> None:
        self._entries.clear()

    @property
    def is_exceeded(self) -> bool:
        """True if the last failure exceeded the intensity."""
        return sum(entry.is_counted for entry in self._entries) > self.intensity

    def attempts(self, unit: int) -> int:
        """Return how often a unit has failed in the period."""
        return sum(entry.is_counted and entry.unit == unit for entry in self._entries)

    @property
    def causes(self) -> Sequence[Exception]:
        """Failures of the period, oldest first."""
        return [entry.cause for entry in self._entries]
