"""How the values of a process travel: by pickle, by annotations, tensors, handles."""

from trimesh._runtime.values.codec import Values
from trimesh._runtime.values.endpoint_spec import (
    ENDPOINTS,
    GENERATOR,
    EndpointKind,
    EndpointSpec,
    endpoints_of,
    is_abstract,
    signature_of,
)
from trimesh._runtime.values.guarded import Guarded
from trimesh._runtime.values.payload import take_payload
from trimesh._runtime.values.reference import MemberInfo, MeshInfo

__all__ = [
    "ENDPOINTS",
    "GENERATOR",
    "EndpointKind",
    "EndpointSpec",
    "Guarded",
    "MemberInfo",
    "MeshInfo",
    "Values",
    "endpoints_of",
    "is_abstract",
    "signature_of",
    "take_payload",
]
