"""Torch modules on a mesh: placement of parameters, hooks of parallel plans, and sharded optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from types import MethodType
from typing import Any, Final, Self, TypeVar

import attrs
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import Sizes
from trimesh.tensor.ops.global_tensor import checked_team, global_meta, put, put_like, redistribute
from trimesh.tensor.parallel.explanation import Lying, NamedTensor, named_tensors
from trimesh.tensor.parallel.plan import Exchange, ParallelPlan, check_exchanges
from trimesh.tensor.protocol import tracing
from trimesh.tensor.protocol.placement import Cut, cuts_by_label
from trimesh.tensor.session.opening import team_of

M = TypeVar("M", bound=nn.Module)

Patterns = Mapping[str, Sequence[Cut] | None]


def module_to_mesh(module: M, mesh: ProcMesh, plan: ParallelPlan | Patterns | None = None) -> M:
    """Move the parameters and buffers of a module onto a mesh, as global tensors; in place, as `module.to` does.

    Make the optimizer afterwards: parameters are new objects. Shared ones stay shared. From then on `load_state_dict`
    accepts tensors of this process, and each gets the placements of the one that it replaces.

    Args:
        module: The module to move.
        mesh: The processes.
        plan: A `ParallelPlan`. Or placements, as `distribute` takes them, by name pattern of parameters and buffers
            (`"layers.*.up.weight"`, syntax of `fnmatch`); the first matching pattern applies. All others are
            replicated: with inputs cut along a dimension of the mesh this is data parallel training.

    Returns:
        The module.

    Raises:
        ShapeError: Placements do not fit their tensor and the mesh, a pattern matches no name, or two patterns of a
            `ParallelPlan` disagree. Nothing was moved.
        TypeError: `torch.compile` was applied to the module, or to a submodule.
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
    """Move the state of an optimizer onto the meshes of its parameters, with the placements of the parameters.

    Needed after `optimizer.load_state_dict(saved)`, which leaves the tensors of `saved` in this process. State that
    differs in size from its parameter (the step count) stays here.

    Needed also for an optimizer of a module under `ParallelPlan.optimizer_sharded`: from then on each rank keeps the
    state of one part of each parameter.

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
        # Torch's compiler traces the code of handles instead of running it, and leaves partial effects behind.
        if hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None:
            raise TypeError(
                "a module under torch.compile cannot move onto a mesh, got "
                f"{repr(name) if name else 'one'}: compile what runs on the ranks, in a function under "
                "@trimesh.remote, or record whole steps by trimesh.compile"
            )


def _check_local(tensors: Sequence[NamedTensor]) -> None:
    for one in tensors:
        if isinstance(one.tensor, MeshTensor):
            raise TypeError(f"module_to_mesh takes a module of this process, but {one.names[0]!r} is on a mesh already")


def _checked_placements(
    tensors: Sequence[NamedTensor], patterns: Patterns, team: Team
) -> dict[int, Sequence[Cut] | None]:
    """Return the placements of each tensor by its `id`; see `module_to_mesh` for the errors."""
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
    """Hooks of a fully sharded module: while it runs, its attributes are the gathered parameters.

    Gathered parameters are put into the `__dict__` of the module, which attribute access reads first. The registered
    parameters, which optimizers and `state_dict` use, stay sharded. Outside of a run, code reads the sharded ones, with
    which operators compute the same values.
    """

    placements: Mapping[str, Sequence[Cut]]

    def begin(self, module: nn.Module, _: Any) -> None:
        for name, cuts in self.placements.items():
            parameter = module._parameters.get(name)
            if isinstance(parameter, MeshTensor) and parameter._meta.is_global:  # torch.func may have replaced it
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
    for name, value in vars(local).items():  # attributes set by users
        if name not in vars(parameter):
            setattr(parameter, name, value)
    if local.grad is not None:
        parameter.grad = put(local.grad, team, cuts)
    return parameter


def _upload_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of `load_state_dict`: put tensors of this process onto the module's mesh."""
    for name, target in [*module._parameters.items(), *module._buffers.items()]:
        value = state.get(prefix + name)
        if (
            isinstance(target, MeshTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, MeshTensor)
            and value.size() == target.size()  # torch reports other sizes
        ):
            state[prefix + name] = put_like(value, target)


# ---- exchanges -------------------------------------------------------------------------------------------------------

# Exchanges of a plan on a mesh: hooks around modules that reshard activations along one label.


class Exchanging:
    """Performs the exchanges of a module that was moved by a plan."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return one without cached activations: a module is copied with its hooks."""
        return type(self)()

    def follow(self, part: nn.Module, exchanges: list[Exchange]) -> None:
        """Register hooks that perform exchanges whenever a module runs."""
        hooks = _Hooks(self, exchanges)
        if any(one.side == "input" for one in exchanges):
            part.register_forward_pre_hook(hooks.before)
        if any(one.side == "output" for one in exchanges):
            part.register_forward_hook(hooks.after)

    def moved(self, one: Exchange, value: Any) -> Any:
        """Return a tensor resharded along the label of an exchange; any other value unchanged."""
        if not isinstance(value, MeshTensor) or not value._meta.is_global or not one.is_for(value):
            return value
        along = list(value._held.team.region.extent).index(one.label)
        if one.kind != "gather" or value.grad_fn is None or not torch.is_grad_enabled():
            if one.kind == "scatter":
                self._last = None
            return _moved(value, along, one.dim)
        # Sibling modules (queries, keys, values) share one gathered input, so that its gradient moves back once.
        # Only within this pass: a write to such a tensor changes its version.
        last = self._last
        if last is not None and last[0]() is value and last[1:3] == (value._version, along):
            return last[3]
        made = _moved(value, along, one.dim)
        self._last = weakref.ref(value), value._version, along, made
        return made


