"""Tensors that move between simulated views: the target waits until the source has sent, and then for the link."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import attrs
import torch

from trimesh.tensor.dtensor.sharding import assemble, box_by_placements, boxed, part_on_rank, placements_by_label
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.kernels.global_tensors import KeptPlacements, refreshed
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.simulation.group import link_between
from trimesh.tensor.simulation.meter import Meter
from trimesh.tensor.simulation.process import proc_id_of, rank_of


@attrs.frozen
class _Sent:
    """What a view has sent.

    Attributes:
        at: When, in seconds.
        cuts: How it lay, of a global tensor.
    """

    at: float
    cuts: Sequence[int] = ()


class Sent(dict[int, _Sent]):
    """What is on its way between the ranks of one simulation, by number of the move."""


def meter_of(rank: Rank) -> Meter:
    found = rank.above[Meter]
    assert isinstance(found, Meter)
    return found


def mesh_of(rank: Rank, team: TeamOnRank) -> Any:
    """Return the device mesh of a team, whose tables of ranks have values."""
    with meter_of(rank).paused():
        return device_mesh(rank, team)


def _sent(rank: Rank) -> Sent:
    found = rank.above[Sent]
    assert isinstance(found, Sent)
    return found


def send(rank: Rank, _: TeamOnRank, value: torch.Tensor, move: int, *_how: Any) -> None:
    meter = meter_of(rank)
    meter.copy_out(value.numel() * value.element_size())
    _sent(rank)[move] = _Sent(meter.now)


def receive(
    rank: Rank, team: TeamOnRank, move: int, routes: Sequence[Sequence[int]], dtype: torch.dtype, size: Sequence[int]
) -> Any:
    meter, own = meter_of(rank), proc_id_of(rank.number)
    sources = routes[team.index]
    made = meter.made(size, dtype)
    sent = _sent(rank).pop(move)
    for source in sources:
        if source != own:
            _read(rank, sent, [rank_of(source)], prod(size) * dtype.itemsize)
    for _ in sources[1:]:
        made.add_(made)
    return made


def send_parts(rank: Rank, team: TeamOnRank, value: Any, move: int, *_how: Any) -> KeptPlacements:
    del team
    layout = KeptPlacements(value.placements)
    _, local, lying = part_on_rank(refreshed(rank, value))
    meter = meter_of(rank)
    meter.copy_out(local.numel() * local.element_size())
    cuts = [getattr(one, "dim", WHOLE) for one in lying.placements]
    _sent(rank)[move] = _Sent(meter.now, cuts)
    return layout


def receive_parts(
    rank: Rank,
    team: TeamOnRank,
    move: int,
    sources: Sequence[int],
    same: Sequence[int],
    dtype: torch.dtype,
    size: tuple[int, ...],
    like: Sequence[KeptPlacements],
) -> Any:
    sent = _sent(rank).pop(move)
    mesh = mesh_of(rank, team)
    placements = placements_by_label([WHOLE if place == WHOLE else sent.cuts[place] for place in same])
    for layout in like:
        placements = boxed(layout.placements)
    box = box_by_placements(size, mesh, placements)
    there = meter_of(rank).made(box.size, dtype)
    if proc_id_of(rank.number) not in sources:
        _read(rank, sent, [rank_of(source) for source in sources], box.count * dtype.itemsize)
    return assemble(there, mesh, placements, torch.empty(size, dtype=dtype, device="meta"))


def _read(rank: Rank, sent: _Sent, sources: Sequence[int], nbytes: int) -> None:
    """Wait for what others have sent, and let it come."""
    meter = meter_of(rank)
    link = link_between(meter.device, [rank.number, *sources])
    meter.receive("to_mesh", sent.at, link, nbytes)


KERNELS: Final = (
    Kernel("send", send),
    Kernel("receive", receive),
    Kernel("send_parts", send_parts),
    Kernel("receive_parts", receive_parts),
)
