"""What a remote function is given to work with the other ranks by `torch.distributed`: groups, a device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import attrs

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

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
        from trimesh.tensor.groups.groups import torch_group  # noqa: PLC0415 - takes a second, at the ranks only

        return torch_group(rank, team, self.labels)


@attrs.frozen
class RanksDeviceMesh:
    """Stands, at the controller, for torch's device mesh of the ranks that a remote function runs on.

    Attributes:
        labels: Its dimensions.
    """

    labels: tuple[str, ...]

    def __reduce__(self) -> NoReturn:
        """Refuse; see `ProcessGroup`."""
        raise TypeError(
            f"the device mesh of ranks is an argument of functions under @trimesh.remote, got the one along "
            f"{self.labels} for something else: in actors use that of a group of theirs, group.device_mesh()"
        )


@attrs.frozen
class SentDeviceMesh:
    """What becomes of a `RanksDeviceMesh` on its way to the ranks.

    Attributes:
        labels: Its dimensions.
    """

    labels: tuple[str, ...]

    def on_rank(self, rank: Rank, team: TeamOnRank) -> DeviceMesh:
        from trimesh.tensor.groups.groups import device_mesh  # noqa: PLC0415 - takes a second, at the ranks only

        if tuple(team.extent) != self.labels:
            raise TypeError(
                f"a remote function gets the device mesh of the ranks that it runs on, along {tuple(team.extent)}, got "
                f"one along {self.labels}: write device_mesh() of the view that its tensors are on"
            )
        return device_mesh(rank, team)
