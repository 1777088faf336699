"""Process mesh at its owner: start all, watch all, end all.

PM-1 Either every member is ready, or none is left and the error names those that failed (E11).
PM-2 A death is reported to the block first and to the calls after that (X3).
PM-3 Stopping escalates for all members at once: request, the block's grace, SIGTERM, SIGKILL.
PM-4 A member is replaced by another one at its rank, with the next incarnation, as the policy of the mesh decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.actors.reports import log_kept_back
from trimesh._runtime.calls.invocation import Request, post_nowait
from trimesh._runtime.calls.membership import family_of
from trimesh._runtime.meshes.actor_members import ActorMembers
from trimesh._runtime.meshes.block import Block
from trimesh._runtime.meshes.failures import FailureHandling, Restarts, remaking
from trimesh._runtime.meshes.launching import Launching
from trimesh._runtime.meshes.member import Member, discard, force, kill_silent, wait_gone
from trimesh._runtime.peers.deaths import ReportedLosses
from trimesh._runtime.peers.host import Host
from trimesh._runtime.peers.peer import Target
from trimesh._runtime.spawner.proc_options import ProcOptions
from trimesh._runtime.values.endpoint_spec import MemberInfo, MeshInfo
from trimesh._runtime.watch.events import EventHub
from trimesh._runtime.watch.progress_view import showing
from trimesh._supervision.policy import (
    Ending,
    FailFast,
    MemberFailure,
    MeshState,
    Policy,
    Restart,
    Verdict,
    decide,
    ending_of,
    is_healing,
    judge,
    replaces_all,
    units_of,
)
from trimesh._supervision.supervisor import Round, Supervisor
from trimesh.config import current
from trimesh.errors import (
    MeshErrorGroup,
    MeshStopped,
    Origin,
    ProcDied,
    RestartLimit,
    SpawnError,
    Unresponsive,
    set_origin,
)
from trimesh.events import Died, GaveUp, MemberEvent, Restarted, Restarting, Stalled, Unacknowledged
from trimesh.ids import AGENT, ProcId
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.meshes.changes import Changes, MembershipHub


class ProcMembers:
    """The members of one process mesh.

    Attributes:
        proc: The owner's process.
        block: The block that owns the mesh.
        whole: All places that it has ever had.
        present: The mesh at its present size.
        members: The latest incarnations, by rank.
        actors: The actor meshes that live there, in spawn order.
        events: Events published to readers.
        is_stopping: Whether its block has begun to stop.
        on_last_exit: Called before the members are stopped for good.
        on_stopped: Called when they have ended for good.
        grace: Seconds for clean-up.
        failures: Handlers that are called for failures before the policy.
        stopped: Set once the mesh has been ended for good.
        absent: Ranks that have left the mesh, or have not joined yet.
        replacing: Ranks whose members the user is changing.
        remade_by: Tasks that are starting next members, by rank.
        fixed_by: Why its size cannot change; empty when it can.
    """

    def __init__(
        self,
        proc: Proc,
        host: Host,
        block: Block,
        name: str,
        whole: Region,
        options: ProcOptions,
        policy: Policy | None = None,
    ) -> None:
        self.proc = proc
        self.host = host
        self.block = block
        self.name = name
        self.whole = self.present = whole
        self.options = options
        self.policy: Policy = FailFast() if policy is None else policy
        self.members: list[Member] = []
        self.actors: list[ActorMembers] = []
        self.is_stopping = False
        self.grace = options.grace
        self._others_until = 0.0  # Trio time
        self.stopped = trio.Event()
        self.on_last_exit: Callable[[], None] | None = None
        self.on_stopped: Callable[[], object] | None = None
        self._restarts: Restarts | None = None
        self.failures = FailureHandling()
        self.launching = Launching(self, options)
        self._is_ready = False
        self._down: set[int] = set()
        self._losses = ReportedLosses()
        self.absent: set[int] = set()
        self.replacing: set[int] = set()
        self.remade_by: dict[int, trio.lowlevel.Task] = {}
        self.fixed_by = ""
        self._changes: Changes | None = None
        self._views: MembershipHub | None = None
        self._settled = trio.Event()
        self.events = EventHub(self.origin_of, self.proc.journal)
        if isinstance(self.policy, Restart):
            units = units_of(self.whole, self.policy.along)
            self._restarts = Restarts(self.proc, Supervisor(self.name, self.policy, units), self)
            self._restarts.supervisor.absent = self.absent

    @property
    def info(self) -> MeshInfo:
        """Description sent in references."""
        members = tuple(member.info for member in self.members)
        return MeshInfo(
            AGENT, self.name, None, self.whole, members, self.proc.proc_id, self.is_healing, family_of(self.proc),
            self.options.shared, replaces_all=replaces_all(self.policy),
        )  # fmt: skip

    @property
    def is_healing(self) -> bool:
        """True if members may be replaced."""
        return is_healing(self.policy)

    @property
    def changes(self) -> Changes:
        """Replacement of members, and resizes."""
        if self._changes is None:
            from trimesh._runtime.meshes.changes import Changes  # noqa: PLC0415 - few meshes change

            self._changes = Changes(self)
        return self._changes

    @property
    def views(self) -> MembershipHub:
        """Record of its members, for readers."""
        if self._views is None:
            from trimesh._runtime.meshes.changes import MembershipHub  # noqa: PLC0415

            self._views = MembershipHub(lambda: (self.present, self.whole))
            self.note_joined()
        return self._views

    def note_joined(self) -> None:
        """Publish to readers which members serve now."""
        if self._views is not None and not self.is_stopping:
            serving = (rank for rank in self.present.ranks() if self.is_live(rank) and self.members[rank].child)
            self._views.join({rank: self.members[rank].incarnation for rank in serving})

    def note_left(self, ranks: Collection[int], why: Exception) -> None:
        """Publish to readers which members no longer serve."""
        if self._views is not None:
            self._views.leave(ranks, why)

    def origin_of(self, rank: int) -> Origin:
        """Return the coordinates of the errors of the member of a rank."""
        return self.members[rank].origin

    def member_info(self, rank: int) -> MemberInfo:
        return self.members[rank].info

    def is_live(self, rank: int) -> bool:
        """Return whether the member of a rank serves, as far as this process knows."""
        return rank not in self._down and rank not in self.absent and self.members[rank].is_alive

    def is_restarting(self, rank: int) -> bool:
        """Return whether calls and spawns wait for the member of a rank."""
        return rank in self._down

    def agents(self, ranks: Sequence[int]) -> list[Target]:
        """Return the agents of the members of some ranks as targets of a call."""
        return [Target(self.members[rank].peer, AGENT) for rank in ranks]

    # ---- start -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every member and run `setup` there.

        Raises:
            MeshErrorGroup: Some could not be started; the others have been ended.
        """
        try:
            with showing(self.proc, f"starting the processes of {self.name}", len(self.whole)) as progress:
                with trio.fail_after(current().spawn_seconds):
                    await self.launching.launch_all(progress)
                    await self.launching.setup_all(self.whole.ranks(), None)
                if self.options.setup is not None:  # without a time limit
                    progress.begin(f"setting up the processes of {self.name}")
                    await self.launching.setup_all(self.whole.ranks(), self.options.setup)
        except trio.TooSlowError:
            error = SpawnError(
                f"{self.name} was not ready within the setting spawn_seconds ({current().spawn_seconds:g} s)"
            )
            await self._discard()
            raise MeshErrorGroup(f"{self.name} could not be started", [error], mesh=self.name) from None
        except BaseException:
            await self._discard()
            raise
        self._is_ready = True

    def new_member(self, rank: int, incarnation: int) -> Member:
        """Return a member that is not started yet."""
        proc_id = ProcId(self.proc.new_id())
        peer, point = self.proc.peer(proc_id), self.whole.point(rank)
        member = Member(self.proc, peer, rank, self.name, point, incarnation, self._died)
        member.stall.listeners.append(partial(self._stalled, rank))
        self.proc.members[proc_id] = member
        return member

    def _stalled(self, rank: int, seconds: float, stack: str) -> None:
        self.events.tell(Stalled, rank, seconds=seconds, stack=stack)

    async def _discard(self) -> None:
        await discard(self.members)
        self._forget()

    # ---- watch -----------------------------------------------------------------------------------------------

    def _died(self, member: Member, error: Exception) -> None:
        rank = member.rank
        if not self._is_ready or member is not self.members[rank]:
            return
        self.events.tell(Died, rank, error=error)
        self.note_left([rank], error)
        for actors in self.actors:
            actors.process_died(rank, error)
        ending = ending_of(error.exit_code, error.signal) if isinstance(error, ProcDied) else Ending.ERROR
        self._act(rank, error, MemberFailure(type(error), ending))

    def _act(self, rank: int, error: Exception, failure: MemberFailure) -> None:
        """Apply the policy to a failure of a member."""
        if rank in self.absent or (failure.has_ended and rank in self.replacing):
            self._defer(rank, partial(self._act, rank, error, failure))
            return
        restarts = self._restarts
        state = MeshState() if restarts is None else restarts.supervisor.state(rank, is_stopping=self.is_stopping)
        effects = decide(failure, self.policy, state)
        ask = self.failures.is_handled
        if effects.asks and ask([rank], self.origin_of, [rank], error, has_ended=failure.has_ended):
            if failure.has_ended:
                self.give_up([rank], error)
        elif effects.verdict is Verdict.RESTART:
            assert restarts is not None
            restarts.failed(rank, error)
        elif effects.verdict is Verdict.FAIL:
            if not self._losses.is_repeated(error):
                self.block.fail(error)
        elif failure.has_ended:
            log_kept_back(self.proc, self.name, error, "the mesh goes on without it")
            self.give_up([rank], error)
        elif not self.is_stopping:
            log_kept_back(self.proc, self.name, error, "the mesh goes on without the actor")

    def give_up(self, ranks: Sequence[int], cause: Exception) -> None:
        """Give up some members, and the actors there."""
        self.note_left(ranks, cause)
        for actors in self.actors:
            actors.processes_gone(ranks, cause)

    def member_silent(self, rank: int, error: Unresponsive, *, is_logged: bool) -> None:
        """Handle an actor that did not acknowledge a cancel: only an event, unless the policy names it (C2)."""
        self.events.tell(Unacknowledged, rank, error=error)
        verdict = judge(MemberFailure(Unresponsive, has_ended=False), self.policy)
        if verdict in (Verdict.FAIL, Verdict.RESTART):
            self.escalate(rank, error)
        elif not is_logged:
            log_kept_back(self.proc, self.name, error, "its process goes on")

    def escalate(self, rank: int, error: Exception) -> None:
        """Handle the failure of a live member: it is silent, or the policy of its actors could not heal it (P1)."""
        self._act(rank, error, MemberFailure(type(error), has_ended=False, of="handed up"))

    # ---- heal ------------------------------------------------------------------------------------------------

    def _defer(self, rank: int, act: Callable[[], None]) -> None:
        """Postpone an event of a member to the end of the change that is under way for it."""
        if self._changes is not None:
            self._changes.defer(rank, act)

    async def catch_up(self, actors: ActorMembers) -> None:
        """Spawn the missing members of a mesh in processes that have joined since it was spawned."""
        if self._changes is not None:
            await self._changes.catch_up(actors)

    async def wait_settled(self, ranks: Collection[int]) -> None:
        """Wait until none of some members is being restarted (rule M2). No checkpoint when none is."""
        while not self._down.isdisjoint(ranks):
            await self._settled.wait()

    async def settled(self, ranks: Collection[int]) -> None:
        """Wait until all deaths of the given members have been handled, and none of them is being restarted."""
        await trio.lowlevel.checkpoint()
        for rank in ranks:
            if not self.members[rank].is_alive:
                await self.members[rank].gone.wait()
        await self.wait_settled(ranks)

    def mark_down(self, ranks: Collection[int], cause: Exception) -> None:
        """Make calls and spawns wait for some members."""
        self.note_left(ranks, cause)
        for rank in ranks:
            if rank not in self._down:
                self.events.tell(Restarting, rank, cause=cause)
        self._down.update(ranks)
        for actors in self.actors:
            actors.processes_going_down(ranks, cause)

    def mark_up(self, ranks: Collection[int]) -> None:
        """Release the calls and spawns that wait for some members, whatever their state."""
        self._down.difference_update(ranks)
        self.note_joined()
        self._settled.set()
        self._settled = trio.Event()

    def going_down(self, round_: Round) -> None:
        """Make calls and spawns wait for the members of a round."""
        self.mark_down(round_.ranks, round_.cause)

    async def take_down(self, round_: Round) -> None:
        """End the live members of a round: actors in reverse spawn order, then their processes, within the grace."""
        while not self.replacing.isdisjoint(round_.ranks):
            await self._settled.wait()
            self.mark_down(round_.ranks, round_.cause)
        if isinstance(round_.cause, Unresponsive):  # the failed members would not react to a request to stop
            await kill_silent([self.members[rank] for rank in round_.failed])
        await self.end([member for rank in round_.ranks for member in [self.members[rank]]])

    async def end(self, members: Sequence[Member], by: str = "stopped") -> None:
        """End some members in good order, by force when the grace is over; `by` is the reason that callers get."""
        alive = [member for member in members if member.child is not None and member.is_alive]
        deadline = trio.current_time() + self.grace
        ranks = [member.rank for member in alive]
        for actors in reversed(self.actors):
            await actors.stop_in(ranks, deadline, by)
        for member in alive:
            member.expect_exit()
        self._ask_to_exit([member for member in alive if member.is_alive])
        await wait_gone(members, self._exit_deadline(deadline))
        late = [member.rank for member in members if member.child is not None and not member.gone.is_set()]
        for error, rank in zip(await self.force(late), late, strict=True):
            self.events.tell(Died, rank, error=error)

    async def bring_up(self, round_: Round) -> None:
        """Start the members of a round, with the actors there, in spawn order.

        Raises:
            MeshErrorGroup: Some could not be started.
        """
        await self.follow(list(round_.ranks))
        self.mark_up(round_.ranks)

    def extend_units(self) -> None:
        """Extend the units of the policy to all places."""
        if self._restarts is not None and isinstance(self.policy, Restart):
            self._restarts.supervisor.extend(units_of(self.whole, self.policy.along))

    async def follow(self, ranks: Sequence[int]) -> None:
        """Start the next members at some ranks, with the actors there.

        Raises:
            MeshErrorGroup: Some could not be started.
        """
        with remaking(self.remade_by, ranks):
            await self.launching.launch_next(ranks, "be restarted")
            for actors in list(self.actors):
                await actors.remake_in(ranks)
        self.tell_started(Restarted, ranks)

    def tell_started(self, kind: type[MemberEvent], ranks: Sequence[int]) -> None:
        """Publish an event of `kind` for each process that serves now."""
        for rank in ranks:
            member = self.members[rank]
            self.events.tell(kind, rank, host=member.host_name, pid=member.pid)

    def gave_up(self, round_: Round | None, rank: int, error: RestartLimit) -> None:
        """Handle the end of restarts: the block fails, unless a failure handler handles it."""
        set_origin(error, self.origin_of(rank))
        for one in [rank] if round_ is None else round_.ranks:
            self.events.tell(GaveUp, one, error=error)
        ranks = [rank] if round_ is None else list(round_.ranks)
        if self.failures.is_handled(ranks, self.origin_of, ranks, error, has_ended=True):
            self.give_up(ranks, error)
        else:
            self.block.fail(error)
        self._stop_healing(error)

    def _stop_healing(self, cause: Exception) -> None:
        if self._restarts is not None:
            self._restarts.stop()
        self.give_up(list(self._down), cause)
        self.mark_up(list(self._down))

    # ---- end -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Refuse new actors; restart nothing more."""
        self.is_stopping = True
        self._others_until = 0.0
        self._stop_healing(MeshStopped(f"the block of {self.name} has begun to stop"))

    def kill_now(self) -> None:
        for member in self.members:
            member.kill()

    def cancel_background(self, reason: str) -> None:
        """Do nothing: only actors receive messages."""

    async def drain(self) -> list[Exception]:
        """Do nothing: only actors receive messages."""
        return []

    async def stop(self, deadline: float) -> list[Exception]:
        """End all members, by force from `deadline` on; return a `ProcDied` for each that needed it."""
        if self._restarts is not None:
            await self._restarts.wait_stopped()
        alive = [member for member in self.members if member.child is not None and member.is_alive]
        for member in alive:
            member.expect_exit()
        if self.on_last_exit is not None:
            self.on_last_exit()
        self._ask_to_exit(alive)
        await wait_gone(self.members, self._exit_deadline(deadline))
        late = [
            member.rank
            for member in self.members
            if member.child is not None and not member.gone.is_set() and member.by is None
        ]
        errors = await self.force(late)
        is_killed = bool(late) or self.block.is_killed
        is_shown = self.options.output in ("inherit", "discard") or all(member.is_shown for member in self.members)
        if not is_killed and not is_shown:
            await self.host.flush_output()
        self._forget()
        self.events.close()
        if self._views is not None:
            self._views.close()
        self.stopped.set()
        if self.on_stopped is not None:
            self.on_stopped()
        return errors

    def spared(self, deadline: float) -> float:
        """Return the clean-up deadline of the members, given the end of the grace.

        Members that used up the grace must not cost the others their clean exit, which takes seconds in some libraries.
        """
        return max(deadline, self._others_until)

    def _exit_deadline(self, deadline: float) -> float:
        return max(self.spared(deadline), trio.current_time() + limits.TERM_SECONDS)

    def _ask_to_exit(self, members: Sequence[Member]) -> None:
        request = Request(self.name, "exit", (), {}, lambda index: members[index].origin)
        post_nowait(self.proc, [Target(member.peer, AGENT) for member in members], request)

    async def force(self, ranks: Sequence[int]) -> list[Exception]:
        """End members whose grace has run out, all at once: SIGTERM, then SIGKILL; return the error for each."""
        await force(late := [self.members[rank] for rank in ranks])
        if late and not (self.is_stopping and self._others_until > 0.0):  # once for a block that is being left
            self._others_until = trio.current_time() + min(self.grace, limits.SPARED_EXIT_SECONDS)
        return [member.killed_for_grace(self.grace) for member in late]

    async def end_late(self, ranks: Sequence[int]) -> list[Exception]:
        """End by force members whose actors have not ended in time; return the error for each.

        If the mesh itself is not stopping, these are deaths, which its policy handles.
        """
        members = [self.members[rank] for rank in ranks]
        errors = await self.force(ranks)
        if not self.is_stopping:
            for member, error in zip(members, errors, strict=True):
                self._died(member, error)
        return errors

    def _forget(self) -> None:
        for member in self.members:
            self.proc.members.pop(member.peer.proc_id, None)
        self.launching.close()
