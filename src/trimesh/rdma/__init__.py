"""Bulk data: memory that other processes read and write themselves, while its owner's Python does something else."""

from trimesh.rdma.allocation import allocate
from trimesh.rdma.batch import Batch, batch
from trimesh.rdma.buffer import RDMABuffer
from trimesh.rdma.multicast import multicast
from trimesh.rdma.published import Published
from trimesh.rdma.reading import VersionGone
from trimesh.rdma.snapshot import Snapshot

__all__ = ["Batch", "Published", "RDMABuffer", "Snapshot", "VersionGone", "allocate", "batch", "multicast"]
