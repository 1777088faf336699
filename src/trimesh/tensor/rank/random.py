"""The random numbers of global tensors: one generator for each team, in the same state on all of its ranks."""

from __future__ import annotations

import torch

from trimesh.tensor.rank.rank import Rank, TeamOnRank


def generator_of(rank: Rank, team: TeamOnRank) -> torch.Generator:
    """Return the generator of a team; all ranks draw from it alike. Torch's own seed until it is given another."""
    found = team.above.get(torch.Generator)
    if found is None:
        found = team.above[torch.Generator] = torch.Generator(rank.device)
    assert isinstance(found, torch.Generator)
    return found
