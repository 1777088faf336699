"""Monarch's data-parallel examples: a script of torchrun, unmodified, on the processes of a mesh.

Run it: python examples/monarch/ddp.py [--ranks 2] [--steps 3]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trio

from trimesh import coords, leaves, spmd, this_host

SCRIPT = Path(__file__).parent / "train_ddp.py"


async def main(ranks: int, steps: int) -> None:
    async with this_host().spawn_procs({"gpus": ranks}) as procs:
        codes = await spmd.run(procs, SCRIPT, "--steps", str(steps))
        print("exit codes:", list(codes))
        try:
            await spmd.run(procs, SCRIPT, "--steps", str(steps), "--fail-rank", str(ranks - 1))
        except* spmd.ScriptFailed as group:
            for error in leaves(group):
                print(f"failed at {coords(error)[0]}: {str(error).splitlines()[-1]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps of the training (default: %(default)s)")
    options = parser.parse_args()
    trio.run(main, options.ranks, options.steps)
