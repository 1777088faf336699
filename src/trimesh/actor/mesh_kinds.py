"""Encoding of mesh handles without pickle: numbers and names; for an actor mesh its class by name."""

from __future__ import annotations

from typing import Any

import msgspec

from trimesh._runtime.values import MemberInfo, MeshInfo, endpoints_of
from trimesh._wire.memory import Sink
from trimesh._wire.typed.codec import DecodeSource, ValueKind, register_kind
from trimesh._wire.typed.known_kinds import name_of
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.proc_mesh import ProcMesh, refer_procs
from trimesh.actor.verbs import Outcome
from trimesh.actor.view import MeshView
from trimesh.errors import ProtocolError
from trimesh.shape.region import Region


def _take_actors_apart(mesh: ActorMesh, _: Sink) -> tuple[Any, ...]:
    info, region, cls = mesh.__reduce__()[1]
    name_of(cls, f"the actor class {cls.__qualname__}")
    return region, cls, *_fields_of(info)


def _fields_of(info: MeshInfo) -> tuple[Any, ...]:
    fields = msgspec.structs.astuple(info)
    return tuple([msgspec.structs.astuple(one) for one in info.members] if it is info.members else it for it in fields)


def _put_actors_together(_: DecodeSource, region: Any, cls: Any, *fields: Any) -> ActorMesh:
    if not (isinstance(region, Region) and isinstance(cls, type) and issubclass(cls, Actor)):
        raise ProtocolError("a handle on actors must have a region and an actor class")
    info = _put_info_together(_, *fields)
    if not set(region.ranks()) <= set(info.whole.ranks()):
        raise ProtocolError("a handle must know all the members that it shows")
    return ActorMesh(MeshView(info, region, endpoints_of(cls)), cls)


def _put_info_together(_: DecodeSource, *fields: Any) -> MeshInfo:
    info = MeshInfo(*fields)
    if not (
        isinstance(info.whole, Region)
        and all(
            type(number) is int
            for number in (info.mesh, info.owner, info.family, info.borrower, info.epoch, info.first)
        )
        and isinstance(info.actor, str | None)
    ):
        raise ProtocolError("a handle must have the numbers and the region of its mesh")
    flags = (info.is_healing, info.is_shared, info.replaces_all)
    if not (isinstance(info.name, str) and all(type(flag) is bool for flag in flags)):
        raise ProtocolError("a handle must have the name and the flags of its mesh")
    members: Any = info.members  # as received: a tuple of fields for each
    found = tuple(_member(*one) for one in members)
    if len(found) < info.whole.extent.nelements:
        raise ProtocolError("a handle must know all the members that it shows")
    return msgspec.structs.replace(info, members=found)


def _member(*fields: Any) -> MemberInfo:
    one = MemberInfo(*fields)
    numbers = (one.proc_id, one.pid, one.incarnation)
    if not (all(type(number) is int for number in numbers) and isinstance(one.host, str)):
        raise ProtocolError("a member of a mesh must be numbers and the name of a host")
    return one


def _take_procs_apart(mesh: ProcMesh, _: Sink) -> tuple[Any, ...]:
    info, region = mesh.__reduce__()[1]
    return region, *_fields_of(info)


def _put_procs_together(_: DecodeSource, region: Any, *fields: Any) -> ProcMesh:
    info = _put_info_together(_, *fields)
    if not isinstance(region, Region):
        raise ProtocolError("a handle on processes must be a view of them")
    return refer_procs(info, region)


def _put_outcome_together(_: DecodeSource, value: Any = None, error: Any = None) -> Outcome[Any]:
    if not isinstance(error, Exception | None):
        raise ProtocolError("an outcome must be a value or an error")
    return Outcome(value, error)


def _is_actor_class(cls: type) -> bool:
    return issubclass(cls, Actor)


def register() -> None:
    register_kind(ValueKind("actors", ActorMesh, _take_actors_apart, _put_actors_together, stands_for=_is_actor_class))
    register_kind(ValueKind("mesh", MeshInfo, lambda info, _: _fields_of(info), _put_info_together))
    register_kind(
        ValueKind("outcome", Outcome, lambda outcome, _: (outcome.value, outcome.error), _put_outcome_together)
    )
    register_kind(ValueKind("processes", ProcMesh, _take_procs_apart, _put_procs_together))
