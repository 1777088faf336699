"""Kernels of global tensors: distribute, redistribute, convert from and to local tensors, fetch, move between meshes.

Collectives are torch's own. Every rank of the team runs each of these kernels, so all of them take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch

from trimesh import limits
from trimesh.errors import CollectiveFailed, ProtocolError, ShapeError
from trimesh.ids import ProcId
from trimesh.tensor.dtensor.copied_view import copied_views
from trimesh.tensor.dtensor.sharding import (
    KeptPlacements,
    assemble,
    box_by_placements,
    boxed,
    is_first_replica,
    part_on_rank,
    placements_by_label,
    unsummed,
)
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.arguments import new_tensor
from trimesh.tensor.protocol.placement import WHOLE, Box, contiguous_strides
from trimesh.tensor.rank.kernel import Kernel, Poison
from trimesh.tensor.rank.moves import Moves, Part, PartReading, arrived, deliver, fill, moves_of, part_of, unneeded
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.engine import engine_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def distribute(
    rank: Rank,
    team: TeamOnRank,
    data: memoryview,
    move: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    cuts: tuple[int, ...],
) -> torch.Tensor:
    """Make a global tensor from a tensor of the controller; each rank reads its own part."""
    mesh, placements = device_mesh(rank, team), placements_by_label(cuts)
    part = arrived(rank, data, move, dtype, size, box_by_placements(size, mesh, placements))
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def distribute_like(
    rank: Rank, team: TeamOnRank, data: memoryview, move: int, dtype: torch.dtype, like: DTensor | Poison
) -> torch.Tensor | Poison:
    """Make a global tensor from a tensor of the controller, with the placements of `like`, which has the same size."""
    if isinstance(like, Poison):
        if like.kept is None:
            unneeded(rank, move)
            rank.leave(team, like)
            return like
        like = cast("DTensor", like.kept)
    size, mesh, placements = tuple(like.size()), like.device_mesh, boxed(like.placements)
    part = arrived(rank, data, move, dtype, size, box_by_placements(size, mesh, placements))
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def redistribute(rank: Rank, team: TeamOnRank, value: DTensor, cuts: tuple[int, ...]) -> tuple[DTensor, KeptPlacements]:
    """Redistribute a tensor; return it and its former placements."""
    placements = placements_by_label(cuts)
    kept = KeptPlacements(value.placements)
    return detached(value, refreshed(rank, value).redistribute(placements=placements)), kept


def redistribute_back(rank: Rank, team: TeamOnRank, value: DTensor, layout: KeptPlacements) -> DTensor:
    """Redistribute a gradient to the former placements of its tensor."""
    return detached(value, refreshed(rank, value).redistribute(placements=unsummed(layout.placements)))


def sum_together(rank: Rank, team: TeamOnRank, values: list[DTensor | Poison]) -> None:
    """Reduce the partial sums of tensors in few collectives, before operations that would reduce each by itself.

    If a rank cannot take part, all tensors stay partial: one that could not be computed must not poison the others.
    """
    poison = next((value for value in values if isinstance(value, Poison)), None)
    if poison is not None:
        rank.leave(team, poison)
        return
    with suppress(CollectiveFailed):
        engine_of(rank).sums.settle_together([refreshed(rank, value) for value in cast("list[DTensor]", values)])


def to_local(rank: Rank, team: TeamOnRank, value: DTensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """Return this rank's part as a local tensor, or a part of it; raise if other ranks' data is needed."""
    wanted = placements_by_label(cuts)
    fresh = refreshed(rank, value)
    for label, now, then in zip(list(team.extent) or ["all"], fresh.placements, wanted, strict=True):
        if now.is_shard() and now != then:
            raise ShapeError(
                f"t.local([...]) must not move data between ranks, got a tensor cut along {label!r} in dimension "
                f"{getattr(now, 'dim', '?')}: write trimesh.redistribute(t, [...]).local(), which moves it"
            )
    return fresh.redistribute(placements=wanted).to_local().clone()


def to_global(
    rank: Rank,
    team: TeamOnRank,
    value: torch.Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    cuts: tuple[int, ...],
) -> DTensor:
    """Make a global tensor whose parts are the local tensors of the ranks."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    mesh, placements = device_mesh(rank, team), placements_by_label(cuts)
    local = value.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(size), stride=stride)


