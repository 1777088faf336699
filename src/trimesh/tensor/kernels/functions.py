"""Kernels of remote functions: defined once on the ranks, then called with tensors and encoded arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh._wire.memory import STOP
from trimesh.tensor.dtensor.sharding import adopted, lent_to_function
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.protocol.placement import contiguous_strides
from trimesh.tensor.rank.function_parts import LocalMeta, Named, OnRank, meta_of, put_together, take_apart
from trimesh.tensor.rank.kernel import Kernel, Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.call import is_global

Body = memoryview


@attrs.define(eq=False)
class _Functions:
    """Remote functions of one rank.

    Attributes:
        table: Functions, by number.
    """

    table: dict[int, Callable[..., Any]] = attrs.field(factory=dict[int, "Callable[..., Any]"])


@attrs.frozen(eq=False)
class _Graph:
    """Autograd graph of a call, kept to differentiate it later.

    Attributes:
        inputs: Inputs that need a gradient.
        outputs: Outputs of the call.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


def _functions(rank: Rank) -> dict[int, Callable[..., Any]]:
    found = rank.above.get(_Functions)
    if found is None:
        found = rank.above[_Functions] = _Functions()
    assert isinstance(found, _Functions)
    return found.table


def define_function(rank: Rank, _: TeamOnRank, number: int, payload: Body, bodies: Sequence[Body]) -> None:
    """Define a function from its pickle, or from the name by which to import it."""

    def missing(*_: Any, **__: Any) -> Any:
        raise error

    try:
        found = _decode(rank, payload, bodies, "a remote function")
        if isinstance(found, Named):
            found = _imported(found)
    except Exception as caught:  # noqa: BLE001 - raised by each call of the function
        error = caught
        found = missing
    _functions(rank)[number] = found


def _imported(named: Named) -> Callable[..., Any]:
    found: Any = importlib.import_module(named.module)
    for part in named.qualname.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = getattr(found, "__trimesh_function__", found)
    return function


def function(
    rank: Rank,
    team: TeamOnRank,
    number: int,
    tensors: Sequence[torch.Tensor],
    payload: Body,
    bodies: Sequence[Body],
    metas: Sequence[Sequence[Any]],
) -> list[torch.Tensor] | None:
    """Call a function; return the tensors of its result, whose metadata must be as the controller expects."""
    with lent_to_function(rank, tensors):
        name, result = _call(rank, team, number, tensors, payload, bodies)
    made = _checked(name, result, metas)
    return [_strided(rank, team, name, one, meta[1]) for one, meta in zip(made, metas, strict=True)] or None


def function_graph(
    rank: Rank,
    team: TeamOnRank,
    number: int,
    tensors: Sequence[torch.Tensor],
    payload: Body,
    bodies: Sequence[Body],
    metas: Sequence[Sequence[Any]],
    needed: Sequence[int],
) -> list[Any]:
    """Call a function as `function` does; return the tensors, and last the graph for its gradient."""
    inputs = [one.detach().requires_grad_(index in needed) for index, one in enumerate(tensors)]
    with lent_to_function(rank, tensors), torch.enable_grad():
        name, result = _call(rank, team, number, inputs, payload, bodies)
    made = _checked(name, result, metas)
    results = [_strided(rank, team, name, one.detach(), meta[1]) for one, meta in zip(made, metas, strict=True)]
    return [*results, _Graph([inputs[index] for index in needed], made)]


def function_backward(
    rank: Rank, team: TeamOnRank, graph: _Graph, grads: Sequence[torch.Tensor], given: Sequence[int]
) -> list[torch.Tensor]:
    """Return the gradients of a call's inputs, given those of some of its outputs."""
    pairs = [(graph.outputs[index], grad) for index, grad in zip(given, grads, strict=True)]
    pairs = [(output, grad) for output, grad in pairs if output.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(graph.inputs)
    with lent_to_function(rank, grads):
        if pairs:
            outputs, wanted = zip(*pairs, strict=True)
            # Retain the graph for further gradients; it is freed when the controller drops it.
            found = torch.autograd.grad(outputs, graph.inputs, wanted, allow_unused=True, retain_graph=True)
    every = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(graph.inputs, found, strict=True)]
    return [_strided(rank, team, "its gradient", one.detach(), contiguous_strides(one.size())) for one in every]