class _Hooks:
    """Hooks of one module."""

    def __init__(self, exchanging: Exchanging, exchanges: list[Exchange]) -> None:
        self._exchanging = exchanging
        self._exchanges = exchanges

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for one in self._exchanges:
            if one.side == "input":
                args = tuple(self._exchanging.moved(one, value) for value in args)
        return args

    def after(self, _: nn.Module, _args: Any, made: Any) -> Any:
        for one in self._exchanges:
            if one.side == "output":
                made = self._exchanging.moved(one, made)
        return made


def exchange_around(module: nn.Module, exchanges: tuple[Exchange, ...]) -> None:
    """Register hooks for the exchanges of a plan on the modules that they apply to."""
    exchanging = Exchanging()
    for name, part in module.named_modules():
        found = [one for one in exchanges if one.fits(name, part)]
        if found:
            exchanging.follow(part, found)


def _moved(value: MeshTensor, along: int, dim: int) -> torch.Tensor:
    apply: Any = _Move.apply
    made: torch.Tensor = apply(value, along, dim)
    return made


class _Move(torch.autograd.Function):
    """Autograd function of an exchange: along the label, the gradient gets the placement of the tensor."""

    @staticmethod
    def forward(ctx: Any, value: MeshTensor, along: int, dim: int) -> torch.Tensor:
        team = value._held.team
        nothing = team.engine.shapes.meta((0,), (1,), torch.uint8, value.device)
        meta = global_meta(team, value._meta.size, value.dtype)
        made, ctx.layout = call_kernel(team, "move_along", value, Sizes((along, dim)), outputs=[meta, nothing])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        [grad] = grads
        meta = global_meta(grad._held.team, grad._meta.size, grad.dtype)
        [made] = call_kernel(grad._held.team, "move_along_back", grad, ctx.layout, outputs=[meta])
        return made, None, None


# ---- linear layers ---------------------------------------------------------------------------------------------------

# Linear layers of modules whose inputs are cut along the sequence: one operator that keeps the cut.

_torch: Final[Any] = torch._C


