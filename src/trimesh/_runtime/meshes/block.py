r"""Block: the meshes that one `async with` owns, how a failure ends it, and how it is left.

    entering --> open --fail()--> cancelled --.
                   \--body ends--------------+--> stopping --> left

BL-1 Leaving joins everything that the block owns, in reverse order, whatever happens meanwhile.
BL-2 The group that it raises holds every failure of its meshes, root cause first, each once (E09, X3).
BL-3 Clean-up of all its meshes shares one deadline: `grace` seconds from the moment of stopping. Once, after a process
     was killed for exceeding it, the others of its mesh get as long again, at most `limits.SPARED_EXIT_SECONDS`.
BL-4 A cancel of its scope, or of one around it, cancels the background work of all its meshes at once, wherever the
     body is: blocks that are cancelled together do not wait for each other.
BL-5 Once it is cancelled or being left, an error that only reports a stop does not count as its failure. Before that
     it counts, unless the block is left right after the stopped mesh, too (`limits.LEAVING_SECONDS`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors.reports import log_line
from trimesh._runtime.calls.outgoing import pass_on
from trimesh._runtime.calls.started import StartedCalls
from trimesh._runtime.meshes.failures import MeshProcesses, fold_into_deaths, place_of
from trimesh._runtime.peers.deaths import ReportedLosses
from trimesh._runtime.tasks.background import is_consequence, split_cancelled, without_consequences
from trimesh._runtime.tasks.interrupt import interruptible, run_to_end
from trimesh._runtime.values.codec import describe
from trimesh._runtime.values.endpoint_spec import MeshInfo
from trimesh._runtime.watch.report import describe_waiting, grace_left
from trimesh.context_managers import asynccontextmanager, contextmanager
from trimesh.errors import HostLost, MeshErrorGroup, ProcDied, has_origin, leaves, origin

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


_log = logging.getLogger("trimesh")
_DEATHS = ProcDied, HostLost


class Owned(Protocol):
    """Something that a block owns: a process mesh or an actor mesh."""

    @property
    def info(self) -> MeshInfo:
        """Description sent in references."""
        ...

    def cancel_background(self, reason: str) -> None:
        """Request the cancel of work that has no caller; never blocks."""

    async def drain(self) -> list[Exception]:
        """Let accepted messages run to their end; return failures. Cancellable."""
        ...

    async def stop(self, deadline: float) -> list[Exception]:
        """End it, by force after `deadline` (Trio time); return failures. Called under a shield."""
        ...

    def abandon(self) -> None:
        """Begin to stop: accept no new messages and no new members."""

    def kill_now(self) -> None:
        """End it at once, without clean-up; `stop` returns soon after."""


class Left(msgspec.Struct, frozen=True):
    """Result of leaving a block.

    Attributes:
        first: Failures before the end of the body.
        error: Error of the body, or the cancel or Ctrl-C that cut the leaving of a healthy block short.
        late: Failures after the end of the body.
        meshes: The processes of each mesh that it owned.
        borrows: See `Block`.
    """

    first: list[Exception]
    error: BaseException | None
    late: list[Exception]
    meshes: Sequence[MeshProcesses] = ()
    borrows: bool = False


class Block:
    """Owner of meshes, in the order in which they were spawned.

    Attributes:
        name: Name in texts.
        grace: Seconds for clean-up.
        scope: Cancelled by the first failure.
        is_stopping: Whether it refuses new meshes.
        is_cancelled: Whether its scope, or one around it, has been cancelled since it was opened.
        is_interrupted: Whether a Ctrl-C has come since it was opened.
        is_killed: Whether a second Ctrl-C has come, which skips clean-up.
        deadline: End of the grace (Trio time), once clean-up has begun.
        started: Calls to its meshes that were started and are awaited later.
        borrows: Whether another process runs its meshes. Their failures arrive after the errors that calls to them
            raise in the body, which are then left out.
    """

    def __init__(self, proc: Proc, name: str, grace: float) -> None:
        self.proc = proc
        self.name = name
        self.grace = grace
        self.scope = trio.CancelScope()
        self.is_stopping = False
        self.is_cancelled = False
        self.is_interrupted = False
        self.is_killed = False
        self.borrows = False
        self.deadline: float | None = None
        self.started = StartedCalls(f"the block of {name}", self.fail)
        self._owned: list[Owned] = []
        self._failures: list[Exception] = []
        self._entering: list[trio.CancelScope] = []
        self._all_entered = trio.Event()
        self._watcher: trio.lowlevel.Task | None = None
        self._held: list[tuple[Exception, bool]] = []
        self._runs_out = False
        self._holding = trio.CancelScope()

    def check_open(self) -> None:
        """Refuse new meshes once the block has begun to stop.

        Raises:
            RuntimeError: It has begun to stop.
        """
        if self.is_stopping:
            raise RuntimeError(f"the block of {self.name} has begun to stop and takes no new meshes")

    @contextmanager
    def entering(self) -> Generator[None, None, None]:
        """Surround the start of a mesh that the block is to own; it is cancelled when the block begins to stop.

        Raises:
            RuntimeError: The block has begun to stop.
        """
        self.check_open()
        scope = trio.CancelScope()
        self._entering.append(scope)
        try:
            with scope:
                yield
        finally:
            self._entering.remove(scope)
            if not self._entering:
                self._all_entered.set()
        if scope.cancelled_caught:
            self.check_open()

    async def _wait_entered(self) -> None:
        while self._entering:
            self._all_entered = trio.Event()
            await self._all_entered.wait()

    def adopt(self, owned: Owned) -> None:
        """Own a mesh, which is stopped before everything adopted earlier."""
        self._owned.append(owned)

    def disown(self, owned: Owned) -> None:
        """Release an owned mesh that has ended."""
        if owned in self._owned:
            self._owned.remove(owned)

    def fail(self, error: Exception, *, is_message: bool = False) -> None:
        """Handle a failure: cancel the body and all calls under the block's scope; leaving raises it.

        Args:
            is_message: Whether the error ended a message without a caller, which the block lets run to its end.
        """
        failure = without_consequences(error)
        if failure is None and not self.proc.stopping_blocks.is_quiet and not self._is_ending:
            self._held.append((error, is_message))
            if len(self._held) == 1:
                self._holding = trio.CancelScope()
                self.proc.nursery.start_soon(self._fail_later, self._holding)
        elif not self._is_ending:
            self._failures.append(error)
            self._cancel_for(error)
        elif failure is None:
            self._log_consequence(error, is_message=is_message)
        else:
            self._failures.append(failure)

    def ignores(self, error: Exception, *, is_message: bool) -> bool:
        """Return whether a cancelled or leaving block ignores this error as a follow-on error; log it then (BL-5)."""
        is_none = self._is_ending and without_consequences(error) is None
        if is_none:
            self._log_consequence(error, is_message=is_message)
        return is_none

    @property
    def _is_ending(self) -> bool:
        return self.is_stopping or self.is_cancelled or self.scope.cancel_called

    @trio.lowlevel.enable_ki_protection
    async def _fail_later(self, scope: trio.CancelScope) -> None:
        """Handle failures caused by the stop of another block, unless this one is left right after it (BL-5)."""
        with scope:
            await self.proc.stopping_blocks.wait_quiet()
        held, self._held = self._held, []
        if self._is_ending:
            for error, is_message in held:
                self._log_consequence(error, is_message=is_message)
        else:
            self._failures += [error for error, _ in held]
            self._cancel_for(held[0][0])

    def _log_consequence(self, error: Exception, *, is_message: bool) -> None:
        """Log a follow-on error; at WARNING for a message of a block that lets its messages run to their end."""
        if is_message and self._runs_out:
            text = "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))
            log_line(self.proc, f"a message of {self.name} did not run to its end: {text}")
            return
        for leaf in leaves(error):
            where = origin(leaf)
            place = "" if where is None else f" ({describe(where)})"
            _log.debug("%s is being left, which causes: %s: %s%s", self.name, type(leaf).__name__, leaf, place)

    def _cancel_for(self, error: Exception) -> None:
        self.scope.cancel(reason=f"{type(error).__name__} in {self.name}")

    def kill_now(self) -> None:
        """Kill everything at once, without clean-up, after a second Ctrl-C (rule O6)."""
        for owned in self._owned:
            owned.kill_now()

    @trio.lowlevel.enable_ki_protection
    async def watch(self) -> None:
        """Wait, in a task under the block's scope, for a cancel or for the end of the body (BL-4)."""

        def cancelled(_: object) -> trio.lowlevel.Abort:
            # Refuse the cancel: this task only observes it, and ends by itself.
            self.is_cancelled = True
            self._wake_watcher()
            return trio.lowlevel.Abort.FAILED

        if not self.is_stopping:
            self._watcher = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(cancelled)
        if self.is_cancelled and not self.is_stopping:
            self._cancel_background()

    def _wake_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            trio.lowlevel.reschedule(watcher)

    def _cancel_background(self) -> None:
        for owned in self._owned:
            owned.cancel_background(f"the block of {self.name} has been cancelled")

    async def leave(self, error: BaseException | None) -> Left:
        """Stop everything: first all messages that were accepted, then all meshes in reverse order (rule M3).

        Args:
            error: Raised by the body.
        """
        self.is_stopping = True
        self._runs_out = error is None and not self._failures
        self._holding.cancel()
        self._wake_watcher()
        if not _is_cut_short(error):  # the body has handled earlier interrupts
            self.is_interrupted = self.is_killed = False
        meshes = [{place for info in owned.info.members if (place := place_of(info))} for owned in self._owned]
        for owned in self._owned:
            owned.abandon()
        if self.is_killed:
            self.kill_now()
        first, late = list(self._failures), list[Exception]()
        if error is not None or first:
            self._cancel_background()
        for scope in self._entering:
            scope.cancel(reason=f"the block of {self.name} has begun to stop")
        with self._watched():
            _, interrupt = await run_to_end(self._wait_entered)
            error = error or interrupt
            if error is None and not first:
                try:
                    await self._drain(late, self._owned)
                except BaseException as cut:  # noqa: BLE001 - raised again by raise_all, when everything has stopped
                    error = cut
            self.deadline = trio.current_time() + self.grace
            while self._owned:
                owned = self._owned[-1]
                failed, interrupt = await run_to_end(partial(owned.stop, self.deadline))
                late += filter(None, map(without_consequences, failed))
                error = error or interrupt
                self.disown(owned)
        return Left(first, error, [*self._failures[len(first) :], *late], meshes, self.borrows)

    async def _drain(self, late: list[Exception], some: Sequence[Owned]) -> None:
        @trio.lowlevel.enable_ki_protection
        async def drain(owned: Owned) -> None:
            late.extend(filter(None, map(without_consequences, await owned.drain())))

        await trio.lowlevel.checkpoint()  # also of a block that owns nothing (K01)
        async with trio.open_nursery() as nursery:
            for owned in some:
                nursery.start_soon(drain, owned)

    async def stop_early(self, some: Sequence[Owned], grace: float) -> list[Exception]:
        """End some owned meshes while the block is open, as leaving it would; return failures.

        Args:
            some: In the order in which they were spawned. Meshes that another block owns are ended, too.
            grace: Seconds for clean-up, once accepted messages have run to their end.

        Raises:
            trio.Cancelled, KeyboardInterrupt: It was cut short; all meshes have been ended, within the grace.
        """
        late: list[Exception] = []
        cut: BaseException | None = None
        for owned in some:
            owned.abandon()
        try:
            await self._drain(late, some)
        except BaseException as error:  # noqa: BLE001 - raised again, when everything has stopped
            cut = error
        deadline = trio.current_time() + grace
        for owned in reversed(some):
            failed, interrupt = await run_to_end(partial(owned.stop, deadline))
            late += failed
            cut = cut or interrupt
            self.disown(owned)
        if cut is not None:
            for failure in late:
                self.fail(failure)
            raise cut
        return late

    @contextmanager
    def _watched(self) -> Generator[None, None, None]:
        """Log once, while the block is being left, what it waits for (rule M4)."""
        scope = trio.CancelScope()
        with self.proc.stopping_blocks.holding(self):
            if not self.proc.has_crashed:
                self.proc.nursery.start_soon(self._log_what_it_waits_for, scope)
            try:
                yield
            finally:
                scope.cancel()

    @trio.lowlevel.enable_ki_protection
    async def _log_what_it_waits_for(self, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(limits.STOPPING_LOG_SECONDS)
            owned = {info.proc_id for one in self._owned for info in one.info.members}
            members = [member for proc_id, member in self.proc.members.items() if proc_id in owned]
            lines = await describe_waiting(self.proc, members)
            text = "\n".join(lines) or "  endpoints of this process"
            _log.warning(
                "the block of %s has been stopping for %g s, %s; it waits for:\n%s",
                self.name,
                limits.STOPPING_LOG_SECONDS,
                grace_left(self.deadline),
                text,
            )


def _is_cut_short(error: BaseException | None) -> bool:
    return error is not None and any(isinstance(leaf, KeyboardInterrupt | trio.Cancelled) for leaf in leaves(error))


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def run_block(block: Block) -> AsyncGenerator[None, None]:
    """Run the body of a block, then leave it.

    Raises:
        MeshErrorGroup: The body failed, or something that the block owns did.
        BaseExceptionGroup: The same, together with an error of the body that is not an `Exception`.
    """
    error: BaseException | None = None
    with interruptible(block), block.scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(block.watch)
            block.started.open(nursery)
            block.proc.blocks.append(block)
            try:
                yield
                await block.started.wait_ended()
            except BaseException as raised:  # noqa: BLE001 - raised again by raise_all, beside the block's failures
                error = raised
            finally:
                block.proc.blocks.remove(block)
            block.started.close(f"the block of {block.name} is being left")
            left = await block.leave(error)
        left.late.extend(filter(None, map(without_consequences, block.started.take_errors())))
        raise_all(block.name, left)


def raise_all(name: str, left: Left) -> None:
    """Raise all failures of a block, in the order in which they happened; return when there are none (rule X1)."""
    if left.error is not None:
        pass_on(left.error)
        from trimesh._wire.exceptions.hints import add_hints  # noqa: PLC0415 - only errors need it

        add_hints(left.error)
    cancelled, rest = split_cancelled(left.error)
    losses = ReportedLosses()
    failures = [failure for failure in (*left.first, *left.late) if not losses.is_repeated(failure)]
    rest = _without_told(rest, failures)
    body, base = _split_exceptions(rest)
    is_of_body = not failures
    if left.borrows and failures and body is not None:
        body = _without_borrowed(body, failures)
    if body is not None:
        failures[len(left.first) : len(left.first)] = [body] if is_of_body else _side_by_side(body)
    failures = fold_into_deaths(failures, left.meshes)
    if is_of_body and base is None and len(failures) == 1 and isinstance(failures[0], ExceptionGroup):
        raise failures[0]  # the block has nothing to add
    message = f"{name} failed"
    if base is not None:
        if is_of_body and isinstance(rest, BaseExceptionGroup):
            raise rest
        inside: list[BaseException] = [base]
        if failures:
            inside.insert(0, MeshErrorGroup(message, failures, mesh=name))
        raise BaseExceptionGroup(message, inside) from None
    if failures:
        raise MeshErrorGroup(message, failures, mesh=name) from None
    if cancelled is not None:
        raise cancelled


def _side_by_side(error: Exception) -> list[Exception]:
    """Return the failures of an inner block, to be listed beside those of this one; any other error stays whole."""
    if isinstance(error, MeshErrorGroup) and error.endpoint is None:
        return list(error.failures)
    return [error]


def _without_told(error: BaseException | None, failures: Sequence[Exception]) -> BaseException | None:
    """Return an error of a body without deaths and losses that the block reports itself: each surfaces once (X3).

    A function that waits without `await` raises the error for which a call would have been cancelled.
    """
    told = {origin(failure) for failure in failures if isinstance(failure, _DEATHS) and has_origin(failure)}
    if error is None or not told:
        return error

    def is_told(leaf: BaseException) -> bool:
        return isinstance(leaf, _DEATHS) and origin(leaf) in told

    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        found, rest = group.split(is_told)
        return group if found is None else rest
    return None if is_told(error) else error


def _without_borrowed(error: Exception, failures: Sequence[Exception]) -> Exception | None:
    """Return an error of a body without what only follows from the end of a borrowed mesh, which `failures` report."""
    found = [leaf for failure in failures for leaf in leaves(failure)]
    lost = {leaf.host for leaf in found if isinstance(leaf, HostLost)}
    dead = {place_of(origin(leaf)) for leaf in found if isinstance(leaf, _DEATHS)} - {None}

    def is_told(leaf: BaseException) -> bool:
        if not isinstance(leaf, _DEATHS):
            return is_consequence(leaf)
        where = origin(leaf)
        return place_of(where) in dead or (leaf.host if isinstance(leaf, HostLost) else where.host) in lost

    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return group.split(is_told)[1]
    return None if is_told(error) else error


def _split_exceptions(error: BaseException | None) -> tuple[Exception | None, BaseException | None]:
    """Return an error's `Exception` part and the rest."""
    if isinstance(error, Exception):
        return error, None
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        exceptions, rest = group.split(Exception)
        if exceptions is None or isinstance(exceptions, ExceptionGroup):
            return exceptions, rest
        return None, group  # a class that derives only groups of itself, which are not `Exception`s
    return None, error


# ---- blocks of one process that are being left -----------------------------------------------------------------------


class StoppingBlocks:
    """Iterates over the blocks that are being left, in the order in which leaving began."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._left_at = -math.inf
        self._left = trio.Event()

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    @contextmanager
    def holding(self, block: Block) -> Generator[None, None, None]:
        """Register `block` while it is being left."""
        self._blocks.append(block)
        try:
            yield
        finally:
            self._blocks.remove(block)
            self._left_at = trio.current_time()
            self._left.set()
            self._left = trio.Event()

    @property
    def is_quiet(self) -> bool:
        """True if no block is being left, nor was in the last `limits.LEAVING_SECONDS`."""
        return not self._blocks and trio.current_time() >= self._left_at + limits.LEAVING_SECONDS

    async def wait_quiet(self) -> None:
        """Wait until no block has been left for `limits.LEAVING_SECONDS`. No checkpoint if that holds already."""
        while not self.is_quiet:
            if self._blocks:
                await self._left.wait()
            else:
                await trio.sleep_until(self._left_at + limits.LEAVING_SECONDS)
