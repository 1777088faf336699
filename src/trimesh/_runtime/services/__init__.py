"""Services: messages of higher packages, and memory granted to other processes."""

from trimesh._runtime.services.bulk import Bulk, Granted, NotByAdapter, Registration, describe
from trimesh._runtime.services.registry import TENSORS, Handler, known_services

__all__ = [
    "TENSORS",
    "Bulk",
    "Granted",
    "Handler",
    "NotByAdapter",
    "Registration",
    "describe",
    "known_services",
]
