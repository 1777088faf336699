"""A program whose hosts others start: mpirun, srun, torchrun or SkyPilot, by examples/jobs/start.sh.

Run it: SHARED=$(mktemp -d) INTERFACE=127.0.0.1 torchrun --nproc-per-node=3 --no-python examples/jobs/start.sh \
    examples/jobs/train.py
"""

from __future__ import annotations

import os
from pathlib import Path

import trio

from trimesh import Actor, current_point, endpoint, jobs

SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "SKYPILOT_NUM_NODES")


class Trainer(Actor):
    """Stands for what is trained."""

    @endpoint
    def where(self) -> str:
        """Return its coordinates."""
        return str(dict(current_point()))


async def main() -> None:
    shared = Path(os.environ["SHARED"])
    size = next(int(os.environ[name]) for name in SIZES if name in os.environ)
    async with jobs.open_door(os.environ.get("INTERFACE")) as door:  # None takes the default route
        door.write_tokens(shared / "tokens", size)  # line 0 is that of this program's rank, and stays unused
        (shared / "door.new").write_text(door.addresses[0])
        (shared / "door.new").rename(shared / "door")  # whole when it is there
        async with (
            door.expect(size - 1) as hosts,
            hosts.spawn_procs({"gpus": 2}) as procs,
            procs.spawn("trainers", Trainer) as trainers,
        ):
            print(f"{len(hosts)} hosts, {len(procs)} processes")
            print(*await trainers.where.call(), sep="\n")


if __name__ == "__main__":
    trio.run(main)
