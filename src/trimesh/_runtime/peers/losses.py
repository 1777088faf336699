"""How a host was lost, with all that ran there: one failure, and what each of its processes has died of."""

from __future__ import annotations

import msgspec

from trimesh._runtime.system.records import LostHost
from trimesh.errors import HostLost, Origin, place_name, set_origin
from trimesh.shape.extent import Extent, Point


class HostLoss(msgspec.Struct, frozen=True):
    """The loss of one host; called, it is what a process there has died of (`DeathOf`).

    Attributes:
        reason: See `HostLost.reason`.
        text: The same in words.
        point: Its place among the hosts of its job.
    """

    host: str
    reason: str
    text: str
    point: Point | None = None
    job: str = "hosts"

    @classmethod
    def of(cls, lost: LostHost) -> HostLoss:
        """Return the loss that another process has been told of."""
        point = Extent(hosts=lost.hosts).point(lost.rank) if lost.rank < lost.hosts else None
        return cls(lost.host, lost.reason, lost.text, point)

    @property
    def record(self) -> LostHost:
        """What other processes are told."""
        hosts, rank = (0, 0) if self.point is None else (self.point.extent.nelements, self.point.rank)
        return LostHost(self.host, self.reason, self.text, hosts, rank)

    def __call__(self, *, maybe_executed: bool = True) -> Exception:
        """Return an error of its own for one call, or for a block."""
        place = "" if self.point is None else f" {place_name(self.job, self.point)}"
        error = HostLost(
            f"the host {self.host}{place} was lost with all that ran there: {self.text}",
            host=self.host,
            point=self.point,
            reason=self.reason,
        )
        set_origin(error, Origin(self.point, self.job, host=self.host))
        return error


class ToldLosses:
    """The hosts whose loss a block has been told of: that is one failure, not one for each process there."""

    def __init__(self) -> None:
        self._told = set[tuple[str, Point | None]]()

    def is_told(self, error: Exception) -> bool:
        """Return whether an error is the loss of a host that was told before; it is from now on."""
        if not isinstance(error, HostLost):
            return False
        lost = (error.host, error.point)
        is_told = lost in self._told
        self._told.add(lost)
        return is_told
