"""What is done with a module once it has been imported, and not before: nothing is imported for it.

The import system asks a finder at the head of `sys.meta_path`, which knows the few names that are waited for. It lets
the finders behind it find such a module, and has the module's loader do what is to be done when it has run the module's
code. Any other import costs one look into a dictionary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
