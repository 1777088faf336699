"""Other processes: the link to one, an actor of one, its calls here, how they ended, what they may send."""

from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Parcel, Peer, Target

__all__ = [
    "IncomingCall",
    "Parcel",
    "Peer",
    "Target",
]
