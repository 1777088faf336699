"""Seeds of a process's random generators: their derivation, and the seeding of the generators.

    mesh seed --(mesh, rank, incarnation)--> ProcSeeds --now, or when its module is imported--> random, numpy, torch

`spawn_procs(seed=...)` sets the mesh seed, else it is drawn anew for each mesh. The rule is a promise to users
(docs/guide.md): a process can draw the same numbers again.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import msgspec

SEED_MAX = 2**63 - 1
"""Largest seed of a mesh: the maximum of a record's field, and of a drawn seed."""


class ProcSeeds(msgspec.Struct, frozen=True):
    """Initial seeds of the generators of one process.

    Attributes:
        python: Seed of the module `random`; 64 bits.
        numpy: Seed of numpy's global generator (`numpy.random.seed`); 32 bits.
        torch: Argument of `torch.manual_seed`; 63 bits.
    """

    python: int
    numpy: int
    torch: int

    @classmethod
    def of(cls, seed: int, mesh: str, rank: int, incarnation: int) -> ProcSeeds:
        """Return the seeds of one process of a mesh, by the rule of docs/guide.md.

        Args:
            rank: Rank of the process in the mesh.
            incarnation: Number of earlier processes at this rank.
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
            found: Any = getattr(module, function, None)  # a module of the user may have this name
            if found is not None and os.getpid() == owner:
                found(seed)

        when_imported("numpy.random", lambda module: plant(module, "seed", self.numpy))
        when_imported("torch", lambda module: plant(module, "manual_seed", self.torch))


# ---- hooks that run once a module has been imported; they import nothing themselves ----------------------------------

# The import system calls a finder at the head of `sys.meta_path`, which knows the few expected names. It lets the
# finders behind it find such a module, and makes the module's loader run the hook after the module's code. Any other
# import costs one dictionary look-up.

Action = Callable[[ModuleType], object]


class _ImportWatch:
    """Finder for the expected modules.

    Attributes:
        actions: Hooks, by the name of the module.
    """

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find an expected module, by the other finders."""
        if name not in self.actions:
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                self._watch_loader(spec.loader, name)
                return spec
        return None

    def _watch_loader(self, loader: Any, name: str) -> None:
        """Make one loader, which may load other modules, too, run the hook after it has loaded this one."""
        own: dict[str, Any] = getattr(loader, "__dict__", {})
        if isinstance(loader, type) or "exec_module" in own or not hasattr(loader, "exec_module"):
            return
        execute: Callable[[ModuleType], None] = loader.exec_module

        def execute_watched(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:
                own.pop("exec_module", None)
                self._imported(module)

        own["exec_module"] = execute_watched  # of this object only; for other users it is unchanged

    def _imported(self, module: ModuleType) -> None:
        for action in self.actions.pop(module.__name__, ()):
            action(module)
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)


_watch = _ImportWatch()


def when_imported(name: str, action: Action) -> None:
    """Call `action` with the module `name`: now if it is loaded, otherwise when its own code has run.

    It runs once, in the thread that imports the module; its exceptions leave the import. If the import fails, the hook
    waits for the next one.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    _watch.actions.setdefault(name, []).append(action)
