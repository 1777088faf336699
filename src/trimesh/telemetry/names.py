"""Names of attributes and metrics, as OpenTelemetry's conventions for RPC (1.44) have them: here alone, as they change.

Coordinates are on spans alone: a label of a metric must not have a value for each rank.
"""

from typing import Final

SYSTEM: Final = "rpc.system.name"
METHOD: Final = "rpc.method"
ERROR: Final = "error.type"
MEMBERS: Final = "trimesh.members"
MESH: Final = "trimesh.mesh"
ENDPOINT: Final = "trimesh.endpoint"
POINT: Final = "trimesh.point"
INCARNATION: Final = "trimesh.incarnation"
CALLER: Final = "trimesh.caller"
QUEUED: Final = "trimesh.queued_seconds"

CLIENT_SECONDS: Final = "rpc.client.call.duration"
SERVER_SECONDS: Final = "rpc.server.call.duration"

OTHER: Final = "_OTHER"
"""Of an error whose class is not known here: that of another process, which says it in its own span."""

BUCKETS: Final = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)
"""Bounds in seconds: a call within a host takes some 30 us, where the conventions begin at 5 ms."""
