"""Publications of mesh tensors on the ranks: each publishes its own parts, all under the same number of the version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec
import torch

from trimesh._runtime.actors import set_proc_of_task
from trimesh.rdma.publications.published import rebuild
from trimesh.rdma.publications.publisher import Publisher, publications_of
from trimesh.tensor.dtensor.sharding import is_first_replica, part_on_rank
from trimesh.tensor.kernels.global_tensors import refreshed
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.state_layout import LAYOUT, PartOfState
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank


@attrs.define(eq=False)
class _Open:
    """Those of one rank, by number."""

    by_number: dict[int, Publisher] = attrs.field(factory=dict[int, Publisher])


def publication_open(rank: Rank, team: TeamOnRank, number: int, slots: int, request: int) -> None:
    """Begin a publication; answer with a handle on it."""

    def begin() -> Any:
        made = publications_of(rank.outside.proc).open(slots)
        rank.above.setdefault(_Open, _Open()).by_number[number] = made
        return rebuild(made.number, made.board)

    _answer(rank, team, request, lambda: _in_trio(rank, begin))


def publish(
    rank: Rank, team: TeamOnRank, values: list[Any], names: tuple[str, ...], number: int, version: int, request: int
) -> None:
    """Publish this rank's parts of tensors; of a part that several ranks have, the first of them does."""
    poison = next((value for value in values if isinstance(value, Poison)), None)
    if poison is not None:
        rank.leave(team, poison)
        rank.outside.reply(request, poison)
        return

    def run() -> int:
        parts: list[PartOfState] = []
        tensors: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            box, local, is_own = Box.of_all(value.size()), value, True
            is_global = type(value) is not torch.Tensor
            if is_global:
                box, local, lying = part_on_rank(refreshed(rank, value))
                is_own = is_first_replica(lying)
            dtype = str(value.dtype).removeprefix("torch.")
            has_part = is_own and box.count > 0
            parts.append(PartOfState(name, is_global, dtype, tuple(value.size()), box.start, box.size, has_part))
            if has_part:
                tensors[name] = local.detach().contiguous()
        head = bytearray(msgspec.msgpack.encode(parts))
        publisher = rank.above[_Open].by_number[number]

        async def copy() -> int:
            set_proc_of_task(rank.outside.proc)
            published: int = await publisher.publish({LAYOUT: head, **tensors}, version)
            return published

        found: int = rank.outside.run_in_trio(copy)
        return found

    _answer(rank, team, request, run)


def publication_close(rank: Rank, team: TeamOnRank, number: int, request: int) -> None:
    publisher = rank.above[_Open].by_number.pop(number)

    async def close() -> None:
        set_proc_of_task(rank.outside.proc)
        await publisher.aclose()

    _answer(rank, team, request, lambda: rank.outside.run_in_trio(close))


def _in_trio(rank: Rank, function: Callable[[], Any]) -> Any:
    async def run() -> Any:
        set_proc_of_task(rank.outside.proc)
        return function()

    return rank.outside.run_in_trio(run)


def _answer(rank: Rank, team: TeamOnRank, request: int, function: Callable[[], Any]) -> None:
    """Send what a function returns, or why it has failed."""
    try:
        found = function()
    except Exception as error:  # noqa: BLE001 - goes to whoever publishes
        found = Poison(team.number, team.done, "trimesh::publish", error)
        rank.leave(team, found)
    rank.outside.reply(request, found)


KERNELS: Final = (
    Kernel("publication_open", publication_open),
    Kernel("publish", publish, takes_poison=True),
    Kernel("publication_close", publication_close),
)
