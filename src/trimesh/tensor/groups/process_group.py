"""`ProcessGroup`: what a remote function is given to do something with the other ranks by `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import attrs

if TYPE_CHECKING:
    import torch.distributed as dist

    from trimesh.tensor.rank.rank import Rank, TeamOnRank


@attrs.frozen
class ProcessGroup:
    """Stands, at the controller, for the process groups of the ranks that differ in some dimensions only.

    As an argument of a remote function it is a `torch.distributed.ProcessGroup` there, of the ranks that the function
    runs on. It is made when it is used first, and anew after a rank could not take part.

    Attributes:
        labels: The dimensions.
    """

    labels: tuple[str, ...]

    def __reduce__(self) -> NoReturn:
        """Refuse: elsewhere than on the ranks of a remote function there is no group for it to be."""
        raise TypeError(
            f"a process group of a mesh is an argument of functions under @trimesh.remote, got the one along "
            f"{self.labels} for something else: in actors use torch.distributed itself, "
            "with spawn_procs(rendezvous=True) and init_process_group()"
        )


@attrs.frozen
class SentGroup:
    """What becomes of a `ProcessGroup` on its way to the ranks.

    Attributes:
        labels: The dimensions.
    """

    labels: tuple[str, ...]

    def on_rank(self, rank: Rank, team: TeamOnRank) -> dist.ProcessGroup:
        """Return the group of a rank."""
        from trimesh.tensor.groups.groups import torch_group  # noqa: PLC0415 - takes a second, at the ranks only

        return torch_group(rank, team, self.labels)
