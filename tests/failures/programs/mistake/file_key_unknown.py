"""A key of the file of settings is misspelt.

Words: grace
"""

import os
from pathlib import Path

import trio

Path("trimesh.toml").write_text("gracee = 1\n")
os.environ["TRIMESH_CONFIG"] = "trimesh.toml"

import trimesh


async def main() -> None:
    async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
        print(procs)


trio.run(main)
