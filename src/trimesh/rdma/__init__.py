"""Bulk data: memory that other processes read and write themselves, while its owner's Python does something else."""

from trimesh.rdma.allocation import allocate
from trimesh.rdma.batch import Batch, batch
from trimesh.rdma.buffer import RDMABuffer

__all__ = ["Batch", "RDMABuffer", "allocate", "batch"]
