"""Programs that are the same on every rank, as torchrun starts them, on the processes of a mesh.

`await trimesh.spmd.run(procs, "train.py", "--lr", "0.1")` runs an unmodified script once for each process of a mesh, in
an interpreter of its own, and `await trimesh.spmd.run(procs, train, 0.1)` a function. The first rank that fails ends
the others; nothing of them outlives the call.
"""

from trimesh.spmd.program import ScriptFailed, SPMDActor, env, run

__all__ = ["SPMDActor", "ScriptFailed", "env", "run"]
