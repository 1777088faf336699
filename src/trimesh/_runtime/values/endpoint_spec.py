"""Endpoint specification, read from the actor class and used on both sides of the wire."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import force_setattr

from trimesh.errors import Origin
from trimesh.ids import MeshId, ProcId
from trimesh.shape.region import Region

ENDPOINTS: Final = "__trimesh_endpoints__"
"""Attribute of an actor class that holds its endpoints by name."""


class EndpointKind(enum.Enum):
    """Way in which an endpoint runs."""

    ASYNC = "async"
    """A coroutine function, on the Trio thread."""
    INLINE = "inline"
    """A plain function, on the Trio thread; nothing else runs meanwhile."""
    THREAD = "thread"
    """A plain function, in a worker thread."""
    GENERATOR = "generator"
    """An async generator function, on the Trio thread; `stream` calls it."""


# For checks made once a message: naming a member of an enum costs as much as two function calls.
ASYNC: Final = EndpointKind.ASYNC
INLINE: Final = EndpointKind.INLINE
GENERATOR: Final = EndpointKind.GENERATOR


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or class.

    Since Python 3.14 its annotations may use names that are not defined yet, or for a type checker only.

    Raises:
        ValueError: It has none.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format  # noqa: PLC0415 - the module came with 3.14

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def _slots_of(spec: EndpointSpec) -> str:
    if spec.group is not None:
        return f"group {spec.group}"
    return f"endpoint {spec.name}" if spec.concurrency != 1 else ""


def _arity_of(spec: EndpointSpec) -> tuple[int, int]:
    least = most = 0
    for parameter in spec.signature.parameters.values():
        is_required = parameter.default is inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            most = sys.maxsize
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY and is_required:
            return 1, 0
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            least += is_required
            most += 1
    return least, most


class EndpointSpec(msgspec.Struct, frozen=True):
    """One endpoint of an actor class.

    Attributes:
        name: Attribute of the class.
        concurrency: How many of its group may run at once on one actor.
        group: Name of the group it shares slots with, or None for the one slot of the actor.
        idempotent: Running it twice does no harm; only then may it be retried.
        signature: Without `self`, and without the reply.
        slots: Key of the slots that it takes: of its group, of its own, or of the actor (rule C4).
        arity: Least and greatest number of arguments with which it can be called, all of them positional.
        bound: What type variables of its annotations stand for, as in `Box[int]`; used where nothing is pickled.
        applies: Its parameter for a function, by whose annotations its parameters `args` and `kwargs` travel.
        applied: That function, at the caller: its annotation counts for the result.
        answers_later: Whether its first argument is a `Reply`, which answers the call.
        arguments_text, item_text, result_text: Names of its arguments, its items and its result in errors.
    """

    name: str
    fn: Callable[..., Any]
    kind: EndpointKind
    concurrency: int
    group: str | None
    idempotent: bool
    signature: inspect.Signature
    answers_later: bool = False
    bound: tuple[tuple[Any, Any], ...] = ()
    applies: str = ""
    applied: Callable[..., Any] | None = None
    # Computed from those above.
    slots: str = ""
    parameters: tuple[str, ...] = ()
    arity: tuple[int, int] = (0, 0)
    arguments_text: str = ""
    item_text: str = ""
    result_text: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "slots", _slots_of(self))
        force_setattr(self, "parameters", tuple(self.signature.parameters))
        force_setattr(self, "arity", _arity_of(self))
        force_setattr(self, "arguments_text", f"the arguments of {self.name}()")
        force_setattr(self, "item_text", f"an item of {self.name}()")
        force_setattr(self, "result_text", f"the result of {self.name}()")


def is_abstract(spec: EndpointSpec) -> bool:
    """Return whether an endpoint is an `abc.abstractmethod`, to be defined by subclasses."""
    return bool(getattr(spec.fn, "__isabstractmethod__", False))


AGENT_ENDPOINTS: Final[dict[str, EndpointSpec]] = {}
"""Endpoints of the agent, which every process has; its class adds them."""


def endpoints_of(cls: Any) -> Mapping[str, EndpointSpec]:
    """Return the endpoints of an actor class by name; for `Box[int]` with its type arguments."""
    found: Mapping[str, EndpointSpec] = getattr(class_of(cls), ENDPOINTS, {})
    return found if isinstance(cls, type) else bind_endpoints(cls, found)


def bind_endpoints(cls: Any, endpoints: Mapping[str, EndpointSpec]) -> Mapping[str, EndpointSpec]:
    """Return endpoints with the type arguments of a class; the same ones if it has none."""
    bound = tuple(bound_variables(cls).items())
    if not bound:
        return endpoints
    return {name: msgspec.structs.replace(spec, bound=bound) for name, spec in endpoints.items()}


# ---- type arguments --------------------------------------------------------------------------------------------------


def class_of(cls: Any) -> Any:
    """Return the class; for `Box[int]` it is `Box`, for other objects None."""
    return cls if isinstance(cls, type) else get_origin(cls)


def bound_variables(cls: Any) -> dict[Any, Any]:
    """Return what type variables stand for in a class: those of `Box[int]`, and of bases as in `class A(Box[int])`."""
    made: Any = class_of(cls)
    parameters = getattr(made, "__parameters__", ())
    found: dict[Any, Any] = {}
    if not isinstance(cls, type) and all(isinstance(one, TypeVar) for one in parameters):
        found.update(zip(parameters, get_args(cls), strict=False))
    own: Mapping[str, Any] = made.__dict__
    bases: tuple[Any, ...] = own.get("__orig_bases__", made.__bases__)
    for base in bases:
        for variable, given in bound_variables(base).items():
            found.setdefault(variable, bind_hint(given, found))
    return {variable: given for variable, given in found.items() if variable is not given}


def bind_hint(hint: Any, bound: Mapping[Any, Any]) -> Any:
    """Return an annotation with type variables replaced; those that are not bound stay."""
    if isinstance(hint, TypeVar):
        return bound.get(hint, hint)
    generic: Any = hint
    variables = () if isinstance(hint, type) else getattr(hint, "__parameters__", ())
    if not any(one in bound for one in variables):
        return generic
    return generic[tuple(bound.get(one, one) for one in variables)]


# ---- meshes and hosts as sent in handles: numbers and names, no ownership ------------------------------------------


class MemberInfo(msgspec.Struct, frozen=True):
    """One process incarnation.

    Attributes:
        pid: Process id there.
        incarnation: 0 for the first process at its point.
    """

    proc_id: ProcId
    host: str
    pid: int
    incarnation: int = 0


class MeshInfo(msgspec.Struct, frozen=True):
    """One actor mesh, or the agents of one process mesh, at one moment.

    Attributes:
        mesh: Its number in the family.
        actor: Class name, or None for a process mesh.
        whole: All of it.
        members: By rank.
        owner: The process whose block owns it, and which knows the replacements of members that have ended.
        is_healing: Whether members may be replaced: its policy is not `FailFast`.
        is_shared: For a process mesh: whether other processes of the family may spawn on it.
        borrower: The process that has requested these actors from the owner, if it is another one.
        family: The controller of its program; 0 for none, which is refused.
        epoch: Number of resizes.
        first: Places along its first dimension now, which are the first ones of `whole`; -1 for all of them.
        replaces_all: Whether its policy restarts all members when one fails.
    """

    mesh: MeshId
    name: str
    actor: str | None
    whole: Region
    members: Sequence[MemberInfo]
    owner: ProcId = ProcId(0)
    is_healing: bool = False
    family: ProcId = ProcId(0)
    is_shared: bool = False
    borrower: ProcId = ProcId(0)
    epoch: int = 0
    first: int = -1
    replaces_all: bool = False

    def origin(self, rank: int, endpoint: str | None = None) -> Origin:
        """Return the coordinates of an error of the member of base rank `rank`."""
        member = self.members[rank]
        point = self.whole.point(rank)
        return Origin(point, self.name, self.actor, endpoint, member.host, member.pid or None, member.incarnation)


class HostsInfo(msgspec.Struct, frozen=True):
    """Shared hosts of a job as sent in a handle.

    Attributes:
        number: Their number at the owner.
        owner: The process whose block owns them.
        family: The controller of its program.
        whole: All of them.
        names: Names of the machines, by rank.
        parts: Names that the job gives, each with its range of ranks.
    """

    number: int
    owner: ProcId
    family: ProcId
    whole: Region
    names: Sequence[str]
    parts: Mapping[str, tuple[int, int]]
