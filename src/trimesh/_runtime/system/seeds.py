"""Seeds of the random generators of a process: which they are, and how the generators get them.

    mesh seed --(mesh, rank, incarnation)--> ProcSeeds --now, or when its module is imported--> random, numpy, torch

The mesh seed is what `spawn_procs(seed=...)` says, or drawn anew for each mesh. The rule is a promise to users
(docs/guide.md): what a process drew once it can draw again.
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


# ---- what is done with a module once it has been imported, and not before: nothing is imported for it ----------------

# The import system asks a finder at the head of `sys.meta_path`, which knows the few names that are waited for. It lets
# the finders behind it find such a module, and has the module's loader do what is to be done when it has run the
# module's code. Any other import costs one look into a dictionary.

Action = Callable[[ModuleType], object]


class _ImportWatch:
    """A finder for the modules that are waited for.

    Attributes:
        actions: By the name of the module.
    """

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is waited for, by the other finders."""
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
        """Let one loader, which may load other modules, too, tell when it has loaded this one."""
        own: dict[str, Any] = getattr(loader, "__dict__", {})
        if isinstance(loader, type) or "exec_module" in own or not hasattr(loader, "exec_module"):
            return
        execute: Callable[[ModuleType], None] = loader.exec_module

        def execute_watched(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:
                own.pop("exec_module", None)
                self._imported(module)

        own["exec_module"] = execute_watched  # of this object only; others look at it as they did before

    def _imported(self, module: ModuleType) -> None:
        for action in self.actions.pop(module.__name__, ()):
            action(module)
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)


_watch = _ImportWatch()


def when_imported(name: str, action: Action) -> None:
    """Call `action` with the module `name`: now if it is loaded, otherwise when its own code has run.

    Once, in the thread that imports it; what it raises comes out of the import. A module whose import fails is waited
    for again.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    _watch.actions.setdefault(name, []).append(action)
