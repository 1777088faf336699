"""`breakpoint()` in a process that has no terminal."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn


def refuse_breakpoints(setting: str) -> None:
    """Let `breakpoint()` say what to do instead: pdb would read an end of file and raise `BdbQuit`.

    A debugger that `PYTHONBREAKPOINT` names, or the program has set, stays.

    Args:
        setting: The one by which no terminal can come.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise RuntimeError(
            f"breakpoint() in a process of a mesh waits for `trimesh debug`, which TRIMESH_{setting.upper()}=off rules "
            "out: leave that setting out; or spawn the actor on this_proc(), or run it under "
            "@trimesh.testing.simulate, where it is in your process"
        )

    if "PYTHONBREAKPOINT" not in os.environ and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = refuse
