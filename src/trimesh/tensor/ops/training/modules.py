"""Modules of torch with their parameters and buffers on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import attrs
import torch
from torch import nn

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.global_tensor import checked_team, put, put_like, redistribute
from trimesh.tensor.ops.training.exchanging import exchange_around
from trimesh.tensor.ops.training.linear_layers import keep_dimensions
from trimesh.tensor.ops.training.optimizer_parts import add_in_parts, share_out, update_parts
from trimesh.tensor.parallel.exchanges import check_exchanges
from trimesh.tensor.parallel.explanation import Lying
from trimesh.tensor.parallel.names import NamedTensor, named_tensors
from trimesh.tensor.parallel.plan import ParallelPlan
from trimesh.tensor.protocol.placement import Cut, cuts_by_label
from trimesh.tensor.session.mesh import team_of

M = TypeVar("M", bound=nn.Module)

Patterns = Mapping[str, Sequence[Cut] | None]


def module_to_mesh(module: M, mesh: ProcMesh, plan: ParallelPlan | Patterns | None = None) -> M:
    """Move the parameters and buffers of a module onto a mesh, as global tensors; in place, as `module.to` does.

    Make the optimizer afterwards: parameters are new objects. Shared ones stay shared. `load_state_dict` of tensors of
    this process works from then on, and each lies as what it replaces.

    Args:
        module: What is moved.
        mesh: The processes.
        plan: A `ParallelPlan`, which says the kind of parallelism. Or placements, as `distribute` takes them, by name
            of parameter or buffer (`"layers.*.up.weight"`, as `fnmatch` has it); the first pattern that fits counts.
            The others are on every rank, whole: with inputs that are cut along a dimension of the mesh this is data
            parallel training.

    Returns:
        The module.

    Raises:
        ShapeError: Placements do not fit their tensor and the mesh, a pattern fits no name, or two patterns of a
            `ParallelPlan` disagree. Nothing was moved.
        TypeError: `torch.compile` has been at the module, or at one in it.
        RuntimeError: See `ProcMesh.activate`.

    Blocking: no checkpoint.

    Example:
        >>> model = trimesh.module_to_mesh(Net(), procs, {"up.weight": ["tp", None], "down.weight": [None, "tp"]})
    """
    team = checked_team(team_of(mesh, "a global tensor is on"))
    tensors = named_tensors(module)
    _check_local(tensors)
    _check_plain(module)
    if isinstance(plan, ParallelPlan):
        lying = plan.resolved(tensors, team.region.extent)
        check_exchanges(plan.exchanges, module, team.region.extent)
        chosen: dict[int, Sequence[Cut] | None] = {
            id(one.named.tensor): one.placements(team.region.extent) for one in lying
        }
    else:
        lying, chosen = [], _checked_placements(tensors, plan or {}, team)
    moved: dict[int, Any] = {}
    for named in tensors:
        tensor, cuts = named.tensor, chosen[id(named.tensor)]
        made = put(tensor.detach(), team, cuts)
        moved[id(tensor)] = _parameter(tensor, made, team, cuts) if isinstance(tensor, nn.Parameter) else made
    gathered = {id(moved[id(one.named.tensor)]): one for one in lying if one.gathered}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                if old is not None:
                    table[name] = moved[id(old)]
        hooks: Any = part
        hooks.register_load_state_dict_pre_hook(_upload_state)
        _gather_when_it_runs(part, gathered, team)
    if isinstance(plan, ParallelPlan):
        exchange_around(module, plan.exchanges)
        if plan.contexts:
            keep_dimensions(module)
        share_out(plan, [(moved[id(one.named.tensor)], one) for one in lying if one.shared], team)
        for one in lying:
            if one.named.is_parameter and one.named.needs_gradient and not one.gathered:
                add_in_parts(moved[id(one.named.tensor)])
    return module


def optimizer_to_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Move what an optimizer keeps of each parameter onto the parameter's mesh, where it lies as the parameter does.

    For a state that was loaded: `optimizer.load_state_dict(saved)` leaves the tensors of `saved` in this process. What
    has not the size of its parameter (the number of steps) stays here.

    And for an optimizer of a module under `ParallelPlan.optimizer_sharded`: from then on it keeps, on each rank, the
    state of a part of each parameter.

    Blocking: no checkpoint.
    """
    for parameter, kept in optimizer.state.items():
        if not isinstance(parameter, MeshTensor) or not parameter._meta.is_global:
            continue
        for name, value in kept.items():
            is_local = isinstance(value, torch.Tensor) and not isinstance(value, MeshTensor)
            if is_local and value.ndim and value.size() == parameter.size():
                kept[name] = put_like(value, parameter)
    update_parts(optimizer)


def _check_plain(module: nn.Module) -> None:
    for name, one in module.named_modules():
        # Torch's compiler reads the code of handles rather than run it, and leaves half of what it has tried behind.
        if hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None:
            raise TypeError(
                f"a module that torch.compile has been at ({name or 'the module itself'!r}) cannot move onto a mesh, "
                "got one: compile what runs on the ranks, in a function under @trimesh.remote, or record whole steps "
                "by trimesh.compile"
            )


def _check_local(tensors: Sequence[NamedTensor]) -> None:
    for one in tensors:
        if isinstance(one.tensor, MeshTensor):
            raise TypeError(f"a module of this process is moved onto a mesh; {one.names[0]!r} is on one already")


def _checked_placements(
    tensors: Sequence[NamedTensor], patterns: Patterns, team: Team
) -> dict[int, Sequence[Cut] | None]:
    """Return the placements of each tensor by its identity; see `module_to_mesh` for what is refused."""
    every = [name for one in tensors for name in one.names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ShapeError(f"a pattern of a plan must fit a parameter or buffer, got {pattern!r} for {every}")
    chosen: dict[int, Sequence[Cut] | None] = {}
    for one in tensors:
        fitting = (cuts for pattern, cuts in patterns.items() for name in one.names if fnmatchcase(name, pattern))
        cuts = chosen[id(one.tensor)] = next(fitting, None)
        try:
            cuts_by_label(cuts, one.tensor.ndim, team.region.extent)
        except ShapeError as error:
            raise ShapeError(f"{one.names[0]}: {error}") from None
    return chosen


@attrs.frozen
class _Gathering:
    """Hooks of a module that is fully sharded: while it runs, it has its parameters as they are without that.

    They are in the `__dict__` of the module, where attributes are looked for first: the parameters themselves, which
    optimizers and `state_dict` see, stay what they are. What reads a parameter of a module that does not run gets the
    one in parts, with which operators compute the same.
    """

    placements: Mapping[str, Sequence[Cut]]

    def begin(self, module: nn.Module, _: Any) -> None:
        for name, cuts in self.placements.items():
            parameter = module._parameters.get(name)
            if isinstance(parameter, MeshTensor) and parameter._meta.is_global:  # torch.func may have put another
                vars(module)[name] = redistribute(parameter, cuts)

    def end(self, module: nn.Module, *_: Any) -> None:
        for name in self.placements:
            vars(module).pop(name, None)


def _gather_when_it_runs(module: nn.Module, gathered: Mapping[int, Lying], team: Team) -> None:
    placements: dict[str, Sequence[Cut]] = {}
    for name, parameter in module._parameters.items():
        one = gathered.get(id(parameter))
        if one is not None:
            placements[name] = one.placements(team.region.extent, without=one.gathered)
    if placements:
        gathering = _Gathering(placements)
        module.register_forward_pre_hook(gathering.begin)
        module.register_forward_hook(gathering.end, always_call=True)


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
