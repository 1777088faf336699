"""The two halves of a move of a global tensor, on the ranks.

Each rank of the source says which part it has; of several with the same part, one of them offers it to a rank of the
target. Each rank of the target waits for all of them, and reads what it needs of the parts that it was offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId
from trimesh.tensor.dtensor.sharding import assemble, box_by_placements, boxed, part_on_rank, placements_by_label
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.kernels.global_tensors import KeptPlacements, refreshed
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.moves import Moves, moves_of
from trimesh.tensor.rank.parts import Part, PartReading, fill, part_of
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@attrs.frozen(eq=False)
class _Kept:
    """What a rank has for itself.

    Attributes:
        cuts: For each dimension of the mesh the dimension of the tensor that is cut along it, or `WHOLE`.
        box: The part.
        value: The same.
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
    """Return the processes, but for this one, that read this rank's part from this rank, and the others.

    One that has the same part reads its own; for the rest those that have the same part take turns, by the place of
    the reader among all targets: every sender must count alike.
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
    """Return a copy of a part for others, and what it is; nothing if there is none."""
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
    """Make this rank's part of a global tensor of what the ranks of the source have.

    Args:
        rank: This one.
        team: Its own.
        move: Number of the move.
        sources: The processes of the source.
        same: For each dimension of the mesh of this team the one of the source with the same label, or `WHOLE`.
        dtype: Of the tensor.
        size: Of the tensor.
        like: How it is to lie, if not along the labels that both have.
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
            assert isinstance(layout, KeptPlacements), "what has failed was dealt with"
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
            raise RuntimeError(f"parts of a tensor must be all of it: {found} of {box.count} elements came")
        return assemble(there.to(rank.device), mesh, placements, torch.empty(size, dtype=dtype, device="meta"))
    finally:
        for source, offer in left.items():
            outside.tell(moves.leave, outside.proc.peer(ProcId(source)), offer.engine, key)


async def _wait_all(
    moves: Moves, key: Any, sources: Sequence[int]
) -> tuple[list[tuple[int, messages.Offer, Any]], Exception | None]:
    """Wait for the offers of some processes; return them, and why one of them will make none."""
    offers: list[tuple[int, messages.Offer, Any]] = []
    first: Exception | None = None
    for source in sources:
        try:
            offers.append((source, *await moves.wait_offer(key, ProcId(source))))
        except Exception as error:  # noqa: BLE001 - the others are waited for, so that they get their memory back
            first = first or error
    return offers, first


def _cuts(told: Sequence[Any]) -> Sequence[int]:
    """Return how the tensor lay, as the first of those says that have sent something."""
    found = told[0][0] if told and told[0] is not None else None
    if not isinstance(found, list | tuple) or not all(type(cut) is int for cut in found):
        raise ProtocolError(f"a part of a tensor must come with how that lay, got {told!r:.100}")
    return found


def _bytes_of(fields: Any, dtype: torch.dtype) -> int:
    """Return the size of a part that is lent alone.

    Raises:
        ProtocolError: It is of another type.
    """
    part = part_of(fields, 1 << 62)
    if part.dtype != dtype or part.offset:
        raise ProtocolError(f"a part must be of a tensor of {dtype}, got {part!r}")
    return part.nbytes


KERNELS: Final = (
    Kernel("send_parts", send_parts, takes_poison=True),
    Kernel("receive_parts", receive_parts, takes_poison=True),
)
