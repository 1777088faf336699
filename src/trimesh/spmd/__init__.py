"""SPMD programs (torchrun style) on the processes of a mesh.

`await trimesh.spmd.run(procs, "train.py", "--lr", "0.1")` runs an unmodified script once for each process of a mesh, in
a separate interpreter; `await trimesh.spmd.run(procs, train, 0.1)` runs a function. The first rank that fails ends the
others; no process of theirs outlives the call. `async with trimesh.spmd.from_torchrun() as procs:` turns the processes
of a running torchrun job into a mesh.
"""

from trimesh.spmd.program import ScriptFailed, SPMDActor, env, from_torchrun, run

__all__ = ["SPMDActor", "ScriptFailed", "env", "from_torchrun", "run"]
