"""`trimesh.spmd.run`: one program, once for each process of a mesh.

RK-1 a rank that fails for a reason of its own ends the others at once.
RK-2 one that fails since a peer is gone is a consequence: the peer's own failure has `limits.SPMD_VERDICT_SECONDS` to
     be known before the others are ended.
RK-3 consequences are told as a note on a failure that is none, and raised only where there is no other.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, overload

import trio

from trimesh import limits
from trimesh._runtime.meshes import says_peer_is_gone, text_says_peer_is_gone
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import MeshErrorGroup, add_note, leaves, origin, place_name
from trimesh.shape.value_mesh import ValueMesh
from trimesh.spmd.actor import ScriptFailed, SPMDActor, environments
from trimesh.spmd.child import pack

R = TypeVar("R")


@overload
async def run(
    procs: ProcMesh,
    program: str | os.PathLike[str],
    /,
    *args: str,
    env: Mapping[str, str] | None = None,
    module: bool = False,
    grace: float = limits.GRACE_SECONDS,
) -> ValueMesh[int]: ...
@overload
async def run(
    procs: ProcMesh,
    program: Callable[..., R],
    /,
    *args: Any,
    env: Mapping[str, str] | None = None,
    grace: float = limits.GRACE_SECONDS,
) -> ValueMesh[R]: ...
async def run(
    procs: ProcMesh,
    program: str | os.PathLike[str] | Callable[..., Any],
    /,
    *args: Any,
    env: Mapping[str, str] | None = None,
    module: bool = False,
    grace: float = limits.GRACE_SECONDS,
) -> ValueMesh[Any]:
    """Run an unmodified script, or a function, once for each process of a mesh, as torchrun would.

    Each rank has an interpreter of its own, below the process of the mesh, with torchrun's environment; it finds the
    others by `torch.distributed.init_process_group()`. What it prints comes out as what that process prints does.

    Args:
        procs: Owned by this program; its ranks are those of the program, in row-major order.
        program: Path of a script, or a function, which is pickled by cloudpickle; with `module=True` the name of a
            module, as for `python -m`.
        *args: Command line of the script, or arguments of the function.
        env: Variables for all ranks, beside those of the processes. Those of torchrun win.
        module: See `program`.
        grace: Seconds from SIGTERM to SIGKILL for ranks that are ended.

    Returns:
        The exit codes, all 0, or what the function has returned.

    Raises:
        MeshErrorGroup: A rank has failed: `ScriptFailed` with its traceback, or what the function has raised. The
            others were ended. Ranks that failed since a peer was gone are told in a note on the failure of that peer.
        TypeError: The function, or what it is given, cannot be pickled; an argument of a script is no string.
        RuntimeError: `procs` is a reference; only the block that owns processes can spawn on them.

    Blocking: a checkpoint, cancellable. It has ended all ranks, with all that they have started, when it raises.
    """
    if callable(program):
        work, name = pack(program, args), f"{getattr(program, '__qualname__', program)}()"
        async with launchers_on(procs, env or {}) as (launchers, variables):
            calls = [partial(one.call.call_one, work, name, own, grace) for one, own in _each(launchers, variables)]
            answers = await run_together(calls, name)
        return ValueMesh(variables.region, [pickle.loads(answer) for answer in answers])
    command = _command(program, args, module=module)
    async with launchers_on(procs, env or {}) as (launchers, variables):
        mains = [partial(one.main.call_one, command, own, grace) for one, own in _each(launchers, variables)]
        return ValueMesh(variables.region, await run_together(mains, os.fspath(program)))


def _each(launchers: SPMDActor, variables: ValueMesh[dict[str, str]]) -> Iterator[tuple[SPMDActor, dict[str, str]]]:
    """Yield the launcher of each rank, and its environment."""
    for point, own in variables.items():
        yield launchers.slice(**point), own


async def env(procs: ProcMesh) -> ValueMesh[dict[str, str]]:
    """Return what torchrun would set in the environment of each process of a mesh, for programs that you start.

    The port in it is free now and not kept: `spawn_procs(rendezvous=True)` keeps one for as long as the mesh lives, and
    `run` for as long as the program runs.

    Args:
        procs: Owned by this program.

    Blocking: a checkpoint, cancellable; costs an actor in each process while it runs.
    """
    async with launchers_on(procs, {}) as (_, variables):
        return variables


@asynccontextmanager
async def launchers_on(
    procs: ProcMesh, more: Mapping[str, str]
) -> AsyncGenerator[tuple[SPMDActor, ValueMesh[dict[str, str]]], None]:
    """Have a launcher on each process, with the environment of its rank."""
    async with procs.spawn("spmd", SPMDActor) as launchers:
        places = await launchers.place.call()
        first = launchers.slice(**dict.fromkeys(launchers.extent, 0))
        _, port = await first.get_host_port.call_one()
        found = environments(places.values(), port, secrets.token_hex(8))
        yield launchers, ValueMesh(places.region, [{**more, **one} for one in found])


def _command(program: str | os.PathLike[str], args: Sequence[Any], *, module: bool) -> list[str]:
    command = [sys.executable, *(["-m"] if module else []), os.fspath(program)]
    for one in args:
        if not isinstance(one, str | os.PathLike):
            raise TypeError(f"arguments of a script must be strings, got {one!r}: write {str(one)!r}")
        command.append(os.fspath(one))
    return command


# ---- run the ranks of one program together: the first failure ends the others ----------------------------------------


async def run_together(ranks: Sequence[Callable[[], Awaitable[R]]], name: str) -> list[R]:
    """Run what each rank does; return the results.

    Args:
        ranks: What they do.
        name: Of the mesh, for the error.

    Raises:
        MeshErrorGroup: Some have failed; the others were cancelled.
    """
    results: dict[int, R] = {}
    failures: list[Exception] = []
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope

        async def run(rank: int, work: Callable[[], Awaitable[R]]) -> None:
            try:
                results[rank] = await work()
            except Exception as error:  # noqa: BLE001 - raised below, with the others
                failures.append(error)
                if _is_consequence(error):
                    scope.deadline = min(scope.deadline, trio.current_time() + limits.SPMD_VERDICT_SECONDS)
                else:
                    scope.cancel(reason="another rank has failed")

        for rank, work in enumerate(ranks):
            nursery.start_soon(run, rank, work)
    if failures:
        raise MeshErrorGroup(f"{name} failed", _told(failures), mesh=name)
    return [results[rank] for rank in range(len(ranks))]


def _is_consequence(error: Exception) -> bool:
    return all(
        text_says_peer_is_gone(leaf.stderr_tail) if isinstance(leaf, ScriptFailed) else says_peer_is_gone(leaf)
        for leaf in leaves(error)
    )


def _told(failures: Sequence[Exception]) -> list[Exception]:
    """Return the failures that are no consequences, if there are any, with a note on those that are."""
    causes = [error for error in failures if not _is_consequence(error)]
    others = [error for error in failures if error not in causes]
    if not causes:
        return others
    if others:
        places = [origin(leaf) for error in others for leaf in leaves(error)]
        where = ", ".join(place_name(one.mesh, one.point) for one in places if one is not None)
        add_note(causes[0], f"ranks that failed since a peer was gone: {where}")
    return causes
