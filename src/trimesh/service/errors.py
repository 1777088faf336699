"""Errors of services."""

from __future__ import annotations

from trimesh.errors import CollectiveFailed, MeshError


class Paused(MeshError):
    """A request that ran was aborted, because the pool was paused by `paused("abort")`; it may be made again."""


class GroupEnded(CollectiveFailed):
    """The process group of one epoch of a mesh has ended: a member was lost, has come or has left it; join again.

    Attributes:
        epoch: Of the view that the group was made of.
    """

    def __init__(self, message: str = "", *, epoch: int = -1) -> None:
        super().__init__(message)
        self.epoch = epoch