def placements(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int) -> None:
    """Send the controller the placements of a tensor."""

    def find(fresh: DTensor) -> tuple[list[int], list[str]]:
        cuts = [getattr(one, "dim", WHOLE) for one in fresh.placements]
        return cuts, [getattr(one, "reduce_op", "") for one in fresh.placements]

    _answer(rank, team, [value], request, lambda found: find(found[0]), is_asked=team.index == 0)


def fetch_full(rank: Rank, team: TeamOnRank, values: list[DTensor | Poison], request: int) -> None:
    """Gather whole tensors: the first rank sends them to the controller, the others only confirm or report errors."""

    def find(fresh: list[DTensor]) -> list[torch.Tensor]:
        wholes = [one.full_tensor() for one in fresh]
        return [_copy(whole) for whole in wholes] if team.index == 0 else []

    _answer(rank, team, values, request, find, is_asked=True)


def fetch_large_full(rank: Rank, team: TeamOnRank, values: list[DTensor | Poison], request: int) -> None:
    """Lend whole tensors to the controller: the first rank that holds a part lends it."""

    def find(fresh: list[DTensor]) -> list[tuple[int, Box, torch.Tensor]]:
        found = []
        for index, value in enumerate(fresh):
            box, local, lying = part_on_rank(value)
            if is_first_replica(lying) and box.count:
                found.append((index, box, local))
        return found

    _answer(rank, team, values, request, find, is_asked=True, is_large=True)


def fetch_large_part(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int, place: int) -> None:
    """Lend one rank's part to the controller; see `fetch_part`."""

    def find(fresh: list[DTensor]) -> list[tuple[int, Box, torch.Tensor]]:
        local = _unsummed(fresh[0])
        return [(0, Box.of_all(local.size()), local)]

    _answer(rank, team, [value], request, find, is_asked=team.index == place, is_large=True)


def fetch_part(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int, place: int) -> None:
    """Send one rank's part to the controller. All ranks take part, because partial sums are reduced first."""

    def find(fresh: list[DTensor]) -> torch.Tensor:
        return _copy(_unsummed(fresh[0]))

    _answer(rank, team, [value], request, find, is_asked=team.index == place)


def _answer(
    rank: Rank,
    team: TeamOnRank,
    values: Sequence[DTensor | Poison],
    request: int,
    find: Callable[[list[DTensor]], Any],
    *,
    is_asked: bool,
    is_large: bool = False,
) -> None:
    """Send the result of `find` on global tensors, or the error, to the controller."""
    poison = next((value for value in values if isinstance(value, Poison)), None)
    found: Any = None
    if poison is not None:
        rank.leave(team, poison)
    else:
        try:
            found = find([refreshed(rank, value) for value in values if not isinstance(value, Poison)])
        except Exception as error:  # noqa: BLE001 - sent to the controller, which raises it
            poison = Poison(team.number, team.done, "trimesh::fetch", error)
            rank.leave(team, poison)
    if is_asked and is_large and poison is None:
        deliver(rank, request, found, (team.number, team.done))
    elif is_asked:
        rank.outside.reply(request, found if poison is None else poison)


def _unsummed(value: DTensor) -> torch.Tensor:
    return value.redistribute(placements=unsummed(value.placements)).to_local()


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def detached(value: DTensor, made: DTensor) -> DTensor:
    """Return `made` with memory of its own, as torch returns the same tensor when there is nothing to do.

    The result is row-major, as the controller expects, whatever the strides of `value` are.
    """
    if made._local_tensor is value._local_tensor:
        made = cast("DTensor", made.clone(memory_format=torch.contiguous_format))
    size = made.size()
    if made.stride() != contiguous_strides(size) or not made._local_tensor.is_contiguous():
        whole = torch.empty(size, device="meta")
        return assemble(made._local_tensor.contiguous(), made.device_mesh, made.placements, whole)
    return made


def refreshed(rank: Rank, value: DTensor) -> DTensor:
    """Return a tensor after applying writes to the tensors that it is a view of."""
    copied_views(rank).refresh(value)
    return value


KERNELS: Final = (
    Kernel("distribute", distribute),
    Kernel("distribute_like", distribute_like, takes_poison=True),
    Kernel("redistribute", redistribute),
    Kernel("redistribute_back", redistribute_back),
    Kernel("sum_together", sum_together, takes_poison=True),
    Kernel("to_local", to_local),
    Kernel("to_global", to_global),
    Kernel("placements", placements, takes_poison=True),
    Kernel("fetch_full", fetch_full, takes_poison=True),
    Kernel("fetch_large_full", fetch_large_full, takes_poison=True),
    Kernel("fetch_large_part", fetch_large_part, takes_poison=True),
    Kernel("fetch_part", fetch_part, takes_poison=True),
)


