"""`faults`: what a test writes to plan faults. Each is checked when it is planned, and must happen in the test.

Members are named by a mesh or a view of one, by a mapping or point of the fixture `mesh`, or as "controller".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, Self, cast

import attrs
import trio

from trimesh._runtime.values.endpoint_spec import MeshInfo
from trimesh._transport.native.fault_table import TableKey
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.endpoint import Endpoint
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError, place_name
from trimesh.ids import ProcId
from trimesh.shape.region import Region
from trimesh.testing.plans.armed import ArmedSetup
from trimesh.testing.plans.plan import FaultPlan, Planned
from trimesh.testing.plans.vocabulary import (
    DIRECTIONS,
    LOSSES,
    REFUSALS,
    STAGES,
    ClockFault,
    Death,
    Direction,
    EndpointFault,
    Fault,
    HostFault,
    LinkFault,
    LoopLag,
    Loss,
    LostCall,
    Moment,
    Partition,
    Place,
    ProcessorFault,
    Refusal,
    ResourceFault,
    SpawnFault,
    Stage,
    TransferFault,
    Where,
    checked_amount,
    checked_count,
    parse_how,
)

Members = Any
"""A `ProcMesh`, an actor mesh, a view of one, a mapping of coordinates, or "controller"."""

Heal = Callable[[], None]


class Executor(Protocol):
    """Makes planned faults happen: in a simulation, or in real processes."""

    plan: FaultPlan

    def execute(self, planned: Planned) -> Heal:
        """Arrange for a fault; return what heals it.

        Raises:
            UnsupportedFault: This executor cannot.
        """
        ...

    async def pause(self, seconds: float, messages: int) -> None:
        """Wait before a fault of chaos; over real processes for so many messages, if those come sooner.

        Args:
            seconds: How long.
            messages: How many the process of the test receives; 0 to count none.
        """
        ...

    def moment(self, share: float) -> Moment:
        """Return when a process that chaos kills ends; `share` is drawn from 0 to 1."""
        ...

    def place_of(self, proc_id: ProcId) -> Place: ...

    def is_alive(self, place: Place) -> bool: ...


class UnsupportedFault(NotImplementedError):
    """The back end of this test cannot make this fault happen."""


@attrs.define(eq=False)
class Faults:
    """Plans faults; the fixture `faults`.

    Attributes:
        executor: Makes them happen.
        mesh: The fixture `mesh`, by whose coordinates members are named.
        token, table: What real processes are armed with.
    """

    executor: Executor = attrs.field(repr=False)
    mesh: ProcMesh | None = None
    token: str = attrs.field(default="", repr=False)
    table: TableKey | None = attrs.field(default=None, repr=False)
    _heals: list[Heal] = attrs.field(factory=list[Heal], repr=False)

    # ---- endpoints -------------------------------------------------------------------------------------------

    def at(self, endpoint: Any, point: Mapping[str, int] | None = None, *, nth: int = 1, times: int = 1) -> AtEndpoint:
        """Choose starts of an endpoint: `faults.at(w.step, point={"gpus": 2}, nth=3).raises(MemoryError())`.

        Args:
            endpoint: Of an actor mesh or a view of one.
            point: The member that is meant; all of the view by default.
            nth: Which start, counted for each member from now on.
            times: How many from there on.

        Raises:
            TypeError: It is no endpoint of a mesh.
            ShapeError: There is no such member.
            ValueError: A count is below 1.
        """
        info, where, ranks = self._endpoint(endpoint, point)
        name = endpoint._spec.name  # noqa: SLF001 - the handle keeps to itself what only tests ask for
        return AtEndpoint(self, where, info.mesh, ranks, name, checked_count("nth", nth), checked_count("times", times))

    def call(self, endpoint: Any, point: Mapping[str, int] | None = None) -> OfCall:
        """Choose calls of an endpoint: `faults.call(w.load).lose("reply", nth=2)`. Raises as `at` does."""
        info, where, ranks = self._endpoint(endpoint, point)
        return OfCall(self, where, info.mesh, ranks, endpoint._spec.name)  # noqa: SLF001

    def _endpoint(self, endpoint: Any, point: Mapping[str, int] | None) -> tuple[MeshInfo, Where, tuple[int, ...]]:
        if not isinstance(endpoint, Endpoint):
            raise TypeError(f"a fault is planned for an endpoint of a mesh, as in faults.at(w.step); got {endpoint!r}")
        view = cast("Any", endpoint)._mesh  # noqa: SLF001
        region = view.region if point is None else _only(view.region, point)
        return view.info, self._where(view.info, region), tuple(region.ranks())

    # ---- processes -------------------------------------------------------------------------------------------

    def kill(self, members: Members, how: str = "sigkill") -> Heal:
        """Let processes end now: by "sigkill", "sigterm", "sigsegv", "abort", "oom", "exit(n)"; or stop answering.

        "sigstop" stops them; the lease then runs out, unless what is returned is called before. "hold_gil(seconds)"
        lets Python do nothing there for so long.

        Returns:
            A function that lets stopped processes go on.

        Raises:
            ValueError: There is no such way.
            ShapeError: There is no such member.
        """
        parse_how(how)
        return self._plan(Death(self.where(members), how))

    def clock(self, members: Members) -> OfClock:
        """Choose clocks: `faults.clock({"gpus": 1}).jump(30.0)`, `.drift(0.01)`, `.skew(5.0)`."""
        return OfClock(self, self.where(members))

    def processor(self, members: Members) -> OfProcessor:
        """Choose processors: `faults.processor({"gpus": 1}).slow(0.2)`."""
        return OfProcessor(self, self.where(members))

    def loop(self, members: Members) -> OfLoop:
        """Choose event loops: `faults.loop({"gpus": 1}).lag(0.5)`."""
        return OfLoop(self, self.where(members))

    def spawn(self, nth: int = 1) -> OfSpawn:
        """Choose a start: the nth process from now on, `faults.spawn(nth=5).fails("launch")`."""
        return OfSpawn(self, checked_count("nth", nth))

    def resources(self, members: Members) -> OfResources:
        """Choose what the system gives: `faults.resources({"gpus": 1}).fails("EMFILE", nth=2)`."""
        return OfResources(self, self.where(members))

    def transfer(self, members: Members, *, nth: int = 1, times: int = 1) -> OfTransfers:
        """Choose transfers of buffers: `faults.transfer({"gpus": 1}, nth=3).raises(OSError())`, `.delays(0.5)`.

        Each read, write and atomic operation of an `RDMABuffer` is one, whatever it is part of: a batch, a publication.

        Args:
            members: Whose tasks make them; the owner of the memory makes none.
            nth: Which, counted for each process from now on.
            times: How many from there on.

        Raises:
            ShapeError: There is no such member.
            ValueError: A count is below 1.
        """
        return OfTransfers(self, self.where(members), checked_count("nth", nth), checked_count("times", times))

    def host(self, rank: int) -> OfHost:
        """Choose a host of `simulate(hosts=)`: `faults.host(1).lose()`, `heal = faults.host(1).cut()`."""
        return OfHost(self, rank)

    # ---- links -----------------------------------------------------------------------------------------------

    def link(self, a: Members, b: Members, *, direction: Direction = "both") -> OfLink:
        """Choose the links between two places: `faults.link("controller", mesh).delay(0.1).drop(0.05)`."""
        return OfLink(self, self.where(a), self.where(b), _checked_direction(direction))

    @asynccontextmanager
    async def partition(self, a: Members, b: Members, direction: Direction = "both") -> AsyncGenerator[None, None]:
        """Let nothing pass between two places while the block runs; healed, always, when it is left.

        What was sent meanwhile arrives then. Beyond `limits.LEASE_SECONDS` the owner of a process that it does not hear
        gives it up: `ProcDied` with `reason="stopped"`.
        """
        heal = self._plan(Partition(self.where(a), self.where(b), _checked_direction(direction)))
        await trio.lowlevel.checkpoint()
        try:
            yield
        finally:
            heal()

    def armed(self, setup: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """Return the `setup=` of further real processes that are to have faults; simulated ones need none."""
        return ArmedSetup(self.token, setup, self.table)

    # ---- planning --------------------------------------------------------------------------------------------

    def plan(self, fault: Fault, key: str | None = None) -> Heal:
        """Plan a record of the vocabulary itself; return what heals it.

        Args:
            fault: What.
            key: What the fault is called; by default `f0`, `f1`, and so on.
        """
        return self._plan(fault, key)

    def heal(self) -> None:
        """Heal every partition, link fault and stop that lasts."""
        while self._heals:
            self._heals.pop()()

    @contextmanager
    def healed_after(self) -> Generator[Self, None, None]:
        """Heal everything when the block is left."""
        try:
            yield self
        finally:
            self.heal()

    def _plan(self, fault: Fault, key: str | None = None) -> Heal:
        planned = self.executor.plan.add(fault, key)
        try:
            heal = self.executor.execute(planned)
        except (UnsupportedFault, ShapeError):
            self.executor.plan.planned.remove(planned)
            raise
        self._heals.append(heal)
        return heal

    def where(self, members: Members) -> Where:
        """Return the processes that `members` names.

        Raises:
            ShapeError: There is no such member.
            TypeError: It names none.
        """
        if isinstance(members, str) and members == "controller":
            return Where("controller", (None,))
        if isinstance(members, ActorMesh):
            view = members._view  # noqa: SLF001
            return self._where(view.info, view.region)
        if isinstance(members, ProcMesh):
            owned = members._owned  # noqa: SLF001
            if owned is None:
                raise TypeError("faults need a process mesh that is owned here, got a reference")
            return self._where(owned.info, members._shown)  # noqa: SLF001
        if isinstance(members, Mapping) and self.mesh is not None:
            return self.where(self.mesh._seen(_only(self.mesh._shown, cast("Any", members))))  # noqa: SLF001
        raise TypeError(
            'members are named by a mesh, a view of one, coordinates of the fixture "mesh", or "controller"; '
            f"got {members!r}"
        )

    def _where(self, info: MeshInfo, region: Region) -> Where:
        ranks = region.ranks()
        places = tuple(self.executor.place_of(info.members[rank].proc_id) for rank in ranks)
        if len(ranks) == 1:
            return Where(place_name(info.name, info.whole.point(ranks[0])), places)
        return Where(f"{info.name}[{len(ranks)}]", places)


def _checked_direction(direction: Direction) -> Direction:
    if direction not in DIRECTIONS:
        raise ValueError(f"a direction is one of {', '.join(DIRECTIONS)}; got {direction!r}")
    return direction


def _only(region: Region, point: Mapping[str, int]) -> Region:
    """Return the part of a view that is one member.

    Raises:
        ShapeError: There is no such member.
    """
    others = set(region.exclude([point]).ranks())
    return region.exclude_ranks(sorted(others))


@attrs.frozen(eq=False)
class AtEndpoint:
    """Starts of an endpoint, of which it remains to be said what happens to them."""

    _faults: Faults
    _where: Where
    _mesh: int
    _ranks: tuple[int, ...]
    _endpoint: str
    _nth: int
    _times: int

    def raises(self, error: BaseException | type[BaseException]) -> None:
        """Let them raise `error` instead of running the endpoint."""
        made = error() if isinstance(error, type) else error
        self._plan(error=made)

    def delays(self, seconds: float) -> None:
        """Let them begin so much later; the slot is taken meanwhile."""
        self._plan(seconds=checked_amount("seconds", seconds))

    def _plan(self, *, error: BaseException | None = None, seconds: float = 0.0) -> None:
        fault = EndpointFault(
            self._where, self._mesh, self._ranks, self._endpoint, self._nth, self._times, error, seconds
        )
        self._faults.plan(fault)


@attrs.frozen(eq=False)
class OfCall:
    """Calls of an endpoint, of which it remains to be said what is lost."""

    _faults: Faults
    _where: Where
    _mesh: int
    _ranks: tuple[int, ...]
    _endpoint: str

    def lose(self, what: Loss, *, nth: int = 1) -> None:
        """Lose a frame of the nth call at each member, and so the link: links are reliable.

        Args:
            what: "request": the endpoint never runs. "in_flight": it is running. "reply": it has run.
            nth: Which call, counted for each member from now on.
        """
        if what not in LOSSES:
            raise ValueError(f"what is lost is one of {', '.join(LOSSES)}; got {what!r}")
        nth = checked_count("nth", nth)
        self._faults.plan(LostCall(self._where, self._mesh, self._ranks, self._endpoint, what, nth))


@attrs.frozen(eq=False)
class OfLink:
    """Links between two places; faults of them add up, and last until `faults.heal()`."""

    _faults: Faults
    _a: Where
    _b: Where
    _direction: Direction = "both"

    def drop(self, probability: float = 1.0) -> OfLink:
        """Lose messages, and with the first one that is lost the link."""
        return self._plan("drop", checked_amount("a probability", probability, most=1))

    def delay(self, seconds: float) -> OfLink:
        """Let every message take so much longer."""
        return self._plan("delay", checked_amount("seconds", seconds))

    def duplicate(self, probability: float = 1.0) -> OfLink:
        """Let messages come twice. The first is taken, the second is dropped, and counted in `statistics()`."""
        return self._plan("duplicate", checked_amount("a probability", probability, most=1))

    def reorder(self, seconds: float) -> OfLink:
        """Let messages of different links and lanes overtake each other: each takes up to so much longer."""
        return self._plan("reorder", checked_amount("seconds", seconds))

    def corrupt(self, probability: float = 1.0) -> OfLink:
        """Damage messages, which breaks the protocol and ends the link."""
        return self._plan("corrupt", checked_amount("a probability", probability, most=1))

    def bandwidth(self, bytes_per_second: float) -> OfLink:
        """Let each direction carry no more than this."""
        return self._plan("bandwidth", checked_amount("bytes a second", bytes_per_second))

    def reset_after(self, nbytes: float) -> OfLink:
        """End the link with the message that exceeds so many bytes in one direction."""
        return self._plan("reset", checked_amount("bytes", nbytes))

    def _plan(self, kind: Any, amount: float) -> OfLink:
        self._faults.plan(LinkFault(self._a, self._b, kind, amount, self._direction))
        return self


@attrs.frozen(eq=False)
class OfSpawn:
    """The start of a process."""

    _faults: Faults
    _nth: int

    def fails(self, stage: Stage) -> None:
        """Let it fail: "launch" (there is no process) or "handshake" (it ends before its first word)."""
        if stage not in STAGES:
            raise ValueError(f"a start fails at one of {', '.join(STAGES)}; got {stage!r}")
        self._faults.plan(SpawnFault(self._nth, stage))


@attrs.frozen(eq=False)
class OfClock:
    """Clocks of processes."""

    _faults: Faults
    _where: Where

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward (or back). Deadlines and budgets must not care."""
        self._faults.plan(ClockFault(self._where, jump=float(seconds)))

    def drift(self, rate: float) -> None:
        """Let the clock run `1 + rate` times as fast, budgets of calls that arrive included."""
        if rate <= -1:
            raise ValueError(f"a clock cannot stand still or run backwards: drift must be above -1, got {rate!r}")
        self._faults.plan(ClockFault(self._where, drift=float(rate)))

    def skew(self, seconds: float) -> None:
        """Set each wall clock forward or back, by up to so much; by how much each, the seed says."""
        self._faults.plan(ClockFault(self._where, skew=checked_amount("seconds", seconds)))


