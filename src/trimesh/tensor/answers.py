"""Wait for the answers of ranks, with `await` or without (rule N2), and make values or one error of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimesh._runtime.peer import Peer
from trimesh.errors import CollectiveFailed, DeadlockError, MeshErrorGroup, set_origin
from trimesh.ids import MeshId
from trimesh.tensor.engine import Engine, Request, unexplained_death


async def answers(request: Request) -> Mapping[int, Any]:
    """Wait until every rank has answered; return the values by place in the team.

    Raises:
        MeshErrorGroup: What they wanted could not be computed, or a process has ended.
    """
    engine = request.team.engine
    try:
        await request.complete.wait()
    finally:
        engine.forget(request)
    return values_of(request)


def answers_now(request: Request) -> Mapping[int, Any]:
    """Wait in the native library; no other task runs meanwhile.

    Raises:
        MeshErrorGroup: See `answers`.
        trio.TooSlowError: The deadline of the calling task has passed.
        DeadlockError: The value needs an actor of this process, which cannot run meanwhile.
        RuntimeError: The mesh is simulated.
    """
    engine = request.team.engine
    proc = engine.proc
    engine.stuck.clear()
    try:
        while request.waiting:
            if proc.is_simulated:
                raise RuntimeError(
                    "the value of a mesh tensor was asked for without `await`, which would stop a simulation: "
                    "write `await trimesh.fetch(t)`"
                )
            engine.wait_now("a value of a mesh tensor had come")
            for peer, place in list(request.waiting.items()):
                _check_calls(engine, peer)
                if peer.link is None:  # its end is known; how it ended is found out by tasks, which do not run now
                    request.settle(peer, _ended(request, place))
    finally:
        engine.forget(request)
    return values_of(request)


def _check_calls(engine: Engine, peer: Peer) -> None:
    """Refuse to wait for a rank that waits for an actor of this process: no task runs here until the wait is over."""
    for call_id in engine.stuck.pop(peer, ()):
        call = peer.inbound.get(call_id)
        if call is None or call.ended:
            continue  # it has been answered since
        cell = engine.proc.cells.get(MeshId(call.mesh))
        cycle = [] if cell is None else [(cell.spec.cls.__qualname__, call.spec.name, cell.spec.point)]
        name = call.spec.name if cell is None else f"{cell.spec.name}.{call.spec.name}()"
        raise DeadlockError(
            f"a value that needs an actor of this process must be fetched with `await`, got one that waits for {name}: "
            "write `await trimesh.fetch(t)`",
            cycle=cycle,
        )


def _ended(request: Request, place: int) -> Exception:
    peer = request.team.peers[place]
    if peer.death is not None:
        return peer.death(maybe_executed=True)
    return unexplained_death(request.team.name, request.team.origins[place])


def values_of(request: Request) -> Mapping[int, Any]:
    """Return the values of a request that all have answered, by place; raises as `answers` does."""
    team = request.team
    engine = team.engine
    values = engine.proc.values
    found: dict[int, Any] = {}
    errors: list[Exception] = []
    for place, answer in sorted(request.answers.items()):
        if isinstance(answer, Exception):
            set_origin(answer, team.origins[place])
            errors.append(answer)
            continue
        payload, bodies, failed_at, cargo = answer
        if failed_at is None:
            found[place] = values.decode(payload, bodies, what="a value of a mesh tensor")
        else:
            error = values.decode_error(payload)
            failure = engine.failure(*failed_at)
            if failure is not None:
                failure.is_told = True
                error.add_note(f"issued at {failure.line}")
            errors.append(error)
        del cargo
    if errors:
        # What has failed by itself comes before what has failed with it.
        errors.sort(key=lambda error: isinstance(error, CollectiveFailed))
        raise MeshErrorGroup(f"a tensor on {team.name} could not be computed", errors, mesh=engine.name)
    return found
