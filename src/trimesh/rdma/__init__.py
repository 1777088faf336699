"""Bulk data: memory that other processes read and write themselves, while its owner's Python does something else."""

from trimesh.rdma.buffers.batch import Batch, batch
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.buffers.multicast import multicast
from trimesh.rdma.memory.allocation import allocate
from trimesh.rdma.publications.published import Published
from trimesh.rdma.publications.reading import VersionGone
from trimesh.rdma.publications.snapshot import Snapshot

__all__ = ["Batch", "Published", "RDMABuffer", "Snapshot", "VersionGone", "allocate", "batch", "multicast"]
