"""`ActorMesh`: the handle on the actors of one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from trimesh._runtime.life import current_proc
from trimesh._runtime.meshes import ActorMembers, Member, ProcMembers
from trimesh._runtime.tasks import in_trio_now
from trimesh._runtime.values import MemberInfo, MeshInfo, class_of, endpoints_of
from trimesh._runtime.watch import EventStream, MeshStatistics
from trimesh.actor.actor import MESH_ATTRIBUTES
from trimesh.actor.endpoint import Endpoint
from trimesh.actor.view import MeshView
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import Shaped


class ActorMesh(Shaped):
    """All actors of one `spawn`, or a view of some: `mesh.<endpoint>.<verb>(...)`.

    Type checkers see the actor class instead (`Actor` declares the mesh attributes for them). Sent to another process,
    it becomes a reference, which can call and be sliced but owns nothing.
    """

    def __init__(self, view: MeshView, cls: Any) -> None:
        self._view = view
        self._cls = cls

    @property
    def name(self) -> str:
        """Name given at spawn."""
        return self._view.info.name

    def alive(self) -> Self:
        """Return the view without the members whose end is known here."""
        return type(self)(self._view.alive(), self._cls)

    def statistics(self) -> MeshStatistics:
        """Return counts of the members of this view, as far as this process knows them; sends no message.

        Raises:
            RuntimeError: No mesh is open in this Trio run.
        """
        return in_trio_now(self._view.statistics)()

    def events(self) -> AbstractAsyncContextManager[EventStream]:
        """Read events of the members of this view: `async with mesh.events() as events: async for event in events`.

        The events begin with a `Started` for each live member, and end when the mesh has stopped. A reader that is
        more than `limits.EVENTS` records behind gets one `Lagged(n)` in place of the n oldest.

        Raises:
            RuntimeError: This is a reference; events are read only in the process that owns the mesh.
        """
        members = self._view.owner
        if not isinstance(members, ActorMembers):
            raise RuntimeError(  # noqa: TRY004 - the handle is of the right type, its use here is not
                f"events are read in the process that owns the mesh, got {self!r} from another one: read them there"
            )
        view = self._view

        def sees(rank: int) -> bool:
            return rank in view.region or view.region == view.info.whole  # a whole mesh has new members, too

        ranks = [rank for rank in members.ranks if sees(rank) and members.membership.is_live(rank)]
        return members.events.open(members.events.snapshot(ranks), sees)

    def __getattr__(self, name: str) -> Endpoint[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        spec = self._view.endpoints.get(name)
        if spec is None:
            from trimesh.actor.options import no_endpoint  # noqa: PLC0415 - only errors need it

            raise no_endpoint(class_of(self._cls), name, self._view.endpoints, MESH_ATTRIBUTES)
        found: Endpoint[..., Any] = Endpoint(self._view, spec)
        vars(self)[name] = found
        return found

    def _region(self) -> Region:
        return self._view.region

    def _states(self) -> Sequence[str]:
        return self._view.states()

    def _seen(self, region: Region) -> Self:
        return type(self)(self._view.seen(region), self._cls)

    def __repr__(self) -> str:
        return f"<actors {self._view!r} of {class_of(self._cls).__qualname__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _refer, (self._view.current, self._view.region, class_of(self._cls))


def is_whole(mesh: ActorMesh) -> bool:
    """Return whether no end of a member of a view is known here: `len(mesh.alive()) == len(mesh)`."""
    return mesh._view.is_whole()  # noqa: SLF001 - a method would hide an endpoint of that name


def incarnations_of(mesh: ActorMesh) -> tuple[MemberInfo, ...]:
    """Return the latest incarnation of each member of a view, as known here."""
    view = mesh._view  # noqa: SLF001 - as above
    members = view.current.members
    return tuple([members[rank] for rank in view.ranks])


def is_lost(mesh: ActorMesh) -> bool:
    """Return whether a member of a view has ended and will not be replaced, unless by `replace` or `resize`."""
    view = mesh._view  # noqa: SLF001 - as above
    return view.membership(current_proc()).are_lost(view.ranks)


async def wait_changed(mesh: ActorMesh) -> None:
    """Wait until this process learns of a change of a member: an end, a restart, a replacement."""
    await mesh._view.membership(current_proc()).wait_changed()  # noqa: SLF001 - as above


def processes_of(mesh: ActorMesh) -> list[Member]:
    """Return the processes that the actors of a view live in.

    Raises:
        RuntimeError: Another process owns them, or they live in this one.
    """
    view = mesh._view  # noqa: SLF001 - as above
    owner = view.owner
    if not isinstance(owner, ActorMembers) or not isinstance(owner.processes, ProcMembers):
        text = f"the processes of {view.name} belong to another process: do this where they were spawned"
        raise RuntimeError(text)  # noqa: TRY004 - the handle has the right type, and is elsewhere
    return [owner.processes.members[owner.proc_ranks[rank]] for rank in view.ranks]


def _refer(info: MeshInfo, region: Region, cls: type) -> ActorMesh:
    return ActorMesh(MeshView(info, region, endpoints_of(cls)), cls)
