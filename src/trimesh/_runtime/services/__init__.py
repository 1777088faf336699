"""Messages of the packages above, and memory granted to other processes."""

from trimesh._runtime.services.bulk import Bulk, Granted, Registration, describe
from trimesh._runtime.services.registry import TENSORS, Handler

__all__ = [
    "TENSORS",
    "Bulk",
    "Granted",
    "Handler",
    "Registration",
    "describe",
]
