"""The kernels behind `seeding`: the generators of one rank."""

from __future__ import annotations

import torch

from trimesh.tensor.kernel import kernel
from trimesh.tensor.random import generator_of
from trimesh.tensor.rank import Rank, TeamOnRank


@kernel("seed")
def seed_generators(rank: Rank, team: TeamOnRank, seed: int, step: int) -> None:
    """Seed the generators of this process, and, with one seed, that of the team's global tensors."""
    torch.manual_seed(seed + step * team.index)
    generator_of(rank, team).manual_seed(seed)


@kernel("get_generator")
def tell_generator(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Tell the controller the state of this rank's generator."""
    del team
    on_device = rank.device.type == "cuda"
    rank.outside.reply(request, torch.cuda.get_rng_state(rank.device) if on_device else torch.get_rng_state())


@kernel("set_generator")
def set_generator(rank: Rank, team: TeamOnRank, states: list[memoryview]) -> None:
    """Give this rank's generator a state."""
    state = torch.frombuffer(bytearray(states[team.index % len(states)]), dtype=torch.uint8)
    if rank.device.type == "cuda":
        torch.cuda.set_rng_state(state, rank.device)
    else:
        torch.set_rng_state(state)
