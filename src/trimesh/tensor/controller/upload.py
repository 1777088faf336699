"""Upload of tensors from the controller to the ranks, and random states that include the ranks' generators.

A small tensor is a body of the command that makes it. A large one is copied to lent memory (`Moves`), and the body has
its handle: each rank reads its part directly, not through links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
import trio
from torch.utils.weak import WeakIdKeyDictionary

from trimesh import limits
from trimesh._wire.memory import memory_at
from trimesh.errors import LimitExceeded
from trimesh.tensor.controller.shapes import Meta
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol.arguments import new_tensor
from trimesh.tensor.protocol.placement import Box, contiguous_strides
from trimesh.tensor.rank.moves import Moves, Part, fill, moves_of

if TYPE_CHECKING:
    from trimesh.tensor.controller.engine import Engine


class Sizes(tuple[int, ...]):
    """Integers that are part of an operation's definition, not operands."""

    __slots__ = ()


def upload(tensor: torch.Tensor, team: Team) -> MeshTensor:
    """Return a copy of a tensor of this process on every rank of a team."""
    size = tuple(tensor.size())
    meta = team.engine.shapes.meta(size, contiguous_strides(size), tensor.dtype, team.engine.device)
    with supplied(tensor, team) as (data, move):
        return _put(team, data, move, meta)


def put(team: Team, data: memoryview, meta: Meta) -> MeshTensor:
    """Return a tensor with these bytes on every rank of a team."""
    return _put(team, data, 0, meta)


def _put(team: Team, data: memoryview, move: int, meta: Meta) -> MeshTensor:
    [made] = call_kernel(team, "put", data, move, meta.dtype, Sizes(meta.size), Sizes(meta.stride), outputs=[meta])
    return made


@contextmanager
def supplied(tensor: torch.Tensor, team: Team) -> Generator[tuple[memoryview, int]]:
    """Provide a copy of a tensor of this process for one command to the ranks of a team.

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
    """Lend staged memory to the ranks of a team for one command; it is freed when they have read it.

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
    # A recorded command runs again when the copy is gone; and only Trio's thread can grant memory.
    if engine.proc.is_simulated or engine.shapes.recorder is not None or get_ident() != engine.thread:
        return None
    team.check()
    moves = moves_of(engine.proc)
    while (memory := moves.stage_now(nbytes)) is None and _others_go(team, moves):
        pass
    return memory


