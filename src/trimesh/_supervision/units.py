"""The units that a policy restarts as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from trimesh._supervision.policy import Policy, Restart
from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region


def check_units(policy: Policy, extent: Extent) -> None:
    """Refuse a policy whose units are along a dimension that a mesh has not.

    Raises:
        ShapeError: It is; the text names the dimensions that there are.
    """
    if isinstance(policy, Restart) and policy.along is not None and policy.along not in extent:
        names = ", ".join(repr(label) for label in extent) or "none"
        raise ShapeError(f"Restart(along={policy.along!r}) must name a dimension of the mesh, which has: {names}")


def units_of(region: Region, along: str | None) -> Sequence[Sequence[int]]:
    """Return the base ranks of each unit, in spawn order.

    Args:
        region: The mesh as spawned.
        along: The unit is the slice along this dimension; None makes each member a unit.
    """
    if along is None:
        return [(rank,) for rank in region.ranks()]
    found: dict[int, list[int]] = {}
    for rank in region.ranks():
        found.setdefault(region.point(rank)[along], []).append(rank)
    return [found[index] for index in sorted(found)]
