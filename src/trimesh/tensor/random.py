"""The random numbers of global tensors: one generator for each team, in the same state on all of its ranks."""

from __future__ import annotations

import torch

from trimesh.tensor.kernel import kernel
from trimesh.tensor.rank import Rank, TeamOnRank


def generator_of(rank: Rank, team: TeamOnRank) -> torch.Generator:
    """Return the generator of a team; all ranks draw from it alike. Torch's own seed until `seed_global` is called."""
    found = team.above.get(torch.Generator)
    if found is None:
        found = team.above[torch.Generator] = torch.Generator(rank.device)
    assert isinstance(found, torch.Generator)
    return found


@kernel("seed_global")
def seed_global(rank: Rank, team: TeamOnRank, seed: int) -> None:
    """Begin the random numbers of global tensors anew."""
    generator_of(rank, team).manual_seed(seed)
