"""SPMD programs (torchrun style) on the processes of a mesh.

`await trimesh.spmd.run(procs, "train.py", "--lr", "0.1")` runs an unmodified script once for each process of a mesh, in
a separate interpreter; `await trimesh.spmd.run(procs, train, 0.1)` runs a function. The first rank that fails ends the
others; no process of theirs outlives the call.
"""

from trimesh.spmd.program import ScriptFailed, SPMDActor, env, run

__all__ = ["SPMDActor", "ScriptFailed", "env", "run"]
