"""A handle as a record, and back: numbers and names, no class and nothing that was pickled."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trimesh._runtime.calls.membership import family_of, membership_of
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.programs.connection import ProgramConnection
from trimesh._runtime.spawner import wire
from trimesh._runtime.values.reference import MemberInfo, MeshInfo
from trimesh.errors import ConnectError, ShapeError
from trimesh.ids import MeshId, ProcId
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


def handle_record(proc: Proc, info: MeshInfo, region: Region, endpoints: Mapping[str, bool]) -> wire.PublishedHandle:
    """Return what travels of a handle.

    Raises:
        RuntimeError: The mesh belongs to another program.
    """
    if info.family != family_of(proc):
        raise RuntimeError(f"a program publishes meshes of its own, {info.name!r} is another one's: publish it there")
    now = membership_of(proc, info).info
    missing = region.missing()
    return wire.PublishedHandle(
        mesh=info.mesh,
        owner=info.owner,
        name=info.name,
        actor=info.actor or "",
        is_healing=info.is_healing,
        base=tuple(region.base.items()),
        extent=tuple(region.extent.items()),
        table=tuple(attrs.evolve(region, excluded=frozenset[int]()).ranks()),
        excluded=tuple(missing),
        members=tuple(wire.PublishedMember(one.proc_id, one.host, one.pid, one.incarnation) for one in now.members),
        endpoints=dict(endpoints),
    )


def handle_of(connection: ProgramConnection) -> tuple[MeshInfo, Region]:
    """Return the handle that another program publishes.

    Raises:
        ConnectError: It is none.
    """
    handle = connection.handle
    mesh, table, shown = MeshId(handle.mesh), handle.table, set(handle.table)
    try:
        base, extent = Extent(dict(handle.base)), Extent(dict(handle.extent))
        fits = len(shown) == len(table) == extent.nelements and len(handle.members) == base.nelements
        if not (fits and shown <= set(range(base.nelements)) and shown >= set(handle.excluded)):
            raise ConnectError("the other program publishes a handle that is none")
        region = Region(base, mesh=mesh, extent=extent, table=table, excluded=frozenset(handle.excluded))
        whole = Region(base, mesh=mesh)
    except ShapeError as error:
        raise ConnectError(f"the other program publishes a handle that is none: {error}") from error
    members = tuple(MemberInfo(ProcId(one.proc_id), one.host, one.pid, one.incarnation) for one in handle.members)
    info = MeshInfo(
        mesh, handle.name, handle.actor, whole, members, ProcId(handle.owner), handle.is_healing, connection.family
    )
    return info, region
