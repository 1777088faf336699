"""Which operators ran on whole tensors, for the table has no rule for them."""

from __future__ import annotations

from typing import Any

from trimesh._runtime.tasks import in_trio
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.tensor.controller import expected
from trimesh.tensor.controller.answers import answers
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.team import Team
from trimesh.tensor.session.mesh import team_of


class Fallbacks(dict[str, int]):
    """How often each operator was run on whole tensors, by name.

    Attributes:
        operators: How many operators on global tensors there were in all.
    """

    def __init__(self, found: dict[str, int], operators: int) -> None:
        super().__init__(found)
        self.operators = operators


async def fallbacks(mesh: ProcMesh) -> Fallbacks:
    """Return which operators on global tensors had no rule for parts, and how often they ran.

    Their arguments were gathered, every rank computed the whole, and results were cut again: right, and slow. What was
    asked of tensors of which all ranks had the whole anyhow does not count.

    Args:
        mesh: The processes; the first of them tells, as all run the same operators. Counts are of its life.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.

    Example:
        >>> await trimesh.tensor.fallbacks(procs)
        {'aten::_linalg_eigh': 1}
    """
    team = team_of(mesh, "the operators without a rule are asked of")
    found: Fallbacks = await in_trio(_asked)(team)
    return found


async def _asked(team: Team) -> Fallbacks:
    request = team.engine.ask(team, [0], lambda number: call_kernel(team, "fallbacks", number), expected.FALLBACKS)
    found: tuple[Any, Any] = (await answers(request))[0]
    return Fallbacks(*found)
