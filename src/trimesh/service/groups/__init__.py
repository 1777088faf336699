"""Process groups of elastic meshes: a new one for each set of members, the one before is ended.

`from trimesh.service.groups import open_groups`: `async with open_groups(procs) as groups:` in the process that owns
the mesh, `async with groups.joined() as group:` in its actors.
"""

from trimesh.service.errors import GroupEnded
from trimesh.service.groups.groups import ElasticGroups, open_groups
from trimesh.service.groups.member import ElasticGroup

__all__ = ["ElasticGroup", "ElasticGroups", "GroupEnded", "open_groups"]
