"""Process groups of a team, one for each set of its dimensions, and its torch device mesh (rule N3)."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import attrs
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from trimesh.errors import ShapeError
from trimesh.tensor.groups.group import BACKEND, Group
from trimesh.tensor.rank.rank import Rank, TeamOnRank


@attrs.define(eq=False)
class _Groups:
    """Groups of a team on this rank.

    Attributes:
        number: Number in the names of its groups; see `_Numbers`.
        made: Groups, by key.
        published: Names in torch's registry.
        mesh: See `device_mesh`.
    """

    number: int
    made: dict[str, Group] = attrs.field(factory=dict[str, Group])
    published: set[str] = attrs.field(factory=set[str])
    mesh: DeviceMesh | None = None


@attrs.define(eq=False)
class _Numbers:
    """Numbers in the names of groups; a team reuses the number of an earlier team on the same ranks.

    Torch treats device meshes over the same ranks as equal, whatever groups they name, and caches layouts of results
    with the first such mesh. So results of a later team name the groups of the earlier one.

    Attributes:
        by_layout: Number, by extent, ranks and presence of each rank.
        holders: Team that uses each number now.
    """

    by_layout: dict[Hashable, int] = attrs.field(factory=dict[Hashable, int])
    holders: dict[int, int] = attrs.field(factory=dict[int, int])

    def take(self, team: TeamOnRank) -> int:
        """Return the number for a team: its own, unless an ended team was on the same ranks."""
        layout = team.extent, tuple(team.ranks), tuple(map(bool, team.procs))
        number = self.by_layout.setdefault(layout, team.number)
        return number if self.holders.setdefault(number, team.number) == team.number else team.number

    def free(self, number: int, team: TeamOnRank) -> None:
        if self.holders.get(number) == team.number:
            del self.holders[number]


@attrs.define(eq=False)
class _World:
    """Torch's default group in this process, made by trimesh.

    Attributes:
        group: The group: right rank and size, no backend, so that no collective can run in it.
    """

    group: dist.ProcessGroup


def group_of(rank: Rank, team: TeamOnRank, labels: Sequence[str]) -> Group:
    """Return the group of the ranks that differ from this one only in some dimensions of the team.

    Nothing is connected yet. Call it in the rank's own thread, in a command that all ranks of the team execute.

    Args:
        rank: This rank.
        team: The team.
        labels: The dimensions.

    Raises:
        ShapeError: The team has no such dimension.
    """
    extent = team.extent
    for label in labels:
        if label not in extent:
            raise ShapeError(f"a process group must span dimensions of {extent!r}, got {label!r}")
    here = extent.point(team.place)
    fixed = {label: here[label] for label in extent if label not in labels}
    key = ",".join(label for label in extent if label in labels)
    key += "".join(f" {label}={index}" for label, index in fixed.items())
    groups = _of(rank, team)
    found = groups.made.get(key)
    if found is None:
        places = [
            place
            for place in range(extent.nelements)
            if team.procs[place] and all(extent.point(place)[label] == index for label, index in fixed.items())
        ]
        make: type[Group] = rank.above.get(Group, Group)  # a simulated rank has another
        found = groups.made[key] = make(rank, team, groups.number, places, key)
    return found


def torch_group(rank: Rank, team: TeamOnRank, labels: Sequence[str]) -> dist.ProcessGroup:
    """Return a group that `torch.distributed` takes as `group=`; see `group_of`.

    Raises:
        RuntimeError: Code of this process has initialised `torch.distributed` itself.
    """
    group = group_of(rank, team, labels)
    _publish(rank, team, group)
    return group


def device_mesh(rank: Rank, team: TeamOnRank) -> DeviceMesh:
    """Return the device mesh over the extent of a team; see `group_of`.

    Raises:
        RuntimeError: Code of this process has initialised `torch.distributed` itself.
        ShapeError: Members are missing from the view.
    """
    groups = _of(rank, team)
    if groups.mesh is not None:
        return groups.mesh
    extent = team.extent
    if not all(team.procs):
        raise ShapeError(f"a global tensor needs every member of its view, got {extent!r} with some excluded")
    labels = list(extent) or ["all"]
    made = [torch_group(rank, team, [label] if extent else []) for label in labels]
    table = torch.tensor(list(team.ranks)).reshape(list(extent.values()) or [1])
    groups.mesh = DeviceMesh.from_group(list[Any](made), rank.device.type, mesh=table, mesh_dim_names=tuple(labels))

    return groups.mesh


@attrs.frozen
class Disband:
    """Step that destroys the groups of a team after one of its processes has ended."""

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        groups = _of(rank, team)
        for group in groups.made.values():
            group.destroy()
            if group.full_name in groups.published:
                unregister(group, group.full_name)
        groups.published.clear()
        _numbers(rank).free(groups.number, team)


def _of(rank: Rank, team: TeamOnRank) -> _Groups:
    found = team.above.get(_Groups)
    if found is None:
        found = team.above[_Groups] = _Groups(_numbers(rank).take(team))
    assert isinstance(found, _Groups)
    return found


def _numbers(rank: Rank) -> _Numbers:
    found = rank.above.setdefault(_Numbers, _Numbers())
    assert isinstance(found, _Numbers)
    return found


# ---- torch's registry ----------------------------------------------------------------------------------------


def _publish(rank: Rank, team: TeamOnRank, group: Group) -> None:
    """Register a group for `torch.distributed` and its functional collectives."""
    published = _of(rank, team).published
    if group.full_name in published:
        return
    _make_world(rank, group)
    register(group, group.full_name, [team.ranks[place] for place in group.places], group.store)
    published.add(group.full_name)
    # Operations of torch may use it from now on; if one is not executed here, the other ranks must not wait for it.
    team.on_failed.append(group.destroy)


def _make_world(rank: Rank, group: Group) -> None:
    world = rank.above.get(_World)
    if dist.is_initialized():
        if world is None or c10d._get_default_group() is not world.group:
            raise RuntimeError(
                "torch.distributed must be left to the mesh in a process that holds its tensors, but code of this "
                "process has called init_process_group: destroy that group first, or keep such actors on another mesh"
            )
        return
    # It has all ranks of the mesh, unconnected: a collective in it raises that it has no backend.
    default = dist.ProcessGroup(group.store, rank.number, rank.extent.nelements)
    register(default, f"{rank.mesh}/all", list(range(rank.extent.nelements)), group.store)
    c10d._update_default_pg(default)
    rank.above[_World] = _World(default)


@contextmanager
def swap_world(rank: Rank) -> Generator[None]:
    """Make a rank's default group torch's default group in a block, when this process simulates several ranks."""
    before = c10d._get_default_group() if dist.is_initialized() else None
    world = rank.above.get(_World)
    c10d._update_default_pg(None if world is None else world.group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)


def forget_world(rank: Rank) -> None:
    """Remove the default group of a rank from torch; see `swap_world`."""
    world = rank.above.pop(_World, None)
    if world is not None:
        unregister(world.group, f"{rank.mesh}/all")


def register(group: dist.ProcessGroup, name: str, ranks: Sequence[int], store: Any) -> None:
    """Register an existing group as `torch.distributed.new_group` does; torch has no public function for it."""
    world: Any = c10d._world
    world.pg_map[group] = BACKEND, store
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = f"cpu:{BACKEND},cuda:{BACKEND}"
    tag = f"ptd:{name}"
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault(tag, []).append(group)
    note: Any = getattr(c10d, "_register_process_group")  # noqa: B009 - not among what its stub exports
    note(name, group)


def unregister(group: dist.ProcessGroup, name: str) -> None:
    """Undo `register`."""
    world: Any = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    world.tags_to_pg.pop(tag, None)
    forget: Any = getattr(c10d, "_unregister_process_group")  # noqa: B009 - see above
    forget(name)


# ---- process group ---------------------------------------------------------------------------------------------------

# Arguments of remote functions for use with `torch.distributed`: process groups, a device mesh.


@attrs.frozen
class ProcessGroup:
    """Reference, at the controller, to the process groups of the ranks that differ only in some dimensions.

    A remote function that gets it as an argument receives a `torch.distributed.ProcessGroup` of the ranks that it runs
    on. The group is made on first use, and rebuilt after a rank could not take part.

    Attributes:
        labels: The dimensions.
    """

    labels: tuple[str, ...]

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a group exists only on the ranks of a remote function."""
        raise TypeError(
            "a process group of a mesh can only be an argument of functions under @trimesh.remote, got the one along "
            f"{self.labels} elsewhere: in actors use torch.distributed itself, "
            "with spawn_procs(rendezvous=True) and init_process_group()"
        )


