"""Channels: ports, receivers, and the items that wait at both ends."""

from trimesh._runtime.channels.ports import CarriedPorts, Port
from trimesh._runtime.channels.receiver import Receiver

__all__ = [
    "CarriedPorts",
    "Port",
    "Receiver",
]
