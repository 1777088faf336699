"""Errors of services."""

from __future__ import annotations

from trimesh.errors import CollectiveFailed, MeshError


class Paused(MeshError):
    """A running request was aborted because the pool was paused by `paused("abort")`; it can be retried."""


class GroupEnded(CollectiveFailed):
    """The process group of an epoch has ended: a member of the mesh was lost, joined or left; join again.

    Attributes:
        epoch: Epoch of the view that the group was made of.
    """

    def __init__(self, message: str = "", *, epoch: int = -1) -> None:
        super().__init__(message)
        self.epoch = epoch
