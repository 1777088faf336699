"""Fetching of tensor values to the controller: with `await`, or blocking where torch's interface requires it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import trio
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._runtime.tasks import in_trio
from trimesh.errors import MeshErrorGroup, ProtocolError, set_origin
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller.engine import RankRequest, answers, answers_now, values_of
from trimesh.tensor.controller.recording import check_not_compiled
from trimesh.tensor.controller.shapes import LARGE, ONE_TENSOR, Meta, tensors_like
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol.arguments import new_tensor
from trimesh.tensor.protocol.placement import Box
from trimesh.tensor.rank.moves import Part, PartReading, moves_of, part_of


async def fetch(tree: Any) -> Any:
    """Return the values of a mesh tensor, or of all in a dict, list or other tree, fetched in one request.

    Args:
        tree: A tensor, or a tree with tensors, such as `model.state_dict()`. Tensors of this process in it are copied,
            other leaves are returned unchanged.

    Returns:
        The same tree. A global tensor becomes one tensor; a tensor on each rank becomes a `ValueMesh` of the ranks'
        tensors. Values are copies, on the CPU.

    Raises:
        MeshErrorGroup: An operation that a tensor depends on has failed, with the line that issued it; or a process has
            ended.
        TypeError: The tree has no mesh tensor.

    Blocking: a checkpoint, cancellable; the ranks go on.
    """
    leaves, shape = pytree.tree_flatten(tree)
    if not any(isinstance(leaf, MeshTensor) for leaf in leaves):
        checked(tree)
    made = pytree.tree_unflatten(await in_trio(_fetched)(leaves), shape)
    versions = getattr(tree, "_metadata", None)
    if versions is not None:  # of a module's state; `load_state_dict` reads it
        made._metadata = versions
    return made


async def _fetched(leaves: list[Any]) -> list[Any]:
    groups: dict[tuple[Team, bool], list[int]] = {}
    whole = list(leaves)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, MeshTensor):
            groups.setdefault((leaf._held.team, leaf._meta.is_global), []).append(index)
        elif isinstance(leaf, torch.Tensor):  # a copy, as it may change later (an optimizer's steps)
            whole[index] = leaf.detach().clone()
    requests: list[RankRequest] = []
    try:
        for (team, _), group in groups.items():
            requests.append(_ask(team, [leaves[index] for index in group]))
        for request, ((team, is_global), group) in zip(requests, groups.items(), strict=True):
            if request.expected is LARGE:
                found = await gathered(request, [leaves[index]._meta for index in group] if is_global else None)
            else:
                found = await answers(request)
            for number, index in enumerate(group):
                values = [found[place][number] for place in sorted(found) if found[place]]
                whole[index] = values[0] if is_global else ValueMesh(team.region, values)
    finally:
        for request in requests:  # those after a failed one
            request.team.engine.forget(request)
    return whole


async def fetch_shard(tensor: torch.Tensor, coordinates: Mapping[str, int] | None = None, /, **coords: int) -> Any:
    """Return one rank's values of a mesh tensor.

    Args:
        tensor: The tensor.
        coordinates: Coordinates of the rank, in the labels of the view that the tensor is on; none for its first rank.
            Dimensions of size 1 may be left out.
        **coords: The same, by keyword.

    Returns:
        The rank's own tensor; for a global tensor, the rank's part. A copy, on the CPU.

    Raises:
        MeshErrorGroup: See `fetch`.
        ShapeError: No rank has these coordinates.
    """
    mesh_tensor = checked(tensor)
    team = mesh_tensor._held.team
    where = {**(coordinates or {}), **coords}
    return await in_trio(_fetched_at)(mesh_tensor, place_of(team, where) if where else 0)


async def _fetched_at(tensor: MeshTensor, place: int) -> Any:
    team = tensor._held.team
    if tensor._meta.is_global:
        kernel, form = ("fetch_large_part", LARGE) if _is_large(team, [tensor]) else ("fetch_part", ONE_TENSOR)
        request = team.engine.ask(team, [place], lambda number: call_kernel(team, kernel, tensor, number, place), form)
    else:
        request = _ask(team, [tensor], [place])
    found = (await (gathered(request, None) if request.expected is LARGE else answers(request)))[place]
    return found if request.expected is ONE_TENSOR else found[0]


def place_of(team: Team, coordinates: Mapping[str, int]) -> int:
    """Return the place in a team of the rank with these coordinates; dimensions of size 1 may be left out.

    Raises:
        ShapeError: There is no such rank.
    """
    extent = team.region.extent
    rank = extent.rank({**{label: 0 for label, size in extent.items() if size == 1}, **coordinates})
    return list(team.region.ranks()).index(team.region.base_rank(rank))


def checked(tensor: Any) -> MeshTensor:
    """Return the argument, if it is a mesh tensor.

    Raises:
        TypeError: The argument is not a mesh tensor.
    """
    if not isinstance(tensor, MeshTensor):
        raise TypeError(f"this takes a tensor on a mesh, got {type(tensor).__qualname__}, whose value is here already")
    return tensor


def scalar_now(tensor: MeshTensor) -> Any:
    """Return the number that a one-element tensor has on every rank. Blocks; see `answers_now`.

    Raises:
        ValueError: The ranks have different numbers.
    """
    values = [value.item() for value in values_now(tensor)]
    first = values[0]
    if any(value != first and not (value != value and first != first) for value in values):  # noqa: PLR0124 - nan
        raise ValueError(
            f"a number of a mesh tensor must be the same on every rank, got {values[:8]}: "
            "write `await trimesh.fetch(t)` for all of them, or `await trimesh.fetch_shard(t, ...)` for one"
        )
    return first


def same_now(tensor: MeshTensor) -> torch.Tensor:
    """Return the value that a tensor has on every rank. Blocks; see `answers_now`.

    Raises:
        ValueError: The ranks have different values.
    """
    values = values_now(tensor)
    if not all(torch.equal(value, values[0]) or _equal_with_nan(value, values[0]) for value in values[1:]):
        raise ValueError(
            f"the values of {tensor!r} must be the same on every rank, got different ones: write "
            "`await trimesh.fetch(t)` for all of them, or `await trimesh.fetch_shard(t, ...)` for those of one rank"
        )
    return values[0]


def _equal_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_floating_point() and one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def values_now(tensor: MeshTensor) -> list[torch.Tensor]:
    """Return the tensor of each rank, or a list with the one global tensor. Blocks; see `answers_now`."""
    found = answers_now(_ask(tensor._held.team, [tensor], may_lend=False))
    return [values[0] for _, values in sorted(found.items()) if values]


def _is_large(team: Team, tensors: Sequence[MeshTensor]) -> bool:
    """Return whether tensors are read from the ranks' memory rather than sent in messages."""
    nbytes = sum(tensor._meta.dtype.itemsize * math.prod(tensor._meta.size) for tensor in tensors)
    return nbytes >= limits.TENSOR_LENT_BYTES_MIN and not team.engine.proc.is_simulated