def function_fetch(
    rank: Rank,
    team: TeamOnRank,
    number: int,
    tensors: Sequence[Any],
    payload: Body,
    bodies: Sequence[Body],
    request: int,
    places: Sequence[int],
) -> None:
    """Call a function at some places of the team, and send its result to the controller."""
    if team.index not in places:
        return
    reply = rank.outside.reply
    poison = next((one for one in tensors if isinstance(one, Poison)), None)
    if poison is not None:
        reply(request, poison)
        return
    try:
        with lent_to_function(rank, tensors):
            name, result = _call(rank, team, number, tensors, payload, bodies)
        if any(is_global(one) for one in pytree.tree_leaves(result)):
            raise TypeError(
                f"a function whose result is fetched must return values of one rank, {name} returned a DTensor: return "
                "t.full_tensor() or t.to_local()"
            )
        # Copies: later commands may write to the tensors before their bytes are sent.
        reply(request, pytree.tree_map_only(torch.Tensor, lambda one: one.detach().cpu().clone(), result))
    except BaseException as error:
        reply(request, Poison(team.number, team.done, "trimesh::function", error))
        raise


def function_inspect(
    rank: Rank,
    team: TeamOnRank,
    number: int,
    tensors: Sequence[torch.Tensor],
    payload: Body,
    bodies: Sequence[Body],
    request: int,
) -> _Graph:
    """Call a function, keep its result, and send the controller the metadata of the result."""
    try:
        with lent_to_function(rank, tensors):
            name, result = _call(rank, team, number, tensors, payload, bodies)
        made, parts = take_apart(name, result)
        made = [_strided(rank, team, name, one, one.stride()) for one in made]
    except BaseException as error:
        rank.outside.reply(request, Poison(team.number, team.done, "trimesh::function", error))
        raise
    rank.outside.reply(request, (list(map(meta_of, made)), parts))
    return _Graph((), made)


def function_parts(_: Rank, __: TeamOnRank, kept: _Graph) -> list[torch.Tensor]:
    """Return the tensors of an inspected call."""
    return list(kept.outputs)


def _call(
    rank: Rank, team: TeamOnRank, number: int, tensors: Sequence[torch.Tensor], payload: Body, bodies: Sequence[Body]
) -> tuple[str, Any]:
    """Call a function; return its name and its result."""
    called = _functions(rank)[number]
    parts = put_together(_decode(rank, payload, bodies, "an argument of a remote function"), tensors)
    args, kwargs = pytree.tree_map_only(OnRank, lambda one: one.on_rank(rank, team), parts)
    return str(getattr(called, "__qualname__", called)), called(*args, **kwargs)


def _decode(rank: Rank, payload: Body, bodies: Sequence[Body], what: str) -> Any:
    proc = rank.outside.proc
    # Payloads that use no table of the process are decoded here, all others in Trio's thread, which owns the tables.
    if proc.is_simulated or payload[-1] == STOP:
        return proc.values.decode(payload, bodies, what=what)

    async def decode() -> Any:
        return proc.values.decode(payload, bodies, what=what)

    return rank.outside.run_in_trio(decode)


def _checked(name: str, result: Any, metas: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    made, _ = take_apart(name, result)
    expected = [LocalMeta(tuple(size), tuple(stride), dtype, parts) for size, stride, dtype, parts in metas]
    found = list(map(meta_of, made))
    if [(one.size, one.dtype, one.is_global) for one in found] != [
        (one.size, one.dtype, one.is_global) for one in expected
    ]:
        raise TypeError(
            f"a remote function must return what its propagation predicts, {name} returned {_shown(found)} here "
            f"instead of {_shown(expected)}: see `propagate` and `returns_global` of trimesh.remote"
        )
    return made


def _strided(rank: Rank, team: TeamOnRank, name: str, tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor with the strides that the controller expects, as it plans later operations by them."""
    if is_global(tensor):
        return adopted(name, tensor, device_mesh(rank, team), stride)
    if tuple(tensor.stride()) == tuple(stride):
        return tensor
    made = torch.empty_strided(tensor.size(), stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _shown(metas: Sequence[LocalMeta]) -> str:
    return (
        ", ".join(
            f"{'DTensor ' if one.is_global else ''}{str(one.dtype).removeprefix('torch.')}{list(one.size)}"
            for one in metas
        )
        or "no tensor"
    )


KERNELS: Final = (
    Kernel("define_function", define_function),
    Kernel("function", function),
    Kernel("function_graph", function_graph),
    Kernel("function_backward", function_backward),
    Kernel("function_fetch", function_fetch, takes_poison=True),
    Kernel("function_inspect", function_inspect),
    Kernel("function_parts", function_parts),
)
