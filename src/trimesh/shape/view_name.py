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
    ranks, stride = seen.ranks(), 1
    for index, (label, size) in reversed(list(enumerate(whole.extent.items()))):
        # The first dimension may have grown since: its places are not bounded by what was known.
        places = {rank // stride if index == 0 else rank // stride % max(size, 1) for rank in ranks}
        stride *= max(size, 1)
        if label not in left and len(places) == 1:
            fixed[label] = places.pop()
    name = place_name(mesh, dict(reversed(fixed.items())))
    return f"{name}{left!r}" if left else name
