"""Tensors of the controller on the ranks.

A small one is a body of the command that makes it. Of a large one a copy is lent (`Moves`), and the body says where it
lies: each rank reads its part, and nothing of it passes through links.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident

import msgspec
import torch
import trio

from trimesh import limits
from trimesh._wire.memory.regions import memory_at
from trimesh.errors import LimitExceeded
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.plan import Meta
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol.box import Box, contiguous_strides
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.rank.moves import Moves, moves_of
from trimesh.tensor.rank.parts import Part, fill


class Sizes(tuple[int, ...]):
    """Whole numbers that are part of an operation, rather than vary."""

    __slots__ = ()


def upload(tensor: torch.Tensor, team: Team) -> MeshTensor:
    """Return a copy of a tensor of this process on every rank of a team."""
    size = tuple(tensor.size())
    meta = team.engine.shapes.meta(size, contiguous_strides(size), tensor.dtype, team.engine.device)
    with supplied(tensor, team) as (data, move):
        return _put(team, data, move, meta)


def put(team: Team, data: memoryview, meta: Meta) -> MeshTensor:
    """Return a tensor of the same bytes on every rank of a team."""
    return _put(team, data, 0, meta)


def _put(team: Team, data: memoryview, move: int, meta: Meta) -> MeshTensor:
    [made] = call_kernel(team, "put", data, move, meta.dtype, Sizes(meta.size), Sizes(meta.stride), outputs=[meta])
    return made


@contextmanager
def supplied(tensor: torch.Tensor, team: Team) -> Generator[tuple[memoryview, int]]:
    """Have a copy of a tensor of this process for one command to the ranks of a team.

    Yields:
        The body of the command, and the number of the move by which ranks read the rest, or 0 if the body is all.
    """
    if not team.engine.has_values:
        yield memoryview(b""), 0
        return
    nbytes = tensor.numel() * tensor.element_size()
    memory = _staged(team, nbytes) if nbytes >= limits.TENSOR_LENT_BYTES_MIN else None
    if memory is None:
        yield bytes_of(tensor), 0
        return
    with torch._C._DisableTorchDispatch():  # a mesh may be active
        fill(memory, Part(Box.of_all(tensor.size()), tensor.dtype, 0), tensor.detach())
    with lent(team, memory) as told:
        yield told


@contextmanager
def lent(team: Team, memory: memoryview) -> Generator[tuple[memoryview, int]]:
    """Have memory that was staged lent to the ranks of a team, for one command; it goes back when they have read it.

    Yields:
        As `supplied`.
    """
    proc, move = team.engine.proc, team.engine.shapes.new_number()
    moves, key = moves_of(proc), (proc.proc_id, move)
    try:
        handle = moves.lend(key, memory, [peer for peer in team.peers if peer.link is not None])
    except LimitExceeded:  # this process has too many buffers
        yield memoryview(bytes(memory)), 0
        return
    try:
        yield memoryview(msgspec.msgpack.encode(handle.fields())), move
    except BaseException:
        moves.take_back(key)
        raise


def _staged(team: Team, nbytes: int) -> memoryview | None:
    """Return memory for a copy that ranks will read, or None if it must go in a message."""
    engine = team.engine
    # A recorded command comes again when the copy is gone; and only the thread of Trio grants memory.
    if engine.proc.is_simulated or engine.shapes.recorder is not None or get_ident() != engine.thread:
        return None
    team.check()
    moves = moves_of(engine.proc)
    while (memory := moves.stage_now(nbytes)) is None and _others_go(team, moves):
        pass
    return memory


def _others_go(team: Team, moves: Moves) -> bool:
    """Wait, without `await`, until something that was lent has been read; return False if that does not happen.

    A rank may be waiting for an actor of this process, which cannot run meanwhile.
    """
    for engine in team.engine.engines.values():
        engine.flush()
    before, patience = moves.lent_bytes, time.monotonic() + limits.TENSOR_STUCK_SECONDS_MAX
    while moves.lent_bytes >= before and time.monotonic() < patience:
        try:
            team.engine.wait_now("ranks had read what was put onto them")
        except trio.TooSlowError:
            return False
    return moves.lent_bytes < before


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a copy of a tensor of this process, row-major."""
    with torch._C._DisableTorchDispatch():  # a mesh may be active
        # By strides of its own: one that has a single element counts as contiguous whatever its strides are.
        copy = new_tensor(tensor.size(), tensor.dtype).copy_(tensor.detach())
        flat = copy.reshape(-1).view(torch.uint8) if copy.numel() else torch.empty(0, dtype=torch.uint8)
        return memory_at(flat.data_ptr(), flat.numel(), flat)  # torch's own way needs numpy, which need not be there