@attrs.frozen(eq=False)
class OfProcessor:
    """Processors of processes."""

    _faults: Faults
    _where: Where

    def slow(self, seconds: float) -> Heal:
        """Let each start of an endpoint there take so much computing first; its process does nothing else meanwhile.

        Returns:
            A function that ends it.
        """
        return self._faults.plan(ProcessorFault(self._where, checked_amount("seconds", seconds)))


@attrs.frozen(eq=False)
class OfLoop:
    """Event loops of processes."""

    _faults: Faults
    _where: Where

    def lag(self, seconds: float) -> None:
        """Let them take no message, and let nothing they send arrive, for so long. Heartbeats go on."""
        self._faults.plan(LoopLag(self._where, checked_amount("seconds", seconds)))


@attrs.frozen(eq=False)
class OfResources:
    """Shared memory and descriptors, which the system may refuse."""

    _faults: Faults
    _where: Where

    def fails(self, error: Refusal, *, nth: int = 1, times: int = 1) -> None:
        """Let the system refuse them: to make a link, to take what a peer passes, to have a large body in a segment.

        Args:
            error: "ENOSPC": no shared memory. "EMFILE": no descriptor.
            nth: Which call that could fail so, counted for each member from now on.
            times: How many from there on.
        """
        if error not in REFUSALS:
            raise ValueError(f"the system refuses by one of {', '.join(REFUSALS)}; got {error!r}")
        nth, times = checked_count("nth", nth), checked_count("times", times)
        self._faults.plan(ResourceFault(self._where, error, nth, times))


