"""`publish_as` and `connect`: handles between two programs of one user on one host."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, cast

from trimesh._runtime.life import Proc
from trimesh._runtime.programs import checked_program_name, handle_of, handle_record, open_connection, open_publication
from trimesh._runtime.tasks import in_trio_block
from trimesh._runtime.values import GENERATOR, MeshInfo, class_of, endpoints_of
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.view import MeshView
from trimesh.config import current
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ConnectError

A = TypeVar("A", bound=Actor)


def publish_as(name: str, actors: Actor, /) -> AbstractAsyncContextManager[None]:
    """Let other programs of this user on this host call some actors: `async with trimesh.publish_as("judge", judges):`.

    While the block is open, `trimesh.connect(name, Class)` gives them a handle. Like any holder of a reference, they
    call, slice and stream, and own nothing.

    Leaving the block refuses new calls, which raise `MeshStopped` in the other program. Calls under way run to their
    end, for at most the setting `grace`; an exception or a cancel of the block cancels them.

    Args:
        name: Letters, digits, `_`, `-` and `.`; at most `limits.PUBLISHED_NAME_CHARS_MAX` (64).
        actors: A handle, or a view of one, on actors of this program.

    Raises:
        ConnectError: On entering: another program publishes this name, or the folder of names cannot be trusted.
        RuntimeError: On entering: in a worker or a simulation.
        TypeError: `actors` is no handle on actors.
        ValueError: The name has other characters, or too many.

    Blocking: a checkpoint; cancellable.
    """
    handle: object = actors
    if not isinstance(handle, ActorMesh):
        raise TypeError(f"publish_as takes a handle on actors, as spawn() returns it, got {handle!r}")
    return in_trio_block(_publish(checked_program_name(name), handle))


def connect(name: str, cls: type[A], /) -> AbstractAsyncContextManager[A]:
    """Connect to the actors that another program publishes: `async with trimesh.connect("judge", Judge) as judge:`.

    Calls, streams, cancels, deadlines and errors cross as within a program: links lead straight to the processes of the
    actors. If the other program ends, calls raise `ConnectionLost`; if it leaves its `publish_as`, `MeshStopped`. If
    this program ends, its calls to the other one are cancelled. The handle works in this process only, in no worker.

    Args:
        name: Name of the publication.
        cls: Their class, or one with some of the same endpoints: only those of `cls` can be called.

    Raises:
        ConnectError: On entering: no program of this user publishes the name; or its version of trimesh or Python, its
            `pickle=` or its endpoints differ.
        RuntimeError: On entering: in a worker or a simulation.
        TypeError: `cls` is no class of actors.

    Blocking: entering for at most `limits.JOIN_SECONDS` (5 s). Leaving waits for running calls of other tasks, unless
        an exception or a cancel leaves the block. Cancellable.
    """
    given: Any = cls
    made: Any = class_of(given)
    if not (isinstance(made, type) and issubclass(made, Actor)):
        raise TypeError(f"connect needs the class of the actors, a subclass of trimesh.Actor, got {given!r}")
    return cast("AbstractAsyncContextManager[A]", in_trio_block(_connect(checked_program_name(name), given)))


@asynccontextmanager
async def _publish(name: str, actors: ActorMesh) -> AsyncGenerator[None, None]:
    info, region, cls = cast("tuple[MeshInfo, Any, type]", actors.__reduce__()[1])
    endpoints = {name: spec.kind is GENERATOR for name, spec in endpoints_of(cls).items()}

    def describe(proc: Proc) -> Any:
        MeshView(info, region, {}).membership(proc)  # an error unless the mesh is of this program
        return handle_record(proc, info, region, endpoints)

    async with open_publication(name, describe, current().grace):
        yield


@asynccontextmanager
async def _connect(name: str, cls: Any) -> AsyncGenerator[ActorMesh, None]:
    async with open_connection(name) as connection:
        offered, wanted = connection.handle.endpoints, endpoints_of(cls)
        for endpoint, spec in wanted.items():
            is_stream = spec.kind is GENERATOR
            if offered.get(endpoint) != is_stream:
                why = "not there" if endpoint not in offered else "a generator in one of the two programs only"
                wants = class_of(cls).__qualname__
                raise ConnectError(
                    f"the endpoints of {wants} must be among those of {connection.handle.actor}, which is "
                    f"published as {name!r} and has {', '.join(sorted(offered)) or 'none'}: {endpoint} is {why}"
                )
        info, region = handle_of(connection)
        yield ActorMesh(MeshView(info, region, wanted, connection), cls)