def _ask(
    team: Team, tensors: Sequence[MeshTensor], places: Sequence[int] | None = None, *, may_lend: bool = True
) -> RankRequest:
    """Request tensors of one team, all global or all local; large ones are lent and then `gathered`, if allowed.

    Every rank answers for a global tensor, the first with the value. So a failure of any rank is reported at once, with
    its cause, while the first rank would only see that its peers have left.
    """
    check_not_compiled()
    asked = range(len(team.peers)) if places is None else places
    is_large, is_global = may_lend and _is_large(team, tensors), tensors[0]._meta.is_global
    form = LARGE if is_large else tensors_like([one._meta for one in tensors], only_first=is_global)
    if not is_global:
        return team.engine.fetch(team, [one._held.ref for one in tensors], asked, form, is_large=is_large)
    kernel = "fetch_large_full" if is_large else "fetch_full"
    return team.engine.ask(team, asked, lambda number: call_kernel(team, kernel, list(tensors), number), form)


# ---- gathering -------------------------------------------------------------------------------------------------------

# Large tensors: the ranks report their parts, and the controller reads these from the ranks' memory.


@attrs.frozen
class _Told:
    """Answer of one rank.

    Attributes:
        parts: Index of a tensor and the part of it, for each part.
        body: The bytes, if they were sent and not lent.
        nbytes: Size of all parts.
    """

    parts: Sequence[tuple[int, Part]]
    body: torch.Tensor | None
    nbytes: int


