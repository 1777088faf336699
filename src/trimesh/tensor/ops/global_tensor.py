"""Global tensors at the controller: single tensors that are sharded over the ranks or replicated on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from trimesh._runtime.tasks import in_trio
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.tensor.controller.engine import RankRequest, answers, answers_now
from trimesh.tensor.controller.shapes import Meta, layout_along
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import Sizes, supplied
from trimesh.tensor.issue.fetching import checked
from trimesh.tensor.issue.issue import issue
from trimesh.tensor.protocol.placement import (
    WHOLE,
    Cut,
    Placements,
    Where,
    contiguous_strides,
    cuts_by_label,
    placements_by_name,
    placements_of,
)
from trimesh.tensor.session.opening import team_of


def distribute(
    tensor: torch.Tensor, mesh: ProcMesh, placements: Sequence[Cut] | None = None, *, sharding_spec: Where = None
) -> MeshTensor:
    """Put a tensor of this process onto a mesh, as one global tensor.

    Args:
        tensor: Of this process; it is copied.
        mesh: The processes.
        placements: For each dimension of the tensor, the label of the mesh, or a tuple of labels, that it is cut along,
            or None. Parts need not be equal. None for all: the tensor is replicated.
        sharding_spec: In place of `placements`: the same, or for labels of the mesh the tensor dimension to cut along
            each (`{"gpus": 0}`; also torch's `Shard(0)`, `Replicate()`). It is replicated along other labels.

    Returns:
        A tensor of the same size, on which every torch operation gives the same result as on `tensor`. Requires
        gradients if `tensor` does.

    Raises:
        ShapeError: The placements do not fit the tensor and the mesh.
        TypeError: The tensor is on a mesh already, or both `placements` and `sharding_spec` are given.
        RuntimeError: See `ProcMesh.activate`.

    Blocking: no checkpoint.

    Example:
        >>> w = trimesh.distribute(torch.randn(1024, 1024), procs, ["gpus", None])
    """
    if isinstance(tensor, MeshTensor):
        raise TypeError(
            f"distribute takes a tensor of this process, got {tensor!r}: "
            "write trimesh.redistribute(t, [...]) for a global one, t.to_global([...]) for a tensor on each rank"
        )
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"distribute takes a tensor of this process, got {type(tensor).__qualname__}: "
            "write torch.as_tensor(...) of it"
        )
    if placements is not None and sharding_spec is not None:
        raise TypeError(
            f"distribute takes placements or sharding_spec, got {placements!r} and {sharding_spec!r}: write one of them"
        )
    team = checked_team(team_of(mesh, "a global tensor is on"))
    where = placements if sharding_spec is None else sharding_spec
    return put(tensor, team, placements_by_name(where, tensor.ndim, team.region.extent))


def replicate(tensor: torch.Tensor, mesh: ProcMesh) -> MeshTensor:
    """Put a tensor of this process onto a mesh as one replicated global tensor; see `distribute`."""
    return distribute(tensor, mesh)


def put(tensor: torch.Tensor, team: Team, placements: Sequence[Cut] | None) -> MeshTensor:
    """Return a tensor of this process as a global one."""
    cuts = cuts_by_label(placements, tensor.ndim, team.region.extent)
    meta = global_meta(team, tuple(tensor.size()), tensor.dtype)
    with supplied(tensor, team) as (data, move):
        [made] = call_kernel(team, "distribute", data, move, meta.dtype, Sizes(meta.size), Sizes(cuts), outputs=[meta])
    made.requires_grad_(tensor.requires_grad)
    return made


def put_like(tensor: torch.Tensor, like: MeshTensor) -> MeshTensor:
    """Return a tensor of this process as a global one with the placements of another of its size."""
    team = like._held.team
    meta = global_meta(team, tuple(tensor.size()), tensor.dtype)
    with supplied(tensor, team) as (data, move):
        [made] = call_kernel(team, "distribute_like", data, move, meta.dtype, like, outputs=[meta])
    return made


def redistribute(tensor: torch.Tensor, placements: Sequence[Cut] | None) -> MeshTensor:
    """Reshard a global tensor: same values, other placements. Differentiable.

    Args:
        tensor: A global tensor.
        placements: See `distribute`; None to replicate.

    Raises:
        ShapeError: The placements do not fit the tensor and the mesh.
        TypeError: It is not a global tensor.

    Blocking: no checkpoint.
    """
    value = checked_global(tensor)
    cuts = cuts_by_label(placements, value.ndim, value._held.team.region.extent)
    apply: Any = _Redistribute.apply
    made: MeshTensor = apply(value, cuts)
    return made


class _Redistribute(torch.autograd.Function):
    """Autograd function of a reshard: the gradient gets the placements of the tensor."""

    @staticmethod
    def forward(ctx: Any, value: MeshTensor, cuts: tuple[int, ...]) -> torch.Tensor:
        team = value._held.team
        nothing = team.engine.shapes.meta((0,), (1,), torch.uint8, value.device)
        meta = global_meta(team, value._meta.size, value.dtype)
        made, ctx.layout = call_kernel(team, "redistribute", value, Sizes(cuts), outputs=[meta, nothing])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        [grad] = grads
        meta = global_meta(grad._held.team, grad._meta.size, grad.dtype)
        [made] = call_kernel(grad._held.team, "redistribute_back", grad, ctx.layout, outputs=[meta])
        return made, None


async def placements(tensor: torch.Tensor) -> Placements:
    """Query the ranks for the placements of a global tensor, in the form that `distribute` takes.

    Raises:
        MeshErrorGroup: See `fetch`.
        TypeError: It is not a global tensor.

    Blocking: a checkpoint, cancellable.
    """
    value = checked_global(tensor)
    team = value._held.team
    cuts, partial = await in_trio(_asked)(value)
    labels = list(team.region.extent)
    return placements_of(cuts[: len(labels)], partial[: len(labels)], value.ndim, labels)


async def _asked(tensor: MeshTensor) -> tuple[list[int], list[str]]:
    found: tuple[list[int], list[str]] = (await answers(_asking(tensor)))[0]
    return found


def _asking(tensor: MeshTensor) -> RankRequest:
    team = tensor._held.team
    form = layout_along(max(1, len(team.region.extent)))
    return team.engine.ask(team, [0], lambda number: call_kernel(team, "placements", tensor, number), form)


def to_local(tensor: torch.Tensor, cuts: Sequence[Cut] | None) -> MeshTensor:
    value = checked_global(tensor)
    if value.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"gradients do not pass from a global tensor to a tensor on each rank, got {value!r}: write t.detach()"
        )
    team = value._held.team
    if cuts is None:
        lying, _ = answers_now(_asking(value))[0]
        along = tuple(max(cut, WHOLE) for cut in lying[: len(team.region.extent)])
    else:
        along = cuts_by_label(cuts, value.ndim, team.region.extent)
    size = list(value._meta.size)
    for (label, count), dim in zip(team.region.extent.items(), along, strict=True):
        if dim != WHOLE:
            if size[dim] % count:
                raise ShapeError(
                    f"a tensor on each rank must have the same size everywhere: dimension {dim} of {value._meta.size} "
                    f"cannot be cut into equal parts along {label!r}, of size {count}"
                )
            size[dim] //= count
    meta = team.engine.shapes.meta(size, contiguous_strides(size), value.dtype, value.device)
    [made] = call_kernel(team, "to_local", value, Sizes(along), outputs=[meta])
    return made


def to_global(tensor: torch.Tensor, cuts: Sequence[Cut] | None) -> MeshTensor:
    value = checked(tensor)
    if value._meta.is_global:
        raise TypeError(f"to_global takes a tensor on each rank, got {value!r}: write trimesh.redistribute(t, [...])")
    if value.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"gradients do not pass from a tensor on each rank to a global tensor, got {value!r}: write t.detach()"
        )
    return _joined(value, checked_team(value._held.team), cuts)


def whole(value: MeshTensor, team: Team) -> MeshTensor:
    """Return a tensor that is equal on all ranks as a replicated global tensor."""
    if value._held.team is not team:
        return value
    return _joined(value, team, None)


def _joined(value: MeshTensor, team: Team, cuts: Sequence[Cut] | None) -> MeshTensor:
    along = cuts_by_label(cuts, value.ndim, team.region.extent)
    size = list(value._meta.size)
    for count, dim in zip(team.region.extent.values(), along, strict=True):
        if dim != WHOLE:
            size[dim] *= count
    meta = global_meta(team, tuple(size), value.dtype)
    [made] = call_kernel(team, "to_global", value, Sizes(meta.size), Sizes(meta.stride), Sizes(along), outputs=[meta])
    return made


def checked_global(tensor: Any) -> MeshTensor:
    """Check that a tensor is a global tensor; return it.

    Raises:
        TypeError: It is not.
    """
    value = checked(tensor)
    if not value._meta.is_global:
        raise TypeError(f"this takes a global tensor, got {value!r}: write t.to_global([...])")
    return value


def checked_team(team: Team) -> Team:
    """Check that a team can hold a global tensor; return it.

    Raises:
        ShapeError: Ranks are missing in its extent.
    """
    if len(team.peers) != team.region.extent.nelements:
        raise ShapeError(
            f"a global tensor needs every rank of its mesh, got {team.name} with {len(team.peers)} of "
            f"{team.region.extent.nelements}: write mesh.slice(...) for a view without holes"
        )
    return team


def global_meta(team: Team, size: tuple[int, ...], dtype: torch.dtype) -> Meta:
    """Return the metadata of a global tensor."""
    return team.engine.shapes.meta(size, contiguous_strides(size), dtype, team.engine.device, is_global=True)


# ---- torch factories under `mesh.activate(global_tensors=True)`: replicated global tensors ---------------------------

aten = torch.ops.aten

_FILLERS: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "rand": (aten.uniform_.default, ()),
    "randn": (aten.normal_.default, ()),
    "randint": (getattr(aten.random_, "from"), ("low", "high")),
    "normal": (aten.normal_.default, ("mean", "std")),
}
"""For each random factory, the in-place operator that draws the same numbers, and its arguments."""

_OPTIONS: Final = ("dtype", "layout", "device", "pin_memory")


def make_global(func: Any, args: Sequence[Any], kwargs: dict[str, Any], team: Team) -> MeshTensor:
    """Run a factory on every rank, and return its result as one replicated global tensor."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _drawn(func, args, kwargs, team)
    made: MeshTensor = issue(func, args, kwargs, team)
    return whole(made, team)


def put_global(tensor: torch.Tensor, team: Team) -> MeshTensor:
    """Return data of this process as one global tensor."""
    return put(tensor, team, None)


def _drawn(func: Any, args: Sequence[Any], kwargs: dict[str, Any], team: Team) -> MeshTensor:
    """Draw from the generator of global tensors, which is equal on all ranks, unlike the ranks' own generators."""
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    name = func._schema.name.partition("::")[2]
    if name not in _FILLERS or given.get("generator") is not None:
        raise NotImplementedError(
            f"global random tensors are made by rand, randn, randint and normal, with the ranks' generator, got {name}"
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


# ---- global tensors from one mesh to another: each target rank reads what it needs from the source ranks -------------


def global_to_mesh(tensor: MeshTensor, target: Team) -> MeshTensor:
    """Return a global tensor on other ranks; see `MeshTensor.to_mesh`.

    Raises:
        ShapeError: Some ranks of the target are missing in their extent.
        RuntimeError: The processes are simulated.
    """
    checked_team(target)
    if torch.is_grad_enabled() and tensor.requires_grad:
        apply: Any = _MoveParts.apply
        made: MeshTensor = apply(tensor, target, None)
        return made
    return send_global(tensor, target)[0]()


def send_global(
    tensor: MeshTensor, target: Team, like: MeshTensor | None = None, *, waits: bool = True
) -> tuple[Callable[[], MeshTensor], MeshTensor]:
    """Send a tensor; return a function that receives it on the target, to be called once, and its kept placements.

    Args:
        tensor: The tensor to move.
        target: The target ranks.
        like: Kept placements of another tensor to copy; None to keep cuts along the labels that the target has, too.
        waits: Whether source ranks wait while too much that they have sent is unread. If other commands are issued
            before the target receives, set it only if none of these waits for the source.

    Raises:
        RuntimeError: The processes are simulated.
    """
    source = tensor._held.team
    engine = source.engine
    ids = [[peer.proc_id for peer in team.peers] for team in (source, target)]
    if engine.has_values and engine.proc.is_simulated and set(ids[0]) != set(ids[1]):
        raise RuntimeError("tensors of a simulated mesh cannot move to other processes: test this with real processes")
    nothing = engine.shapes.meta((0,), (1,), torch.uint8, tensor.device)
    meta = global_meta(target, tensor._meta.size, tensor.dtype)
    labels = list(source.region.extent)
    same = Sizes(labels.index(label) if label in labels else WHOLE for label in target.region.extent)
    move = engine.shapes.new_number()
    [layout] = call_kernel(source, "send_parts", tensor, move, Sizes(ids[1]), waits, outputs=[nothing])
    # A later wait for the target flushes nothing of the source, so send now the commands that the target waits for.
    engine.flush_team(source)
    layouts = [] if like is None else [like]
    receive = partial(
        call_kernel, target, "receive_parts", move, Sizes(ids[0]), same, meta.dtype, Sizes(meta.size), layouts,
        outputs=[meta],
    )  # fmt: skip
    return lambda: receive()[0], layout


class _MoveParts(torch.autograd.Function):
    """Autograd function of a move: the gradient moves back and gets the placements of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, target: Team, like: MeshTensor | None) -> MeshTensor:
        ctx.source = tensor._held.team
        receive, ctx.layout = send_global(tensor, target, like)
        return receive()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        apply: Any = _MoveParts.apply
        return apply(grad, ctx.source, ctx.layout), None, None
