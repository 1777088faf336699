"""Actor mesh at its owner: spawn on all ranks, receive failures, stop on all ranks.

Members restarted by their own policy are remade in the same process (P1); members restarted with their process are
remade in the next process. Both use the recipe kept from the first spawn.

AZ-1 A mesh spawned on a view that shows every place along the dimension follows resizes: new processes get its
     actors, from the recipe of the first ones. Any other mesh only loses members.
AZ-2 Ranks are never removed; those that are not in the mesh are `absent`, and no message is sent to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.cell import Recipe, argument_named, keep
from trimesh._runtime.actors.reports import errors_of, is_silent, log_kept_back, news_of, raise_errors
from trimesh._runtime.calls.invocation import Request, Result, invoke, invoke_until, post_nowait
from trimesh._runtime.calls.membership import Membership, Standing
from trimesh._runtime.meshes.block import Block
from trimesh._runtime.meshes.failures import Restarts, remaking
from trimesh._runtime.peers.peer import Peer, Target
from trimesh._runtime.tasks.interrupt import run_to_end
from trimesh._runtime.values.endpoint_spec import MemberInfo, MeshInfo
from trimesh._runtime.watch.events import EventHub
from trimesh._supervision.policy import (
    Ending,
    FailFast,
    MemberFailure,
    MeshState,
    Policy,
    Restart,
    Verdict,
    decide,
    is_healing,
)
from trimesh._supervision.supervisor import Round, Supervisor
from trimesh.errors import (
    ActorFailed,
    MeshErrorGroup,
    Origin,
    ProcDied,
    RemoteCancelled,
    RestartLimit,
    Unresponsive,
    origin,
    place_name,
    set_origin,
)
from trimesh.events import Died, Failed, GaveUp, Restarted, Restarting, Started, Unacknowledged
from trimesh.ids import AGENT, ProcId
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.meshes.proc_members import ProcMembers


UnitsIn = Callable[[Region, Sequence[int]], Sequence[Sequence[int]]]
"""Returns groups of members that restart together, given the whole mesh and the process rank of each member."""


def no_units(whole: Region, proc_ranks: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return no groups: for a mesh whose policy restarts nothing."""
    del whole, proc_ranks
    return ()


class ActorSize:
    """The size of one actor mesh.

    Attributes:
        absent: Ranks that have left the mesh.
    """

    def __init__(self, actors: ActorMembers, units: UnitsIn, view: Region | None) -> None:
        """Begin with the members as spawned.

        Args:
            units: Returns the groups that restart together.
            view: The view of processes that they were spawned on and grow with; None if they do not grow.
        """
        self.absent: set[int] = set()
        self._actors = actors
        self._units = units
        self._view = view

    @property
    def present(self) -> Region:
        """The mesh at its present size."""
        return self._actors.membership.present

    def note(self, shown: Region) -> None:
        """Update handles to the present size of the process mesh, if this mesh follows it."""
        if self._view is not None and self._actors.is_ready:
            self._actors.membership.resized(shown.base.sizes[0])

    def lacks(self, shown: Region) -> bool:
        """Return whether this mesh follows the process mesh and some of its processes still lack actors."""
        actors, view = self._actors, self._view
        if view is None or actors.is_stopping or not actors.is_ready:
            return False
        if shown.base.sizes[0] > view.base.sizes[0]:
            return True
        return any(
            rank not in actors.ranks and actors.proc_ranks[rank] in shown
            for rank in actors.membership.info.whole.ranks()
        )

    async def grow(self, label: str, shown: Region) -> None:
        """Make members in the processes that lack them.

        Raises:
            MeshErrorGroup: Some could not be made.
        """
        actors, view, size = self._actors, self._view, shown.base.sizes[0]
        assert actors.processes is not None
        assert view is not None
        if size > view.base.sizes[0]:
            self._view = view.resized(label, size)
            actors.proc_ranks = self._view.table
            members = [actors.processes.member_info(rank) for rank in actors.proc_ranks]
            infos = [msgspec.structs.replace(member, incarnation=-1) for member in members]
            actors.membership.extend(actors.membership.info.whole.resized(label, size), infos, Standing.GONE)
            if actors.restarts is not None:
                actors.restarts.supervisor.extend(self._units(actors.membership.info.whole, actors.proc_ranks))
        every = actors.membership.info.whole.ranks()
        ranks = [rank for rank in every if rank not in actors.ranks and actors.proc_ranks[rank] in shown]
        actors.ranks = sorted([*actors.ranks, *ranks])
        self.absent.difference_update(ranks)
        await actors.remake({rank: actors.processes.member_info(actors.proc_ranks[rank]) for rank in ranks}, Started)

    def leave(self, proc_ranks: Collection[int]) -> None:
        """Stop sending to members in processes that are being removed from their mesh."""
        actors = self._actors
        for rank in self._ranks_of(proc_ranks):
            if actors.restarts is not None:
                actors.restarts.supervisor.leave(rank)
            self.absent.add(rank)
            actors.membership.leave(rank)

    def drop(self, proc_ranks: Collection[int]) -> None:
        """Forget the members in some processes, which have ended."""
        self.leave(proc_ranks)
        self._actors.ranks = [rank for rank in self._actors.ranks if rank not in self.absent]

    def _ranks_of(self, proc_ranks: Collection[int]) -> list[int]:
        actors = self._actors
        return [rank for rank in actors.ranks if actors.proc_ranks[rank] in proc_ranks]


