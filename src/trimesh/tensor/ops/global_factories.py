"""The factories of torch under `mesh.activate(global_tensors=True)`: one tensor, whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.issue import issue
from trimesh.tensor.ops.global_tensor import put, whole

aten = torch.ops.aten

_FILLERS: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "rand": (aten.uniform_.default, ()),
    "randn": (aten.normal_.default, ()),
    "randint": (getattr(aten.random_, "from"), ("low", "high")),
    "normal": (aten.normal_.default, ("mean", "std")),
}
"""What fills an empty tensor with the numbers that a factory draws, and its arguments."""

_OPTIONS: Final = ("dtype", "layout", "device", "pin_memory")


def make_global(func: Any, args: Sequence[Any], kwargs: dict[str, Any], team: Team) -> MeshTensor:
    """Return what a factory makes, the same on every rank, as one global tensor."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _drawn(func, args, kwargs, team)
    made: MeshTensor = issue(func, args, kwargs, team)
    return whole(made, team)


def put_global(tensor: torch.Tensor, team: Team) -> MeshTensor:
    """Return data of this process as one global tensor."""
    return put(tensor, team, None)


def _drawn(func: Any, args: Sequence[Any], kwargs: dict[str, Any], team: Team) -> MeshTensor:
    """Draw from the generator of the ranks' global tensors, which each of them has: their own ones differ."""
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    name = func._schema.name.partition("::")[2]
    if name not in _FILLERS or given.get("generator") is not None:
        raise NotImplementedError(
            f"global tensors draw from a generator that the ranks share, by rand, randn, randint and normal, got {name}"
            f"{' with a generator' if given.get('generator') is not None else ''}: "
            "write trimesh.replicate(...) of what torch draws outside of activate(), or torch.rand(n).argsort()"
        )
    filler, bounds = _FILLERS[name]
    options = {key: given[key] for key in _OPTIONS if given.get(key) is not None}
    if name == "randint":
        options.setdefault("dtype", torch.int64)
        given.setdefault("low", 0)
    made: MeshTensor = whole(issue(aten.empty.memory_format, (given["size"],), options, team), team)
    issue(filler, (made, *(given[one] for one in bounds)), {})
    return made
