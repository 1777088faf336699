"""`DeviceMesh`, a mesh of processes for tensors by one constructor, and `heal`, which makes a mesh whole again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from trimesh._supervision.policy import Policy
from trimesh.actor.host_mesh import HostMesh, this_host
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.actor.spawning import Spawning

_FOR_TENSORS: Final = ("torch", "torch.distributed.tensor")


class DeviceMesh(Spawning[ProcMesh]):
    """Processes for tensors: `async with trimesh.DeviceMesh({"gpus": 4}) as mesh:` owns them, and is a `ProcMesh`.

    It is `this_host().spawn_procs(...)` with torch preloaded; that has more options.

    Args:
        extent: Dimensions of the mesh: label to size.
        name: For messages and errors.
        hosts: Where the processes start, each host with this extent; None for this machine.
        preload: Modules imported once, before the processes are forked.
        supervision: What the end of a process does; see `spawn_procs`. `heal` needs `Isolate()` or `Restart(...)`.

    Raises:
        ShapeError: The extent is none.
        MeshErrorGroup: On entering, when a process could not be started; a module that is not there is its cause.

    Example:
        >>> async with trimesh.DeviceMesh({"dp": 2, "tp": 2}) as mesh:
        ...     w = trimesh.distribute(torch.randn(8, 4), mesh, sharding_spec={"tp": 1})
    """

    def __init__(
        self,
        extent: Mapping[str, int],
        *,
        name: str = "mesh",
        hosts: HostMesh | None = None,
        preload: Sequence[str] = _FOR_TENSORS,
        supervision: Policy | None = None,
    ) -> None:
        host = this_host() if hosts is None else hosts
        spawning = host.spawn_procs(extent, name=name, preload=preload, supervision=supervision)
        spawning._use()  # noqa: SLF001 - its start is that of this one
        super().__init__(f"DeviceMesh({dict(extent)})", spawning._open, spawning._adopt)  # noqa: SLF001


async def heal(mesh: ProcMesh) -> ProcMesh:
    """Start new processes in place of those of a view that have ended, with the actors that lived there.

    Handles mean the new ones from then on. Tensors of the dead are lost: those that were on them raise `ProcDied`, so
    make them again, from the last state that you have kept.

    Args:
        mesh: Processes that the caller's block owns, or a view of them. What its policy is restarting is waited for.

    Returns:
        The same view.

    Raises:
        MeshErrorGroup: One could not be started; then none of the new ones lives.
        TypeError: It is no mesh of processes.
        RuntimeError: This is a reference, or `this_proc()`, or a `FailFast` mesh.

    Blocking: a checkpoint, cancellable; see `ProcMesh.replace`.

    Example:
        >>> try:
        ...     loss = await trimesh.fetch(step(batch))
        ... except trimesh.DeviceMeshError:
        ...     await trimesh.heal(mesh)
    """
    if not isinstance(mesh, ProcMesh):
        raise TypeError(f"heal takes a mesh of processes, got {mesh!r}: its actors come back with their processes")
    await mesh.settled()
    living = set(mesh.alive().points())
    await mesh.replace([point for point in mesh.points() if point not in living])
    return mesh