def _others_go(team: Team, moves: Moves) -> bool:
    """Wait, without `await`, until some lent memory has been read; return False if that does not happen.

    A rank may be waiting for an actor of this process, which cannot run meanwhile.
    """
    for engine in team.engine.engines.values():
        engine.flush()
    before, patience = moves.lent_bytes, time.monotonic() + limits.TENSOR_STUCK_SECONDS_MAX
    while moves.lent_bytes >= before and time.monotonic() < patience:
        try:
            team.engine.wait_now("the ranks had read uploaded tensors")
        except trio.TooSlowError:
            return False
    return moves.lent_bytes < before


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a copy of a tensor of this process, row-major."""
    with torch._C._DisableTorchDispatch():  # a mesh may be active
        # Copy to fresh strides: a tensor with one element counts as contiguous whatever its strides are.
        copy = new_tensor(tensor.size(), tensor.dtype).copy_(tensor.detach())
        flat = copy.reshape(-1).view(torch.uint8) if copy.numel() else torch.empty(0, dtype=torch.uint8)
        return memory_at(flat.data_ptr(), flat.numel(), flat)  # torch's own way needs numpy, which need not be there


# ---- `torch.get_rng_state` and `set_rng_state` include the ranks' generators -----------------------------------------

# Code that recomputes (`torch.utils.checkpoint`) or undoes draws (`torch.random.fork_rng`) saves the state of torch's
# generator in this process and restores it later. A mesh draws its random numbers on its ranks. So while this process
# has meshes with tensors, `torch.get_rng_state` makes the ranks save their states for the lifetime of the tensor that
# it returns, and `torch.set_rng_state` with that same tensor restores them: in order with the operations around it,
# without waiting.
#
# Torch has no hook for this, so both functions are replaced in torch's namespaces while there is a mesh with tensors.
# This state is global to the process, but a call only affects meshes of the calling thread.

_NAMESPACES: Final[tuple[Any, ...]] = (torch, torch.random)


class _Kept:
    """Saved states of the ranks' generators.

    GS-1 A team made after the save had drawn nothing then, so its initial state is its saved state, except for
    generators of processes that were in a team at the save: their states were saved with that team.

    Attributes:
        by_team: A tensor on the ranks, and the places of ranks whose own generator is saved with another team.
    """

    __slots__ = ("_peers", "_thread", "by_team")

    def __init__(self) -> None:
        self.by_team: dict[Team, tuple[MeshTensor, Sizes]] = {}
        self._peers: set[Any] = set()
        self._thread = get_ident()

    def keep(self, team: Team) -> None:
        """Make the ranks of a team save their states."""
        if team.engine.thread != self._thread or team in self.by_team:
            return
        known = Sizes(tuple(place for place, peer in enumerate(team.peers) if peer in self._peers))
        nothing = team.engine.shapes.meta((0,), (1,), torch.uint8, team.engine.device)  # only the ranks know its size
        [states] = call_kernel(team, "keep_generators", outputs=[nothing])
        self.by_team[team] = states, known
        self._peers.update(team.peers)

    def give_back(self) -> None:
        """Make the ranks restore their states."""
        for team, (states, known) in self.by_team.items():
            if not team.is_lost and _may_issue(team.engine):
                call_kernel(team, "give_generators_back", states, known)


class _Followed:
    """Meshes of this process whose generators `torch.get_rng_state` includes, and the saved states."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        self._kept: Any = WeakIdKeyDictionary()
        self._replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []

    def follow(self, engine: Engine) -> None:
        """Include the generators of a mesh until `forget`."""
        if not self._engines:
            self._replace("get_rng_state", self._getting)
            self._replace("set_rng_state", self._setting)
        self._engines.append(engine)

    def forget(self, engine: Engine) -> None:
        """Stop including them; after the last mesh, restore torch's own functions."""
        self._engines.remove(engine)
        if not self._engines:
            for space, name, own, ours in self._replaced:
                if getattr(space, name) is ours:  # other code may have wrapped it
                    setattr(space, name, own)
            self._replaced.clear()

    def joined(self, team: Team) -> None:
        """Add a new team to the saved states."""
        for kept in list(self._kept.values()):
            kept.keep(team)

    def _replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        ours = make(getattr(torch, name))
        for space in _NAMESPACES:
            self._replaced.append((space, name, getattr(space, name), ours))
            setattr(space, name, ours)

    def _getting(self, own: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        @wraps(own)
        def get_rng_state() -> torch.Tensor:
            state = own()
            teams = [team for engine in self._usable() for team in engine.teams if not team.is_lost]
            if teams or any(engine.thread == get_ident() for engine in self._engines):
                kept = self._kept[state] = _Kept()
                for team in teams:
                    kept.keep(team)
            return state

        return get_rng_state

    def _setting(self, own: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        @wraps(own)
        def set_rng_state(new_state: torch.Tensor) -> None:
            own(new_state)
            kept = self._kept.get(new_state)
            if kept is not None:
                kept.give_back()

        return set_rng_state

    def _usable(self) -> Iterator[Engine]:
        return filter(_may_issue, list(self._engines))


def _may_issue(engine: Engine) -> bool:
    """Return whether this thread may issue commands: the mesh's, or one of autograd that it waits for."""
    if engine.is_closed:
        return False
    return engine.thread == get_ident() or (
        engine.device.type != "cpu" and torch._C._current_graph_task_id() != -1  # autograd has threads only for devices
    )


_followed: Final = _Followed()

follow = _followed.follow
forget = _followed.forget
joined = _followed.joined
