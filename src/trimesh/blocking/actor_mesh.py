"""`ActorMesh`: all actors of one `spawn`, without `await`."""

from __future__ import annotations

from typing import Any

from trimesh.actor import actor_mesh
from trimesh.blocking.calls import Endpoint
from trimesh.blocking.handle import FacedHandle


class ActorMesh(FacedHandle[actor_mesh.ActorMesh]):
    """All actors of one `spawn`, or a view of some: `mesh.<endpoint>.<verb>(...)`.

    To type checkers it is `type[...]` of the actor class: what its endpoints are on the class are the verbs of this
    library, as what they are on an object are those of `trimesh`.
    """

    def __getattr__(self, name: str) -> Endpoint[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        found: Endpoint[..., Any] = Endpoint(getattr(self._inner, name), self._home)
        vars(self)[name] = found
        return found
