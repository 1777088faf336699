"""Other processes: links, outboxes, incoming calls, recorded deaths, permitted senders."""

from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Parcel, Peer, Target

__all__ = [
    "IncomingCall",
    "LaunchRequest",
    "Parcel",
    "Peer",
    "Target",
]
