"""Optimizers that update, on each rank, a part of each parameter that is whole there: ZeRO 1 and 2."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.global_tensor import redistribute
from trimesh.tensor.parallel.explanation import Lying
from trimesh.tensor.parallel.plan import ParallelPlan
from trimesh.tensor.protocol.placement import Cut


@attrs.frozen
class _Shares:
    """How a parameter lies, and how the state of its optimizer does."""

    own: Sequence[Cut]
    part: Sequence[Cut]


_shares: Final[Any] = WeakIdKeyDictionary()
"""By parameter, of those whose optimizers are to update parts."""


_updating: Final[weakref.WeakKeyDictionary[torch.optim.Optimizer, _Updating]] = weakref.WeakKeyDictionary()
"""Optimizers that do."""


def share_out(plan: ParallelPlan, parameters: Sequence[tuple[nn.Parameter, Lying]], team: Team) -> None:
    """Remember which parts of parameters optimizers are to update, and add gradients up so, if the plan says it."""
    extent = team.region.extent
    for parameter, lying in parameters:
        shares = _shares[parameter] = _Shares(lying.placements(extent), lying.state_placements(extent))
        if all(plan.scatters_gradients(label) for label, _ in lying.shared):
            _hook(parameter, _Scattering(shares.part))


@attrs.frozen
class _Scattering:
    """A hook of a parameter: its gradient in parts."""

    part: Sequence[Cut]

    def __call__(self, grad: Any) -> Any:
        is_global = isinstance(grad, MeshTensor) and grad._meta.is_global
        return redistribute(grad, self.part) if is_global else grad


def _hook(parameter: Any, function: Callable[[Any], Any]) -> None:
    parameter.register_hook(function)


def add_in_parts(parameter: nn.Parameter) -> None:
    """Let gradients of several backward passes be added to each other as parts of a sum, which are added up once.

    Autograd adds in place, and what is written to in place is no part of a sum.
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
    """Whether the pass that runs adds to the gradient of a parameter: `torch.autograd.grad` returns it instead."""
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    try:
        return bool(torch._C._will_engine_execute_node(view.grad_fn.next_functions[0][0]))
    except RuntimeError:  # torch says that of `torch.autograd.grad`
        return False


def update_parts(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update parts of the parameters that are to be shared out; once is enough."""
    every = [one for group in optimizer.param_groups for one in group["params"]]
    if optimizer not in _updating and any(one in _shares for one in every):
        updating = _updating[optimizer] = _Updating()
        optimizer.register_step_pre_hook(updating.begin)
        optimizer.register_step_post_hook(updating.end)
        _end_after_errors(optimizer, updating)


def _end_after_errors(optimizer: torch.optim.Optimizer, updating: _Updating) -> None:
    """Call `end` also after a step that fails, for which torch has no hook."""
    before: Any = optimizer.step
    function: Any = getattr(before, "__func__", None)  # None once a schedule has wrapped it
    of = weakref.ref(optimizer)  # without a cycle

    @wraps(before)
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        found = of()
        assert found is not None
        try:
            return function(found, *args, **kwargs) if function is not None else before(*args, **kwargs)
        finally:
            updating.end(found)

    vars(optimizer)["step"] = MethodType(step, weakref.proxy(optimizer))  # a method: schedules ask for its function


class _Updating:
    """Hooks of an optimizer: while it steps it has parts instead of parameters, and their state."""

    def __init__(self) -> None:
        self._whole: dict[nn.Parameter, nn.Parameter] = {}
        self._laid: Any = WeakIdKeyDictionary()

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(map(callable, args[1:])):  # the first is the optimizer itself
            raise TypeError(
                "an optimizer that updates parts steps without a closure, which would compute with parameters that are "
                "not updated yet: write loss.backward() before optimizer.step()"
            )
        with torch.no_grad():
            for group in optimizer.param_groups:
                group["params"] = [self._part(optimizer, one) for one in group["params"]]

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Give the optimizer its parameters back, with what was computed; once for each step, later calls do nothing.

        Groups and state are right again before anything is moved, which fails where a process has ended.
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
                # What was loaded lies as the parameter.
                if isinstance(value, MeshTensor) and value.size() == part.size() and value not in self._laid:
                    state[part][name] = redistribute(value, shares.part)
        return part
