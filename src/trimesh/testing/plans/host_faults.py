"""`faults.host(1)`: what can happen to a host of a simulated job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trimesh.testing.plans.vocabulary import DIRECTIONS, Direction, HostFault

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
        if direction not in DIRECTIONS:
            raise ValueError(f"a direction is one of {', '.join(DIRECTIONS)}; got {direction!r}")
        return self._faults.plan(HostFault(self._rank, "cut", direction))
