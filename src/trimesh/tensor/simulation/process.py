"""What stands for processes where there are none: their numbers, and how values travel to nowhere and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from trimesh._runtime.values import Values
from trimesh.ids import ProcId
from trimesh.tensor.session.opening import WithoutProcesses

if TYPE_CHECKING:
    from trimesh.shape.region import Region

CONTROLLER: Final = ProcId(1)
_FIRST_RANK: Final = 2


def proc_id_of(rank: int) -> ProcId:
    """Return the number of the process that a rank would have."""
    return ProcId(_FIRST_RANK + rank)


def rank_of(proc: int) -> int:
    return proc - _FIRST_RANK


class _NoDeadlocks:
    """Nothing waits for anything."""

    def end_search_now(self) -> None:
        """Nothing."""


class SimulatedController:
    """The process of the controller, as far as an engine without ranks asks it for anything.

    Attributes:
        is_simulated: That nothing of it may be waited for, nor lent.
        proc_id: Its number.
        values: Encodes what is answered.
    """

    is_simulated = True
    proc_id = CONTROLLER

    def __init__(self) -> None:
        self.values = Values(CONTROLLER)
        self.deadlocks = _NoDeadlocks()


@attrs.define(eq=False)
class SimulatedPeer:
    """The process of one rank.

    Attributes:
        proc_id: Its number.
        link: Anything but None, which would say that it is gone.
        death: None.
    """

    proc_id: ProcId
    link: object = attrs.field(factory=object)
    death: None = None

    def define(self, definitions: object) -> None:
        """Nothing: this process has them."""


class SimulatedProcs(WithoutProcesses):
    """What stands for the processes that a mesh owns.

    Attributes:
        name: Of the mesh.
        whole: All of it.
    """

    def __init__(self, name: str, whole: Region) -> None:
        self.name = name
        self.whole = whole
