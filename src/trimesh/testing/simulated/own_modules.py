"""Copies of names: `from time import monotonic` in a module of the tested program keeps the function itself."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

Change = tuple[Any, str, Any]
"""An attribute and its new value: owner, name, value."""

_INSTALLED: Final = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()})

_own: Final[set[str]] = set()
"""Names of modules of the program that is tested, and of its tests."""

_installed: Final[set[str]] = {"__main__"}
"""Names of those that a package manager has installed. Thousands, so they are inspected once, not in each run."""


def with_copies(changes: Iterable[Change]) -> list[Change]:
    """Return the changes, and those of the same functions under the names that own modules have imported."""
    made = list(changes)
    of_real = {id(getattr(owner, name)): value for owner, name, value in made if isinstance(owner, ModuleType)}
    for module in _own_modules():
        names = vars(module)
        if not of_real.keys().isdisjoint(map(id, names.values())):
            made += [(module, name, of_real[id(held)]) for name, held in names.items() if id(held) in of_real]
    return made


def _own_modules() -> list[ModuleType]:
    """Return the modules that no package manager has installed: those of the program that is tested, and its tests."""
    for name in sys.modules.keys() - _own - _installed:
        (_own if _is_own(name) else _installed).add(name)
    main = ("__main__",) if _is_own("__main__") else ()  # a notebook, or a test, gives it another one
    return [module for name in (*_own, *main) if (module := sys.modules.get(name)) is not None]


def _is_own(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and not file.startswith(_INSTALLED) and name.partition(".")[0] != "trimesh"
