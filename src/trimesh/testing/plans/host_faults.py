"""Host faults: loss, partition, bad network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from trimesh.errors import ShapeError
from trimesh.testing.plans.fault import (
    Direction,
    Fault,
    Heal,
    UnsupportedFault,
    checked_amount,
    checked_direction,
    healed,
)

if TYPE_CHECKING:
    from trimesh.testing.plans.faults import Faults
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.real.network_job import NetworkJob
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation


@attrs.frozen
class HostFault(Fault):
    """A host of a job is lost, cut off until it is healed, or has a bad network.

    Attributes:
        host: Its rank among those of the job.
        kind: "lose" or "cut"; of real networks alone, "drop", "bandwidth" or "reset".
        direction: Direction of "cut" and "drop": "a_to_b" is to the host, "b_to_a" from it.
        amount: Probability of "drop" for a packet; bytes a second of "bandwidth".
    """

    host: int
    kind: Literal["lose", "cut", "drop", "bandwidth", "reset"]
    direction: Direction = "both"
    amount: float = 0.0

    def __str__(self) -> str:
        amount = f" {self.amount:g}" if self.amount else ""
        return f"host {self.host}: {self.kind}{amount}" + ("" if self.direction == "both" else f"({self.direction})")

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        self._check(len(run.hosts))
        if self.kind not in ("lose", "cut"):
            raise UnsupportedFault(f'simulated hosts have no packets: run on the back end "net", got {self}')
        host = run.hosts[self.host]
        run.fire(planned.index, "host", host.name)
        if self.kind == "cut":
            return host.cut(self.direction)
        host.end_agent()
        host.lose("agent exit", "its agent has ended (simulated)")
        return healed

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        if run.job is None:
            raise UnsupportedFault(
                f'faults of hosts need the back end "sim" or "net" with simulate(hosts=), got {self}'
            )
        self._check(run.job.hosts)
        heal = self._disturb(run.job)
        run.fire(planned.index, "host", f"host {self.host}")
        return heal

    def _disturb(self, job: NetworkJob) -> Heal:
        match self.kind:
            case "cut":
                return job.network.cut([self.host], self.direction)
            case "drop":
                return job.network.lose_packets([self.host], self.amount, self.direction)
            case "bandwidth":
                return job.network.limit([self.host], 8 * self.amount)
            case "reset":
                job.network.reset([self.host])
            case "lose":
                job.kill_agent(self.host)
        return healed

    def _check(self, hosts: int) -> None:
        if not 0 <= self.host < hosts:
            raise ShapeError(f"the rank of a host must be below simulate(hosts={hosts}), got host {self.host}")


@attrs.frozen(eq=False)
class OfHost:
    """A host; its fault is chosen next."""

    _faults: Faults
    _rank: int

    def lose(self) -> None:
        """End its agent now, and everything on the host with it: `HostLost` with the reason "agent exit"."""
        self._faults.plan(HostFault(self._rank, "lose"))

    def cut(self, direction: Direction = "both") -> Heal:
        """Cut the host off from everything else until the returned function is called.

        Messages sent meanwhile arrive afterwards, if no lease has expired. After `limits.AGENT_LEASE_SECONDS` of
        silence from the program everything on the host ends; after `limits.HOST_LEASE_SECONDS` of silence from the
        host the program gives it up, with a `HostLost` with the reason "lease".

        Args:
            direction: "a_to_b" blocks traffic to the host, "b_to_a" traffic from it.

        Raises:
            ValueError: There is no such direction.
        """
        return self._faults.plan(HostFault(self._rank, "cut", checked_direction(direction)))

    def drop(self, probability: float, direction: Direction = "both") -> Heal:
        """Drop packets between the host and everything else until the returned function is called. TCP resends them.

        Raises:
            UnsupportedFault: The hosts are simulated, or there is no network: the back end is not "net".
            ValueError: It is no probability, or there is no such direction.
        """
        amount = checked_amount("a probability", probability, most=1)
        return self._faults.plan(HostFault(self._rank, "drop", checked_direction(direction), amount))

    def bandwidth(self, bytes_per_second: float) -> Heal:
        """Limit its network bandwidth, each way, until the returned function is called. Raises as `drop` does."""
        amount = checked_amount("bytes a second", bytes_per_second)
        return self._faults.plan(HostFault(self._rank, "bandwidth", amount=amount))

    def reset(self) -> None:
        """Break its TCP connections, by resets, now. Nothing is lost: sessions go on. Raises as `drop` does."""
        self._faults.plan(HostFault(self._rank, "reset"))
