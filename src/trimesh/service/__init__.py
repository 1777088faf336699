"""Services on meshes: pools of replicas behind one name, work with bounded staleness, key-value stores.

`async with trimesh.service.open_pool(generators) as pool:` yields a handle that any actor may hold;
`await pool.generate(prompt)` runs the endpoint on one replica. `open_slots` and `open_replay` connect generators to a
trainer that runs at the same time; `open_store` keeps values by key.
"""

from trimesh.errors import Overloaded
from trimesh.service.dispatch import Adaptive, Affinity, LeastLoaded, RoundRobin
from trimesh.service.errors import Paused
from trimesh.service.health import health_app
from trimesh.service.kinds import register
from trimesh.service.pool.pool import Pool, PoolEndpoint, PoolSession, PoolStatistics, ReplicaStatistics, open_pool
from trimesh.service.pool.replicas import Health
from trimesh.service.pool.streams import PoolStream
from trimesh.service.replay import ReplayBuffer, ReplayStatistics, open_replay
from trimesh.service.request_policies import Rate
from trimesh.service.scaling import LatencyTarget, Requests
from trimesh.service.slots import Lease, Slots, SlotStatistics, open_slots
from trimesh.service.store import Store, StoreStatistics, open_store

__all__ = [
    "Adaptive",
    "Affinity",
    "Health",
    "LatencyTarget",
    "Lease",
    "LeastLoaded",
    "Overloaded",
    "Paused",
    "Pool",
    "PoolEndpoint",
    "PoolSession",
    "PoolStatistics",
    "PoolStream",
    "Rate",
    "ReplayBuffer",
    "ReplayStatistics",
    "ReplicaStatistics",
    "Requests",
    "RoundRobin",
    "SlotStatistics",
    "Slots",
    "Store",
    "StoreStatistics",
    "health_app",
    "open_pool",
    "open_replay",
    "open_slots",
    "open_store",
]

register()