# ---- actor members ---------------------------------------------------------------------------------------------------


class ActorMembers:
    """The members of one actor mesh.

    Attributes:
        proc: The owner's process.
        block: The block that owns the mesh.
        ranks: Its ranks, without missing ones.
        processes: The processes of the members, by `proc_ranks`; None for this very process.
        proc_ranks: Rank in the process mesh by rank here.
        policy: Handles failures without a caller.
        restarts: Restarts of actors alone; None without a `Restart` policy.
        size: Follows the size of the process mesh.
        ready: Set when all actors serve, or none will.
        is_ready: Whether all actors have served.
        events: Events published to readers.
    """

    def __init__(
        self,
        proc: Proc,
        block: Block,
        membership: Membership,
        ranks: Sequence[int],
        processes: ProcMembers | None,
        proc_ranks: Sequence[int],
        policy: Policy | None = None,
        units: UnitsIn = no_units,
        view: Region | None = None,
    ) -> None:
        self.proc = proc
        self.block = block
        self.membership = membership
        self.ranks = ranks
        self.processes = processes
        self.proc_ranks = proc_ranks
        self.policy: Policy = FailFast() if policy is None else policy
        self.ready = trio.Event()
        self.is_stopping = False
        self.size = ActorSize(self, units, view)
        self.restarts: Restarts | None = None
        self._recipe: Recipe | None = None
        self.is_ready = False
        self._starting = trio.CancelScope()
        self._early: list[Exception] = []
        self._lost: Exception | None = None
        self._with_processes: set[int] = set()
        self._untold: dict[ProcId, list[Callable[[int], None]]] = {}
        self._remaking: dict[trio.CancelScope, trio.Event] = {}
        self._remade_by: dict[int, trio.lowlevel.Task] = {}
        self.events = EventHub(self.origin_of, self.proc.journal)
        if isinstance(self.policy, Restart):
            found = units(self.info.whole, proc_ranks)
            self.restarts = Restarts(self.proc, Supervisor(self.info.name, self.policy, found), self)
            self.restarts.supervisor.absent = self.size.absent

    @property
    def info(self) -> MeshInfo:
        """Description sent in references."""
        return self.membership.info

    def origin_of(self, rank: int) -> Origin:
        """Return the coordinates of the errors of the member of a rank."""
        return self.membership.info.origin(rank)

    @property
    def is_held(self) -> bool:
        """True if messages to a failed actor wait, because it is remade."""
        return isinstance(self.policy, Restart) and ActorFailed in self.policy.on

    def _agents(self, ranks: Sequence[int]) -> list[Target]:
        return [Target(self.membership.peer(rank), AGENT) for rank in ranks]

    def _reachable(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self.membership.peer(rank).death is None]

    def _request(self, ranks: Sequence[int], endpoint: str, *args: Any) -> Request:
        info = self.info
        return Request(info.name, endpoint, args, {}, lambda index: info.origin(ranks[index]))

    # ---- start -----------------------------------------------------------------------------------------------

    async def start(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Spawn the actors; return when all of them serve.

        Raises:
            MeshErrorGroup: Some could not be spawned; the others have been ended.
        """
        info = self.info
        if info.is_healing or is_healing(self.policy):
            self._recipe = keep(self.proc.values, info.name, cls, args, kwargs)
            request = self._remake_request(self.ranks, info.members)
        else:
            request = self._request(self.ranks, "spawn", info, self.proc.values.sent_class(cls), args, kwargs)
        self.proc.owners[info.mesh] = self
        if self.processes is not None:
            self.processes.actors.append(self)
        from trimesh._runtime.meshes.launching import starting  # noqa: PLC0415 - at the first spawn

        results: list[Result] = []
        try:
            with self._starting, starting(self.proc, info, self.ranks):
                results = await invoke(self.proc, self._agents(self.ranks), request, fail_fast=True)
            errors = errors_of(results)
            is_cut = all(isinstance(error, RemoteCancelled) for error in errors)
            if self._lost is not None and is_cut:  # a process was lost after it had answered, so the others were ended
                errors = [self._lost]
        except BaseException as error:  # noqa: BLE001 - raised again when the mesh is gone
            await self._discard([], argument_named(error, self.proc.values, info.name, cls, args, kwargs))
        else:
            if errors or self._early:
                await self._discard(errors, None)
        self.is_ready = True
        if self.processes is not None and self.size.lacks(self.processes.present):
            try:
                await self.processes.catch_up(self)
            except BaseException as error:  # noqa: BLE001 - raised again when the mesh is gone
                await self._discard([], error)
        self.ready.set()

    def _remake_request(self, ranks: Sequence[int], members: Sequence[MemberInfo]) -> Request:
        info, recipe = self.info, self._recipe
        assert recipe is not None
        now = msgspec.structs.replace(info, members=tuple(members))
        request = self._request(ranks, "spawn_kept", now, recipe.value, self.is_held)
        return msgspec.structs.replace(request, definitions=recipe.definitions)

    async def _discard(self, errors: Sequence[Exception], cut: BaseException | None) -> NoReturn:
        """End a mesh that could not be started, and raise the reason.

        A cancel stays a cancel: a process killed because it did not unwind is left to the policy of the processes.
        """
        self.ready.set()
        late, _ = await run_to_end(lambda: self.stop(trio.current_time() + self.block.grace))
        if cut is not None:
            killed = [error for error in late if isinstance(error, ProcDied) and error.by == "grace"]
            late = [error for error in late if error not in killed]
            if self.block.is_stopping:
                for error in killed:
                    self.block.fail(error)
        found = [*self._early, *errors, *late]
        if found:
            name = self.info.name
            raise MeshErrorGroup(f"{name} could not be spawned", found, mesh=name) from None
        assert cut is not None
        raise cut

    # ---- failures of the actors ------------------------------------------------------------------------------

    def actor_failed(self, peer: Peer, error: Exception, *, ended: bool) -> None:
        """Handle a failure that has no caller; while other ranks still start, it is a failure of the spawn."""
        if not self.is_ready:
            self._early.append(error)
            self._starting.cancel(reason=f"another rank of {self.info.name} failed")
            return
        self._take(peer, lambda rank: self._failed(rank, error, Ending.ERROR, ended=ended))

    def actor_ended(self, peer: Peer) -> None:
        """Handle the end of an actor by itself, without an error."""
        self._take(peer, self._ended)

    def _ended(self, rank: int) -> None:
        error = ActorFailed(f"{place_name(self.info.name, self.info.whole.point(rank))} has ended by itself")
        self._failed(rank, error, Ending.CANCELLED, ended=True)

    def _take(self, peer: Peer, act: Callable[[int], None]) -> None:
        """Apply news of an actor; deferred until its start in the next process is known."""
        if peer.proc_id in self._untold:
            self._untold[peer.proc_id].append(act)
        for rank in self._ranks_in(peer.proc_id):
            act(rank)

    def _ranks_in(self, proc_id: ProcId) -> list[int]:
        """Return the ranks that an event of a process concerns: none if it has been replaced already (R08)."""
        return [rank for rank in self.membership.ranks_in(proc_id) if rank in self.ranks]

    def _failed(self, rank: int, error: Exception, ending: Ending, *, ended: bool) -> None:
        is_error = ending is Ending.ERROR
        if ended:
            self.events.tell(Died, rank, error=error if is_error else None)
        else:
            self.events.tell(Failed, rank, error=error)
        if rank in self._with_processes or rank in self.size.absent:
            return  # its process is being restarted, or has left the mesh
        restarts = self.restarts
        state = MeshState() if restarts is None else restarts.supervisor.state(rank, is_stopping=self.is_stopping)
        effects = decide(MemberFailure(ActorFailed, ending, ended, "actor"), self.policy, state)
        is_handled = effects.asks and self._is_handled(rank, error, has_ended=ended)
        if effects.verdict is Verdict.RESTART and not is_handled:
            assert restarts is not None
            restarts.failed(rank, error)
            return
        if ended:
            self.membership.set(rank, Standing.GONE)
            self._release(rank)
        if is_handled:
            return
        if effects.verdict is Verdict.FAIL:
            self.block.fail(error, is_message=not ended)
        elif is_error and not self.block.ignores(error, is_message=not ended):
            log_kept_back(self.proc, self.info.name, error, f"the actor {'has ended' if ended else 'goes on'}")

    def _is_handled(self, rank: int, error: Exception, *, has_ended: bool) -> bool:
        """Query the failure handlers of the processes; an actor of this very process has none."""
        if self.processes is None:
            return False
        proc_ranks = [self.proc_ranks[rank]]
        return self.processes.failures.is_handled(proc_ranks, self.origin_of, [rank], error, has_ended=has_ended)

    def _release(self, rank: int) -> None:
        """Answer the messages that wait for an actor that will not be remade."""
        if self.is_held and self.membership.peer(rank).death is None:
            post_nowait(
                self.proc, self._agents([rank]), self._request([rank], "stop", self.info.mesh, self.block.grace)
            )

    def member_silent(self, proc_id: ProcId, what: str, *, is_logged: bool) -> None:
        """Handle a member that did not acknowledge a cancel in time (rule C2); the caller here has logged it."""
        for rank in self._ranks_in(proc_id):
            label = f"{what} at {place_name(self.info.name, self.info.whole.point(rank))}"
            error = Unresponsive(f"{label} did not acknowledge its cancel in time; it may still run")
            set_origin(error, self.origin_of(rank))
            self.events.tell(Unacknowledged, rank, error=error)
            if self.processes is not None:
                self.processes.member_silent(self.proc_ranks[rank], error, is_logged=is_logged)

    # ---- failures of their processes -------------------------------------------------------------------------

    def _ranks_of(self, proc_ranks: Collection[int]) -> list[int]:
        return [rank for rank in self.ranks if self.proc_ranks[rank] in proc_ranks]

    def process_died(self, proc_rank: int, error: Exception) -> None:
        """Publish the deaths of the actors in a process that has died; the process mesh acts on it."""
        for rank in self._ranks_of([proc_rank]):
            if self.is_ready:
                self.events.tell(Died, rank, error=error)

    def processes_going_down(self, proc_ranks: Collection[int], cause: Exception) -> None:
        """Make calls wait for the members in some processes, which are being restarted."""
        for rank in self._ranks_of(proc_ranks):
            if self.restarts is not None:
                self.restarts.supervisor.leave(rank)
            if self.is_ready:
                self._with_processes.add(rank)
                self.membership.set(rank, Standing.RESTARTING)
                self.events.tell(Restarting, rank, cause=cause)
            else:
                self._lost = self._lost or cause

    def processes_gone(self, proc_ranks: Collection[int], cause: Exception) -> None:
        """Give up the members in some processes."""
        for rank in self._ranks_of(proc_ranks):
            if self.restarts is not None:
                self.restarts.supervisor.leave(rank)
            self._with_processes.discard(rank)
            self.membership.set(rank, Standing.GONE)
            if not self.is_ready:
                self._lost = self._lost or cause

    async def stop_in(self, proc_ranks: Collection[int], deadline: float, by: str = "stopped") -> None:
        """End the members in some processes in good order, before those are ended."""
        ranks = self._reachable(self._ranks_of(proc_ranks))
        request = self._request(ranks, "stop", self.info.mesh, math.inf, by)
        for error in news_of(await invoke_until(self.proc, self._agents(ranks), request, deadline)):
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        """Publish and log the error of a clean-up that no task waits for."""
        log_kept_back(self.proc, self.info.name, error, "it was raised by the clean-up before a restart")
        where = origin(error)
        if where is not None and where.point is not None:
            self.events.tell(Failed, where.point.rank, error=error)

    async def remake_in(self, proc_ranks: Collection[int]) -> None:
        """Remake the members in the processes that replace old ones; raise as `remake` does."""
        assert self.processes is not None
        if self.is_ready and not self.is_stopping:
            ranks = self._ranks_of(proc_ranks)
            infos = {rank: self.processes.member_info(self.proc_ranks[rank]) for rank in ranks}
            await self.remake(infos)

    async def remake(self, infos: dict[int, MemberInfo], kind: type[Restarted | Started] = Restarted) -> None:
        """Spawn members again, or for the first time; raise when some could not be spawned."""
        members = list(self.membership.members)
        for rank, info in infos.items():
            members[rank] = msgspec.structs.replace(info, incarnation=members[rank].incarnation + 1)
        ranks = list(infos)
        agents = [Target(self.proc.peer(members[rank].proc_id), AGENT) for rank in ranks]
        before = [self.membership.news[rank] for rank in ranks]
        next_procs = {members[rank].proc_id for rank in ranks} - {member.proc_id for member in self.membership.members}
        untold: dict[ProcId, list[Callable[[int], None]]] = {proc_id: [] for proc_id in next_procs}
        self._untold |= untold
        results: list[Result] = []
        with trio.CancelScope() as scope:  # the block of these actors may end before that of the processes
            over = self._remaking[scope] = trio.Event()
            try:
                results = await invoke(self.proc, agents, self._remake_request(ranks, members), fail_fast=True)
            finally:
                for proc_id in untold:
                    del self._untold[proc_id]
                del self._remaking[scope]
                over.set()
        if scope.cancelled_caught:
            return
        done = "restarted" if kind is Restarted else "started"
        raise_errors(results, f"{self.info.name} could not be {done}", self.info.name)
        for rank, known in zip(ranks, before, strict=True):
            if self.membership.news[rank] != known:
                continue  # the member or its process was given up meanwhile, or it is remade in the next process
            if self.proc.peer(members[rank].proc_id).death is None:
                self._with_processes.discard(rank)
                self.membership.set(rank, Standing.LIVE, members[rank])
                self.events.tell(kind, rank, host=members[rank].host, pid=members[rank].pid)
        for proc_id, acts in untold.items():
            for rank in self._ranks_in(proc_id):
                for act in acts:
                    act(rank)

    # ---- restarts of the actors alone ------------------------------------------------------------------------

    def going_down(self, round_: Round) -> None:
        """Make calls wait for the actors of a round."""
        assert self.restarts is not None
        for rank in self._with_processes:  # they are remade anyway
            self.restarts.supervisor.leave(rank)
        for rank in round_.ranks:
            self.membership.set(rank, Standing.RESTARTING)
            self.events.tell(Restarting, rank, cause=round_.cause)

    async def take_down(self, round_: Round) -> None:
        """End the live actors of a round; if one does not end in time, its process is left to the process mesh."""
        ranks = self._reachable(round_.ranks)
        deadline = trio.current_time() + self.block.grace
        is_here = self.processes is None
        grace = self.block.grace if is_here else math.inf
        request = self._request(ranks, "stop", self.info.mesh, grace, "stopped", True)  # noqa: FBT003 - travels so
        results = await invoke_until(self.proc, self._agents(ranks), request, math.inf if is_here else deadline)
        for error in news_of(results):
            self._tell(error)
        for rank, result in zip(ranks, results, strict=True):
            if is_silent(result) and self.processes is not None:
                name = place_name(self.info.name, self.info.whole.point(rank))
                text = f"the clean-up of {name} took longer than grace={self.block.grace:g} s"
                self.processes.escalate(self.proc_ranks[rank], ActorFailed(text))

    async def bring_up(self, round_: Round) -> None:
        """Remake the actors of a round in their processes."""
        ranks = self._reachable(round_.ranks)
        with remaking(self._remade_by, ranks):
            await self.remake({rank: self.membership.members[rank] for rank in ranks})

    def remaker(self, rank: int) -> trio.lowlevel.Task | None:
        """Return the task that is remaking a member, for deadlock searches."""
        found = self._remade_by.get(rank)
        if found is None and self.processes is not None:
            found = self.processes.remade_by.get(self.proc_ranks[rank])
        return found

    def gave_up(self, round_: Round | None, rank: int, error: RestartLimit) -> None:
        """Escalate a failure that this policy could not heal to the policy of the processes (P1)."""
        assert self.restarts is not None
        set_origin(error, self.origin_of(rank))
        ranks = [rank] if round_ is None else list(round_.ranks)
        for one in ranks:
            self.events.tell(GaveUp, one, error=error)
            self.membership.set(one, Standing.GONE)
            self._release(one)
        if self.processes is None:
            self.block.fail(error)
            return
        self.restarts.supervisor.resume()
        for one in ranks:
            self.restarts.supervisor.leave(one)
            self.processes.escalate(self.proc_ranks[one], error)

    # ---- end -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Refuse new messages, restart nothing."""
        self.is_stopping = True
        if self.restarts is not None:
            self.restarts.stop()
        for scope in list(self._remaking):
            scope.cancel(reason=f"the block of {self.info.name} is being left")
        for rank, standing in enumerate(self.membership.standings):
            if standing is Standing.RESTARTING:
                self.membership.set(rank, Standing.GONE)

    def kill_now(self) -> None:
        """Do nothing: the processes are killed by their own block."""

    def cancel_background(self, reason: str) -> None:
        """Request that every actor cancels work without a caller; never blocks."""
        ranks = self._reachable(self.ranks)
        request = self._request(ranks, "cancel_background", self.info.mesh, reason[: limits.REASON_CHARS_MAX])
        with suppress(trio.WouldBlock):  # the agents are busy: the work is cancelled when its mesh is stopped
            post_nowait(self.proc, self._agents(ranks), request)

    async def drain(self) -> list[Exception]:
        """Let every actor finish messages accepted from this process; wait `grace` for abandoned ones."""
        ranks = self._reachable(self.ranks)
        request = self._request(ranks, "drain", self.info.mesh, self.block.grace)
        return news_of(await invoke(self.proc, self._agents(ranks), request, fail_fast=False))

    async def stop(self, deadline: float) -> list[Exception]:
        """End every actor; kill a process in which clean-up is not over at `deadline` (Trio time).

        An actor of this very process cannot be killed: its clean-up is cancelled and awaited.
        """
        self.abandon()
        if self.restarts is not None:
            await self.restarts.wait_stopped()
        for over in list(self._remaking.values()):
            await over.wait()
        if self.processes is not None and self in self.processes.actors:
            self.processes.actors.remove(self)
        is_here = self.processes is None
        grace = max(0.0, deadline - trio.current_time()) if is_here else math.inf
        ranks = self._reachable(self.ranks)
        request = self._request(ranks, "stop", self.info.mesh, grace)
        until = math.inf if self.processes is None else self.processes.spared(deadline)
        results = await invoke_until(self.proc, self._agents(ranks), request, until)
        self.proc.owners.pop(self.info.mesh, None)
        errors = news_of(results)
        silent = [rank for rank, result in zip(ranks, results, strict=True) if is_silent(result)]
        if silent and self.processes is not None:
            errors += await self.processes.end_late([self.proc_ranks[rank] for rank in silent])
        for rank in self.ranks:  # calls that wait for a replacement fail now
            self.membership.set(rank, Standing.GONE)
        self.events.close()
        return errors