def keep_dimensions(module: nn.Module) -> None:
    """Make the linear layers of a module compute without folding dimensions of their inputs."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
            vars(part)["forward"] = MethodType(_forward, part)


def _forward(layer: nn.Linear, value: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    if not _is_ours(value, weight):
        return nn.functional.linear(value, weight, bias)
    apply: Any = _Linear.apply
    made: torch.Tensor = apply(value, weight, bias)
    return made


def _is_ours(value: Any, weight: Any) -> bool:
    return (
        isinstance(value, MeshTensor)
        and isinstance(weight, MeshTensor)
        and value._meta.is_global
        and value.ndim > 2
        and value.dtype is weight.dtype  # else torch raises
        and value.size(-1) == weight.size(-1)
        and not torch.is_autocast_enabled(value.device.type)
        and _torch._functorch.peek_interpreter_stack() is None
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        made: torch.Tensor = tracing.linear(value, weight, bias)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        [grad] = grads
        value, weight = ctx.saved_tensors
        of_value, of_weight, of_bias = ctx.needs_input_grad
        linear: Any = _Linear.apply
        gradient: Any = _WeightGradient.apply
        return (
            linear(grad, weight.t(), None) if of_value else None,
            gradient(grad, value) if of_weight else None,
            grad.sum(tuple(range(grad.ndim - 1))) if of_bias else None,
        )


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad, value)
        made: torch.Tensor = tracing.linear_weight_gradient(grad, value)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor]:
        [own] = grads
        grad, value = ctx.saved_tensors
        linear: Any = _Linear.apply
        return linear(value, own, None), linear(grad, own.t(), None)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _sum_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Reduce gradients in few collectives before a step, which would reduce them one after the other."""
    of_team: dict[Team, list[MeshTensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if type(grad) is MeshTensor and grad._meta.is_global and parameter not in _shares:
                of_team.setdefault(grad._held.team, []).append(grad)
    for team, grads in of_team.items():
        if len(grads) > 1:
            call_kernel(team, "sum_together", grads)


register_optimizer_step_pre_hook(_sum_gradients)


# ---- optimizers that update, on each rank, a part of each replicated parameter: ZeRO 1 and 2 -------------------------


@attrs.frozen
class _Shares:
    """Placements of a parameter and of the state of its optimizer."""

    own: Sequence[Cut]
    part: Sequence[Cut]


_shares: Final[Any] = WeakIdKeyDictionary()
"""Placements by parameter, for parameters that their optimizer is to update in parts."""


_updating: Final[weakref.WeakKeyDictionary[torch.optim.Optimizer, _Updating]] = weakref.WeakKeyDictionary()
"""Hooks of the optimizers that update in parts."""


def share_out(plan: ParallelPlan, parameters: Sequence[tuple[nn.Parameter, Lying]], team: Team) -> None:
    """Record the parts of parameters for optimizers to update; reduce-scatter gradients if the plan requires it."""
    extent = team.region.extent
    for parameter, lying in parameters:
        shares = _shares[parameter] = _Shares(lying.placements(extent), lying.state_placements(extent))
        if all(plan.scatters_gradients(label) for label, _ in lying.shared):
            _hook(parameter, _Scattering(shares.part))


@attrs.frozen
class _Scattering:
    """Hook of a parameter that reduce-scatters its gradient."""

    part: Sequence[Cut]

    def __call__(self, grad: Any) -> Any:
        is_global = isinstance(grad, MeshTensor) and grad._meta.is_global
        return redistribute(grad, self.part) if is_global else grad


def _hook(parameter: Any, function: Callable[[Any], Any]) -> None:
    parameter.register_hook(function)


def add_in_parts(parameter: nn.Parameter) -> None:
    """Accumulate gradients of several backward passes as partial sums, which are reduced once.

    Needed because autograd accumulates in place, and a tensor written in place cannot stay partial.
    """
    of = weakref.ref(parameter)

    def add(grad: Any) -> Any:
        found = of()
        before = None if found is None else found.grad
        if found is None or not isinstance(before, MeshTensor) or torch.is_grad_enabled() or not _is_added(found):
            return grad
        found.grad = None
        return before + grad

    _hook(parameter, add)


def _is_added(parameter: nn.Parameter) -> bool:
    """Return whether the running pass accumulates a parameter's gradient; `torch.autograd.grad` returns it instead."""
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    try:
        return bool(torch._C._will_engine_execute_node(view.grad_fn.next_functions[0][0]))
    except RuntimeError:  # torch raises this in `torch.autograd.grad`
        return False


def update_parts(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer update parameters recorded by `share_out` in parts; idempotent."""
    every = [one for group in optimizer.param_groups for one in group["params"]]
    if optimizer not in _updating and any(one in _shares for one in every):
        updating = _updating[optimizer] = _Updating()
        optimizer.register_step_pre_hook(updating.begin)
        optimizer.register_step_post_hook(updating.end)
        _end_after_errors(optimizer, updating)


def _end_after_errors(optimizer: torch.optim.Optimizer, updating: _Updating) -> None:
    """Make sure that `end` is called after a failed step, too, for which torch has no hook."""
    before: Any = optimizer.step
    function: Any = getattr(before, "__func__", None)  # None once a schedule has wrapped it
    of = weakref.ref(optimizer)  # avoids a reference cycle

    @wraps(before)
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        found = of()
        assert found is not None
        try:
            return function(found, *args, **kwargs) if function is not None else before(*args, **kwargs)
        finally:
            updating.end(found)

    vars(optimizer)["step"] = MethodType(step, weakref.proxy(optimizer))  # a method: schedules use its `__func__`


class _Updating:
    """Hooks of an optimizer: during a step it has parts in place of parameters, and their state."""

    def __init__(self) -> None:
        self._whole: dict[nn.Parameter, nn.Parameter] = {}
        self._laid: Any = WeakIdKeyDictionary()

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(map(callable, args[1:])):  # the first is the optimizer itself
            raise TypeError(
                "an optimizer that updates parts must step without a closure, which would compute with parameters "
                "that are not updated yet: write loss.backward() before optimizer.step()"
            )
        with torch.no_grad():
            for group in optimizer.param_groups:
                group["params"] = [self._part(optimizer, one) for one in group["params"]]

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Restore the parameters of the optimizer with their new values; idempotent within a step.

        Groups and state are restored before anything is moved, because moves fail where a process has ended.
        """
        whole, self._whole = self._whole, {}
        state: Any = optimizer.state
        for group in optimizer.param_groups:
            group["params"] = [whole.get(one, one) for one in group["params"]]
        for part, parameter in whole.items():
            if part in state:
                state[parameter] = state.pop(part)
                for value in state[parameter].values():
                    if isinstance(value, MeshTensor):
                        self._laid[value] = True
        with torch.no_grad():
            for part, parameter in whole.items():
                parameter.copy_(redistribute(part.detach(), _shares[parameter].own))

    def _part(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> nn.Parameter:
        shares = _shares.get(parameter)
        if shares is None or parameter.grad is None:
            return parameter
        part = nn.Parameter(redistribute(parameter.detach(), shares.part))
        part.grad = redistribute(parameter.grad, shares.part)
        self._whole[part] = parameter
        state: Any = optimizer.state
        if parameter in state:
            state[part] = state.pop(parameter)
            for name, value in state[part].items():
                # Loaded state has the placements of the parameter.
                if isinstance(value, MeshTensor) and value.size() == part.size() and value not in self._laid:
                    state[part][name] = redistribute(value, shares.part)
        return part
