"""Pools, slots, replay buffers and stores without `await`: in plain scripts, notebooks and threads.

`from trimesh.blocking.service import open_pool`, then `with open_pool(generators) as pool: pool.generate(prompt)`.
"""

from trimesh.blocking.service.faces import face
from trimesh.blocking.service.pool import Pool, PoolSession, open_pool
from trimesh.blocking.service.work import ReplayBuffer, Slots, Store, open_replay, open_slots, open_store

__all__ = [
    "Pool",
    "PoolSession",
    "ReplayBuffer",
    "Slots",
    "Store",
    "face",
    "open_pool",
    "open_replay",
    "open_slots",
    "open_store",
]
