"""Serialisation of a process's values: by pickle, by annotations, tensors, handles."""

from trimesh._runtime.values.codec import Guarded, Values, take_payload
from trimesh._runtime.values.endpoint_spec import (
    ENDPOINTS,
    GENERATOR,
    EndpointKind,
    EndpointSpec,
    HostsInfo,
    MemberInfo,
    MeshInfo,
    bind_endpoints,
    class_of,
    endpoints_of,
    is_abstract,
    signature_of,
)

__all__ = [
    "ENDPOINTS",
    "GENERATOR",
    "EndpointKind",
    "EndpointSpec",
    "Guarded",
    "HostsInfo",
    "MemberInfo",
    "MeshInfo",
    "Values",
    "bind_endpoints",
    "class_of",
    "endpoints_of",
    "is_abstract",
    "signature_of",
    "take_payload",
]
