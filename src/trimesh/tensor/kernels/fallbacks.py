"""The kernels behind `fallbacks` and `traffic`: what this rank has run on whole tensors, and what it has sent."""

from __future__ import annotations

from typing import Final

from trimesh.tensor.groups.traffic import TrafficCounts
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.engine import engine_of


def tell_fallbacks(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Tell the controller how often each operator had no rule, and how many operators of global tensors there were."""
    counts = engine_of(rank).counts
    if team.index == 0:
        rank.outside.reply(request, (dict(counts.fallbacks), counts.all))


def tell_traffic(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Tell the controller which collectives this rank took part in, and what it has sent in them."""
    counts = rank.above.get(TrafficCounts, TrafficCounts())
    if team.index == 0:
        found = [[labels, name, *both] for labels, named in counts.by_labels.items() for name, both in named.items()]
        rank.outside.reply(request, found)


KERNELS: Final = (Kernel("fallbacks", tell_fallbacks), Kernel("traffic", tell_traffic))