@attrs.frozen(eq=False)
class OfTransfers:
    """Transfers of buffers, of which it remains to be said what happens to them."""

    _faults: Faults
    _where: Where
    _nth: int
    _times: int

    def raises(self, error: BaseException | type[BaseException]) -> None:
        """Let them raise `error` instead of being made."""
        made = error() if isinstance(error, type) else error
        self._faults.plan(TransferFault(self._where, self._nth, self._times, error=made))

    def delays(self, seconds: float) -> None:
        """Let them begin so much later; who waits for one can be cancelled meanwhile."""
        seconds = checked_amount("seconds", seconds)
        self._faults.plan(TransferFault(self._where, self._nth, self._times, seconds=seconds))


# ---- `faults.host(1)`: what can happen to a host of a job ------------------------------------------------------------


@attrs.frozen(eq=False)
class OfHost:
    """A host, of which it remains to be said what happens to it."""

    _faults: Faults
    _rank: int

    def lose(self) -> None:
        """End its agent now, and everything there with it: `HostLost` with the reason "agent exit"."""
        self._faults.plan(HostFault(self._rank, "lose"))

    def cut(self, direction: Direction = "both") -> Heal:
        """Let nothing pass between it and everything else, until what is returned is called.

        What was sent meanwhile arrives then, if no lease has run out: after `limits.AGENT_LEASE_SECONDS` without a word
        from the program everything on the host ends, and after `limits.HOST_LEASE_SECONDS` without one from the host
        the program gives it up, as `HostLost` with the reason "lease".

        Args:
            direction: "a_to_b" lets nothing come to the host, "b_to_a" lets nothing leave it.

        Raises:
            ValueError: There is no such direction.
        """
        return self._faults.plan(HostFault(self._rank, "cut", _checked(direction)))

    def drop(self, probability: float, direction: Direction = "both") -> Heal:
        """Lose packets between it and everything else, until what is returned is called: TCP sends them again.

        Raises:
            UnsupportedFault: The hosts are simulated, or there is no network: the back end is not "net".
            ValueError: It is no probability, or there is no such direction.
        """
        amount = checked_amount("a probability", probability, most=1)
        return self._faults.plan(HostFault(self._rank, "drop", _checked(direction), amount))

    def bandwidth(self, bytes_per_second: float) -> Heal:
        """Let its network carry no more than this each way, until what is returned is called. Raises as `drop` does."""
        amount = checked_amount("bytes a second", bytes_per_second)
        return self._faults.plan(HostFault(self._rank, "bandwidth", amount=amount))

    def reset(self) -> None:
        """Break its TCP connections, by resets, now. Nothing is lost: sessions go on. Raises as `drop` does."""
        self._faults.plan(HostFault(self._rank, "reset"))


def _checked(direction: Direction) -> Direction:
    if direction not in DIRECTIONS:
        raise ValueError(f"a direction is one of {', '.join(DIRECTIONS)}; got {direction!r}")
    return direction
