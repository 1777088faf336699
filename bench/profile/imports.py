"""The program that is profiled for a cold start: it imports what a spawner does before it can fork, and ends.

    python -m bench.profile.imports

A spawner of a source tree whose program disables the collector first is imitated in that, too.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path


def spawner_disables_the_collector() -> bool:
    """Return whether the spawner of the tree on the path has no collector while it imports."""
    for folder in sys.path:
        runtime = Path(folder, "trimesh", "_runtime")
        for source in (runtime / "spawner" / "process.py", runtime / "spawner_process.py"):  # of trees before the rooms
            if source.is_file():
                return "gc.disable()" in source.read_text()
    raise ModuleNotFoundError("no folder of sys.path has trimesh")


if spawner_disables_the_collector():
    gc.disable()

if __name__ == "__main__":
    import trimesh._runtime.life.local_host
    import trimesh._runtime.spawner.loop  # noqa: F401 - as a spawner does
    from trimesh._native import lib

    lib.load()
    os._exit(0)  # a spawner goes on; the end of an interpreter costs, too
