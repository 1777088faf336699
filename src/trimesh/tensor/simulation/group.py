"""Process groups of simulated ranks: what goes through them is counted, and does not go anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d

from trimesh.tensor.groups.group import Group
from trimesh.tensor.groups.traffic import TrafficCounts, sent_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimesh.tensor.simulation.device import Device, RankLink
    from trimesh.tensor.simulation.meter import Meter

_c10d: Any = _distributed_c10d  # whose stub leaves out much


class MeteredCounts(TrafficCounts):
    """The collectives of one simulated rank, which take time.

    Args:
        meter: Of the rank.
        links: By label of the mesh, where the program has said what joins the ranks along it.
    """

    def __init__(self, meter: Meter, links: Mapping[str, RankLink]) -> None:
        super().__init__()
        self._meter = meter
        self._links = links
        self.ranks: Sequence[int] = ()

    def count(self, labels: str, name: str, ranks: int, args: tuple[Any, ...], begun: int = 0) -> None:
        super().count(labels, name, ranks, args, begun)
        link = self._link(labels.split(","))
        self._meter.collective(name, labels, link, ranks, sent_bytes(name, ranks, args))

    def _link(self, labels: Sequence[str]) -> RankLink:
        """Return what joins the ranks: of several dimensions the slowest."""
        device = self._meter.device
        found = [self._links[label] for label in labels if label in self._links]
        if len(found) < len(labels):
            found.append(link_between(device, self.ranks))
        return min(found, key=lambda one: one.bytes_per_second)


def link_between(device: Device, ranks: Sequence[int]) -> RankLink:
    """Return what joins some ranks, which are numbered host by host."""
    hosts = {rank // device.per_host for rank in ranks}
    return device.link if len(hosts) < 2 else device.network


class SimulatedGroup(Group):
    """A process group of which one rank is simulated."""

    def run(self, function: Callable[..., Any], *, may_repeat: bool = True) -> Any:
        """Do nothing together: what comes of it has the shape that it has."""
        del function, may_repeat
        counts = self._counts
        assert isinstance(counts, MeteredCounts)
        counts.ranks = [self._team.ranks[place] for place in self.places]
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return _c10d._create_work_from_future(done)

    def leave(self, error: BaseException) -> None:
        """Nothing: no other rank waits."""

    def destroy(self) -> None:
        """Nothing: it has no connection."""
