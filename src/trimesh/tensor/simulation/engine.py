"""`SimulatedEngine`: the controller's engine of a simulation. It executes commands in this process, on shapes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh.errors import MeshStopped, Origin, add_note
from trimesh.tensor.controller import upload
from trimesh.tensor.controller.engine import Engine, RankRequest
from trimesh.tensor.controller.shapes import Shapes
from trimesh.tensor.controller.team import Team, issuing_line
from trimesh.tensor.controller.trace import shown
from trimesh.tensor.groups.group import Group, TrafficCounts
from trimesh.tensor.groups.groups import Disband, forget_world, swap_world
from trimesh.tensor.kernels.values import FetchStep
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.tracing import DATA_DEPENDENT
from trimesh.tensor.rank.rank import Command, Rank, TeamOnRank
from trimesh.tensor.rank.reader import CommandReader
from trimesh.tensor.simulation.kernels import (
    SIMULATED,
    MeteredCounts,
    Sent,
    SimulatedController,
    SimulatedGroup,
    SimulatedPeer,
    SimulatedProcs,
    proc_id_of,
)
from trimesh.tensor.simulation.meter import Meter, SimulatedTimeline

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc
    from trimesh._runtime.peers import Peer
    from trimesh.shape.region import Region
    from trimesh.tensor.controller.shapes import Expected, Line
    from trimesh.tensor.simulation.device import Device, RankLink


StandIn = Callable[[torch.Tensor], torch.Tensor]
"""Makes a substitute value for a tensor, given on the device "meta" with its size and dtype."""

_NUMBERS: Final = count(1)

_NO_VALUES: Final = (
    "a simulation has no values, got a request for one (fetch, .item(), print, a shape that depends on values): remove "
    "it, or write simulate(..., values=0.5), which returns tensors filled with this number"
)


class SimulatedEngine(Engine):
    """The engine of one simulation.

    Args:
        procs: The simulated processes.
        device: Their device.
        links: Links by label, where the program gives them.
        values: Makes substitutes for fetched values; None to refuse fetches.
    """

    has_values: ClassVar[bool] = False

    def __init__(
        self, procs: SimulatedProcs, device: Device, links: Mapping[str, RankLink], values: StandIn | None
    ) -> None:
        numbered: dict[int, Engine] = {}
        owned: Any = procs
        options: dict[str, Any] = {"token": None}  # of Trio's loop, which need not run
        super().__init__(
            cast("Any", SimulatedController()),
            next(_NUMBERS),
            owned,
            Shapes(),
            numbered,
            lambda _: None,
            upload.joined,
            **options,
        )
        numbered[self.number] = self
        self.ranks: dict[int, SimulatedRank] = {}
        self.timeline = SimulatedTimeline()
        self.issued_at = 0.0
        self.commands = 0
        self._procs, self._numbers, self._links, self._values = procs, device, links, values
        self._peers = [SimulatedPeer(proc_id_of(rank)) for rank in range(procs.whole.extent.nelements)]
        self._sent = Sent()
        self._answers: dict[int, Any] = {}
        self._thread = RankThread(f"simulation {self.number}")
        upload.follow(self)

    @property
    def name(self) -> str:
        return self._procs.name

    @property
    def numbers(self) -> Device:
        return self._numbers

    # ---- teams -----------------------------------------------------------------------------------------------

    def team(self, region: Region) -> Team:
        team = self._teams.get(region)
        if team is not None:
            return team
        self.check_open(None)
        ranks = region.ranks()
        if not ranks:
            raise ValueError("tensors need at least one process, got an empty view")
        peers: Any = [self._peers[rank] for rank in ranks]
        origins = [Origin(region.base.point(rank), self.name) for rank in ranks]
        team = Team(self, self.shapes.new_number(), region, peers, origins)
        self._teams[region] = self._by_number[team.number] = team
        first = ranks[0]
        if first not in self.ranks:
            self.ranks[first] = SimulatedRank(
                f"simulation {self.number}", self._procs.whole, first, self._numbers, self._links, self.timeline,
                self._sent, self._answered,
            )  # fmt: skip
        self.ranks[first].join(team.number, region)
        self.on_team(team)
        return team

    def switch_to(self, team: Team) -> None:
        """Execute pending commands of all other teams, so that a rank has sent tensors before another reads them."""
        for other in self._by_number.values():
            if other is not team and other.stream:
                self.flush_team(other)
        self.current = team

    def check_open(self, team: Team | None) -> None:
        """Refuse commands after the end of the block.

        Raises:
            MeshStopped: The block has been left.
        """
        del team
        if self.is_closed:
            raise MeshStopped(f"{self.name} accepts no operations: the block of the simulation has been left")

    def wake(self) -> None:
        """Do nothing: commands are executed when a batch is full, or on a request."""

    def flush_team(self, team: Team) -> None:
        """Execute the commands issued to a team.

        Raises:
            Exception: The error of an operation.
        """
        self._post(team)

    def _post(self, team: Team) -> None:
        lines = list(team._new_lines)
        _, stream, bodies = team.take()
        team.lines.clear()
        if not stream:
            return
        stamped = []
        for line in lines:
            self.issued_at += self._numbers.issue_seconds
            stamped.append((line, self.issued_at))
        self.commands += len(lines)
        rank = self.ranks[team.region.ranks()[0]]
        views: Any = bodies
        error = self._thread.run(partial(rank.execute, team.number, stream, views, stamped))
        if error is not None:
            raise _explained(error, rank)

    # ---- values ----------------------------------------------------------------------------------------------

    def ask(self, team: Team, places: Sequence[int], issue: Callable[[int], object], expected: Expected) -> RankRequest:
        """Make a request, and answer it; see `Engine.ask`.

        Raises:
            RuntimeError: It is for values, and the simulation has no substitutes for them.
        """
        return self._answer(super().ask(team, places, issue, expected))

    def fetch(
        self, team: Team, refs: list[int], places: Sequence[int], expected: Expected, *, is_large: bool = False
    ) -> RankRequest:
        """Make a request, and answer it; see `ask`."""
        return self._answer(super().fetch(team, refs, places, expected, is_large=is_large))

    def _send(self, peers: Sequence[Peer], message: messages.AnyMessage, bodies: Sequence[Any] = ()) -> None:
        """Let the simulated rank answer requests."""
        del bodies
        assert isinstance(message, messages.Fetch)
        team = self._by_number[message.team]
        if team.peers[0] in peers:
            self.issued_at += self._numbers.issue_seconds
            self.commands += 1
            rank = self.ranks[team.region.ranks()[0]]
            self._thread.run(partial(rank.fetch, message, (issuing_line(), self.issued_at)))

    def _answer(self, request: RankRequest) -> RankRequest:
        number, team = request.number, request.team
        try:
            if number not in self._answers:
                raise RuntimeError(
                    "a simulation runs only the first rank of a view, got a request to another one: write "
                    "trimesh.fetch_shard(t) for the first"
                )
            found = self._with_values(self._answers.pop(number))
            self.issued_at = max(self.issued_at, self.ranks[team.region.ranks()[0]].meter.now)
            for peer, place in list(request.waiting.items()):
                fits = request.expected.fits(found, place)
                encoded = self.proc.values.encode(found if fits else [], what="a stand-in")
                self.settle(request, peer, (encoded.payload, [memoryview(one) for one in encoded.buffers], None, None))
        except BaseException:
            self._requests.pop(number, None)
            raise
        return request

    def _answered(self, request: int, value: Any) -> None:
        self._answers[request] = value

    def _with_values(self, value: Any) -> Any:
        def stand_in(one: torch.Tensor) -> torch.Tensor:
            if self._values is None:
                raise RuntimeError(_NO_VALUES)
            with torch._C._DisableTorchDispatch():  # a mesh may be active
                made = self._values(one)
            if made.size() != one.size() or made.dtype != one.dtype or made.device.type != "cpu":
                raise ValueError(
                    "values= of a simulation must return a CPU tensor of its size and dtype, got "
                    f"{tuple(made.size())} of {made.dtype} for {tuple(one.size())} of {one.dtype}"
                )
            return made

        return pytree.tree_map_only(torch.Tensor, stand_in, value)

    # ---- reset and end ---------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Count time, traffic and lines from zero."""
        self.flush()
        for rank in self.ranks.values():
            rank.meter.begin_anew()
            rank.counts.by_labels.clear()
        self.timeline.clear()
        self.issued_at, self.commands = 0.0, 0

    def close(self) -> None:
        """End the simulation: nothing more can be issued."""
        self.is_closed = True
        upload.forget(self)
        for rank in self.ranks.values():
            self._thread.run(rank.close)
        self._thread.close()


