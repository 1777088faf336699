"""Wait for the answers of ranks, with `await` or without (rule N2), and make values or one error of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trimesh._runtime.deadlock import BlockedSearch
from trimesh._runtime.peers import IncomingCall, Peer
from trimesh._transport.interface.base import Buffer
from trimesh.errors import DeadlockError, MeshErrorGroup, PayloadError, ProtocolError, add_note, set_origin
from trimesh.tensor.controller.consequences import causes_first, death_at
from trimesh.tensor.controller.engine import Engine, RankRequest


async def answers(request: RankRequest) -> Mapping[int, Any]:
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


def answers_now(request: RankRequest) -> Mapping[int, Any]:
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
    watch = _Watch(engine)
    try:
        while request.waiting:
            if proc.is_simulated:
                raise RuntimeError(
                    "the value of a mesh tensor was asked for without `await`, which would stop a simulation: "
                    "write `await trimesh.fetch(t)`"
                )
            engine.wait_now("a value of a mesh tensor had come")
            for peer, place in list(request.waiting.items()):
                watch.look_at(peer)
                if peer.link is None:  # its end is known; how it ended is found out by tasks, which do not run now
                    request.settle(peer, death_at(request.team, place))
    finally:
        proc.deadlocks.end_search_now()
        engine.forget(request)
    return values_of(request)


@attrs.define(eq=False)
class _Watch:
    """Refuses to wait for ranks that wait for actors of this process: no task runs here until the wait is over.

    Attributes:
        engine: Of the ranks.
    """

    engine: Engine
    _search: BlockedSearch | None = None

    def look_at(self, peer: Peer) -> None:
        """Look at what a rank has said to wait for.

        Raises:
            DeadlockError: It is an actor of this process.
        """
        deadlocks = self.engine.proc.deadlocks
        stuck = self.engine.stuck.pop(peer, None)
        for call_id in () if stuck is None else stuck.calls:
            call = peer.inbound.get(call_id)
            if call is not None and not call.ended:  # else it has been answered since
                raise self._error(call)
        waits = () if stuck is None else [ref for ref in stuck.waits if ref.proc == peer.proc_id]
        if waits and self._search is None:  # by way of other processes: they are asked, and the rank will say it again
            self._search = deadlocks.search_now(waits)
        if self._search is not None:
            call = self._search.go_on()
            if call is not None:
                raise self._error(call)
            if self._search.search.is_done:
                self._search = None

    def _error(self, call: IncomingCall) -> DeadlockError:
        cell = self.engine.proc.cells.get(call.mesh)
        cycle = [] if cell is None else [(cell.spec.cls.__qualname__, call.spec.name, cell.spec.point)]
        name = call.spec.name if cell is None else f"{cell.spec.name}.{call.spec.name}()"
        return DeadlockError(
            f"a value that needs an actor of this process must be fetched with `await`, got one that waits for {name}: "
            "write `await trimesh.fetch(t)`",
            cycle=cycle,
        )


def values_of(request: RankRequest) -> Mapping[int, Any]:
    """Return the values of a request that all have answered, by place; raises as `answers` does."""
    team = request.team
    found: dict[int, Any] = {}
    deaths: list[Exception] = []
    errors: list[Exception] = []
    for place, answer in sorted(request.answers.items()):
        if isinstance(answer, Exception):
            set_origin(answer, team.origins[place])
            deaths.append(answer)
            continue
        payload, bodies, failed_at, carried = answer
        try:
            if failed_at is None:
                found[place] = _value(request, place, payload, bodies)
            else:
                errors.append(_failure(team.engine, payload, *failed_at))
        except (PayloadError, ProtocolError) as error:
            set_origin(error, team.origins[place])
            errors.append(error)
        del carried
    if deaths or errors:
        causes = causes_first(team, deaths, errors)
        raise MeshErrorGroup(f"a tensor on {team.name} could not be computed", causes, mesh=team.engine.name)
    return found


def _value(request: RankRequest, place: int, payload: Buffer, bodies: Sequence[memoryview]) -> Any:
    """Return what a rank has sent.

    Raises:
        PayloadError: There is something of the user's in it that cannot be rebuilt here.
        ProtocolError: It is no answer to the request.
    """
    expected = request.expected
    try:
        value = request.team.engine.proc.values.decode(payload, bodies, what="a value of a mesh tensor")
    except PayloadError as error:
        if not expected.is_ours:
            raise
        raise ProtocolError(f"a rank must answer with {expected.what}, got bytes that are no value: {error}") from error
    if not expected.fits(value, place):
        raise ProtocolError(f"a rank must answer with {expected.what}, got {value!r:.100}")
    return value


def _failure(engine: Engine, payload: Buffer, team: int, number: int) -> Exception:
    """Return why a rank could not compute what was asked for, with the line that issued it.

    Raises:
        ProtocolError: It is no exception.
    """
    error = engine.proc.values.decode_error(payload)
    failure = engine.failure(team, number)
    if failure is not None:
        failure.is_told = True
        add_note(error, f"issued at {failure.line}")
    return error
