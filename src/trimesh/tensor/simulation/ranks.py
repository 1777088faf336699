"""The ranks that are simulated: of each view the first one, which stands for all of it.

All ranks of a view execute the same commands, on parts of the same sizes but for the last ones, so that one of them
says what all would take. They run in a thread of their own, where no mesh is active and no mode of the program's is,
and whoever issues waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch

from trimesh.errors import Origin
from trimesh.tensor.groups.group import Group
from trimesh.tensor.groups.groups import Disband, forget_world, swap_world
from trimesh.tensor.groups.traffic import TrafficCounts
from trimesh.tensor.rank.rank import Command, Rank, TeamOnRank
from trimesh.tensor.rank.reader import CommandReader
from trimesh.tensor.simulation.group import MeteredCounts, SimulatedGroup
from trimesh.tensor.simulation.kernels import SIMULATED
from trimesh.tensor.simulation.meter import Meter
from trimesh.tensor.simulation.moving import Sent
from trimesh.tensor.simulation.process import SimulatedController, proc_id_of

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc
    from trimesh._runtime.peers import Peer
    from trimesh.shape.region import Region
    from trimesh.tensor.controller.plan import Line
    from trimesh.tensor.protocol.messages import Answer
    from trimesh.tensor.simulation.device import Device, RankLink
    from trimesh.tensor.simulation.timeline import SimulatedTimeline


class _MeteredRank(Rank):
    """A rank whose commands take time."""

    def execute(self, team: TeamOnRank, command: Command) -> None:
        self.above[Meter].begin_command()
        super().execute(team, command)


@attrs.define(eq=False)
class _Outside:
    """What a simulated rank asks of its process; see `Outside`.

    Attributes:
        proc: Of the controller, which is this one.
        controller: The same.
        engine: Its number.
        answered: Called with what the rank answers to a request.
        error: What has failed first.
    """

    proc: Proc
    controller: Peer
    engine: int
    answered: Callable[[int, Any], None]
    error: BaseException | None = None

    def reply(self, request: int, value: Any) -> None:
        """Give a value, or a `Poison`, to the controller."""
        self.answered(request, value)

    def reply_lent(self, request: int, described: list[Any], memory: memoryview, *, is_staged: bool) -> None:
        """Nothing is large here: see `fetching`."""
        raise NotImplementedError

    def run_in_trio(self, function: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError(f"a simulation has no processes that could wait for each other, got {function!r}")

    def ask(
        self,
        team: TeamOnRank,
        verb: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        numbers: Sequence[int] = (),
        error: BaseException | None = None,
        seconds: float = 0.0,
    ) -> Answer:
        """Refuse: no other rank would answer."""
        raise NotImplementedError(f"a simulation has no processes that could meet, got {verb!r} of {list(keys)}")

    def leave(self, team: TeamOnRank, error: BaseException, *, is_waited_for: bool = True) -> None:
        """Learn that something has failed."""
        del team, is_waited_for
        if self.error is None:
            self.error = error

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        function(*args)

    def origin(self, what: str) -> Origin:
        return Origin(None, "a simulation", None, what)


class SimulatedRank:
    """One rank, and what counts for it.

    Args:
        name: Of the mesh, which no other simulation of this process has.
        region: All of the mesh.
        number: Of the rank.
        device: Its numbers.
        links: By label.
        timeline: Takes what it does.
        sent: What is on its way between ranks.
        answered: See `_Outside`.
    """

    def __init__(
        self,
        name: str,
        region: Region,
        number: int,
        device: Device,
        links: Mapping[str, RankLink],
        timeline: SimulatedTimeline,
        sent: Sent,
        answered: Callable[[int, Any], None],
    ) -> None:
        self.number = number
        self.meter = Meter(device, number, timeline)
        proc: Any = SimulatedController()
        self._outside = _Outside(proc, cast("Peer", proc), 0, answered)
        self._rank = _MeteredRank(f"{name}/{number}", region.extent, number, torch.device("cpu"), self._outside)
        self._rank.above[Meter] = self.meter
        self.counts = self._rank.above[TrafficCounts] = MeteredCounts(self.meter, links)
        self._rank.above[Sent] = sent
        self._rank.above[Group] = SimulatedGroup
        self._readers: dict[int, CommandReader] = {}

    def join(self, number: int, region: Region) -> None:
        """Take part in a team."""
        table = attrs.evolve(region, excluded=frozenset[int]()).ranks()
        procs = [proc_id_of(rank) if rank in region else proc_id_of(rank) * 0 for rank in table]
        place = list(table).index(self.number)
        index = sum(map(bool, procs[:place]))
        self._rank.teams[number] = TeamOnRank(number, region.extent, table, cast("Any", procs), index, place)
        self._readers[number] = CommandReader(self._rank.device, SIMULATED)

    def execute(
        self, number: int, stream: Sequence[Any], bodies: Sequence[memoryview], lines: Sequence[tuple[Line, float]]
    ) -> BaseException | None:
        """Execute commands of a team; return what has failed.

        Args:
            number: Of the team.
            stream: The commands.
            bodies: What they carry.
            lines: Where each operation was issued, and when.
        """
        team = self._rank.teams[number]
        first = team.done
        steps = self._readers[number].read(stream, bodies)
        with swap_world(self._rank), self.meter:
            for step in steps:
                done = team.done - first
                if done < len(lines):
                    self.meter.at(*lines[done])
                step.execute(self._rank, team)
                if self._outside.error is not None:
                    break
        error, self._outside.error = self._outside.error, None
        team.failed.clear()
        return error

    def close(self) -> None:
        """Let torch forget the groups."""
        with swap_world(self._rank):
            for team in self._rank.teams.values():
                Disband().execute(self._rank, team)
            forget_world(self._rank)
        self._rank.values.clear()
        self._rank.teams.clear()


class RankThread:
    """The thread in which simulated ranks execute."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while (call := self._calls.get()) is not None:
            try:
                self._results.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - raised where it was called
                self._results.put((None, error))
            del call

    def run(self, call: Callable[[], Any]) -> Any:
        self._calls.put(call)
        result, error = self._results.get()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()
