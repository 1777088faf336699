"""`faults`: the fixture that plans faults. Each fault is checked when it is planned, and must happen in the test.

Members are named by a mesh or a view of one, by a mapping or point of the fixture `mesh`, or as "controller".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import attrs
import trio

from trimesh._runtime.values.endpoint_spec import MeshInfo
from trimesh._transport.native.fault_table import TableKey
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.endpoint import Endpoint
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError, place_name
from trimesh.shape.region import Region
from trimesh.testing.plans.armed import ArmedSetup
from trimesh.testing.plans.disk_faults import OfDisk
from trimesh.testing.plans.endpoint_faults import AtEndpoint, OfCall
from trimesh.testing.plans.fault import (
    MOMENTS,
    Direction,
    Fault,
    Heal,
    Moment,
    UnsupportedFault,
    Where,
    checked_count,
    checked_direction,
    checked_one_of,
    healed,
)
from trimesh.testing.plans.host_faults import OfHost
from trimesh.testing.plans.link_faults import OfLink, Partition
from trimesh.testing.plans.name_faults import OfNames
from trimesh.testing.plans.process_faults import Death, OfClock, OfLoop, OfProcessor, parse_how
from trimesh.testing.plans.system_faults import OfResources, OfSpawn, OfTransfers
from trimesh.testing.plans.torch_faults import OfCollective, OfTorch, checked_operator

if TYPE_CHECKING:
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation

Members = Any
"""A `ProcMesh`, an actor mesh, a view of one, a mapping of coordinates, or "controller"."""


@attrs.define(eq=False)
class Faults:
    """Plans faults; the fixture `faults`.

    Attributes:
        executor: Back end that causes them.
        mesh: The fixture `mesh`, whose coordinates name members.
        token, table: Token and fault table with which real processes are armed.
    """

    executor: Simulation | RealExecutor = attrs.field(repr=False)
    mesh: ProcMesh | None = None
    token: str = attrs.field(default="", repr=False)
    table: TableKey | None = attrs.field(default=None, repr=False)
    _heals: list[Heal] = attrs.field(factory=list[Heal], repr=False)

    # ---- endpoints -------------------------------------------------------------------------------------------

    def at(self, endpoint: Any, point: Mapping[str, int] | None = None, *, nth: int = 1, times: int = 1) -> AtEndpoint:
        """Choose starts of an endpoint: `faults.at(w.step, point={"gpus": 2}, nth=3).raises(MemoryError())`.

        Args:
            endpoint: Endpoint of an actor mesh or a view of one.
            point: The member; all of the view by default.
            nth: Number of the first start, counted for each member from now on.
            times: Number of starts from there on.

        Raises:
            TypeError: It is no endpoint of a mesh.
            ShapeError: There is no such member.
            ValueError: A count is below 1.
        """
        info, where, ranks = self._endpoint(endpoint, point)
        name = endpoint._spec.name  # noqa: SLF001 - only tests need it of a handle
        return AtEndpoint(self, where, info.mesh, ranks, name, checked_count("nth", nth), checked_count("times", times))

    def call(self, endpoint: Any, point: Mapping[str, int] | None = None) -> OfCall:
        """Choose calls of an endpoint: `faults.call(w.load).lose("reply", nth=2)`. Raises as `at` does."""
        info, where, ranks = self._endpoint(endpoint, point)
        return OfCall(self, where, info.mesh, ranks, endpoint._spec.name)  # noqa: SLF001

    def _endpoint(self, endpoint: Any, point: Mapping[str, int] | None) -> tuple[MeshInfo, Where, tuple[int, ...]]:
        if not isinstance(endpoint, Endpoint):
            raise TypeError(f"a fault needs an endpoint of a mesh, as in faults.at(w.step), got {endpoint!r}")
        view = cast("Any", endpoint)._mesh  # noqa: SLF001
        region = view.region if point is None else _only(view.region, point)
        return view.info, self._where(view.info, region), tuple(region.ranks())

    # ---- processes -------------------------------------------------------------------------------------------

    def kill(self, members: Members, how: str = "sigkill", at: Moment = "now") -> Heal:
        """End processes: by "sigkill", "sigterm", "sigsegv", "abort", "oom", "exit(n)"; or block them.

        "sigstop" stops them; their lease then expires, unless the returned function is called first.
        "hold_gil(seconds)" keeps Python there from running for that time.

        Args:
            members: The members.
            how: The way.
            at: When "sigkill" comes: "now", at the "start" or the "end" of the next endpoint of an actor there, or with
                its "reply": the answer leaves, and nothing after it.

        Returns:
            A function that continues stopped processes, and takes back a kill that has not come.

        Raises:
            ValueError: There is no such way or time, or a way other than "sigkill" has a time.
            ShapeError: There is no such member.
        """
        parse_how(how)
        if checked_one_of("at=", at, MOMENTS) != "now" and how != "sigkill":
            raise ValueError(f'at={at!r} needs how="sigkill", got {how!r}: leave out at=')
        return self.plan(Death(self.where(members), how, at))

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
        """Choose system resources: `faults.resources({"gpus": 1}).fails("EMFILE", nth=2)`."""
        return OfResources(self, self.where(members))

    def disk(self, members: Members) -> OfDisk:
        """Choose disks: `heal = faults.disk({"gpus": 1}).full()`, `.slow(0.1)`, `.fails("sync")`, `.tears(nth=3)`."""
        return OfDisk(self, self.where(members))

    def names(self, members: Members, name: str = "") -> OfNames:
        """Choose names of hosts, by default all: `heal = faults.names({"gpus": 1}, "db.internal").fails()`.

        A simulation gives each name an address of its own, by `socket.getaddrinfo` and what uses it.
        """
        return OfNames(self, self.where(members), name.lower().removesuffix("."))

    def torch(self, members: Members, operator: str = "", *, nth: int = 1, times: int = 1) -> OfTorch:
        """Choose operators of torch: `faults.torch({"gpus": 1}, "addmm", nth=3).out_of_memory()`, `.hangs(5)`.

        They are those that actors run in endpoints and tasks, and ranks of a mesh of tensors.

        Args:
            members: Members that run them.
            operator: Name in `torch.ops.aten`, or "namespace::name"; by default any operator of aten.
            nth: Number of the first operator, counted for each member from now on.
            times: Number of operators from there on.

        Raises:
            ImportError: torch is not installed.
            ShapeError: There is no such member.
            ValueError: There is no such operator, torch computes it by others, or a count is below 1.
        """
        name = checked_operator(operator)
        return OfTorch(self, self.where(members), name, checked_count("nth", nth), checked_count("times", times))

    def collective(self, members: Members, *, nth: int = 1, times: int = 1) -> OfCollective:
        """Choose collectives of torch at some members: `faults.collective({"gpus": 1}).fails()`, `.hangs()`.

        Args and errors are those of `torch`; in a simulation there are no collectives.
        """
        counts = checked_count("nth", nth), checked_count("times", times)
        return OfCollective(self, self.where(members), "collective", *counts)

    def transfer(self, members: Members, *, nth: int = 1, times: int = 1) -> OfTransfers:
        """Choose transfers of buffers: `faults.transfer({"gpus": 1}, nth=3).raises(OSError())`, `.delays(0.5)`.

        Each read, write and atomic operation of an `RDMABuffer` is one, also inside a batch or a publication.

        Args:
            members: Members whose tasks make the transfers; the owner of the memory makes none.
            nth: Number of the first transfer, counted for each process from now on.
            times: Number of transfers from there on.

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
        return OfLink(self, self.where(a), self.where(b), checked_direction(direction))

    @asynccontextmanager
    async def partition(self, a: Members, b: Members, direction: Direction = "both") -> AsyncGenerator[None, None]:
        """Cut the links between two places while the block runs; leaving it always heals them.

        Messages sent meanwhile arrive afterwards. After `limits.LEASE_SECONDS` without a heartbeat, the owner of a
        process gives it up: `ProcDied` with `reason="stopped"`.
        """
        heal = self.plan(Partition(self.where(a), self.where(b), checked_direction(direction)))
        await trio.lowlevel.checkpoint()
        try:
            yield
        finally:
            heal()

    def armed(self, setup: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """Return the `setup=` for further real processes that should accept faults; simulated ones need none."""
        return ArmedSetup(self.token, setup, self.table)

    # ---- planning --------------------------------------------------------------------------------------------

    def plan(self, fault: Fault, key: str | None = None) -> Heal:
        """Plan a fault of any kind; return a function that heals it.

        Args:
            fault: The fault.
            key: Key of the fault on the command line; by default `f0`, `f1`, and so on.
        """
        planned = self.executor.plan.add(fault, key)
        try:
            heal = healed if planned.is_left_out else self.executor.execute(planned)
        except (UnsupportedFault, ShapeError):
            self.executor.plan.planned.remove(planned)
            raise
        self._heals.append(heal)
        return heal

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

    def where(self, members: Members) -> Where:
        """Return the processes that `members` names.

        Raises:
            ShapeError: There is no such member.
            TypeError: It is no name of members.
        """
        if isinstance(members, str) and members == "controller":
            return Where("controller", (None,))
        if isinstance(members, ActorMesh):
            view = members._view  # noqa: SLF001
            return self._where(view.info, view.region)
        if isinstance(members, ProcMesh):
            owned = members._owned  # noqa: SLF001
            if owned is None:
                raise TypeError("faults need a process mesh that this process owns, got a reference: plan them there")
            return self._where(owned.info, members._shown)  # noqa: SLF001
        if isinstance(members, Mapping) and self.mesh is not None:
            return self.where(self.mesh._seen(_only(self.mesh._shown, cast("Any", members))))  # noqa: SLF001
        raise TypeError(
            'members are named by a mesh, a view of one, coordinates of the fixture "mesh", or "controller", '
            f"got {members!r}"
        )

    def _where(self, info: MeshInfo, region: Region) -> Where:
        ranks = region.ranks()
        places = tuple(self.executor.place_of(info.members[rank].proc_id) for rank in ranks)
        if len(ranks) == 1:
            return Where(place_name(info.name, info.whole.point(ranks[0])), places)
        return Where(f"{info.name}[{len(ranks)}]", places)


def _only(region: Region, point: Mapping[str, int]) -> Region:
    """Return the part of a view that is one member.

    Raises:
        ShapeError: There is no such member.
    """
    others = set(region.exclude([point]).ranks())
    return region.exclude_ranks(sorted(others))
