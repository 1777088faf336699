"""Everything that a command to a rank may name beside torch's own operators. A new module of kernels is listed here."""

from __future__ import annotations

from functools import partial
from typing import Final

from trimesh.tensor.dtensor.global_operator import operator_on_globals
from trimesh.tensor.dtensor.learnt_replay import LearntReplay
from trimesh.tensor.kernels import (
    checkpoints,
    collectives,
    exchanges,
    fallbacks,
    functions,
    global_moves,
    global_tensors,
    moves,
    profiling,
    rows,
    seeding,
    state,
    values,
)
from trimesh.tensor.rank.kernel import Kernels

KERNELS: Final = Kernels(
    {
        one.name: one
        for one in (
            *values.KERNELS,
            *collectives.KERNELS,
            *moves.KERNELS,
            *global_tensors.KERNELS,
            *global_moves.KERNELS,
            *functions.KERNELS,
            *seeding.KERNELS,
            *state.KERNELS,
            *fallbacks.KERNELS,
            *checkpoints.KERNELS,
            *exchanges.KERNELS,
            *rows.KERNELS,
            *profiling.KERNELS,
        )
    },
    {"global": operator_on_globals},
    LearntReplay,
    partial(LearntReplay, is_counted=True),
)
