"""The kernel behind `fallbacks`: what this rank has run on whole tensors."""

from __future__ import annotations

from typing import Final

from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.engine import engine_of


def tell_fallbacks(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Tell the controller how often each operator had no rule, and how many operators of global tensors there were."""
    engine = engine_of(rank)
    if team.index == 0:
        rank.outside.reply(request, (dict(engine.fallbacks), engine.count))


KERNELS: Final = (Kernel("fallbacks", tell_fallbacks),)
