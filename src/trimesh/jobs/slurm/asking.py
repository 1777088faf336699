"""The commands of Slurm, asked once, and the environment that they get."""

from __future__ import annotations

import os
import re
from typing import Final

import trio

from trimesh.errors import SpawnError
from trimesh.jobs.words.slurm import last_words

_OF_OTHERS: Final = re.compile(
    r"SLURM_(NTASKS|NPROCS|NNODES|JOB_NUM_NODES|NTASKS_PER_NODE|CPUS_PER_TASK|TASKS_PER_NODE|DISTRIBUTION|EXCLUSIVE"
    r"|EXACT|MEM_PER_(NODE|CPU|GPU)|CPU_BIND|TRES_PER_TASK|HET_SIZE|PACK_SIZE|\w+_(HET|PACK)_GROUP_\d+)"
)
"""Variables of the batch script around the program, which srun would take for options of ours."""

_OF_TEXT: Final = re.compile(r"(SQUEUE|SCONTROL|SINFO)_\w+|SLURM_(TIME_FORMAT|JSON|YAML)")
"""Variables by which users change what the commands write."""


def own_environment() -> dict[str, str]:
    """Return the environment of srun."""
    return {name: value for name, value in os.environ.items() if not _OF_OTHERS.fullmatch(name)}


async def ask(*command: str) -> str:
    """Run a command of Slurm, and return what it writes.

    Raises:
        SpawnError: It failed; with its words.
    """
    env = {name: value for name, value in os.environ.items() if not _OF_TEXT.fullmatch(name)}
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, env=env)
    if done.returncode != 0:
        words = last_words(done.stderr.decode(errors="replace").splitlines())
        raise SpawnError(f"{' '.join(command)} failed: {words}")
    return done.stdout.decode(errors="replace")
