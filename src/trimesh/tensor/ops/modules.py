"""Modules of torch with their parameters and buffers on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.global_tensor import checked_team, put, put_like
from trimesh.tensor.protocol.placement import Cut, cuts_by_label
from trimesh.tensor.session.mesh import team_of

M = TypeVar("M", bound=nn.Module)

Plan = Mapping[str, Sequence[Cut] | None]


def module_to_mesh(module: M, mesh: ProcMesh, plan: Plan | None = None) -> M:
    """Move the parameters and buffers of a module onto a mesh, as global tensors; in place, as `module.to` does.

    Make the optimizer afterwards: parameters are new objects. Shared ones stay shared. `load_state_dict` of tensors of
    this process works from then on, and each lies as what it replaces.

    Args:
        module: What is moved.
        mesh: The processes.
        plan: Placements, as `distribute` takes them, by name of parameter or buffer (`"layers.*.up.weight"`, as
            `fnmatch` has it); the first pattern that fits counts. The others are on every rank, whole: with inputs
            that are cut along a dimension of the mesh this is data parallel training.

    Returns:
        The module.

    Raises:
        ShapeError: Placements do not fit their tensor and the mesh, or a pattern fits no name. Nothing was moved.
        RuntimeError: See `ProcMesh.activate`.

    Blocking: no checkpoint.

    Example:
        >>> model = trimesh.module_to_mesh(Net(), procs, {"up.weight": ["tp", None], "down.weight": [None, "tp"]})
    """
    team = checked_team(team_of(mesh, "a global tensor is on"))
    chosen = _checked_placements(module, plan or {}, team)
    moved: dict[int, Any] = {}
    for tensor in _tensors(module):
        cuts = chosen[id(tensor)]
        made = put(tensor.detach(), team, cuts)
        moved[id(tensor)] = _parameter(tensor, made, team, cuts) if isinstance(tensor, nn.Parameter) else made
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                if old is not None:
                    table[name] = moved[id(old)]
        hooks: Any = part
        hooks.register_load_state_dict_pre_hook(_upload_state)
    return module


def optimizer_to_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Move what an optimizer keeps of each parameter onto the parameter's mesh, where it lies as the parameter does.

    For a state that was loaded: `optimizer.load_state_dict(saved)` leaves the tensors of `saved` in this process. What
    has not the size of its parameter (the number of steps) stays here.

    Blocking: no checkpoint.
    """
    for parameter, kept in optimizer.state.items():
        if not isinstance(parameter, MeshTensor) or not parameter._meta.is_global:
            continue
        for name, value in kept.items():
            is_local = isinstance(value, torch.Tensor) and not isinstance(value, MeshTensor)
            if is_local and value.ndim and value.size() == parameter.size():
                kept[name] = put_like(value, parameter)


def _names(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and buffer, by its identity."""
    found: dict[int, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), []).append(name)
    return found


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return each parameter and buffer once."""
    return [*module.parameters(), *module.buffers()]


def _checked_placements(module: nn.Module, plan: Plan, team: Team) -> dict[int, Sequence[Cut] | None]:
    """Return the placements of each tensor by its identity; see `module_to_mesh` for what is refused."""
    names = _names(module)
    every = [name for found in names.values() for name in found]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ShapeError(f"a pattern of a plan must fit a parameter or buffer, got {pattern!r} for {every}")
    chosen: dict[int, Sequence[Cut] | None] = {}
    for tensor in _tensors(module):
        if isinstance(tensor, MeshTensor):
            raise TypeError(
                f"a module of this process is moved onto a mesh; {names[id(tensor)][0]!r} is on one already"
            )
        chosen[id(tensor)] = next(
            (cuts for pattern, cuts in plan.items() for name in names[id(tensor)] if fnmatchcase(name, pattern)), None
        )
        try:
            cuts_by_label(chosen[id(tensor)], tensor.ndim, team.region.extent)
        except ShapeError as error:
            raise ShapeError(f"{names[id(tensor)][0]}: {error}") from None
    return chosen


def _parameter(local: nn.Parameter, made: MeshTensor, team: Team, cuts: Sequence[Cut] | None) -> nn.Parameter:
    parameter = nn.Parameter(made, requires_grad=local.requires_grad)
    for name, value in vars(local).items():  # what users mark parameters with
        if name not in vars(parameter):
            setattr(parameter, name, value)
    if local.grad is not None:
        parameter.grad = put(local.grad, team, cuts)
    return parameter


def _upload_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put what a module is about to load onto its mesh."""
    for name, target in [*module._parameters.items(), *module._buffers.items()]:
        value = state.get(prefix + name)
        if (
            isinstance(target, MeshTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, MeshTensor)
            and value.size() == target.size()  # torch refuses others, and says so
        ):
            state[prefix + name] = put_like(value, target)
