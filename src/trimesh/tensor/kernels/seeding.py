"""The kernels behind `seeding`: the generators of one rank."""

from __future__ import annotations

from typing import Final

import torch

from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.random import generator_of
from trimesh.tensor.rank.rank import Rank, TeamOnRank


def seed_generators(rank: Rank, team: TeamOnRank, seed: int, step: int) -> None:
    """Seed the generators of this process, and, with one seed, that of the team's global tensors."""
    torch.manual_seed(seed + step * team.index)
    generator_of(rank, team).manual_seed(seed)


def tell_generator(rank: Rank, team: TeamOnRank, request: int) -> None:
    """Tell the controller the state of this rank's generator, and after it that of the team's global tensors."""
    *_, own, shared = _generators(rank, team)
    rank.outside.reply(request, torch.cat([own.get_state(), shared.get_state()]))


def set_generator(rank: Rank, team: TeamOnRank, states: list[memoryview]) -> None:
    """Give this rank's generator a state; and the one of the team's global tensors, if the first of them has it."""
    *_, own, shared = _generators(rank, team)
    length = shared.get_state().numel()  # that of the rank's own, too, which is of the same kind
    mine = torch.frombuffer(bytearray(states[team.index % len(states)]), dtype=torch.uint8)
    own.set_state(mine[:length])
    if len(states[0]) > length:  # of the first on all ranks: they must draw alike
        shared.set_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8)[length:].clone())


def keep_generators(rank: Rank, team: TeamOnRank) -> torch.Tensor:
    """Return the states of all generators that operations of a team may draw from on this rank."""
    return torch.cat([generator.get_state() for generator in _generators(rank, team)])


def give_generators_back(rank: Rank, team: TeamOnRank, states: torch.Tensor, known: tuple[int, ...]) -> None:
    """Give them the states that they had; those of the process itself only where no other team has kept them before."""
    at = 0
    for generator in _generators(rank, team):
        length = generator.get_state().numel()
        if team.index not in known or generator is generator_of(rank, team):
            generator.set_state(states[at : at + length].clone())  # torch reads it from the start of its memory
        at += length


def _generators(rank: Rank, team: TeamOnRank) -> list[torch.Generator]:
    """Return those of the process, that of the rank's device last, and that of the team's global tensors.

    They are asked themselves: torch's functions for their states take those of meshes along (`generator_states`), which
    in a simulation are those of this very process.
    """
    own = [torch.default_generator]
    if rank.device.type == "cuda":
        own.append(torch.cuda.default_generators[rank.device.index or 0])
    return [*own, generator_of(rank, team)]


KERNELS: Final = (
    Kernel("seed", seed_generators),
    Kernel("get_generator", tell_generator),
    Kernel("set_generator", set_generator),
    Kernel("keep_generators", keep_generators),
    Kernel("give_generators_back", give_generators_back),
)
