"""Mesh tensors as arguments of actors' endpoints: each actor gets what the rank beside it, in its process, has."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from trimesh._runtime.life import rebuild
from trimesh._runtime.services import TENSORS
from trimesh._runtime.values import Guarded
from trimesh._wire.memory.reducers import Sink
from trimesh.tensor.controller.tensor import MeshTensor


class _Loan(Guarded):
    """Keeps a tensor on the ranks until the call that it is an argument of has ended."""

    def __init__(self, tensor: MeshTensor) -> None:
        self._held = tensor._held
        self._text = repr(tensor)

    def check(self, peers: AbstractSet[object], *, is_broadcast: bool) -> None:
        if is_broadcast:
            raise TypeError(
                f"a mesh tensor is kept for an endpoint until its call has ended, which broadcast does not learn, "
                f"got {self._text}: write `await ep.call(...)`"
            )
        strangers = peers - set(self._held.team.peers)
        if strangers:
            raise TypeError(
                f"an endpoint gets a mesh tensor as its own rank has it, got {self._text} for actors of which "
                f"{len(strangers)} live in other processes: write t.to_mesh(their processes), "
                "or send the value, `await trimesh.fetch(t)`"
            )


def reduce_tensor(tensor: MeshTensor, sink: Sink) -> Any:
    """Say how a mesh tensor travels to the actors beside its ranks."""
    if tensor._meta.is_global:
        raise TypeError(
            f"an endpoint takes a tensor that each rank has, got {tensor!r}: write t.local(), or a function under "
            "@trimesh.remote, which gets a DTensor"
        )
    team = tensor._held.team
    team.check()
    team.engine.flush_team(team)  # what computes it goes ahead of the call
    sink.attach(_Loan(tensor))
    engine = team.engine
    return rebuild, (TENSORS, engine.proc.proc_id, engine.number, team.number, team.issued, tensor._held.ref)
