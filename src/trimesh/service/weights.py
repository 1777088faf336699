"""Weights of many ranks as one version, read by ranks of another layout; it needs torch.

`from trimesh.service.weights import ShardOf, ShardPublisher, publication_of`.
"""

from trimesh.tensor.controller.shapes import ShardOf
from trimesh.tensor.publications.relay import open_relays
from trimesh.tensor.publications.state_publication import (
    Publication,
    ShardPublisher,
    elastic_publication,
    publication_of,
)
from trimesh.tensor.publications.state_snapshot import StateSnapshot

__all__ = [
    "Publication",
    "ShardOf",
    "ShardPublisher",
    "StateSnapshot",
    "elastic_publication",
    "open_relays",
    "publication_of",
]
