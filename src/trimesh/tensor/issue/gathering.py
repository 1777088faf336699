"""Large tensors at the controller: the ranks say what they have of them, and it is read from their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import trio

from trimesh.errors import MeshErrorGroup, ProtocolError, set_origin
from trimesh.tensor.controller.answers import values_of
from trimesh.tensor.controller.engine import RankRequest
from trimesh.tensor.controller.plan import Meta
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.rank.moves import moves_of
from trimesh.tensor.rank.parts import Part, PartReading, part_of


@attrs.frozen
class _Told:
    """What one rank has answered.

    Attributes:
        parts: Which tensor it has a part of, and that part.
        body: Memory that has come along, if it is not lent.
        nbytes: Of all parts.
    """

    parts: Sequence[tuple[int, Part]]
    body: torch.Tensor | None
    nbytes: int


async def gathered(request: RankRequest, metas: Sequence[Meta] | None) -> Mapping[int, list[torch.Tensor]]:
    """Wait for the answers to a request for large tensors, and read them.

    Args:
        request: For tensors, or for parts of global ones.
        metas: Of the global tensors that the answers are parts of; None if each rank has tensors of its own.

    Returns:
        The tensors, by place in the team; of global ones, as those of the first place that was asked.

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
        raise ProtocolError(f"a rank must say which parts of tensors it has, got {answer!r:.100}") from error
    return _Told(parts, body, nbytes)


def _targets(
    told: Mapping[int, _Told], metas: Sequence[Meta] | None
) -> tuple[dict[int, list[torch.Tensor]], dict[int, PartReading]]:
    """Return new tensors, by place, and what is to be read into them from each place."""
    readings = {place: PartReading() for place in told}
    if metas is not None:
        wholes = [new_tensor(meta.size, meta.dtype) for meta in metas]
        for place, one in told.items():
            for index, part in one.parts:
                if not 0 <= index < len(metas) or part.dtype != metas[index].dtype:
                    raise ProtocolError(f"a part must be of a tensor that was asked for, got {part!r}")
                readings[place].add(part, wholes[index], Box.of_all(metas[index].size))
        return {min(told): wholes}, readings
    made: dict[int, list[torch.Tensor]] = {}
    for place, one in told.items():
        made[place] = [new_tensor(part.box.size, part.dtype) for _, part in one.parts]
        for target, (_, part) in zip(made[place], one.parts, strict=True):
            readings[place].add(part, target, part.box)
    return made, readings


async def _read(request: RankRequest, told: Mapping[int, _Told], readings: Mapping[int, PartReading]) -> None:
    """Read from all places at a time.

    Raises:
        MeshErrorGroup: Some could not be read.
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
        except Exception as error:  # noqa: BLE001 - all of them are told, with their places
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
