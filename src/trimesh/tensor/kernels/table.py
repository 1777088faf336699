"""Table of all kernels that a command may name besides torch's own operators. Add new modules of kernels here."""

from __future__ import annotations

from functools import partial
from typing import Final

from trimesh.tensor.dtensor.local_trace import LearntReplay
from trimesh.tensor.dtensor.operators import operator_on_globals
from trimesh.tensor.kernels import collectives, functions, global_tensors, profiling, state, values
from trimesh.tensor.rank.kernel import Kernels

KERNELS: Final = Kernels(
    {
        one.name: one
        for one in (
            *values.KERNELS,
            *collectives.KERNELS,
            *values.KERNELS_MOVES,
            *global_tensors.KERNELS,
            *global_tensors.KERNELS_GLOBAL_MOVES,
            *functions.KERNELS,
            *profiling.KERNELS_SEEDING,
            *state.KERNELS,
            *profiling.KERNELS_FALLBACKS,
            *state.KERNELS_CHECKPOINTS,
            *collectives.KERNELS_EXCHANGES,
            *values.KERNELS_ROWS,
            *profiling.KERNELS,
        )
    },
    {"global": operator_on_globals},
    LearntReplay,
    partial(LearntReplay, is_counted=True),
)
