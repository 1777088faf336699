"""Pools, slots and replay buffers in plain scripts, notebooks and threads: those of `trimesh.service` without `await`.

`from trimesh.blocking.service import open_pool`, then `with open_pool(generators) as pool: pool.generate(prompt)`.
"""

from trimesh.blocking.service.faces import face
from trimesh.blocking.service.pool import Pool, PoolSession, open_pool
from trimesh.blocking.service.work import ReplayBuffer, Slots, open_replay, open_slots

__all__ = [
    "Pool",
    "PoolSession",
    "ReplayBuffer",
    "Slots",
    "face",
    "open_pool",
    "open_replay",
    "open_slots",
]
