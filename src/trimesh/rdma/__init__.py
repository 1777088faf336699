"""Bulk data: one-sided reads and writes of another process's memory, without its Python taking part."""

from trimesh.rdma.buffers.batch import Batch, batch, multicast
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.local import allocate
from trimesh.rdma.publications.published import Published
from trimesh.rdma.publications.reading import Snapshot, VersionGone

__all__ = ["Batch", "Published", "RDMABuffer", "Snapshot", "VersionGone", "allocate", "batch", "multicast"]