# ---- the two halves of a move of a global tensor, on the ranks -------------------------------------------------------

# Each source rank reports its part to each target rank. Of source ranks with the same part, one offers its data. A
# target rank waits for the reports of all source ranks, then reads what it needs from the offered parts.


@attrs.frozen(eq=False)
class _Kept:
    """A part that a rank sends to itself.

    Attributes:
        cuts: For each dimension of the mesh the dimension of the tensor that is cut along it, or `WHOLE`.
        box: Indices of the part.
        value: Values of the part.
    """

    cuts: Sequence[int]
    box: Box
    value: torch.Tensor


def send_parts(
    rank: Rank,
    team: TeamOnRank,
    value: DTensor | Poison,
    move: int,
    targets: Sequence[int],
    waits: bool,  # noqa: FBT001 - operands have no names
) -> KeptPlacements | Poison:
    """Offer this rank's part of a tensor, or its error, to the processes of all ranks of the target.

    For `waits` see `Moves.stage`.
    """
    moves = moves_of(rank.outside.proc)
    if isinstance(value, Poison):
        rank.leave(team, value)
        _offer(rank, moves, move, targets, value, value.what)
        return value
    try:
        layout = KeptPlacements(value.placements)
        box, local, lying = part_on_rank(refreshed(rank, value))
        cuts = [getattr(one, "dim", WHOLE) for one in lying.placements]
        here = rank.outside.proc.proc_id
        mine, others = _readers(team, lying, targets, here)
        what, part = _staged(rank, moves, box, local if mine and box.count else None, waits=waits)
    except BaseException as error:
        poison = Poison(team.number, team.done, "trimesh::send_parts", error)
        _offer(rank, moves, move, targets, poison, poison.what)
        raise
    if here in targets:
        moves.kept[rank.outside.controller.proc_id, move] = _Kept(cuts, box, local.clone())
    _offer(rank, moves, move, mine, what, "trimesh::send_parts", (cuts, part))
    _offer(rank, moves, move, others, b"", "trimesh::send_parts", (cuts, None))
    return layout


def _readers(team: TeamOnRank, value: DTensor, targets: Sequence[int], here: int) -> tuple[list[int], list[int]]:
    """Return the processes, except this one, that read this rank's part from this rank, and those that do not.

    A target that holds the same part reads its own. For the others, ranks with the same part take turns by the place
    of the reader among all targets, so that all senders agree.
    """
    mesh = value.device_mesh
    spread = [dim for dim, placement in enumerate(value.placements) if not placement.is_shard()]

    def number(coordinates: Sequence[int]) -> int:
        found = 0
        for dim in spread:
            found = found * mesh.size(dim) + coordinates[dim]
        return found

    count = 1
    for dim in spread:
        count *= mesh.size(dim)
    mine = number(mesh.get_coordinate() or ())
    shape = tuple(mesh.mesh.size())
    own = {proc: number(_unravel(place, shape)) for place, proc in enumerate(team.procs)}
    chosen = [own.get(ProcId(target), index % count) for index, target in enumerate(targets)]
    pairs = [(target, one) for target, one in zip(targets, chosen, strict=True) if target != here]
    return [target for target, one in pairs if one == mine], [target for target, one in pairs if one != mine]


