"""Encoding of handles without pickle, as numbers and names, for an actor mesh its class by name; and of policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from trimesh._runtime.values import HostsInfo, MemberInfo, MeshInfo, class_of, endpoints_of
from trimesh._supervision.policy import Backoff, FailFast, Isolate, Restart
from trimesh._wire.memory import Sink
from trimesh._wire.typed.annotations import described_type, type_described
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
    return region, mesh._cls, *_fields_of(info)  # noqa: SLF001 - a method would hide an endpoint of that name


def _fields_of(info: MeshInfo) -> tuple[Any, ...]:
    fields = msgspec.structs.astuple(info)
    return tuple([msgspec.structs.astuple(one) for one in info.members] if it is info.members else it for it in fields)


def _put_actors_together(_: DecodeSource, region: Any, cls: Any, *fields: Any) -> ActorMesh:
    if not (isinstance(region, Region) and is_actor_class(cls)):
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


def is_actor_class(cls: Any) -> bool:
    """Return whether this is a class of actors, or one with type arguments."""
    found = class_of(cls)
    return isinstance(found, type) and issubclass(found, Actor)


def _take_alias_apart(alias: Any, _: Sink) -> tuple[Any, ...]:
    if not is_actor_class(alias):
        raise TypeError(f"only actor classes with type arguments can be sent, got {alias!r}: send the class")
    what = f"the arguments of {class_of(alias).__qualname__}[...]"
    return class_of(alias), *(described_type(part, what) for part in get_args(alias))


def _put_alias_together(source: DecodeSource, cls: Any = None, *described: Any) -> Any:
    if not is_actor_class(cls) or len(getattr(cls, "__parameters__", ())) != len(described):
        raise ProtocolError(f"type arguments must be those of an actor class, got {len(described)} for {cls!r:.100}")
    generic: Any = cls
    return generic[tuple(type_described(one, source) for one in described)]


def put_hosts_info_together(*fields: Any) -> HostsInfo:
    """Return the description of hosts that a peer has sent.

    Raises:
        ProtocolError: It is none.
    """
    info: Any = HostsInfo(*fields)
    given: Any = info.names
    is_right = isinstance(info.whole, Region) and isinstance(given, list | tuple) and isinstance(info.parts, dict)
    if not (is_right and all(type(number) is int for number in (info.number, info.owner, info.family))):
        raise ProtocolError("a handle on hosts must have their numbers, region, names and parts")
    names = cast("Sequence[Any]", given)
    if len(names) < info.whole.base.nelements or not all(isinstance(name, str) for name in names):
        raise ProtocolError("a handle on hosts must have the name of each host")
    found: HostsInfo = info
    return found


def _policy_kind(name: str, cls: type[FailFast | Isolate | Restart | Backoff]) -> ValueKind:
    def put_together(_: DecodeSource, fields: Any = None) -> Any:
        if not isinstance(fields, dict):
            raise ProtocolError(f"a {name} must be the values of its fields")
        try:
            made: Any = cls
            return made(**fields)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a {name} cannot be read: {error}") from error

    return ValueKind(name, cls, lambda policy, _: (msgspec.structs.asdict(policy),), put_together)


def register() -> None:
    register_kind(ValueKind("actors", ActorMesh, _take_actors_apart, _put_actors_together, stands_for=is_actor_class))
    register_kind(ValueKind("alias", "typing._GenericAlias", _take_alias_apart, _put_alias_together))
    register_kind(ValueKind("mesh", MeshInfo, lambda info, _: _fields_of(info), _put_info_together))
    register_kind(
        ValueKind("outcome", Outcome, lambda outcome, _: (outcome.value, outcome.error), _put_outcome_together)
    )
    register_kind(ValueKind("processes", ProcMesh, _take_procs_apart, _put_procs_together))
    for cls in (FailFast, Isolate, Restart, Backoff):
        register_kind(_policy_kind(cls.__name__, cls))
