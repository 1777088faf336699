"""Whether the arguments of an operation belong together, and the words for it when they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trimesh.tensor.controller.tensor import MeshTensor


def explain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TypeError:
    """Return the error for arguments that do not belong together, with a mark at each that is wrong."""
    leaves = [(None, value) for value in args] + list(kwargs.items())
    first = next((one for _, value in leaves for one in _tensors(value) if isinstance(one, MeshTensor)), None)
    lines: list[str] = []
    for name, value in leaves:
        faults = [fault for one in _tensors(value) for fault in [_fault(one, first)] if fault]
        label = "" if name is None else f"{name}="
        lines.append(f"{' -> ' if faults else '    '}{label}{_shown(value)}," + (f"   # {faults[0]}" if faults else ""))
    called = func.name().partition("::")[2]
    body = "\n".join(lines)
    return TypeError(f"the tensors of an operation must be on the same ranks:\n{called}(\n{body}\n)")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [one for item in value for one in _tensors(item)]
    return []


def _fault(tensor: torch.Tensor, first: MeshTensor | None) -> str | None:
    if not isinstance(tensor, MeshTensor):
        return (
            "a tensor of this process: make it inside `with mesh.activate():`, "
            "or write trimesh.replicate(t, mesh) or trimesh.distribute(t, mesh, [...])"
        )
    assert first is not None
    team, expected = tensor._held.team, first._held.team
    if team is not expected:
        if team.engine is not expected.engine:
            return f"on {team.name}, not on {expected.name}: write t.to_mesh(mesh)"
        return f"on other ranks of {team.engine.name}: write t.slice_mesh(...) or t.to_mesh(view)"
    if tensor._meta.is_global is not first._meta.is_global:
        return (
            f"{'parts of one global tensor' if tensor._meta.is_global else 'a tensor on each rank'}, "
            f"the first is {'global' if first._meta.is_global else 'one on each rank'}: "
            "write trimesh.replicate(t, mesh) or t.local()"
        )
    return None


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(map(_shown, value))}{right}"
    if isinstance(value, torch.Tensor) and not isinstance(value, MeshTensor):
        return f"<local tensor {str(value.dtype).removeprefix('torch.')}{list(value.size())}>"
    return repr(value)


def explain_data_dependent(func: Any, got: str = "where it follows from their values") -> TypeError:
    """Return the error for an operation whose result cannot be described without knowing the data.

    Args:
        func: The operation.
        got: What the ranks have made of it, if they were asked.
    """
    name = func.name().partition("::")[2].partition(".")[0]
    return TypeError(
        f"the shape of what an operation returns must be the same on every rank, got {name}, {got}: "
        "write torch.where(mask, a, b) instead of a[mask], call "
        f"{name} in a function under @trimesh.remote, or on what `await trimesh.fetch(t)` returns"
    )


def check_dense(func: Any, fake: torch.Tensor) -> None:
    """Refuse to make a tensor that a handle cannot describe by its size and stride.

    Raises:
        TypeError: It is sparse, quantized or nested.
    """
    if fake.layout is not torch.strided or fake.is_quantized:
        name = func.name().partition("::")[2].partition(".")[0]
        kind = "quantized" if fake.is_quantized else str(fake.layout).removeprefix("torch.")
        raise TypeError(
            f"a mesh tensor must be dense, got one that is {kind} from {name}: "
            "use it inside a function under @trimesh.remote"
        )


def check_in_place(func: Any, fakes: Sequence[torch.Tensor], tensors: Sequence[MeshTensor]) -> None:
    """Refuse an operation that gives a tensor another shape, or other memory, in place.

    Raises:
        TypeError: It does: the handle here would show the old one.
    """
    if func.overloadpacket is torch.ops.aten.set_:
        raise TypeError(
            f"an operation must not give a mesh tensor other memory in place, got set_ of {tensors[0]!r}: "
            "write tensor.data = other"
        )
    for fake, tensor in zip(fakes, tensors, strict=True):
        meta = tensor._meta
        if tuple(fake.size()) != meta.size or tuple(fake.stride()) != meta.stride:
            name = func.name().partition("::")[2].partition(".")[0]
            raise TypeError(
                f"an operation must not change the shape of a mesh tensor in place, got {name} of {meta.size} to "
                f"{tuple(fake.size())}: write the one that returns a new tensor, {name.rstrip('_')}"
            )
