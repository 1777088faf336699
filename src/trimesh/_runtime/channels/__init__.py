"""Channels: who has a port, what waits at the two ends."""

from trimesh._runtime.channels.ports import Port
from trimesh._runtime.channels.receiver import Receiver
from trimesh._runtime.channels.registry import CarriedPorts

__all__ = [
    "CarriedPorts",
    "Port",
    "Receiver",
]
