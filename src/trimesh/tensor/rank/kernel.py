"""Operations of ours on the ranks, beside those of torch: `kernels/table.py` has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from trimesh.tensor.dtensor.learnt_operator import LearntOperator
    from trimesh.tensor.dtensor.learnt_replay import LearntReplay


@attrs.frozen
class Kernel:
    """One operation.

    Attributes:
        name: In the table; commands call it "trimesh::name".
        function: Takes the `Rank`, the `TeamOnRank` of the command, then its arguments.
        takes_poison: Whether it is called although an argument is a `Poison`; else its outputs are one, too.
        operator: The operator of torch that it stands for, if it does.
        learnt: Runs it in the place of the function.
    """

    name: str
    function: Callable[..., Any]
    takes_poison: bool = False
    operator: Callable[..., Any] | None = None
    learnt: LearntOperator | None = None


@attrs.frozen
class Kernels:
    """What a command may name beside torch's own operators.

    Attributes:
        by_name: Kernels that commands call "trimesh::name".
        families: What makes a kernel of an operator of torch, by the word before its name: "global::aten::add.Tensor".
        local_replay: Makes what runs the replays of a recording.
        local_sequence: Makes what runs a sequence of commands, each of which counts.
    """

    by_name: dict[str, Kernel]
    families: dict[str, Callable[[str, Callable[..., Any]], Kernel]]
    local_replay: Callable[[], LearntReplay]
    local_sequence: Callable[[], LearntReplay]
