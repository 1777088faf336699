"""Channels: who has a port, what waits at the two ends."""

from trimesh._runtime.channels.ports import CarriedPorts, Port
from trimesh._runtime.channels.receiver import Receiver

__all__ = [
    "CarriedPorts",
    "Port",
    "Receiver",
]
