"""The controller's side of one mesh of processes that holds tensors: what is sent to the ranks and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import trio

from trimesh import limits
from trimesh._runtime.incoming import take_payload
from trimesh._runtime.services import TENSORS
from trimesh.errors import MeshError, MeshStopped, ProtocolError
from trimesh.tensor import protocol
from trimesh.tensor.device import default_device
from trimesh.tensor.team import Team

if TYPE_CHECKING:
    from trimesh._runtime.channels import Cargo
    from trimesh._runtime.ownership import OwnedProcs
    from trimesh._runtime.peer import Peer
    from trimesh._runtime.proc import Proc
    from trimesh.shape.region import Region
    from trimesh.tensor.shapes import Shapes

_Answer = tuple[Any, list[memoryview], "tuple[int, int] | None", Any]
"""Payload, bodies, the command that failed, cargo."""


@attrs.define(eq=False)
class Request:
    """Values that ranks are to send.

    Attributes:
        number: Known to the ranks.
        team: Whose.
        waiting: Ranks of the team, by place, that have not answered.
        answers: What the others have sent, or why they cannot, by place.
        complete: Set when all have.
    """

    number: int
    team: Team
    waiting: dict[Peer, int]
    answers: dict[int, _Answer | Exception] = attrs.field(factory=dict[int, Any])
    complete: trio.Event = attrs.field(factory=trio.Event)

    def settle(self, peer: Peer, answer: _Answer | Exception) -> bool:
        """Take the answer of a rank; return False if none was expected."""
        place = self.waiting.pop(peer, None)
        if place is None:
            return False
        self.answers[place] = answer
        if not self.waiting:
            self.complete.set()
        return True


@attrs.define(eq=False)
class Engine:
    """One mesh of processes.

    Attributes:
        proc: The controller's process.
        number: Known to the ranks.
        owned: The mesh.
        shapes: The plans of this process.
        engines: All of this process, by number.
        device: Where ranks make tensors unless they are told.
        current: The team that commands were issued to last.
        is_closed: Set when nothing more can be sent.
    """

    proc: Proc
    number: int
    owned: OwnedProcs
    shapes: Shapes
    engines: Mapping[int, Engine]
    device: torch.device = attrs.field(factory=default_device)
    current: Team | None = None
    is_closed: bool = False
    _teams: dict[Region, Team] = attrs.field(factory=dict["Region", Team])
    _by_number: dict[int, Team] = attrs.field(factory=dict[int, Team])
    _opened: set[Peer] = attrs.field(factory=set["Peer"])
    _refs: int = 1
    _requests: dict[int, Request] = attrs.field(factory=dict[int, Request])

    @property
    def name(self) -> str:
        """Of the mesh."""
        return self.owned.info.name

    def new_refs(self, number: int) -> int:
        """Return the first of some unused refs."""
        first = self._refs
        self._refs += number
        return first

    # ---- teams -----------------------------------------------------------------------------------------------

    def team(self, region: Region) -> Team:
        """Return the team of a view; a new one when a process of it has been restarted since.

        Raises:
            ValueError: The view is empty.
        """
        team = self._teams.get(region)
        if team is not None and not team.is_lost:
            return team
        ranks = region.ranks()
        if not ranks:
            raise ValueError("tensors need at least one process, got an empty view")
        info = self.owned.info
        peers = [self.proc.peer(info.members[rank].proc_id) for rank in ranks]
        team = Team(self, self.shapes.new_number(), region, peers)
        self.check_open(team)
        self._teams[region] = self._by_number[team.number] = team
        whole = self.owned.whole.extent
        for rank, peer in zip(ranks, peers, strict=True):
            if peer not in self._opened:
                self._opened.add(peer)
                opening = protocol.Open(self.number, self.name, list(whole), list(whole.values()), rank)
                self._send([peer], opening)
        table = attrs.evolve(region, excluded=frozenset[int]()).ranks()
        procs = [info.members[rank].proc_id if rank in region else 0 for rank in table]
        extent = region.extent
        self._send(
            peers,
            protocol.Team(self.number, team.number, list(extent), list(extent.values()), list(table), procs),
        )
        return team

    def switch_to(self, team: Team) -> None:
        """Keep the order of commands on ranks that both teams have."""
        for other in self._by_number.values():
            if other is not team and other.stream and not set(other.peers).isdisjoint(team.peers):
                self.flush_team(other)
        self.current = team

    def check_open(self, team: Team) -> None:
        """Refuse commands when there is nobody to execute them.

        Raises:
            MeshStopped: The block that owns the processes is being left, or was.
            ProcDied: A process of the team has ended.
        """
        if self.is_closed or self.owned.is_stopping:
            raise MeshStopped(f"{self.name} computes no more: the block that owns its processes is being left")
        for peer in team.peers:
            if peer.death is not None:
                raise peer.death(maybe_executed=False)

    # ---- sending ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send everything that was issued."""
        teams = list(self._by_number.values())
        # What one team forgets may be used by commands of another that have not been sent: those go first. Teams with
        # commands have no rank in common (`switch_to`).
        for team in teams:
            if team.stream:
                self.flush_team(team)
        for team in teams:
            if team.has_freed:
                self.flush_team(team)

    def flush_team(self, team: Team) -> None:
        """Send what was issued to a team; read what has come, and wait when the ranks are far behind."""
        first, stream, bodies = team.take()
        if team.is_lost or self.is_closed:
            return
        # Bodies are made for their command, and nobody writes to them, so that nobody needs to wait for them to leave.
        self._send(team.peers, protocol.Run(self.number, team.number, first, stream), bodies)
        if self.proc.is_simulated:
            return
        self.proc.pump(0)
        while team.issued - team.executed > limits.TENSOR_COMMANDS_AHEAD and not team.is_lost:
            self.proc.pump(limits.SIGNAL_SECONDS)

    def _send(self, peers: Sequence[Peer], message: protocol.AnyMessage, bodies: Sequence[Any] = ()) -> None:
        self.proc.services.cast(peers, TENSORS, protocol.encode(message), bodies)

    # ---- values ----------------------------------------------------------------------------------------------

    def ask(self, team: Team, places: Sequence[int], issue: Callable[[int], object]) -> Request:
        """Make a request that `issue`, given its number, lets the ranks at some places of a team answer."""
        request = Request(self.shapes.new_number(), team, {team.peers[place]: place for place in places})
        self._requests[request.number] = request
        try:
            issue(request.number)
            self.flush_team(team)
        except BaseException:
            self.forget(request)
            raise
        return request

    def line_of(self, team: int, number: int) -> str | None:
        """Say where a command that has failed was issued, of whatever mesh: tensors move between them."""
        for engine in self.engines.values():
            found = engine._by_number.get(team)
            if found is not None:
                return found.line_of(number)
        return None

    def forget(self, request: Request) -> None:
        """Drop a request: its answers have been taken, or whoever asked has left."""
        self._requests.pop(request.number, None)

    # ---- messages --------------------------------------------------------------------------------------------

    def done(self, peer: Peer, message: protocol.Done) -> None:
        """Take a report of progress."""
        team = self._by_number.get(message.team)
        if team is None or peer not in team.peers:
            raise ProtocolError(f"progress must be that of a team, got {message.team}")
        team.progressed(peer, message.count, message.failed)

    def replied(self, peer: Peer, message: protocol.Reply, bodies: list[memoryview], cargo: Cargo | None) -> None:
        """Take a value."""
        request = self._requests.get(message.request)
        if request is None:
            return  # whoever asked has left
        payload, rest = take_payload(message.payload, bodies)
        if not request.settle(peer, (payload, rest, message.failed_at, cargo)):
            raise ProtocolError(f"a rank must answer once, and when asked; request {message.request} got another")

    def refused(self, peer: Peer, why: str) -> None:
        """Learn that a process cannot hold tensors."""
        self._lose(peer, MeshError(f"a process of {self.name} cannot hold tensors: {why}"))

    def gone(self, peer: Peer) -> None:
        """Learn that a process has ended: the tensors of its teams are lost."""
        assert peer.death is not None
        self._lose(peer, peer.death(maybe_executed=True))

    def _lose(self, peer: Peer, error: Exception) -> None:
        if peer not in self._opened:
            return
        self._opened.discard(peer)
        for number, team in list(self._by_number.items()):
            if peer in team.peers:
                team.is_lost = True
                self._send(team.peers, protocol.Lost(self.number, number))
                del self._by_number[number]
        for request in list(self._requests.values()):
            request.settle(peer, error)
        if not self._opened and self.owned.is_stopping:
            self.is_closed = True
