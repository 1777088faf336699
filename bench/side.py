"""Runs one side of one workload in this process and writes its samples, as JSON, to a file.

python -m bench.side WORKLOAD trimesh|monarch full|smoke OUTPUT
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from bench.scale import FULL, SMOKE, Samples


def main() -> None:
    """Run what the command line names."""
    workload, side, scale_name, output = sys.argv[1:]
    module = importlib.import_module(f"bench.workloads.{workload}")
    scale = {"full": FULL, "smoke": SMOKE}[scale_name]
    samples: Samples
    if side == "trimesh":
        import trio

        samples = trio.run(module.trimesh_side, scale)
    else:
        import asyncio

        from monarch.actor import shutdown_context

        samples = asyncio.run(module.monarch_side(scale))
        shutdown_context().get()
    Path(output).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
