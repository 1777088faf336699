"""Services on meshes: replicas behind one name.

`async with trimesh.service.open_pool(generators) as pool:` gives a handle that any actor may hold;
`await pool.generate(prompt)` runs the endpoint on one replica.
"""

from trimesh.service.dispatch.adaptive import Adaptive
from trimesh.service.dispatch.routes import Affinity, LeastLoaded, RoundRobin
from trimesh.service.errors import Paused
from trimesh.service.pool.health import Health
from trimesh.service.pool.opening import open_pool
from trimesh.service.pool.pool import Pool, PoolEndpoint, PoolSession
from trimesh.service.pool.statistics import PoolStatistics, ReplicaStatistics

__all__ = [
    "Adaptive",
    "Affinity",
    "Health",
    "LeastLoaded",
    "Paused",
    "Pool",
    "PoolEndpoint",
    "PoolSession",
    "PoolStatistics",
    "ReplicaStatistics",
    "RoundRobin",
    "open_pool",
]
