"""Kernels of simulated ranks for commands that create, send or receive values; all others are those of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch._C import _distributed_c10d

from trimesh._runtime.values import Values
from trimesh.ids import ProcId
from trimesh.tensor.dtensor.sharding import (
    KeptPlacements,
    assemble,
    box_by_placements,
    boxed,
    part_on_rank,
    placements_by_label,
)
from trimesh.tensor.groups.group import Group, TrafficCounts, sent_bytes
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.kernels.global_tensors import refreshed
from trimesh.tensor.kernels.table import KERNELS
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rank.kernel import Kernel, Kernels
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.session.opening import WithoutProcesses
from trimesh.tensor.simulation.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimesh.shape.region import Region
    from trimesh.tensor.simulation.device import Device, RankLink


@attrs.frozen
class _Sent:
    """A tensor that a view has sent.

    Attributes:
        at: Time of sending, in seconds.
        cuts: Its placements, if it is a global tensor.
    """

    at: float
    cuts: Sequence[int] = ()


class Sent(dict[int, _Sent]):
    """Tensors in transit between the ranks of one simulation, by number of the move."""


def meter_of(rank: Rank) -> Meter:
    found = rank.above[Meter]
    assert isinstance(found, Meter)
    return found


def mesh_of(rank: Rank, team: TeamOnRank) -> Any:
    """Return the device mesh of a team; its tables of ranks have values."""
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
    """Simulate receiving tensors that other ranks have sent."""
    meter = meter_of(rank)
    link = link_between(meter.device, [rank.number, *sources])
    meter.receive("to_mesh", sent.at, link, nbytes)


MOVES: Final = (
    Kernel("send", send),
    Kernel("receive", receive),
    Kernel("send_parts", send_parts),
    Kernel("receive_parts", receive_parts),
)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def put(
    rank: Rank,
    _: TeamOnRank,
    _data: memoryview,
    _move: int,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    return meter_of(rank).made(size, dtype, stride)


def distribute(
    rank: Rank,
    team: TeamOnRank,
    _data: memoryview,
    _move: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    cuts: tuple[int, ...],
) -> torch.Tensor:
    mesh, placements = mesh_of(rank, team), placements_by_label(cuts)
    part = meter_of(rank).made(box_by_placements(size, mesh, placements).size, dtype)
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def distribute_like(
    rank: Rank, _: TeamOnRank, _data: memoryview, _move: int, dtype: torch.dtype, like: Any
) -> torch.Tensor:
    size, mesh, placements = tuple(like.size()), like.device_mesh, boxed(like.placements)
    part = meter_of(rank).made(box_by_placements(size, mesh, placements).size, dtype)
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def to_global(rank: Rank, team: TeamOnRank, *args: Any) -> Any:
    mesh_of(rank, team)
    return KERNELS.by_name["to_global"].function(rank, team, *args)


def keep_generators(rank: Rank, _: TeamOnRank) -> torch.Tensor:
    """Return a placeholder for the states of generators; simulated ranks draw nothing."""
    return meter_of(rank).made((0,), torch.uint8)


def _nothing(*_: Any) -> None:
    """Do nothing: there are no values to change."""


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"a simulation has no values, but {what} needs processes")

    return refuse


_REFUSED: Final = {
    "get_generator": "the state of generators",
    "publication_open": "a publication",
    "publish": "a publication",
    "define_function": "a function under @trimesh.remote",
    "write_parts": "a checkpoint",
    "read_parts": "a checkpoint",
    "read_rows": "a stream of rows",
    "profile_begin": "a profile (here: mesh.write_trace())",
}

SIMULATED: Final = Kernels(
    {
        **KERNELS.by_name,
        **{
            one.name: one
            for one in (
                Kernel("put", put),
                Kernel("distribute", distribute),
                Kernel("distribute_like", distribute_like),
                *MOVES,
                Kernel("to_global", to_global),
                Kernel("seed", _nothing),
                Kernel("set_generator", _nothing),
                Kernel("keep_generators", keep_generators),
                Kernel("give_generators_back", _nothing),
                *(Kernel(name, _refused(what)) for name, what in _REFUSED.items()),
            )
        },
    },
    KERNELS.families,
    KERNELS.local_replay,
    KERNELS.local_sequence,
)


# ---- process groups of simulated ranks: they count traffic and send nothing ------------------------------------------

_c10d: Any = _distributed_c10d  # whose stub leaves out much


class MeteredCounts(TrafficCounts):
    """Counts of the collectives of one simulated rank; each also takes simulated time.

    Args:
        meter: Meter of the rank.
        links: Links by label of the mesh, where the program gives them.
    """

    def __init__(self, meter: Meter, links: Mapping[str, RankLink]) -> None:
        super().__init__()
        self._meter = meter
        self._links = links
        self.ranks: Sequence[int] = ()

    def count(self, labels: str, name: str, ranks: int, args: tuple[Any, ...], begun: int = 0) -> None:
        super().count(labels, name, ranks, args, begun)
        link = self._link(labels.split(","))
        self._meter.collective(name, labels, link, ranks, sent_bytes(name, ranks, args))

    def _link(self, labels: Sequence[str]) -> RankLink:
        """Return the link between the ranks; for several dimensions the slowest."""
        device = self._meter.device
        found = [self._links[label] for label in labels if label in self._links]
        if len(found) < len(labels):
            found.append(link_between(device, self.ranks))
        return min(found, key=lambda one: one.bytes_per_second)


def link_between(device: Device, ranks: Sequence[int]) -> RankLink:
    """Return the link between some ranks, which are numbered host by host."""
    hosts = {rank // device.per_host for rank in ranks}
    return device.link if len(hosts) < 2 else device.network


class SimulatedGroup(Group):
    """A process group that counts its collectives; only one of its ranks is simulated."""

    def run(self, function: Callable[..., Any], *, may_repeat: bool = True) -> Any:
        """Move no data: outputs have their shapes already. Return a completed work."""
        del function, may_repeat
        counts = self._counts
        assert isinstance(counts, MeteredCounts)
        counts.ranks = [self._team.ranks[place] for place in self.places]
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return _c10d._create_work_from_future(done)

    def leave(self, error: BaseException) -> None:
        """Do nothing: no other rank waits."""

    def destroy(self) -> None:
        """Do nothing: there are no connections."""


# ---- process ---------------------------------------------------------------------------------------------------------

# Substitutes for processes: their ids, and the encoding of values within this process.

CONTROLLER: Final = ProcId(1)
_FIRST_RANK: Final = 2


def proc_id_of(rank: int) -> ProcId:
    """Return the id of the process of a simulated rank."""
    return ProcId(_FIRST_RANK + rank)


def rank_of(proc: int) -> int:
    return proc - _FIRST_RANK


class _NoDeadlocks:
    """Deadlock search of a simulation, where nothing waits."""

    def end_search_now(self) -> None:
        """Do nothing."""


class SimulatedController:
    """The controller's process, as far as an engine without ranks uses it.

    Attributes:
        is_simulated: Marks that it supports neither waiting nor lending memory.
        proc_id: Its process id.
        values: Encodes replies.
    """

    is_simulated = True
    proc_id = CONTROLLER

    def __init__(self) -> None:
        self.values = Values(CONTROLLER)
        self.deadlocks = _NoDeadlocks()


@attrs.define(eq=False)
class SimulatedPeer:
    """The process of one simulated rank.

    Attributes:
        proc_id: Its process id.
        link: Any object but None, which would mean that the process is gone.
        death: Always None.
    """

    proc_id: ProcId
    link: object = attrs.field(factory=object)
    death: None = None

    def define(self, definitions: object) -> None:
        """Do nothing: this process has the definitions."""


class SimulatedProcs(WithoutProcesses):
    """Substitute for the processes that a mesh owns.

    Attributes:
        name: Name of the mesh.
        whole: Region of the whole mesh.
    """

    def __init__(self, name: str, whole: Region) -> None:
        self.name = name
        self.whole = whole
