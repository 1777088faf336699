"""The form without `await` of a handle that came from elsewhere."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from trimesh._runtime import channels
from trimesh.actor import actor_mesh, host_mesh, proc_mesh
from trimesh.actor.actor import Actor
from trimesh.blocking.actor_mesh import ActorMesh
from trimesh.blocking.buffer import RDMABuffer
from trimesh.blocking.channel import Port
from trimesh.blocking.handle import FacedObject
from trimesh.blocking.meshes import HostMesh
from trimesh.blocking.proc_mesh import ProcMesh
from trimesh.rdma.buffers import buffer

T = TypeVar("T")
A = TypeVar("A", bound=Actor)


@overload
def face(handle: proc_mesh.ProcMesh) -> ProcMesh: ...
@overload
def face(handle: host_mesh.HostMesh) -> HostMesh: ...
@overload
def face(handle: channels.Port[T]) -> Port[T]: ...
@overload
def face(handle: buffer.RDMABuffer) -> RDMABuffer: ...
@overload
def face(handle: A) -> type[A]: ...
def face(handle: Any) -> Any:
    """Return the form without `await` of a handle of `trimesh`: one that an endpoint has returned, or was given.

    A handle is one on a mesh, the port of a channel, or a buffer.

    In an endpoint with `thread=True` it is how the actor calls others: `tb.face(self.peers).step.call(1)`. Such a call
    has the deadline of the endpoint, and is cancelled with it.

    Raises:
        TypeError: It is none of these.
    """
    match handle:
        case FacedObject():
            return handle  # pyright: ignore[reportUnknownVariableType]
        case actor_mesh.ActorMesh():
            return ActorMesh(handle)
        case proc_mesh.ProcMesh():
            return ProcMesh(handle)
        case host_mesh.HostMesh():
            return HostMesh(handle)
        case channels.Port():
            return Port(handle)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case buffer.RDMABuffer():
            return RDMABuffer.of(handle)
        case _:
            raise TypeError(
                f"face takes a handle on a mesh, a port or a buffer, got {handle!r}: for other objects write "
                "run(object.method, ...)"
            )
