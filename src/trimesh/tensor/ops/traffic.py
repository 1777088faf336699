"""What the ranks of a mesh have sent to each other in collectives."""

from __future__ import annotations

import attrs

from trimesh._runtime.tasks import in_trio
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.tensor.controller import expected
from trimesh.tensor.controller.answers import answers
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.team import Team
from trimesh.tensor.session.mesh import team_of


@attrs.frozen
class Collectives:
    """Collectives of one kind along one dimension of a mesh.

    Attributes:
        label: The dimension; several with commas between them.
        name: As methods of torch's process groups are called: `"allreduce"`, `"_allgather_base"`.
        count: How many.
        sent: Bytes that the first rank has sent in them, counted as a ring sends them: to bring B bytes together among
            n ranks, or to scatter them, B (n - 1) / n; to add B bytes up for all twice that.
    """

    label: str
    name: str
    count: int
    sent: int


class Traffic(tuple[Collectives, ...]):
    """What the first rank of a mesh has sent in collectives in its life; `sent` adds it up."""

    __slots__ = ()

    def sent(self, label: str | None = None) -> int:
        """Return the bytes along one dimension of the mesh, or along all."""
        return sum(one.sent for one in self if label in (None, one.label))


async def traffic(mesh: ProcMesh) -> Traffic:
    """Return what collectives the first rank of a mesh took part in, and the bytes that it has sent, so far.

    Those of global tensors, of `reduce` and of remote functions with a process group; tensors that `to_mesh` and
    `fetch` move are read from memory, and not counted. Ask before a step and after it.

    Args:
        mesh: The processes. Counts are of the life of the first of them.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.

    Example:
        >>> (await trimesh.tensor.traffic(procs)).sent("dp")
        1288
    """
    team = team_of(mesh, "collectives are counted on")
    found: Traffic = await in_trio(_asked)(team)
    return found


async def _asked(team: Team) -> Traffic:
    request = team.engine.ask(team, [0], lambda number: call_kernel(team, "traffic", number), expected.TRAFFIC)
    return Traffic(Collectives(*one) for one in (await answers(request))[0])
