"""The UCX of the Python package `libucx` (libucx-cu12, libucx-cu13 on the package index), if that is installed.

It is found without being imported. What is there, and whether it drives the adapters of this machine, the native
library finds out; it looks at this one last, for those of sites and distributions are built for their machines.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

_PACKAGE: Final = "libucx"
_LIBRARY: Final = Path("lib", "libucp.so.0")


def wheel_library() -> Path | None:
    """Return where the package has its library; None if there is none."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except (ImportError, ValueError):  # a module of that name that was made by hand
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / _LIBRARY).is_file():
            return path
    return None
