"""`SimulatedEngine`: the controller's side of a mesh without processes. What it sends is executed here, on shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch.utils import _pytree as pytree

from trimesh.errors import MeshStopped, Origin, add_note
from trimesh.tensor.controller import generator_states
from trimesh.tensor.controller.engine import Engine, RankRequest
from trimesh.tensor.controller.shapes import Shapes
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.trace import shown
from trimesh.tensor.protocol.tracing import DATA_DEPENDENT
from trimesh.tensor.simulation.moving import Sent
from trimesh.tensor.simulation.process import SimulatedController, SimulatedPeer, SimulatedProcs, proc_id_of
from trimesh.tensor.simulation.ranks import RankThread, SimulatedRank
from trimesh.tensor.simulation.timeline import SimulatedTimeline

if TYPE_CHECKING:
    from trimesh.shape.region import Region
    from trimesh.tensor.controller.expected import Expected
    from trimesh.tensor.simulation.device import Device, RankLink

StandIn = Callable[[torch.Tensor], torch.Tensor]
"""Makes a value of a tensor on the device "meta", which has its size and dtype."""

_NUMBERS: Final = count(1)

_NO_VALUES: Final = (
    "a simulation has no values, and one was asked for (fetch, .item(), print, a shape that follows from values): "
    "leave that out, or let simulate(..., values=0.5) give every value that is asked for as a tensor of this number"
)


class SimulatedEngine(Engine):
    """The engine of one simulation.

    Args:
        procs: What stands for its processes.
        device: Their numbers.
        links: What joins the ranks along a dimension, where the program has said so.
        values: What stands for values that are asked for, or None where they are refused.
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
            generator_states.joined,
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
        generator_states.follow(self)

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
        """Keep the order of all commands: what one rank sends another has been sent before it is read."""
        for other in self._by_number.values():
            if other is not team and other.stream:
                self.flush_team(other)
        self.current = team

    def check_open(self, team: Team | None) -> None:
        """Refuse commands when the block has been left.

        Raises:
            MeshStopped: It has.
        """
        del team
        if self.is_closed:
            raise MeshStopped(f"{self.name} computes no more: the block of the simulation has been left")

    def wake(self) -> None:
        """Nothing: what is issued is executed when a batch is full, or when something is asked."""

    def flush_team(self, team: Team) -> None:
        """Execute what was issued to a team.

        Raises:
            Exception: What an operation of it has raised.
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
            RuntimeError: It is for values, which nothing stands for.
        """
        request = super().ask(team, places, issue, expected)
        number = request.number
        try:
            if number not in self._answers:
                raise RuntimeError(
                    "a simulation knows the first rank of a view, and another one was asked: write "
                    "trimesh.fetch_shard(t, ...) of the first"
                )
            found = self._with_values(self._answers.pop(number))
            self.issued_at = max(self.issued_at, self.ranks[team.region.ranks()[0]].meter.now)
            for peer, place in list(request.waiting.items()):
                encoded = self.proc.values.encode(found if expected.fits(found, place) else [], what="a stand-in")
                request.settle(peer, (encoded.payload, [memoryview(one) for one in encoded.buffers], None, None))
        except BaseException:
            self.forget(request)
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
                    f"what stands for a value must be a tensor of this process of its size and dtype, got "
                    f"{tuple(made.size())} of {made.dtype} for {tuple(one.size())} of {one.dtype}"
                )
            return made

        return pytree.tree_map_only(torch.Tensor, stand_in, value)

    def forget(self, request: RankRequest) -> None:
        self._requests.pop(request.number, None)

    # ---- its end ---------------------------------------------------------------------------------------------

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
        generator_states.forget(self)
        for rank in self.ranks.values():
            self._thread.run(rank.close)
        self._thread.close()


def filled_with(number: float) -> StandIn:
    """Return what makes a value of one number."""

    def fill(one: torch.Tensor) -> torch.Tensor:
        value = bool(number) if one.dtype is torch.bool else number
        if not one.is_floating_point() and not one.is_complex():
            value = math.floor(value)
        return torch.full(one.size(), value, dtype=one.dtype)

    return fill


def _explained(error: BaseException, rank: SimulatedRank) -> BaseException:
    """Return what an operation has raised, with the line that has issued it."""
    if isinstance(error, DATA_DEPENDENT):
        error = RuntimeError(_NO_VALUES)
    if rank.meter.line is not None:
        add_note(error, f"issued at {shown(rank.meter.line)}")
    return error
