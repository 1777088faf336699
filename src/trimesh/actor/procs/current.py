"""`current_view`: a mesh as it is now, whatever part of it a handle shows."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import trio

from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.proc_mesh import ProcMesh

M = TypeVar("M")


async def current_view(mesh: M) -> M:
    """Return a handle on all of a mesh as it is now: `engines = await trimesh.current_view(engines)`.

    Handles show what they have shown when they were made; after `procs.resize` this gives one that shows who has come
    and does not show who has left. Members that have died stay in it, as `alive()` says.

    Args:
        mesh: Actors, or processes that a block of this process owns; what it shows of them says nothing here.

    Raises:
        TypeError: It is no mesh.
        MeshError: Its owner, another process, has ended, or has stopped it.
        RuntimeError: It is a reference on processes that came from another process.

    Blocking: a checkpoint, cancellable; of actors of another process a question to the owner.
    """
    return cast("M", await in_trio(_current)(mesh))


async def _current(mesh: Any) -> Any:
    await trio.lowlevel.checkpoint()
    if isinstance(mesh, ProcMesh):
        owned, _ = mesh.owned_view("what it is now is known where it is owned")
        return mesh._seen(owned.whole)  # noqa: SLF001 - of handles
    if not isinstance(mesh, ActorMesh):
        raise TypeError(f"current_view takes a mesh of processes or of actors, got {mesh!r}")
    membership = mesh._view.membership(current_proc())  # noqa: SLF001 - of handles
    await membership.ask_all()
    return mesh._seen(membership.present)  # noqa: SLF001 - of handles
