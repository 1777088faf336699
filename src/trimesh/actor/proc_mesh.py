"""`ProcMesh`: the handle on a mesh of processes, where actors are spawned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, TypeVarTuple, cast, overload

import trio

from trimesh._runtime import life
from trimesh._runtime.life import current_proc, find_proc_anywhere
from trimesh._runtime.meshes import ProcMembers, check_handler, kill_wanted
from trimesh._runtime.tasks import in_trio, in_trio_block, in_trio_now
from trimesh._runtime.values import MemberInfo, MeshInfo, class_of
from trimesh._runtime.watch import EventStream, MeshStatistics
from trimesh._supervision.policy import Policy, check_units, checked_policy
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.options import Merge, Options
from trimesh.actor.spawning import (
    Spawning,
    borrowing,
    check_arguments,
    checked_class,
    checked_grace,
    checked_name,
    handle_on,
)
from trimesh.actor.view import states_of, statistics_of_procs
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ShapeError
from trimesh.events import OnFailure
from trimesh.ids import AGENT, ProcId
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import Shaped, ValueMesh

if TYPE_CHECKING:
    import torch

    from trimesh._runtime.life import BorrowedProcs, OwnedProcs
    from trimesh.actor.item_map import Items
    from trimesh.actor.results import Results
    from trimesh.events import MembershipView
    from trimesh.observe import live
    from trimesh.tensor.groups.groups import ProcessGroup, RanksDeviceMesh
    from trimesh.tensor.ops import on_mesh


R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ModuleAbove:
    """A module of a higher floor, registered by `_assembly`; imported on the first use of one of its names."""

    def __init__(self) -> None:
        self.load: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


tensor_module = ModuleAbove()
live_module = ModuleAbove()
if not TYPE_CHECKING:
    on_mesh = tensor_module
    live = live_module


class MakesTensors:
    """Tensor methods of a mesh of processes."""

    _shown: Region

    @abstractmethod
    def _check_owned(self, rule: str) -> None: ...

    @abstractmethod
    def _owned_here(self) -> OwnedProcs: ...

    def activate(self, *, global_tensors: bool = False) -> AbstractContextManager[None]:
        """Return a block in which torch creates tensors on the ranks of this view, one on each.

        `with procs.activate(): t = torch.rand(3, 4)`. It applies to the task that enters it and to tasks that this one
        starts, and nests. Operations on tensors of a mesh need no activation.

        Args:
            global_tensors: Create global tensors instead, as `trimesh.replicate` does: for tensors that code creates
                beside global ones (a mask, the first state of an LSTM, the counters of a fused optimizer).

        Raises:
            ShapeError: `global_tensors` is set, and ranks are missing in the extent of this view.
            RuntimeError: This is a reference, or `this_proc()`.
            ImportError: torch is not installed.

        Blocking: no checkpoint; issued operations are sent without waiting for them.
        """
        self._check_owned("tensors are made by the block that owns the processes")
        procs = cast("ProcMesh", self)
        return on_mesh.activate(procs, self._owned_here(), self._shown, is_global=global_tensors)

    def rank_tensor(self, label: str) -> torch.Tensor:
        """Return a tensor with the index of each process along a dimension of this view: int64, without dimensions.

        Args:
            label: A dimension of this view.

        Raises:
            ShapeError: There is no such dimension.
            RuntimeError: This is a reference.

        Blocking: no checkpoint.
        """
        self._check_owned("tensors are made by the block that owns the processes")
        return on_mesh.rank_tensor(self._owned_here(), self._shown, label)

    def run(self, function: Callable[..., R] | str, /, *args: Any, **kwargs: Any) -> R:
        """Run a function on every rank of this view, with its own part of each tensor; return its tensors.

        It is `trimesh.remote(function)(...)` while this view is active, and waits for nothing. It passes the parts of
        global tensors (`t.local()`), which waits as `.item()` does.

        Args:
            function: Function or name, as for `trimesh.remote`. Define it once, outside of loops: it is sent once.
            *args: Tensors on these ranks, and other values.
            **kwargs: Like `args`.

        Raises:
            TypeError: A tensor is not on these ranks, or is global and has gradients; or see `trimesh.remote`.
            RuntimeError: This is a reference.

        Blocking: no checkpoint.
        """
        result: R = on_mesh.run(cast("ProcMesh", self), function, args, kwargs)
        return result

    def process_group(self, dims: str | Sequence[str]) -> ProcessGroup:
        """Return an argument for remote functions that becomes a `torch.distributed.ProcessGroup` on each rank.

        Its members are the ranks of the function's view that differ in these dimensions only. The function needs a
        `propagate`, because it cannot be tried without the group.

        Args:
            dims: A dimension of this view, or several.

        Raises:
            ShapeError: There is no such dimension.

        Blocking: no checkpoint; ranks connect when they use it first.
        """
        return on_mesh.process_group(self._shown, dims)

    def device_mesh(self) -> RanksDeviceMesh:
        """Return an argument for remote functions that becomes a `torch.distributed.device_mesh.DeviceMesh`.

        It has the labels, sizes and process groups of this view, on whose ranks the function runs. Global tensors
        arrive in the function as `DTensor`s on it; `DTensor`s on it that the function returns become global tensors.

        Raises:
            TypeError: When the function is called: it runs on a view with other labels.
            ShapeError: When the function is called: ranks are missing in the view.

        Blocking: no checkpoint; ranks connect when they use it first.
        """
        return on_mesh.device_mesh(self._shown)


class RunsFunctions:
    """Methods of a mesh of processes that run functions there without an actor class."""

    @overload
    async def call(
        self, function: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, thread: bool = True
    ) -> ValueMesh[R]: ...
    @overload
    async def call(self, function: Callable[[*Ts], R], /, *args: *Ts, thread: bool = True) -> ValueMesh[R]: ...
    async def call(self, function: Any, /, *args: Any, thread: bool = True) -> ValueMesh[Any]:  # type: ignore[misc]
        """Run a function once in every process of this view and return all results.

        Args:
            function: An async function, which runs in Trio, or a plain one. It is sent as an argument: with
                `pickle="off"` it must stand at the top of an importable module, and its annotations count.
            *args: Its arguments; use `functools.partial` for keywords.
            thread: Run a plain function in a thread, so that its process can still be called; False runs it on the main
                thread.

        Returns:
            The results, over the extent of this view.

        Raises:
            TypeError: It is no function, does not take the arguments, or cannot be sent; nothing was sent.
            MeshErrorGroup: It has raised, or a process has ended; as from `Endpoint.call`.
            RuntimeError: This is a reference, and its owner does not share the processes, or values are not pickled.

        Blocking: a checkpoint, cancellable. A process runs one function at a time; others wait. The first use spawns an
        actor for them.
        """
        from trimesh.actor import functions  # noqa: PLC0415 - few programs need it

        procs = cast("ProcMesh", self)
        found: ValueMesh[Any] = await in_trio(functions.run)(functions.CALL, procs, function, args, thread)
        return found

    @overload
    async def choose(
        self, function: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, thread: bool = True
    ) -> R: ...
    @overload
    async def choose(self, function: Callable[[*Ts], R], /, *args: *Ts, thread: bool = True) -> R: ...
    async def choose(self, function: Any, /, *args: Any, thread: bool = True) -> Any:  # type: ignore[misc]
        """Run a function once, in the live process of this view with the fewest unended functions; see `call`.

        Raises:
            Exception: The function's own exception, bare.
        """
        from trimesh.actor import functions  # noqa: PLC0415 - few programs need it

        return await in_trio(functions.run)(functions.CHOOSE, cast("ProcMesh", self), function, args, thread)

    @overload
    def map(
        self,
        function: Callable[[T], Coroutine[Any, Any, R]],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        window: int | None = None,
        merge: Merge | None = None,
        concurrency: int = 1,
        thread: bool = True,
    ) -> AbstractAsyncContextManager[Results[tuple[int, R]]]: ...
    @overload
    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T] | AsyncIterable[T],
        /,
        *,
        window: int | None = None,
        merge: Merge | None = None,
        concurrency: int = 1,
        thread: bool = True,
    ) -> AbstractAsyncContextManager[Results[tuple[int, R]]]: ...
    def map(
        self,
        function: Callable[[Any], Any],
        items: Items,
        /,
        *,
        window: int | None = None,
        merge: Merge | None = None,
        concurrency: int = 1,
        thread: bool = True,
    ) -> AbstractAsyncContextManager[Results[tuple[int, Any]]]:
        """Run a function once for each item, on the least busy processes; yield results as they arrive.

        `async with procs.map(f, items) as results: async for index, value in results`; see `Endpoint.map`.

        Args:
            function: As for `call`; it gets the item.
            items: As for `Endpoint.map`.
            window: Items under way; by default as many as can run at once, so that a process gets its next item when it
                has finished one and that result was taken.
            merge: "collect" finishes the other items when one has failed.
            concurrency: How many of these functions a process runs at once, for functions that wait.
            thread: As for `call`.

        Raises:
            TypeError, ValueError: As from `call` and `Endpoint.map`.

        Blocking: no checkpoint; entering, each step and leaving are. Cancellable.
        """
        from trimesh.actor import functions  # noqa: PLC0415 - few programs need it

        options = Options(merge=merge, window=window)
        procs = cast("ProcMesh", self)
        return functions.mapped(procs, function, items, options, concurrency=concurrency, thread=thread)


# ---- proc mesh -------------------------------------------------------------------------------------------------------

P = ParamSpec("P")
A = TypeVar("A", bound=Actor)


class ProcMesh(MakesTensors, RunsFunctions, Shaped):
    """A mesh of processes, or a view of some of them."""

    def __init__(
        self,
        owned: OwnedProcs | None,
        region: Region | None,
        *,
        is_reference: bool = False,
        policy: Policy | None = None,
    ) -> None:
        self._owned = owned
        self._policy = policy
        self._shown = region if region is not None else Region(Extent())
        self._is_reference = is_reference
        self._shared_by: MeshInfo | None = None
        self._home: BorrowedProcs | None = None

    @property
    def name(self) -> str:
        """Name given at spawn."""
        return "this_proc" if self._owned is None or self._owned.members is None else self._owned.members.name

    def spawn(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> Spawning[A]:
        """Spawn an actor in every process of this mesh, or view.

        Args:
            name: Name of the actor mesh, for messages and errors.
            cls: A subclass of `Actor`; `cls(*args, **kwargs)` is called in each process.
            *args: Arguments of its `__init__`.
            **kwargs: Like `args`.

        Returns:
            An object to await (the processes' block owns the actors) or to enter (its own block does). The handle is
            ready when `__init__` has run and `lifespan` is entered on every rank.

        Raises:
            TypeError: `cls` is no actor class, the arguments do not fit its `__init__`, or the name is no string.
            ValueError: The name is empty or too long.
            RuntimeError: This is a reference, and its owner does not share the processes (`spawn_procs(shared=True)`).
                A shared reference can be entered by `async with`, in a block of this process, but not awaited.
        """
        self._check_spawning()
        name = checked_name(name)
        actor = checked_class(cls)
        check_arguments(actor, args, kwargs)
        if self._shared_by is not None:
            plan_there = life.BorrowPlan(self._shared_by, self._shown, self._policy, name, actor, args, kwargs)
            what = f"spawn({name!r}, {class_of(actor).__qualname__})"
            return borrowing(plan_there, actor, what, self._home)
        region = None if self._owned is None else self._shown
        plan = life.ActorPlan(self._owned, region, self._policy, name, actor, args, kwargs)
        if self._policy is not None:
            check_units(self._policy, self._shown.extent)

        @asynccontextmanager
        async def open_() -> AsyncGenerator[A, None]:
            async with life.open_actors(plan) as members:
                yield handle_on(members.info, actor, members)

        async def adopt() -> A:
            members = await life.adopt_actors(plan)
            return cast("A", handle_on(members.info, actor, members))

        return Spawning(f"spawn({name!r}, {class_of(actor).__qualname__})", open_, adopt)

    def _spawned_here(self) -> tuple[OwnedProcs | None, Region]:
        """Return the processes whose block adopts actors here, None for a reference and `this_proc()`; and the view."""
        is_owned = self._owned is not None and self._owned.block is not None and not self._is_reference
        return self._owned if is_owned else None, self._shown

    async def get_or_spawn(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> A:
        """Return the one actor of this name on these processes; spawn it if there is none.

        Any process of the family that has a handle may call this, also concurrently: all get the same actor. It lives
        in the first process of the first caller's view and belongs to the processes' block. When it has ended for
        good, the next call spawns another one.

        Args:
            name: Name of the actor, unique on the mesh of processes.
            cls: A subclass of `Actor`; `cls(*args, **kwargs)` is called with the first caller's arguments; those of
                later callers are ignored.
            *args: Arguments of its `__init__`.
            **kwargs: Like `args`.

        Returns:
            A handle on a mesh of this one actor, without dimensions.

        Raises:
            TypeError: The actor of this name has another class, or the arguments do not fit.
            MeshErrorGroup: It could not be spawned.
            RuntimeError: This is a reference, and its owner does not share the processes.

        Blocking: a checkpoint, cancellable. If the caller that spawns is cancelled, the next waiting one spawns.
        """
        self._check_spawning()
        name = checked_name(name)
        actor = checked_class(cls)
        check_arguments(actor, args, kwargs)
        if self._shared_by is not None:
            plan = life.BorrowPlan(self._shared_by, self._shown, None, name, actor, args, kwargs)
            info = await in_trio(life.get_borrowed)(plan)
            return cast("A", handle_on(info, actor, None))
        self._own_members("get_or_spawn needs a mesh of spawn_procs")
        members = await in_trio(self._owned_here().named.get)(self._shown, name, actor, args, kwargs)
        return cast("A", handle_on(members.info, actor, members))

    def _check_spawning(self) -> None:
        if self._shared_by is None:
            self._check_owned(
                "actors are spawned by the process that owns the block, or by others if it calls "
                "spawn_procs(..., shared=True)"
            )

    def alive(self) -> Self:
        """Return the view without the members whose end is known here."""
        members = None if self._owned is None else self._owned.members
        if members is None:
            return self
        dead = [rank for rank in self._shown.ranks() if not members.is_live(rank)]
        return self._seen(self._shown.exclude_ranks(dead))

    def statistics(self) -> MeshStatistics:
        """Return counts of the processes of this view, as far as this process knows them; sends no message.

        Raises:
            RuntimeError: This is a reference, or no mesh is open in this Trio run.
        """
        self._check_owned("read statistics of processes in the process that owns them")
        return in_trio_now(statistics_of_procs)(self.name, self._owned, self._shown)

    def supervised(self, policy: Policy) -> Self:
        """Return the same processes, with another policy for the actor meshes that are spawned on them.

        `procs.supervised(Restart(on=(ActorFailed,))).spawn(...)` makes a failed actor again, in its process. The end of
        a process still follows the policy of the processes.

        Raises:
            TypeError: `policy` is no policy.
        """
        return type(self)(self._owned, self._shown, is_reference=self._is_reference, policy=checked_policy(policy))

    def events(self) -> AbstractAsyncContextManager[EventStream]:
        """Read events of the processes of this view: `async with procs.events() as events: async for ...`.

        The events begin with a `Started` for each live process, and end when the mesh has stopped. A reader that is
        more than `limits.EVENTS` records behind gets one `Lagged(n)` in place of the n oldest.

        Raises:
            RuntimeError: This is a reference, or `this_proc()`.
        """
        members = self._own_members("read events in the process that owns the mesh")
        ranks = [rank for rank in members.whole.ranks() if self._sees(rank) and members.is_live(rank)]
        return members.events.open(members.events.snapshot(ranks), self._sees)

    def live(self) -> AbstractAsyncContextManager[None]:
        """Show the run below the running cell of a notebook: `async with procs.live(): await trainers.train.call()`.

        It is drawn once a second while the block is open: sums, processes that do not run, every mesh as a grid (this
        one first), metrics of the program, newest events. The last drawing stays. Outside of Jupyter and marimo the
        block shows nothing.

        Raises:
            RuntimeError: This is a reference, or `this_proc()`.

        Blocking: entering and leaving are checkpoints; leaving takes at most `limits.LIVE_LAST_SECONDS` longer.
        """
        self._own_members("watch a run in the program that owns its processes")
        return live.live(self.name)

    def _sees(self, rank: int) -> bool:
        """Return whether this handle reports events of a rank: one on the whole mesh also reports later members."""
        return rank in self._shown or self._is_whole

    @property
    def _is_whole(self) -> bool:
        return self._shown == Region(self._shown.base, mesh=self._shown.mesh)

    def on_failure(self, handler: OnFailure) -> AbstractAsyncContextManager[None]:
        """Call a handler for each failure before the policy: `async with procs.on_failure(handler):`.

        `handler(failure)` is called once, in order, for each failure of processes of this view and each failure without
        a caller of actors on them, when it is recorded and before any call raises it. If it returns True, the failure
        is handled: the block goes on, nothing is restarted, and ended members are gone until `replace`. Else the next
        outer handler decides, and last the policy of the mesh. It must not wait: start waiting work in a nursery.

        Args:
            handler: A plain function of a `Failure`. Its exceptions cancel the body and are raised by this block, in an
                `ExceptionGroup`; the failure is not handled then.

        Raises:
            TypeError: `handler` is no plain function.
            RuntimeError: This is a reference, or `this_proc()`.
        """
        members = self._own_members("handle failures in the process that owns the mesh")
        check_handler(handler)
        return in_trio_block(members.failures.open(handler, self._sees))

    async def replace(self, points: Iterable[Mapping[str, int]]) -> None:
        """Replace processes, dead or alive, by new ones with the actors that lived there.

        The new processes have the next incarnation; every handle addresses them from now on. Live ones are stopped
        first, with clean-up; their unended calls raise `MeshStopped`. Policies do not count a replacement as a failure.

        Args:
            points: Points of the mesh (`trimesh.coords(error)`), or mappings in the labels of this view.

        Raises:
            MeshErrorGroup: A process could not be started; then none of the new ones lives.
            MembershipChanged: A process has left by a resize.
            ShapeError: A point is not one of this mesh.
            RuntimeError: This is a reference, `this_proc()`, or a `FailFast` mesh, which ends with its first member.

        Blocking: a checkpoint, cancellable; on cancellation none of the new ones lives.
        """
        members = self._own_members("replace processes in the process that owns them")
        if not members.is_healing:
            raise RuntimeError(
                f"replace needs a mesh that outlives the death of a member, and the policy of {self!r} is FailFast: "
                "write spawn_procs(..., supervision=Isolate())"
            )
        kept = self._shown.exclude(points)
        await in_trio(members.changes.replace)([rank for rank in self._shown.ranks() if rank not in kept])

    async def resize(self, /, **sizes: int) -> Self:
        """Grow or shrink this mesh along its first dimension: `procs = await procs.resize(replica=6)`.

        Ranks do not change. New processes are added at the end, with the actors of each mesh that was spawned on a view
        of the whole dimension, made with the same arguments. Shrinking removes the last processes: new calls to them
        raise `MembershipChanged`, running ones are cancelled and raise it, too; actors clean up and the processes exit.
        A new process at a removed place has the next incarnation.

        Handles keep their members; `trimesh.current_view(actors)` returns one with the new members.

        Args:
            **sizes: The first dimension of the mesh and its new size, at least 1.

        Returns:
            A handle on the whole mesh after the change.

        Raises:
            MeshErrorGroup: A new process, or an actor there, could not be started; the mesh is unchanged.
            ShapeError: The dimension is not the first one of the mesh, or the size is invalid or too large.
            RuntimeError: This is a reference, or `this_proc()`; or the mesh cannot change: it is `FailFast`, is on
                several hosts, is bound to cores, or has tensors or a rendezvous for `torch.distributed`.

        Blocking: a checkpoint, cancellable. While the mesh grows, a cancel leaves it unchanged; while it shrinks, a
        cancel ends the leaving processes at once. A second call waits for the first.

        Cost: a process start for each new one, one after the other, and the start of its actors.
        """
        members = self._own_members("resize a mesh in the process that owns it")
        if len(sizes) != 1:
            raise ShapeError(f"resize takes one dimension and its new size, as in resize(replica=6), got {sizes!r}")
        [(label, size)] = Extent(sizes).items()
        region = await in_trio(members.changes.resize)(label, size)
        return self._seen(region)

    def membership(self) -> AbstractAsyncContextManager[AsyncIterator[MembershipView]]:
        """Read the members of this mesh: `async with procs.membership() as views: async for view in views: ...`.

        Each `MembershipView` has a number, the extent, the serving members, and those that joined or left since the
        previous view, with reasons. The first has all current members; the views end when the mesh has stopped. A slow
        reader gets several changes in one view.

        Raises:
            RuntimeError: This is a reference, or `this_proc()`.
        """
        return self._own_members("read the membership in the process that owns the mesh").views.open()

    async def kill(self, points: Iterable[Mapping[str, int]]) -> None:
        """Kill some processes by SIGKILL, without clean-up; return when their deaths are known.

        Each death is a `ProcDied` with `.by == "kill"`. The policy treats it like any other: `FailFast` fails the
        block, `Restart` starts a new process. Members that have ended already are skipped.

        Args:
            points: Points of the mesh (`trimesh.coords(error)`), or mappings in the labels of this view.

        Raises:
            ShapeError: A point is not one of this mesh.
            RuntimeError: This is a reference, or `this_proc()`.

        Blocking: a checkpoint, cancellable; killed processes stay killed.
        """
        members = self._own_members("kill processes in the process that owns them")
        kept = self._shown.exclude(points)
        await in_trio(kill_wanted)([members.members[rank] for rank in self._shown.ranks() if rank not in kept])

    async def stop(self, *, grace: float | None = None) -> None:
        """End all processes of this mesh now, before its block is left.

        It does what leaving the block does: new messages are refused, those accepted from this process run to their
        end, actors clean up, last spawned first, and the processes exit. Later calls raise `MeshStopped`. The block
        itself goes on. A second call waits for the first.

        Args:
            grace: Seconds for clean-up; None for that of the mesh.

        Raises:
            MeshErrorGroup: Clean-up failed, or took longer than `grace`: then a `ProcDied` with `.by == "grace"`.
            ValueError: `grace` is negative or no number, or this is a view of a part of the mesh: use `kill`.
            RuntimeError: This is a reference, or `this_proc()`, or the block has begun to stop.

        Blocking: a checkpoint, cancellable; a cancel cancels accepted messages, and returns when all has ended.
        """
        self._own_members("stop processes in the process that owns them")
        owned = self._owned_here()
        if not self._is_whole:
            raise ValueError(f"stop ends a whole mesh, and {self!r} shows a part: kill(points) ends some processes")
        await in_trio(life.stop_procs)(owned, None if grace is None else checked_grace(grace))

    async def settled(self) -> None:
        """Wait until the policy is not restarting any process of this view, nor about to.

        The state of replaced members is lost, tensors included; create new ones in `with procs.activate():`.

        Raises:
            RuntimeError: This is a reference, or `this_proc()`.

        Blocking: a checkpoint, cancellable.
        """
        members = self._own_members("wait for restarts in the process that owns the processes")
        await in_trio(members.settled)(self._shown.ranks())

    def owned_view(self, rule: str) -> tuple[OwnedProcs, Region]:
        """Return the processes and the region of them in this view, for packages above.

        Raises:
            RuntimeError: This is a reference; the text states the rule.
        """
        self._check_owned(rule)
        return self._owned_here(), self._shown

    def _owned_here(self) -> OwnedProcs:
        return self._owned if self._owned is not None else life.own_process(current_proc())

    def _check_owned(self, rule: str) -> None:
        if self._is_reference:
            raise RuntimeError(f"{self!r} came from another process, so it is only a reference: {rule}")

    def _own_members(self, rule: str) -> ProcMembers:
        self._check_owned(rule)
        if self._owned is None or self._owned.members is None:
            raise RuntimeError(f"this_proc() is this process itself, which has no owner here: {rule}")
        return self._owned.members

    def _region(self) -> Region:
        return self._shown

    def _states(self) -> Sequence[str]:
        members = None if self._owned is None or self._is_reference else self._owned.members
        if members is None or find_proc_anywhere() is None:
            return super()._states()
        return states_of(self.statistics(), [members.is_restarting(rank) for rank in self._shown.ranks()])

    def _seen(self, region: Region) -> Self:
        return type(self)(self._owned, region, is_reference=self._is_reference, policy=self._policy)

    def __repr__(self) -> str:
        from trimesh.shape.value_mesh import view_name  # noqa: PLC0415 - for people only

        whole = self._shown if self._owned is None else self._owned.whole
        return f"<processes {view_name(self.name, whole, self._shown)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return refer_procs, (self._info, self._shown)

    @property
    def _info(self) -> MeshInfo:
        """State of the whole mesh as sent to other processes."""
        if self._owned is not None:
            return self._owned.info
        proc = find_proc_anywhere()
        if proc is not None:
            return life.own_process(proc).info
        return MeshInfo(AGENT, self.name, None, self._shown, (MemberInfo(ProcId(0), "", 0),))


class _Reference(ProcMesh):
    """A process mesh that came from another process: it has a shape and owns nothing."""

    def __init__(self, info: MeshInfo, region: Region, policy: Policy | None = None) -> None:
        super().__init__(None, region, is_reference=True, policy=policy)
        self._mesh_info = info
        self._shared_by = info if info.is_shared else None

    @property
    def name(self) -> str:
        return self._mesh_info.name

    @property
    def _info(self) -> MeshInfo:
        return self._mesh_info

    def supervised(self, policy: Policy) -> Self:
        return type(self)(self._mesh_info, self._shown, checked_policy(policy))

    def _seen(self, region: Region) -> Self:
        return type(self)(self._mesh_info, region, self._policy)


def refer_procs(info: MeshInfo, region: Region) -> ProcMesh:
    """Return a reference to a process mesh of another process."""
    return _Reference(info, region)


class _Borrowed(_Reference):
    """Processes that a block of this process has started on hosts of another one, which runs them."""

    def __init__(self, home: BorrowedProcs, region: Region, policy: Policy | None = None) -> None:
        super().__init__(home.info, region, policy)
        self._shared_by = home.info
        self._home = home

    def supervised(self, policy: Policy) -> Self:
        assert self._home is not None
        return type(self)(self._home, self._shown, checked_policy(policy))

    def _check_owned(self, rule: str) -> None:
        raise RuntimeError(f"{self!r} runs on hosts of another process, so it is only a reference here: {rule}")

    def _seen(self, region: Region) -> Self:
        assert self._home is not None
        return type(self)(self._home, region, self._policy)


def borrowed_procs(home: BorrowedProcs) -> ProcMesh:
    """Return the handle of the block that has borrowed hosts for some processes."""
    return _Borrowed(home, home.info.whole)


# ---- `current_view`: the whole mesh as it is now, from a handle on any part of it ------------------------------------

M = TypeVar("M")


def check_resize(procs: ProcMesh, label: str, size: int) -> None:
    """Raise what `resize` would raise for this dimension and size before it changes anything."""
    members = procs._own_members("resize a mesh in the process that owns it")  # noqa: SLF001 - not for users
    members.changes.check(label, size)


async def current_view(mesh: M) -> M:
    """Return a handle on the whole mesh as it is now: `engines = await trimesh.current_view(engines)`.

    Handles keep the members that they were made with. After `procs.resize` this returns one with the new members and
    without those that left. Dead members stay in it; `alive()` leaves them out.

    Args:
        mesh: Actors, or processes that a block of this process owns; any view of them.

    Raises:
        TypeError: It is no mesh.
        MeshError: Its owner, another process, has ended, or has stopped it.
        RuntimeError: It is a reference to processes of another process.

    Blocking: a checkpoint, cancellable; for actors of another process, one request to the owner.
    """
    return cast("M", await in_trio(_current)(mesh))


async def _current(mesh: Any) -> Any:
    await trio.lowlevel.checkpoint()
    if isinstance(mesh, ProcMesh):
        owned, _ = mesh.owned_view("call current_view in the process that owns it")
        return mesh._seen(owned.whole)  # noqa: SLF001 - of handles
    if not isinstance(mesh, ActorMesh):
        raise TypeError(
            f"current_view takes a mesh of processes or of actors, got {mesh!r}: pass the mesh that "
            "`async with spawn_procs()` or `await spawn()` returns"
        )
    membership = mesh._view.membership(current_proc())  # noqa: SLF001 - of handles
    await membership.ask_all()
    return mesh._seen(membership.present)  # noqa: SLF001 - of handles