@attrs.frozen
class SentGroup:
    """A `ProcessGroup`, as sent to the ranks.

    Attributes:
        labels: The dimensions.
    """

    labels: tuple[str, ...]

    def on_rank(self, rank: Rank, team: TeamOnRank) -> dist.ProcessGroup:
        return torch_group(rank, team, self.labels)


@attrs.frozen
class RanksDeviceMesh:
    """Reference, at the controller, to torch's device mesh of the ranks that a remote function runs on.

    Attributes:
        labels: Its dimensions.
    """

    labels: tuple[str, ...]

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled; see `ProcessGroup`."""
        raise TypeError(
            "the device mesh of ranks can only be an argument of functions under @trimesh.remote, got the one along "
            f"{self.labels} elsewhere: in actors use that of their elastic group, group.device_mesh()"
        )


@attrs.frozen
class SentDeviceMesh:
    """A `RanksDeviceMesh`, as sent to the ranks.

    Attributes:
        labels: Its dimensions.
    """

    labels: tuple[str, ...]

    def on_rank(self, rank: Rank, team: TeamOnRank) -> DeviceMesh:
        if tuple(team.extent) != self.labels:
            raise TypeError(
                f"a remote function needs the device mesh of its own ranks, along {tuple(team.extent)}, got one along "
                f"{self.labels}: write device_mesh() of the view that its tensors are on"
            )
        return device_mesh(rank, team)