async def gathered(request: RankRequest, metas: Sequence[Meta] | None) -> Mapping[int, list[torch.Tensor]]:
    """Wait for the answers to a request for large tensors, and read them.

    Args:
        request: Request for tensors, or for parts of global ones.
        metas: Metadata of the global tensors that the answers are parts of; None if each rank has tensors of its own.

    Returns:
        The tensors, by place in the team; global tensors are at the first requested place.

    Raises:
        MeshErrorGroup: See `answers`.
    """
    engine = request.team.engine
    try:
        await request.complete.wait()
        told = {place: _told(answer) for place, answer in values_of(request).items()}
        with torch._C._DisableTorchDispatch():  # a mesh may be active
            wholes, readings = _targets(told, metas)
        await _read(request, told, readings)
        with torch._C._DisableTorchDispatch():
            for reading in readings.values():
                reading.finish()
        return wholes
    finally:
        engine.forget(request)


def _told(answer: Any) -> _Told:
    try:
        described, nbytes, body = answer
        parts = [(index, part_of(fields, nbytes)) for index, *fields in described]
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a rank must describe its parts of tensors, got {answer!r:.100}") from error
    return _Told(parts, body, nbytes)


def _targets(
    told: Mapping[int, _Told], metas: Sequence[Meta] | None
) -> tuple[dict[int, list[torch.Tensor]], dict[int, PartReading]]:
    """Return new tensors, by place, and a plan of reads into them, by place."""
    readings = {place: PartReading() for place in told}
    if metas is not None:
        wholes = [new_tensor(meta.size, meta.dtype) for meta in metas]
        for place, one in told.items():
            for index, part in one.parts:
                if not 0 <= index < len(metas) or part.dtype != metas[index].dtype:
                    raise ProtocolError(f"a part must be of a requested tensor, got {part!r}")
                readings[place].add(part, wholes[index], Box.of_all(metas[index].size))
        return {min(told): wholes}, readings
    made: dict[int, list[torch.Tensor]] = {}
    for place, one in told.items():
        made[place] = [new_tensor(part.box.size, part.dtype) for _, part in one.parts]
        for target, (_, part) in zip(made[place], one.parts, strict=True):
            readings[place].add(part, target, part.box)
    return made, readings


async def _read(request: RankRequest, told: Mapping[int, _Told], readings: Mapping[int, PartReading]) -> None:
    """Read from all places concurrently.

    Raises:
        MeshErrorGroup: Some places could not be read.
    """
    team = request.team
    engine = team.engine
    moves, key = moves_of(engine.proc), (engine.proc.proc_id, request.number)
    errors: dict[int, Exception] = {}

    async def read(place: int) -> None:
        peer, one = team.peers[place], told[place]
        lent = request.lent.pop(peer, None)
        try:
            if lent is None:
                _take(one, readings[place])
            else:
                await moves.pull(peer, engine.number, key, lent, readings[place].pieces, one.nbytes)
        except Exception as error:  # noqa: BLE001 - raised below, with the others
            set_origin(error, team.origins[place])
            errors[place] = error

    async with trio.open_nursery() as nursery:
        for place in told:
            nursery.start_soon(read, place)
    if errors:
        found = [error for _, error in sorted(errors.items())]
        raise MeshErrorGroup(f"a tensor on {team.name} could not be read", found, mesh=engine.name)


def _take(told: _Told, reading: PartReading) -> None:
    body = told.body
    if body is None or body.nbytes != told.nbytes or body.dtype != torch.uint8:
        raise ProtocolError(f"a rank must lend or send {told.nbytes} bytes, got neither")
    for offset, target in reading.pieces:
        target.reshape(-1).view(torch.uint8).copy_(body[offset : offset + target.nbytes])
