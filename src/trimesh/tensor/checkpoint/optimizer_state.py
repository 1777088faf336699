"""The state of an optimizer by names of parameters, as `torch.distributed.checkpoint` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from trimesh.tensor.controller.tensor import MeshTensor


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter, in the first module that has it, by its identity."""
    found: dict[int, str] = {}
    for module in modules.values():
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), name)
    return found


def state_by_name(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer, with names of parameters instead of numbers.

    Raises:
        ValueError: A parameter is in no module that is saved, or two have one name.
    """
    groups = []
    every: list[str] = []
    for group in optimizer.param_groups:
        missing = [tuple(one.size()) for one in group["params"] if id(one) not in names]
        if missing:
            raise ValueError(
                f"an optimizer is saved beside the modules whose parameters it has, {key!r} has parameters of sizes "
                f"{missing[:4]} that are in none: give their module, too"
            )
        own = [names[id(one)] for one in group["params"]]
        every += own
        groups.append({**{name: value for name, value in group.items() if name != "params"}, "params": own})
    if len(set(every)) != len(every):
        raise ValueError(f"parameters of one optimizer have names of their own, got some twice in {key!r}")
    kept = {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()}
    return {"state": kept, "param_groups": groups}


def parameters_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    return {names[id(one)]: (one, group) for group in optimizer.param_groups for one in group["params"]}


_COUNTED: Final = frozenset({"step", "eta", "mu", "mu_product"})
"""Names of numbers that torch's optimizers count in this process, unless they are fused or capturable."""


def is_on_mesh(name: str, size: tuple[int, ...], parameter: Any, group: Mapping[str, Any]) -> bool:
    """Whether what an optimizer keeps of a parameter under some name is on the parameter's mesh."""
    if not isinstance(parameter, MeshTensor):
        return False
    return bool(size) or name not in _COUNTED or bool(group.get("fused") or group.get("capturable"))


def load_by_name(
    key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Give an optimizer the state that `state_by_name` has returned.

    Raises:
        ValueError: Its groups have other parameters.
    """
    wanted = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    found = [list(group["params"]) for group in state["param_groups"]]
    if [sorted(one) for one in wanted] != [sorted(one) for one in found]:
        raise ValueError(
            f"an optimizer is loaded with the groups of parameters that it was saved with, {key!r} has {wanted} and "
            f"the checkpoint {found}"
        )
    numbers = {name: number for number, name in enumerate(name for group in wanted for name in group)}
    groups = []
    for group, own in zip(state["param_groups"], wanted, strict=True):
        groups.append({**group, "params": [numbers[name] for name in own]})
    kept = {numbers[name]: value for name, value in state.get("state", {}).items()}
    optimizer.load_state_dict({"state": kept, "param_groups": groups})