def _unravel(place: int, shape: Sequence[int]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        found.insert(0, place % size)
        place //= size
    return found


def _staged(rank: Rank, moves: Moves, box: Box, local: torch.Tensor | None, *, waits: bool) -> tuple[Any, Any]:
    """Return a copy of a part for others, and its description; nothing if there is no part."""
    if local is None:
        return b"", None
    part = Part(box, local.dtype, 0)
    is_small = part.nbytes <= limits.TENSOR_INLINE_BYTES
    memory = (
        memoryview(bytearray(part.nbytes)) if is_small else rank.outside.run_in_trio(moves.stage, part.nbytes, waits)
    )
    fill(memory, part, local)
    return bytes(memory) if is_small else memory, part.fields()


def _offer(rank: Rank, moves: Moves, move: int, targets: Sequence[int], what: Any, name: str, part: Any = None) -> None:
    outside = rank.outside
    key = outside.controller.proc_id, move
    if isinstance(what, Poison) and outside.proc.proc_id in targets:
        moves.kept[key] = what
    elsewhere = [ProcId(target) for target in targets if target != outside.proc.proc_id]
    if elsewhere:
        outside.tell(moves.send, key, outside.engine, elsewhere, what, outside.origin(name), part)


def receive_parts(
    rank: Rank,
    team: TeamOnRank,
    move: int,
    sources: Sequence[int],
    same: Sequence[int],
    dtype: torch.dtype,
    size: tuple[int, ...],
    like: Sequence[KeptPlacements | Poison],
) -> Any:
    """Assemble this rank's part of a global tensor from the parts of the source ranks.

    Args:
        rank: This rank.
        team: The target team.
        move: Number of the move.
        sources: The source processes.
        same: For each mesh dimension of this team, the source's dimension with the same label, or `WHOLE`.
        dtype: Dtype of the tensor.
        size: Size of the whole tensor.
        like: Required placements, if not those along labels that both meshes have.
    """
    outside = rank.outside
    moves, key = moves_of(outside.proc), (outside.controller.proc_id, move)
    kept = moves.kept.pop(key, None)
    offers, error = outside.run_in_trio(_wait_all, moves, key, [one for one in sources if one != outside.proc.proc_id])
    poisons = [one for one in (*like, kept) if isinstance(one, Poison)]
    poisons += [moves.poison_of(offer, body) for _, offer, body in offers if offer.poison is not None]
    left = {source: offer for source, offer, _ in offers if offer.handle is not None}
    try:
        if error is not None:
            raise error
        if poisons:
            return poisons[0]
        told = [offer.part for _, offer, _ in offers]
        cuts = kept.cuts if isinstance(kept, _Kept) else _cuts(told)
        mesh = device_mesh(rank, team)
        placements = placements_by_label([WHOLE if place == WHOLE else cuts[place] for place in same])
        for layout in like:
            assert isinstance(layout, KeptPlacements), "poison was returned above"
            placements = boxed(layout.placements)
        box = box_by_placements(size, mesh, placements)
        there = new_tensor(box.size, dtype)
        found = 0
        if isinstance(kept, _Kept) and (common := kept.box.overlap(box)) is not None:
            there[box.slices(common)].copy_(kept.value[kept.box.slices(common)])
            found += common.count
        for source, offer, body in offers:
            if offer.part is None or offer.part[1] is None:
                continue
            nbytes = _bytes_of(offer.part[1], dtype)
            part = part_of(offer.part[1], nbytes)
            common = part.box.overlap(box)
            if common is None:
                continue
            found += common.count
            reading = PartReading()
            reading.add(part, there, box)
            left.pop(source, None)
            outside.run_in_trio(moves.take, key, ProcId(source), offer, body, reading.pieces, nbytes)
            reading.finish()
        if found != box.count:
            raise RuntimeError(f"parts must cover the whole tensor, got {found} of {box.count} elements")
        return assemble(there.to(rank.device), mesh, placements, torch.empty(size, dtype=dtype, device="meta"))
    finally:
        for source, offer in left.items():
            outside.tell(moves.leave, outside.proc.peer(ProcId(source)), offer.engine, key)


async def _wait_all(
    moves: Moves, key: Any, sources: Sequence[int]
) -> tuple[list[tuple[int, messages.Offer, Any]], Exception | None]:
    """Wait for the offers of some processes; return them, and the first error of a process that makes none."""
    offers: list[tuple[int, messages.Offer, Any]] = []
    first: Exception | None = None
    for source in sources:
        try:
            offers.append((source, *await moves.wait_offer(key, ProcId(source))))
        except Exception as error:  # noqa: BLE001 - wait for the other offers, too, so that their memory is released
            first = first or error
    return offers, first


def _cuts(told: Sequence[Any]) -> Sequence[int]:
    """Return the cuts of the source tensor, from the first report with a part."""
    found = told[0][0] if told and told[0] is not None else None
    if not isinstance(found, list | tuple) or not all(type(cut) is int for cut in found):
        raise ProtocolError(f"a part of a tensor must come with the cuts of the whole, got {told!r:.100}")
    return found


def _bytes_of(fields: Any, dtype: torch.dtype) -> int:
    """Return the size in bytes of a part that is lent alone.

    Raises:
        ProtocolError: The part has another dtype.
    """
    part = part_of(fields, 1 << 62)
    if part.dtype != dtype or part.offset:
        raise ProtocolError(f"a part must be of a tensor of {dtype}, got {part!r}")
    return part.nbytes


KERNELS_GLOBAL_MOVES: Final = (
    Kernel("send_parts", send_parts, takes_poison=True),
    Kernel("receive_parts", receive_parts, takes_poison=True),
)
