"""Weights of many ranks as one version, read by ranks of another layout; it needs torch.

`from trimesh.service.weights import ShardOf, ShardPublisher, publication_of`.
"""

from trimesh.tensor.controller.shard_of import ShardOf
from trimesh.tensor.ops.shard_publisher import ShardPublisher, publication_of
from trimesh.tensor.ops.state_publication import Publication
from trimesh.tensor.ops.state_snapshot import StateSnapshot

__all__ = ["Publication", "ShardOf", "ShardPublisher", "StateSnapshot", "publication_of"]
