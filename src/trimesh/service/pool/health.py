"""`Health`: replicas that do not answer get no requests until they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from trimesh._runtime.meshes import kill_wanted
from trimesh.actor.actor_mesh import ActorMesh, processes_of
from trimesh.plain_numbers import plain_real, plain_whole
from trimesh.service.pool.engine import PoolEngine

if TYPE_CHECKING:
    from trimesh.blocking import calls as blocking


class Health:
    """How replicas are asked whether they are well.

    Args:
        probe: An endpoint without arguments: `Generator.ping`; give it a slot of its own (`@endpoint(group="health")`),
            or it waits behind requests.
        every: Seconds between two probes, and for the answer to one.
        tries: Probes in a row that may fail; then the replica gets no requests until one succeeds.
        kill: Also kill its processes then, so that their policy replaces them: `Restart` counts it as a death. Without
            it a replica that is busy for ever stays so.

    Raises:
        ValueError: `every` or `tries` is not positive.
    """

    def __init__(
        self, probe: blocking.Endpoint[[], Any], *, every: float = 1.0, tries: int = 3, kill: bool = False
    ) -> None:
        every, tries = plain_real(every), plain_whole(tries)
        if not (every > 0 and tries >= 1):
            raise ValueError(f"Health needs every > 0 and tries >= 1, got every={every!r}, tries={tries!r}")
        self.probe: str = getattr(probe, "spec").name  # noqa: B009 - it is another class to type checkers
        self.every = every
        self.tries = tries
        self.kill = kill

    async def watch(self, engine: PoolEngine, index: int) -> None:
        """Probe one replica for as long as the pool is open."""
        failures = 0
        while True:
            await trio.sleep(self.every)
            failures = 0 if await self._is_well(engine.views[index]) else failures + 1
            is_sick = failures >= self.tries
            if is_sick != (index in engine.sick):
                (engine.sick.add if is_sick else engine.sick.discard)(index)
                engine.judge(index)
                engine.pump()
                if is_sick and self.kill:
                    failures = 0
                    await kill_wanted(processes_of(engine.views[index]))

    async def _is_well(self, view: ActorMesh) -> bool:
        if len(view.alive()) < len(view):
            return True  # its death is known, and has its own way
        with trio.move_on_after(self.every):
            outcomes = await getattr(view, self.probe).options(abandon_after=0).call_settled()
            return all(outcome.ok for outcome in outcomes.values())
        return False