def filled_with(number: float) -> StandIn:
    """Return a function that makes values filled with one number."""

    def fill(one: torch.Tensor) -> torch.Tensor:
        value = bool(number) if one.dtype is torch.bool else number
        if not one.is_floating_point() and not one.is_complex():
            value = math.floor(value)
        return torch.full(one.size(), value, dtype=one.dtype)

    return fill


def _explained(error: BaseException, rank: SimulatedRank) -> BaseException:
    """Return the error of an operation with the line that issued it."""
    if isinstance(error, DATA_DEPENDENT):
        error = RuntimeError(_NO_VALUES)
    if rank.meter.line is not None:
        add_note(error, f"issued at {shown(rank.meter.line)}")
    return error


# ---- simulated ranks: the first of each view represents the view -----------------------------------------------------

# All ranks of a view execute the same commands, on parts of the same sizes except for the last ones, so one of them
# gives the costs of all. Simulated ranks run in a thread of their own, without active meshes or dispatch modes, and
# the issuing thread waits for it.


class _MeteredRank(Rank):
    """A rank whose commands take simulated time."""

    def execute(self, team: TeamOnRank, command: Command) -> None:
        self.above[Meter].begin_command()
        super().execute(team, command)


@attrs.define(eq=False)
class _Outside:
    """Services of the process for a simulated rank; see `Outside`.

    Attributes:
        proc: The controller, which is this process.
        controller: The same.
        engine: Number of the engine.
        answered: Called with the rank's reply to a request.
        error: The first error.
    """

    proc: Proc
    controller: Peer
    engine: int
    answered: Callable[[int, Any], None]
    error: BaseException | None = None

    def reply(self, request: int, value: Any) -> None:
        """Reply to the controller with a value or a `Poison`."""
        self.answered(request, value)

    def reply_packed(self, request: int, data: bytes) -> None:
        """Refuse: without values, nothing is packed."""
        raise NotImplementedError

    def reply_lent(self, request: int, described: list[Any], memory: memoryview, *, is_staged: bool) -> None:
        """Refuse: nothing is large here; see `fetching`."""
        raise NotImplementedError

    def run_in_trio(self, function: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError(f"a simulation has no processes, got a wait for another one, {function!r}")

    def ask(
        self,
        team: TeamOnRank,
        verb: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        numbers: Sequence[int] = (),
        error: BaseException | None = None,
        seconds: float = 0.0,
    ) -> messages.Answer:
        """Refuse: there is no other rank to answer."""
        raise NotImplementedError(f"a simulation has no store of a team, got {verb!r} of {list(keys)}")

    def leave(self, team: TeamOnRank, error: BaseException, *, is_waited_for: bool = True) -> None:
        """Record the first error."""
        del team, is_waited_for
        if self.error is None:
            self.error = error

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        function(*args)

    def origin(self, what: str) -> Origin:
        return Origin(None, "a simulation", None, what)


class SimulatedRank:
    """One simulated rank and its meter.

    Args:
        name: Name of the mesh, unique among the simulations of this process.
        region: The whole mesh.
        number: Number of the rank.
        device: Its device.
        links: Links by label.
        timeline: Records its events.
        sent: Tensors in transit between ranks.
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
        """Join a team."""
        table = attrs.evolve(region, excluded=frozenset[int]()).ranks()
        procs = [proc_id_of(rank) if rank in region else proc_id_of(rank) * 0 for rank in table]
        place = list(table).index(self.number)
        index = sum(map(bool, procs[:place]))
        self._rank.teams[number] = TeamOnRank(number, region.extent, table, cast("Any", procs), index, place)
        self._readers[number] = CommandReader(self._rank.device, SIMULATED)

    def execute(
        self, number: int, stream: Sequence[Any], bodies: Sequence[memoryview], lines: Sequence[tuple[Line, float]]
    ) -> BaseException | None:
        """Execute commands of a team; return the first error, if any.

        Args:
            number: Number of the team.
            stream: The commands.
            bodies: Their bodies.
            lines: Source line and time of issue of each operation.
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

    def fetch(self, message: messages.Fetch, issued: tuple[Line, float]) -> None:
        """Answer a request."""
        with swap_world(self._rank), self.meter:
            self.meter.at(*issued)
            self.meter.begin_command()
            FetchStep(message.request, message.refs).execute(self._rank, self._rank.teams[message.team])

    def close(self) -> None:
        """Destroy torch's process groups."""
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
