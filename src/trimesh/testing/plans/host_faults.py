"""`faults.host(1)`: what can happen to a host of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trimesh.testing.plans.vocabulary import DIRECTIONS, Direction, HostFault, checked_amount

if TYPE_CHECKING:
    from trimesh.testing.plans.faults import Faults, Heal


@attrs.frozen(eq=False)
class OfHost:
    """A host, of which it remains to be said what happens to it."""

    _faults: Faults
    _rank: int

    def lose(self) -> None:
        """End its agent now, and everything there with it: `HostLost` with the reason "agent exit"."""
        self._faults.plan(HostFault(self._rank, "lose"))

    def cut(self, direction: Direction = "both") -> Heal:
        """Let nothing pass between it and everything else, until what is returned is called.

        What was sent meanwhile arrives then, if no lease has run out: after `limits.AGENT_LEASE_SECONDS` without a word
        from the program everything on the host ends, and after `limits.HOST_LEASE_SECONDS` without one from the host
        the program gives it up, as `HostLost` with the reason "lease".

        Args:
            direction: "a_to_b" lets nothing come to the host, "b_to_a" lets nothing leave it.

        Raises:
            ValueError: There is no such direction.
        """
        return self._faults.plan(HostFault(self._rank, "cut", _checked(direction)))

    def drop(self, probability: float, direction: Direction = "both") -> Heal:
        """Lose packets between it and everything else, until what is returned is called: TCP sends them again.

        Raises:
            UnsupportedFault: The hosts are simulated, or there is no network: the back end is not "net".
            ValueError: It is no probability, or there is no such direction.
        """
        amount = checked_amount("a probability", probability, most=1)
        return self._faults.plan(HostFault(self._rank, "drop", _checked(direction), amount))

    def bandwidth(self, bytes_per_second: float) -> Heal:
        """Let its network carry no more than this each way, until what is returned is called. Raises as `drop` does."""
        amount = checked_amount("bytes a second", bytes_per_second)
        return self._faults.plan(HostFault(self._rank, "bandwidth", amount=amount))

    def reset(self) -> None:
        """Break its TCP connections, by resets, now. Nothing is lost: sessions go on. Raises as `drop` does."""
        self._faults.plan(HostFault(self._rank, "reset"))


def _checked(direction: Direction) -> Direction:
    if direction not in DIRECTIONS:
        raise ValueError(f"a direction is one of {', '.join(DIRECTIONS)}; got {direction!r}")
    return direction
