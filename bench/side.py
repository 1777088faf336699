"""Runs one side of one workload in this process and writes its samples, as JSON, to a file.

python -m bench.side WORKLOAD trimesh|monarch|ray|xoscar full|smoke OUTPUT
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path

from bench.scale import FULL, SMOKE


def main() -> None:
    """Run what the command line names."""
    workload, side, scale_name, output = sys.argv[1:]
    module = importlib.import_module(f"bench.workloads.{workload}")
    library = importlib.import_module(f"bench.meshes.{side}_mesh")
    scale = {"full": FULL, "smoke": SMOKE}[scale_name]
    if side != "trimesh":
        scale = scale.for_peer()
    function = getattr(module, f"{side}_side", None) or functools.partial(module.any_side, library)
    Path(output).write_text(json.dumps(library.run(function, scale)))


if __name__ == "__main__":
    main()
