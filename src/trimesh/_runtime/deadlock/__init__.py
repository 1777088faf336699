"""Who waits for whom, and which call of a deadlock is to fail."""

from trimesh._runtime.deadlock.blocked_search import BlockedSearch

__all__ = [
    "BlockedSearch",
]
