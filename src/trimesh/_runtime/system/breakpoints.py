"""`breakpoint()` in a process that has no terminal."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn


def refuse_breakpoints() -> None:
    """Let `breakpoint()` say what to do instead: pdb would read an end of file and raise `BdbQuit`.

    A debugger that `PYTHONBREAKPOINT` names, or the program has set, stays.
    """
    if "PYTHONBREAKPOINT" not in os.environ and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = _refuse


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    del args, kwargs
    raise RuntimeError(
        "breakpoint() needs a terminal, and a process of a mesh has none: spawn the actor on this_proc(), or run it "
        "under @trimesh.testing.simulate, where it is in your process; or set PYTHONBREAKPOINT to a debugger that "
        "listens on a socket, as debugpy does"
    )
