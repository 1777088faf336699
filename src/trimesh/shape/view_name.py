"""Names of meshes and of parts of them, for people; PURE."""

from __future__ import annotations

from trimesh.errors import place_name
from trimesh.shape.region import Region


def view_name(mesh: str, whole: Region, seen: Region) -> str:
    """Return the name of a part of a mesh: the coordinates that it fixes, then the sizes that are left.

    Args:
        mesh: Name of the mesh.
        whole: All of it.
        seen: The part.

    Example:
        >>> from trimesh.shape.extent import Extent
        >>> whole = Region(Extent(hosts=2, gpus=4))
        >>> view_name("procs", whole, whole.slice(hosts=1)), view_name("procs", whole, whole.slice(hosts=1, gpus=3))
        ("procs[hosts=1]{'gpus': 4}", 'procs[hosts=1,gpus=3]')
    """
    left = dict(seen.extent)
    fixed = dict[str, int]()
    ranks = seen.ranks()
    if ranks:
        first = whole.extent.point(ranks[0])
        for label in first:
            if label not in left and all(whole.extent.point(rank)[label] == first[label] for rank in ranks):
                fixed[label] = first[label]
    name = place_name(mesh, fixed)
    return f"{name}{left!r}" if left else name
