"""Failure policies: what users configure, and the verdict of a policy on one failure. Pure.

|               | named in `on`                        | not named, a member has ended | not named, it lives |
|---------------|--------------------------------------|-------------------------------|---------------------|
| `FailFast`    | the block fails                      | the member is given up        | an event            |
| `Isolate`     | (takes no `on`)                      | the member is given up        | an event            |
| `Restart`     | by `when`: restarted, or given up    | the block fails               | an event            |

Roster of an elastic mesh: numbered membership changes, and those that a reader has not seen yet. Pure.

    epoch 0 --join(ranks)--> 1 --leave(ranks, why)--> 2 ...

RO-1 the epoch grows by one with each change, and with nothing else.
RO-2 a rank that has left is not reported again before it has joined again: the first reason stays.
RO-3 a reader gets all missed changes at once: between two reads, each incarnation joins and leaves at most once.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import msgspec
from msgspec.structs import force_setattr

from trimesh.errors import ActorFailed, HostLost, LinkLost, ProcDied, ShapeError, Unresponsive
from trimesh.plain_numbers import plain_real, plain_whole
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


class Backoff(msgspec.Struct, frozen=True):
    """Delay before each restart of a unit: `initial`, then `factor` times longer each time, at most `cap`.

    Attributes:
        initial: Seconds before the first restart.
        cap: Maximum delay in seconds.
        factor: Ratio of each delay to the previous one.
        jitter: Fraction of the delay, 0 to 1, that may be subtracted at random, so that units that failed together do
            not restart together.

    Raises:
        ValueError: A number is out of range.
    """

    initial: float = 0.1
    cap: float = 5.0
    factor: float = 2.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        for name, least, most, wanted in _BACKOFF_RANGES:
            value = plain_real(getattr(self, name))
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(f"Backoff({name}=...) must be a number {wanted}, got {value!r}")
            force_setattr(self, name, value)

    def delay(self, attempt: int, luck: float = 0.0) -> float:
        """Return the delay in seconds.

        Args:
            attempt: 1 for the first failure of the period.
            luck: Random number between 0 and 1, from the caller.
        """
        try:
            wait = self.initial * self.factor ** (attempt - 1)
        except OverflowError:
            wait = self.cap if self.initial else 0.0
        return min(wait, self.cap) * (1.0 - self.jitter * luck)


_BACKOFF_RANGES = (
    ("initial", 0, sys.float_info.max, "of seconds >= 0"),
    ("cap", 0, sys.float_info.max, "of seconds >= 0"),
    ("factor", 1, sys.float_info.max, ">= 1"),
    ("jitter", 0, 1, "between 0 and 1"),
)
"""Name of a field, its least and greatest value, and how an error says that."""


# ---- policy ----------------------------------------------------------------------------------------------------------

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
When = Literal["permanent", "transient", "temporary"]
On = tuple[type[Exception], ...]

FAILURES: On = (ProcDied, HostLost, LinkLost, Unresponsive, ActorFailed)
"""Failures that a policy can name. `ActorFailed` stands for every failure of an actor without a caller."""


class Ending(enum.Enum):
    """Way in which a member has failed or ended (the columns of OTP's table)."""

    NORMAL = "normal"
    """Ended by itself, without an error: a process with exit code 0, an actor whose `lifespan` returned."""

    CANCELLED = "cancelled"
    """Requested to end: a process ended by SIGTERM or SIGINT, an actor that cancelled itself."""

    ERROR = "error"
    """Anything else."""


class Verdict(enum.Enum):
    """Reaction to a failure."""

    FAIL = "fail"
    """The owning block fails."""

    RESTART = "restart"
    """The unit of the member is restarted."""

    GIVE_UP = "give up"
    """The member is gone for good; everything else continues."""

    NOTE = "note"
    """The member lives; the failure is only an event."""


def _checked_on(value: Any) -> On:
    found = cast("On", value) if isinstance(value, tuple) else (value,)
    for one in found:
        if one not in FAILURES:
            names = ", ".join(kind.__name__ for kind in FAILURES)
            raise TypeError(f"on= must name failures among {names}, got {one!r}: write on=(ProcDied, Unresponsive)")
    return found


def _check_choice(name: str, value: Any, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"Restart({name}=...) must be one of {names}, got {value!r}")


class FailFast(msgspec.Struct, frozen=True):
    """A failure cancels the owning block, which raises it. The default.

    Attributes:
        on: Failures that cancel the block; others are events, and members that they ended stay ended. Default: all
            but `Unresponsive`.

    Raises:
        TypeError: `on` contains something other than a failure class.
    """

    on: On = (ProcDied, HostLost, LinkLost, ActorFailed)

    def __post_init__(self) -> None:
        force_setattr(self, "on", _checked_on(self.on))


class Isolate(msgspec.Struct, frozen=True):
    """A failure is an event; the block continues without the ended member, and calls to it raise."""


class _Strategy(msgspec.Struct, frozen=True):
    """The field of `Restart` that may be positional."""

    strategy: Strategy = "one_for_one"


class Restart(_Strategy, frozen=True, kw_only=True):
    """Members that have ended are restarted, up to a limit.

    Attributes:
        strategy: Units restarted with the failed one: "one_for_one" none, "one_for_all" all others, "rest_for_one"
            those after it in spawn order.
        along: The unit is the slice along this dimension: all members with the same coordinate there. None makes each
            member a unit.
        intensity: Number of failures in `period` that are healed; one more raises `RestartLimit`.
        period: Seconds; `math.inf` counts all failures.
        backoff: Delay before a restart.
        on: Failures that are healed.
        when: "permanent" restarts after any end, "transient" after an error only, "temporary" never.

    Raises:
        ValueError: A number is out of range, or a name is none of those above.
        TypeError: `along` is not a label, or `on` contains something other than a failure class.
    """

    along: str | None = None
    intensity: int = 3
    period: float = 60.0
    backoff: Backoff = Backoff()
    on: On = (ProcDied, HostLost)
    when: When = "permanent"

    def __post_init__(self) -> None:
        _check_choice("strategy", self.strategy, Strategy)
        along: object = self.along
        if along is not None and not isinstance(along, str):
            raise TypeError(
                f"Restart(along=...) must be the label of one dimension, got {along!r}: write along='replica'"
            )
        intensity = plain_whole(self.intensity)
        if not isinstance(intensity, int) or isinstance(intensity, bool) or intensity < 0:
            raise ValueError(f"Restart(intensity=...) must be a number of restarts >= 0, got {intensity!r}")
        period = plain_real(self.period)
        if isinstance(period, bool) or not isinstance(period, int | float) or not period > 0:
            raise ValueError(
                f"Restart(period=...) must be a number of seconds > 0 (math.inf counts all), got {period!r}"
            )
        backoff: object = self.backoff
        if not isinstance(backoff, Backoff):
            raise TypeError(f"Restart(backoff=...) must be a Backoff, got {backoff!r}: write Backoff(0.1, cap=5)")
        _check_choice("when", self.when, When)
        force_setattr(self, "intensity", intensity)
        force_setattr(self, "period", period)
        force_setattr(self, "on", _checked_on(self.on))


Policy = FailFast | Isolate | Restart


def checked_policy(policy: Any) -> Policy:
    """Return `policy` after checking its type.

    Raises:
        TypeError: It is not a policy.
    """
    if isinstance(policy, type) and issubclass(policy, FailFast | Isolate | Restart):
        raise TypeError(f"supervision must be a policy, got the class: write {policy.__name__}()")
    if not isinstance(policy, FailFast | Isolate | Restart):
        raise TypeError(f"supervision must be FailFast(), Isolate() or Restart(...), got {policy!r}")
    return policy


def replaces_all(policy: Policy) -> bool:
    """Return whether a failure of one member restarts all others, too."""
    return isinstance(policy, Restart) and policy.strategy == "one_for_all"


def is_healing(policy: Policy) -> bool:
    """Return whether a member that has ended may be replaced at its rank."""
    return not isinstance(policy, FailFast)


class MemberFailure(msgspec.Struct, frozen=True):
    """A failure of one member, as a policy sees it.

    Attributes:
        kind: One of `FAILURES`, or a class that a policy cannot name.
        has_ended: Whether the failure ended the member.
        of: "process"; "actor", whose normal end matters only to `Restart` (R11); or "handed up": the process lives,
            but its actor's policy could not heal the actor (P1), or the actor is silent.
    """

    kind: type[Exception]
    ending: Ending = Ending.ERROR
    has_ended: bool = True
    of: Literal["process", "actor", "handed up"] = "process"

    @property
    def unnamed(self) -> Verdict:
        """The verdict of a policy that does not name it."""
        return Verdict.GIVE_UP if self.has_ended else Verdict.NOTE


def judge(failure: MemberFailure, policy: Policy) -> Verdict:
    """Return the verdict of `policy` on a failure."""
    unnamed = failure.unnamed
    if isinstance(policy, Isolate):
        return unnamed
    is_named = issubclass(failure.kind, policy.on)
    if isinstance(policy, FailFast):
        return Verdict.FAIL if is_named else unnamed
    if not is_named:
        # An end without an error does not count as a failure (R11), even if it was not requested.
        return Verdict.FAIL if failure.has_ended and failure.ending is Ending.ERROR else unnamed
    is_wanted = policy.when == "permanent" or (policy.when == "transient" and failure.ending is Ending.ERROR)
    return Verdict.RESTART if is_wanted else unnamed


class MeshState(msgspec.Struct, frozen=True):
    """State of a mesh that a decision depends on, besides failure and policy.

    Attributes:
        is_ending: The member belongs to a round that is being taken down, so its end is expected.
        is_used_up: No more restarts: there were too many, or the block is being left.
        is_stopping: The block is being left.
    """

    is_ending: bool = False
    is_used_up: bool = False
    is_stopping: bool = False


class Effects(msgspec.Struct, frozen=True):
    """Effects of a failure.

    Attributes:
        asks: Whether failure handlers run first; if one of them handles the failure, the verdict does not apply.
        verdict: Reaction to an unhandled failure.
    """

    asks: bool
    verdict: Verdict


def decide(failure: MemberFailure, policy: Policy, state: MeshState) -> Effects:
    """Return the effects of a member's failure."""
    is_error = failure.ending is Ending.ERROR
    restarts = isinstance(policy, Restart)
    unnamed = failure.unnamed
    if failure.of == "handed up":
        asks = True
        verdict = Verdict.RESTART if restarts else Verdict.FAIL if isinstance(policy, FailFast) else unnamed
    elif failure.of == "actor":
        asks = is_error and not state.is_ending
        is_judged = is_error or restarts
        verdict = judge(failure, policy) if is_judged else unnamed
    else:
        verdict = judge(failure, policy)
        asks = (verdict is not unnamed or failure.ending is not Ending.NORMAL) and not state.is_ending
    if restarts and (verdict is Verdict.RESTART or state.is_ending):
        # Used-up restarts have failed the block; a block that is being left just needs no replacement.
        over = unnamed if state.is_stopping else Verdict.FAIL
        verdict = over if state.is_used_up else Verdict.RESTART
    return Effects(asks, verdict)


def ending_of(exit_code: int | None, signal: int | None) -> Ending:
    """Classify the end of a process that trimesh did not request."""
    if signal in _ASKING:
        return Ending.CANCELLED
    return Ending.NORMAL if exit_code == 0 and signal is None else Ending.ERROR


_ASKING = (2, 15)
"""SIGINT and SIGTERM, which request a process to end."""


# ---- the units that a policy restarts as a whole ---------------------------------------------------------------------


def check_units(policy: Policy, extent: Extent) -> None:
    """Check that a mesh has the dimension of a policy's units.

    Raises:
        ShapeError: It does not; the text names the existing dimensions.
    """
    if isinstance(policy, Restart) and policy.along is not None and policy.along not in extent:
        names = ", ".join(repr(label) for label in extent) or "none"
        raise ShapeError(f"Restart(along={policy.along!r}) must name a dimension of the mesh, which has: {names}")


def units_of(region: Region, along: str | None) -> Sequence[Sequence[int]]:
    """Return the base ranks of each unit, in spawn order.

    Args:
        region: The mesh as spawned.
        along: The unit is the slice along this dimension; None makes each member a unit.
    """
    if along is None:
        return [(rank,) for rank in region.ranks()]
    found: dict[int, list[int]] = {}
    for rank in region.ranks():
        found.setdefault(region.point(rank)[along], []).append(rank)
    return [found[index] for index in sorted(found)]


# ---- who is in an elastic mesh: numbered changes, and what a reader has not seen of them. Pure -----------------------


class RosterChange(msgspec.Struct, frozen=True):
    """Membership changes since a reader's last read.

    Attributes:
        epoch: Number of the current state.
        joined: Incarnation by rank of new members.
        left: (rank, incarnation, reason) of departed members.
    """

    epoch: int
    joined: Mapping[int, int]
    left: tuple[tuple[int, int, Exception], ...]


class Roster:
    """Current members of one mesh, and their changes.

    Attributes:
        epoch: Number of the last change.
        present: Incarnation by rank.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.present: dict[int, int] = {}
        self._why: dict[int, Exception] = {}

    def join(self, members: Mapping[int, int]) -> bool:
        """Record that members serve; return whether anything changed.

        Args:
            members: Incarnation by rank.
        """
        news = {rank: incarnation for rank, incarnation in members.items() if self.present.get(rank) != incarnation}
        self.present |= news
        self.epoch += bool(news)
        return bool(news)

    def leave(self, ranks: Iterable[int], why: Exception) -> bool:
        """Record that members no longer serve; return whether anything changed."""
        gone = [rank for rank in ranks if rank in self.present]
        for rank in gone:
            del self.present[rank]
            self._why[rank] = why
        self.epoch += bool(gone)
        return bool(gone)

    def since(self, seen: Mapping[int, int]) -> RosterChange:
        """Return the changes since a reader's last read.

        Args:
            seen: `present` at the reader's last read.
        """
        joined = {rank: number for rank, number in sorted(self.present.items()) if seen.get(rank) != number}
        left = [(rank, number) for rank, number in sorted(seen.items()) if self.present.get(rank) != number]
        return RosterChange(self.epoch, joined, tuple((rank, number, self._why[rank]) for rank, number in left))
