"""Seeds of the random generators of a process: which they are, and how the generators get them.

    mesh seed --(mesh, rank, incarnation)--> ProcSeeds --now, or when its module is imported--> random, numpy, torch

The mesh seed is what `spawn_procs(seed=...)` says, or drawn anew for each mesh. The rule is a promise to users
(docs/guide.md): what a process drew once it can draw again.
"""

from __future__ import annotations

import os
import random
from types import ModuleType
from typing import Any

import msgspec

from trimesh._runtime.system.import_watch import when_imported

SEED_MAX = 2**63 - 1
"""Largest seed of a mesh: what a field of a record carries, and a drawn one never exceeds."""


class ProcSeeds(msgspec.Struct, frozen=True):
    """What the generators of one process start from.

    Attributes:
        python: Of the module `random`; 64 bits.
        numpy: Of numpy's global generator (`numpy.random.seed`); 32 bits.
        torch: Of `torch.manual_seed`; 63 bits.
    """

    python: int
    numpy: int
    torch: int

    @classmethod
    def of(cls, seed: int, mesh: str, rank: int, incarnation: int) -> ProcSeeds:
        """Return the seeds of one process of a mesh, by the rule of docs/guide.md.

        Args:
            rank: The place of the process in it.
            incarnation: How many processes this place had before.
        """
        source = random.Random(f"{seed} {mesh} {rank} {incarnation}")  # noqa: S311 - reproducible, not secret
        return cls(source.getrandbits(64), source.getrandbits(32), source.getrandbits(63))

    def plant(self) -> None:
        """Seed the generators of this process; those of numpy and torch when their modules have been imported.

        A process that is forked from this one seeds nothing: its own imports of numpy and torch draw fresh entropy.
        """
        random.seed(self.python)
        owner = os.getpid()

        def plant(module: ModuleType, function: str, seed: int) -> None:
            found: Any = getattr(module, function, None)  # a module of the user's may have this name
            if found is not None and os.getpid() == owner:
                found(seed)

        when_imported("numpy.random", lambda module: plant(module, "seed", self.numpy))
        when_imported("torch", lambda module: plant(module, "manual_seed", self.torch))
