"""What a failure does: policies as the user states them, and the verdict of one over one failure. Pure.

|               | named in `on`                        | not named, a member has ended | not named, it lives |
|---------------|--------------------------------------|-------------------------------|---------------------|
| `FailFast`    | the block fails                      | the member is given up        | an event            |
| `Isolate`     | (takes no `on`)                      | the member is given up        | an event            |
| `Restart`     | by `when`: restarted, or given up    | the block fails               | an event            |
"""

from __future__ import annotations

import enum
from typing import Any, Literal, cast, get_args

import attrs

from trimesh._supervision.backoff import Backoff
from trimesh.errors import ActorFailed, HostLost, LinkLost, ProcDied, Unresponsive
from trimesh.plain_numbers import plain_real, plain_whole

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
When = Literal["permanent", "transient", "temporary"]
On = tuple[type[Exception], ...]

FAILURES: On = (ProcDied, HostLost, LinkLost, Unresponsive, ActorFailed)
"""What a policy can name. `ActorFailed` stands for every failure of an actor that has no caller."""


class Ending(enum.Enum):
    """How a member has failed, or ended (the columns of the table of OTP)."""

    NORMAL = "normal"
    """It has ended by itself, without an error: a process with exit code 0, an actor whose `lifespan` returned."""

    CANCELLED = "cancelled"
    """It was asked to end: a process that SIGTERM or SIGINT has ended, an actor that cancelled itself."""

    ERROR = "error"
    """Anything else."""


class Verdict(enum.Enum):
    """What is to be done about a failure."""

    FAIL = "fail"
    """The owning block fails."""

    RESTART = "restart"
    """The unit of the member is restarted."""

    GIVE_UP = "give up"
    """The member is gone for good; everything else goes on."""

    NOTE = "note"
    """The member lives; it is an event and nothing more."""


def _checked_on(value: Any) -> On:
    found = cast("On", value) if isinstance(value, tuple) else (value,)
    for one in found:
        if one not in FAILURES:
            names = ", ".join(kind.__name__ for kind in FAILURES)
            raise TypeError(f"on= must name failures among {names}, got {one!r}: write on=(ProcDied, Unresponsive)")
    return found


def _one_of(choices: Any) -> Any:
    allowed = get_args(choices)

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in allowed:
            names = ", ".join(repr(choice) for choice in allowed)
            raise ValueError(f"Restart({attribute.name}=...) must be one of {names}, got {value!r}")

    return check


def _check_intensity(_: object, __: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"Restart(intensity=...) must be a number of restarts >= 0, got {value!r}")


def _check_period(_: object, __: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"Restart(period=...) must be a number of seconds > 0 (math.inf counts all), got {value!r}")


def _check_along(_: object, __: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"Restart(along=...) must be the label of one dimension, got {value!r}: write along='replica'")


def _check_backoff(_: object, __: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Backoff):
        raise TypeError(f"Restart(backoff=...) must be a Backoff, got {value!r}: write Backoff(0.1, cap=5)")


@attrs.frozen
class FailFast:
    """A failure cancels the owning block, which raises it. The default.

    Attributes:
        on: The failures that do; others are events, and what they have ended stays ended. By default all but
            `Unresponsive`.

    Raises:
        TypeError: `on` names something that is no failure.
    """

    on: On = attrs.field(default=(ProcDied, HostLost, LinkLost, ActorFailed), converter=_checked_on)


@attrs.frozen
class Isolate:
    """A failure is an event; the block goes on without what has ended, and calls that address it raise."""


@attrs.frozen
class Restart:
    """What has ended is started again, up to a limit.

    Attributes:
        strategy: What is restarted with the unit that failed: "one_for_one" nothing, "one_for_all" every other unit,
            "rest_for_one" those after it in spawn order.
        along: The unit is the slice along this dimension: all members with the same coordinate there. None makes each
            member a unit.
        intensity: So many failures in `period` are healed; one more raises `RestartLimit`.
        period: Seconds; `math.inf` counts all failures.
        backoff: The wait before a restart.
        on: The failures that are healed.
        when: "permanent" restarts however it has ended, "transient" after an error only, "temporary" never.

    Raises:
        ValueError: A number is outside of its range, or a name is none of those above.
        TypeError: `along` is no label, `on` names something that is no failure.
    """

    strategy: Strategy = attrs.field(default="one_for_one", validator=_one_of(Strategy))
    along: str | None = attrs.field(default=None, kw_only=True, validator=_check_along)
    intensity: int = attrs.field(default=3, kw_only=True, converter=plain_whole, validator=_check_intensity)
    period: float = attrs.field(default=60.0, kw_only=True, converter=plain_real, validator=_check_period)
    backoff: Backoff = attrs.field(default=Backoff(), kw_only=True, validator=_check_backoff)
    on: On = attrs.field(default=(ProcDied, HostLost), kw_only=True, converter=_checked_on)
    when: When = attrs.field(default="permanent", kw_only=True, validator=_one_of(When))


Policy = FailFast | Isolate | Restart


def checked_policy(policy: Any) -> Policy:
    """Return `policy`.

    Raises:
        TypeError: It is none.
    """
    if isinstance(policy, type) and issubclass(policy, FailFast | Isolate | Restart):
        raise TypeError(f"supervision must be a policy, got the class: write {policy.__name__}()")
    if not isinstance(policy, FailFast | Isolate | Restart):
        raise TypeError(f"supervision must be FailFast(), Isolate() or Restart(...), got {policy!r}")
    return policy


def replaces_all(policy: Policy) -> bool:
    """Return whether a failure of one member restarts every other one, too."""
    return isinstance(policy, Restart) and policy.strategy == "one_for_all"


def is_healing(policy: Policy) -> bool:
    """Return whether a member that has ended may be followed by another one at its place."""
    return not isinstance(policy, FailFast)


def judge(policy: Policy, kind: type[Exception], ending: Ending, *, has_ended: bool) -> Verdict:
    """Return what `policy` wants to be done about a failure.

    Args:
        kind: One of `FAILURES`, or a class that a policy cannot name.
        has_ended: Whether the member is gone by it.
    """
    unnamed = Verdict.GIVE_UP if has_ended else Verdict.NOTE
    if isinstance(policy, Isolate):
        return unnamed
    is_named = issubclass(kind, policy.on)
    if isinstance(policy, FailFast):
        return Verdict.FAIL if is_named else unnamed
    if not is_named:
        # To end without an error is no failure (R11), even where it was not asked for.
        return Verdict.FAIL if has_ended and ending is Ending.ERROR else unnamed
    is_wanted = policy.when == "permanent" or (policy.when == "transient" and ending is Ending.ERROR)
    return Verdict.RESTART if is_wanted else unnamed


def ending_of(exit_code: int | None, signal: int | None) -> Ending:
    """Return how a process has ended that none of ours had asked to."""
    if signal in _ASKING:
        return Ending.CANCELLED
    return Ending.NORMAL if exit_code == 0 and signal is None else Ending.ERROR


_ASKING = (2, 15)
"""SIGINT and SIGTERM, by which one asks a process to end."""
