"""Handles between two programs, without `await`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from trimesh import programs
from trimesh.actor.actor import Actor
from trimesh.blocking.actor_mesh import ActorMesh
from trimesh.blocking.body import FacedBody, body_of
from trimesh.blocking.handle import inner_of

A = TypeVar("A", bound=Actor)


def publish_as(name: str, actors: object, /) -> AbstractContextManager[None]:
    """Let other programs of this user on this host call some actors: `with tb.publish_as("judge", judges):`.

    See `trimesh.publish_as`.
    """
    return FacedBody(
        body_of(programs.publish_as(name, inner_of(actors)), f"the name {name!r}"), lambda nothing: nothing
    )


def connect(name: str, cls: type[A], /) -> AbstractContextManager[type[A]]:
    """Connect to the actors that another program publishes: `with tb.connect("judge", Judge) as judge:`.

    See `trimesh.connect`.
    """
    body = body_of(programs.connect(name, cls), f"the connection to {name!r}")
    return FacedBody(body, lambda handle: cast("type[A]", ActorMesh(cast("Any", handle), body)))
