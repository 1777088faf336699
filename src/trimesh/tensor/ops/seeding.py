"""Random numbers on the ranks: seeds, and the state of their generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trimesh._runtime.tasks import in_trio
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller import expected
from trimesh.tensor.controller.answers import answers
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.upload import bytes_of
from trimesh.tensor.session.mesh import team_of


def manual_seed(seed: int, mesh: ProcMesh, *, same: bool = False) -> None:
    """Seed torch's generators on the ranks, in order with the operations on their tensors.

    `torch.manual_seed` seeds those of this process only. A rank's generator is shared by all that runs in its process.
    Global tensors of this view draw from one of their own, the same on every rank: it gets `seed`, and gives the
    numbers that torch gives here after `torch.manual_seed(seed)`, however the tensors lie.

    Args:
        seed: Of the first rank of the view; the others have one more each.
        mesh: The processes.
        same: Whether all have the same seed instead.

    Raises:
        RuntimeError: The mesh is a reference, or `this_proc()`.
    """
    call_kernel(team_of(mesh, "generators are seeded on"), "seed", seed, 0 if same else 1)


async def get_rng_state(mesh: ProcMesh) -> ValueMesh[torch.Tensor]:
    """Return the state of torch's generator on each rank, after what was issued so far.

    It is followed, in the same tensor, by the state of the generator that global tensors of this view draw from.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.
    """
    team = team_of(mesh, "the state of generators is asked of")
    found = await in_trio(_states)(team)
    return ValueMesh(team.region, found)


def set_rng_state(states: ValueMesh[torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor, mesh: ProcMesh) -> None:
    """Give the ranks' generators a state, in order with the operations on their tensors.

    The generator of global tensors gets that of the first rank's state, on all ranks: they draw alike.

    Args:
        states: What `get_rng_state` has returned, or one for all. One of `torch.get_rng_state()` leaves the generator
            of global tensors as it is.
        mesh: The processes.

    Raises:
        ValueError: There are not as many as ranks.
        RuntimeError: The mesh is a reference, or `this_proc()`.
    """
    team = team_of(mesh, "the state of generators is set on")
    each = [states] if isinstance(states, torch.Tensor) else list(_each(states))
    if len(each) not in (1, len(team.peers)):
        raise ValueError(f"there must be one state for all ranks or one for each of {len(team.peers)}, got {len(each)}")
    call_kernel(team, "set_generator", [bytes_of(state) for state in each])


async def _states(team: Team) -> list[Any]:
    places = range(len(team.peers))
    request = team.engine.ask(
        team, places, lambda number: call_kernel(team, "get_generator", number), expected.RNG_STATE
    )
    found = await answers(request)
    return [found[place] for place in places]


def _each(states: ValueMesh[torch.Tensor] | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return list(states.values()) if isinstance(states, ValueMesh) else states
