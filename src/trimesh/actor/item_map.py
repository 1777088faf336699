"""`map`: one call for each item, on the least busy members; results as they arrive.

One task reads the items and sends the calls. Calls have no task of their own, except an item that waits for its retry.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Sequence,
    Sized,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import trio
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint, checkpoint_if_cancelled

from trimesh import limits
from trimesh._routing.collector import Outcome, Returned
from trimesh._runtime.calls import (
    CallSet,
    Err,
    Ok,
    Result,
    SendCall,
    SetCall,
    broken_value,
    has_deadline,
    is_news,
    results_of,
    value_of,
    yield_to_cancel,
)
from trimesh._runtime.life import current_proc
from trimesh._runtime.meshes import DEATHS, fold_into_deaths, says_peer_is_gone
from trimesh._runtime.tasks import effective_deadline
from trimesh._runtime.values import EndpointSpec
from trimesh._runtime.watch import ShownProgress, showing
from trimesh.actor import verbs
from trimesh.actor.options import Options, Retry, Spread, check_window
from trimesh.actor.results import Results
from trimesh.actor.view import MeshView
from trimesh.config import current
from trimesh.errors import (
    MeshErrorGroup,
    MeshStopped,
    RemoteCancelled,
    Unresponsive,
    add_note,
    context_of,
    leaves,
    set_context,
    text_of,
)
from trimesh.shape.value_mesh import ValueMesh

R = TypeVar("R")

Items = Iterable[Any] | AsyncIterable[Any]

_AT_HAND: Final = frozenset((list, tuple, range, dict, set, frozenset, str, bytes, deque))
"""Types that yield their items without running user code, which may be slow."""


_RESTARTED: Final = (MeshStopped, Unresponsive)
"""What calls to ranks raise that a policy restarts because of another one: taken down, or before, silent."""


class Unit(msgspec.Struct, eq=False):
    """An item in progress.

    Attributes:
        index: Index of the item.
        item: The item.
        rank: Rank that it was last sent to.
        errors: Errors of failed attempts.
        tried: Ranks of failed attempts, which the next attempt avoids.
    """

    index: int
    item: Any
    rank: int = -1
    errors: Sequence[Exception] = ()
    tried: Collection[int] = ()


def check_items(items: object) -> None:
    """Check that items can be iterated over.

    Raises:
        TypeError: They cannot.
    """
    # An object with only `__getitem__` (e.g. a dataset) is not an `Iterable` to isinstance, but works in a `for`.
    if not isinstance(items, Iterable | AsyncIterable) and not hasattr(type(items), "__getitem__"):
        raise TypeError(f"map needs items to iterate over, got {items!r}")


class ItemMap(Results[tuple[int, R]]):
    """See `Endpoint.map`.

    Raises:
        TypeError: The endpoint does not take one argument, or `items` cannot be iterated over.
        ValueError: The window is outside its bounds.
    """

    _now: Callable[[], float]
    _calls: CallSet
    _nursery: AbstractAsyncContextManager[trio.Nursery]
    _tasks: trio.Nursery
    _shown: AbstractContextManager[ShownProgress]
    _progress: ShownProgress
    _retries: trio.Nursery

    def __init__(
        self, mesh: MeshView, spec: EndpointSpec, options: Options, items: Items, window: int | None = None
    ) -> None:
        super().__init__(mesh, spec)
        self._check(items)
        self._items = items
        self._window = (options.window or current().map_window) if window is None else check_window(window)
        self._is_fail_fast = options.is_fail_fast
        self._retry = options.retry
        self._options = options
        self._scope = trio.CancelScope()
        self._is_fed = False
        self._is_cut = False  # by the scope around the map
        # The feeder is woken for several items at once, as long as each member can have one meanwhile.
        self._refill = max(1, (self._window - len(mesh.ranks)) // 4)
        self._room: trio.Event | None = None  # set when there is room for the feeder's next item
        self._unbroken = 0  # items read since the feeder last let other tasks run
        self._break_at = -math.inf
        self._deadline = math.inf  # of the feeder
        self._candidates: verbs.Candidates | None = None
        self._senders: dict[int, SendCall] = {}  # of its members, by rank
        self._only: tuple[int, SendCall] | None = None  # of its only member, with its rank
        self._outstanding = 0  # items sent, or waiting to be sent again, whose results were not taken
        self._retrying = 0
        self._lost: list[tuple[Exception, bool]] = []  # and whether a cancelled consumer gets them, too

    def _check(self, items: Items) -> None:
        try:
            verbs.bind(self._mesh, self._spec, (None,), {})
        except TypeError as error:
            raise TypeError(
                f"map calls an endpoint with one argument, the item: {error}; give the endpoint one parameter, such as "
                "a tuple or a record"
            ) from None
        self._check_items(items)

    def _check_items(self, items: Items) -> None:
        check_items(items)
        if not self._mesh.ranks:
            raise ValueError(f"map needs a mesh of at least one member, got the empty view {self._mesh!r}")

    def _pick(self, unit: Unit) -> int:
        """Return the rank that gets a unit next."""
        if self._candidates is None:
            self._candidates = verbs.candidates_of(self._mesh, "map")
        return self._candidates.pick(unit.tried)

    def _arguments(self, unit: Unit) -> tuple[verbs.Args, verbs.Kwargs]:
        return (unit.item,), {}

    def _showing(self) -> AbstractContextManager[ShownProgress]:
        total = len(self._items) if isinstance(self._items, Sized) else 0
        return showing(self._mesh.proc(), f"{self.what}.map()", total)

    def _describe(self, unit: Unit, error: Exception) -> None:
        add_note(error, f"raised for item {unit.index} of {self.what}.map()")

    # ---- sending ---------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        await checkpoint()
        if not self._mesh.is_open:
            verbs.raise_group(self._mesh, self._spec, verbs.refusals(self._mesh, self._spec, self._mesh.ranks))
        self._now = trio.lowlevel.current_clock().current_time
        self._calls = CallSet(self._on_failure, self._waits_for_calls)
        self._nursery = trio.open_nursery()
        self._tasks = await self._nursery.__aenter__()
        self._tasks.start_soon(self._feed)
        self._shown = self._showing()
        self._progress = self._shown.__enter__()

    async def _feed(self) -> None:
        """Read the items one by one; hold the items that wait for a retry."""
        with self._scope:
            async with trio.open_nursery() as self._retries:
                try:
                    await self._take_all_in()
                    self._is_fed = True
                    self._calls.wake()
                    await trio.sleep_forever()
                finally:  # before the nursery takes no more retries
                    if not self._scope.cancel_called:
                        # The scope around the map was cancelled. A shielded consumer must not wait for ever.
                        self._is_cut = True
                        error = RemoteCancelled(reason=f"the scope around {self.what}.map() was cancelled")
                        self._lost.append((error, False))
                        self._stop(f"the scope around {self.what}.map() was cancelled")

    async def _take_all_in(self) -> None:
        index = 0
        try:
            if isinstance(self._items, AsyncIterable):
                async for item in self._items:
                    self._forget_candidates()
                    await self._wait_for_turn()
                    await self._send(self._unit(index, item))
                    self._calls.leave()
                    index += 1
            else:
                is_at_hand = type(self._items) in _AT_HAND
                for item in self._items:
                    is_long = self._unbroken >= limits.MAP_UNBROKEN_ITEMS or self._now() >= self._break_at
                    if is_long or self._outstanding >= self._window:
                        await self._wait_for_turn()
                    await self._send(self._unit(index, item))
                    if not is_at_hand:
                        self._calls.leave()  # the next item may take long
                        if is_long:  # this one has: the member must not sleep meanwhile
                            self._transport.flush()
                    index += 1
        except Exception as error:  # noqa: BLE001 - raised by the iteration over the results
            self._lose(error)
        finally:
            self._calls.leave()
            items, self._items = self._items, ()  # this object is in a reference cycle, which would keep them alive
            await self._end_items(items)

    async def _end_items(self, items: Items) -> None:
        """Close a generator that was left early; errors of its clean-up are raised like its other errors."""
        try:
            if isinstance(items, Generator):
                items.close()
            elif isinstance(items, AsyncGenerator):
                await items.aclose()
        except Exception as error:  # noqa: BLE001 - as above
            self._lose(error)

    async def _wait_for_turn(self) -> None:
        """Let other tasks run, and wait for room, if the next item has to."""
        if self._unbroken >= limits.MAP_UNBROKEN_ITEMS or self._now() >= self._break_at:
            await self._pause(checkpoint)
        while self._outstanding >= self._window:
            self._room = trio.Event()
            self._calls.tell_wait()
            await self._pause(self._room.wait)

    def _unit(self, index: int, item: Any) -> Unit:
        self._unbroken += 1
        self._outstanding += 1
        return Unit(index, item)

    async def _pause(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Let other tasks run; afterwards discard state that may have changed."""
        self._calls.leave()
        await wait()
        await checkpoint_if_cancelled()  # it may have been woken just before a cancel
        self._forget_candidates()  # a task that sends again may have left one meanwhile
        self._unbroken = 0
        self._break_at = self._now() + limits.MAP_UNBROKEN_SECONDS
        self._deadline = effective_deadline()

    def _forget_candidates(self) -> None:
        """Discard the candidates, so that they are computed again."""
        self._candidates = self._only = None
        self._senders.clear()

    def _make_room(self) -> None:
        """Wake the feeder."""
        if self._room is not None:
            self._room.set()
            self._room = None

    async def _send(self, unit: Unit) -> None:
        try:
            if not self._send_at_once(unit):
                await self._send_when_ready(unit)
        except Exception as error:
            self._describe(unit, error)
            raise

    @trio.lowlevel.enable_ki_protection
    def _send_at_once(self, unit: Unit) -> bool:
        """Choose the member for a unit, and send if it lives and has a link; else return False."""
        if self._only is not None:
            unit.rank, send = self._only
        else:
            unit.rank = rank = self._pick(unit)
            found = self._senders.get(rank) or self._sender(rank)
            if found is None:
                return False
            send = found
        send(unit, self._arguments(unit))
        return True

    def _sender(self, rank: int) -> SendCall | None:
        """Return the function that sends to a candidate; None if it is being restarted or has no link."""
        candidates = self._candidates
        if candidates is None:
            return None
        found = candidates.ready(rank, self._spec, self._options)
        if found is None:
            return None
        send = self._senders[rank] = self._calls.sender(candidates.proc, *found, self._deadline)
        if len(candidates.alive) == 1:
            self._only = rank, send
        return send

    @trio.lowlevel.enable_ki_protection
    async def _send_when_ready(self, unit: Unit) -> None:
        """Wait until the member of a unit is not being restarted and has a link; send."""
        self._calls.leave()
        self._mesh.check_open()
        bound = self._arguments(unit)
        proc, [target], request = await verbs.prepare(self._mesh, self._spec, bound, [unit.rank], self._options)
        self._forget_candidates()
        if not self._calls.is_cancelled:
            self._calls.begin(proc, target, request, unit, self._deadline)

    async def _send_again(self, unit: Unit, seconds: float) -> None:
        try:
            await self._pause(partial(trio.sleep, seconds))
            await self._send(unit)
            self._calls.leave()
        except Exception as error:  # noqa: BLE001 - raised by the iteration over the results
            self._lose(with_earlier(error, unit.errors))
        self._retrying -= 1
        self._calls.wake()

    def _waits_for_calls(self) -> bool:
        """True if the consumer waits and every item read so far has become a call."""
        return self._is_waited_for and not self._retrying and (self._is_fed or self._outstanding >= self._window)

    # ---- results ---------------------------------------------------------------------------------------------

    def _on_failure(self, _: SetCall) -> None:
        if self._is_fail_fast and self._retry is None:
            self._stop(f"another item of {self.what} failed")

    def _stop(self, reason: str) -> None:
        self._scope.cancel(reason=reason)
        self._calls.cancel(reason)

    def _lose(self, error: Exception, *, is_always_raised: bool = True) -> None:
        self._lost.append((error, is_always_raised))
        if self._is_fail_fast:
            self._stop(f"another item of {self.what} failed")

    def _take(self) -> tuple[int, R] | None:
        ended = self._calls.ended
        if not ended:
            return None
        call = ended[0]
        outcome = call.collector.outcomes[0]
        if type(outcome) is not Returned:
            return None
        try:
            value = call.proc.values.decode_result(outcome.payload, outcome.bodies, self._spec)
        except Exception as error:  # noqa: BLE001 - becomes the error of the item, as in `value_of`
            return self._take_result(call, broken_value(error, call.request, 0))
        ended.popleft()
        return self._take_value(call.key, value)

    async def _next(self) -> tuple[int, R] | None:
        while self._state == "open":
            if self._calls.ended:
                call = self._calls.ended[0]
                [outcome] = call.collector.outcomes
                if type(outcome) is Returned:
                    found = self._take_result(call, value_of(call, outcome, 0))
                else:
                    found = await self._look_at(call)
                if found is not None:
                    if not (self._transport.skips_left and self._transport.skip_turn()):
                        await cancel_shielded_checkpoint()
                    return found
            elif self._has_ended():
                await checkpoint()
                return None
            else:
                if self._outstanding < self._window:
                    self._make_room()
                self._calls.consumer = trio.lowlevel.current_task()
                self._calls.is_bounded = has_deadline()
                await self._calls.wait()
        raise trio.ClosedResourceError(f"the block of the results of {self.what} has been left: iterate inside it")

    def _has_ended(self) -> bool:
        if self._calls.is_cancelled:
            return not self._calls.running or trio.current_time() >= self._calls.silent_at
        return self._is_fed and not self._calls.running and not self._retrying

    async def _look_at(self, call: SetCall) -> tuple[int, R] | None:
        """Process a call that ended without a value; return its result if it is still wanted."""
        await yield_to_cancel(list(call.collector.failed()))  # if this raises, the call is still in `ended`
        [result] = results_of(call)
        return self._take_result(call, result)

    def _take_result(self, call: SetCall, result: Result) -> tuple[int, R] | None:
        """Process the next ended call, with `result`; return the value if it is still wanted."""
        self._calls.ended.popleft()
        unit: Unit = call.key
        if type(result) is Err and self._would_retry(unit, result.error):
            if not self._calls.is_cancelled:
                self._try_again(call, result.error)
                return None
            if self._is_cut:  # a retry might have succeeded
                self._outstanding -= 1
                return None
        if type(result) is Ok:
            return self._take_value(unit, result.value)
        self._outstanding -= 1  # the next wait for a result makes room
        if isinstance(result, Err):
            self._describe(unit, result.error)
            is_always_raised = is_news(result, call.request.origin(0))
            self._lose(with_earlier(result.error, unit.errors), is_always_raised=is_always_raised)
        return None

    def _take_value(self, unit: Unit, value: Any) -> tuple[int, R] | None:
        """Process the result of a unit; return it if it is still wanted."""
        self._outstanding -= 1
        if self._room is not None:
            self._make_room_for_several()
        self._progress.done += 1
        return None if self._lost and self._is_fail_fast else (unit.index, value)

    def _make_room_for_several(self) -> None:
        """Wake the feeder when there is room for several items."""
        if self._outstanding <= self._window - self._refill:
            self._make_room()

    def _would_retry(self, unit: Unit, error: Exception) -> bool:
        return self._retry is not None and self._retry.wants(error, len(unit.errors) + 1)

    def _try_again(self, call: SetCall, error: Exception) -> None:
        assert self._retry is not None
        unit: Unit = call.key
        unit.errors = [*unit.errors, error]
        unit.tried = {*unit.tried, unit.rank}
        self._retrying += 1
        call.proc.metrics.retries += 1
        self._retries.start_soon(self._send_again, unit, self._retry.delay(len(unit.errors), call.proc.chance()))

    # ---- the end ---------------------------------------------------------------------------------------------

    async def _close(self, reason: str) -> None:
        self._calls.wake()
        self._scope.cancel(reason=reason)
        # Only this cancel ends the tasks, so that the nursery absorbs it and it masks no failure.
        self._tasks.cancel_scope.shield = True
        self._tasks.cancel_scope.cancel(reason=reason)
        try:
            await self._nursery.__aexit__(None, None, None)
        finally:
            self._shown.__exit__(None, None, None)
            self._calls.cancel(reason)
            await self._calls.join()

    def _failed(self) -> Sequence[Outcome]:
        return [outcome for call in self._calls.ended for outcome in call.collector.failed()]

    def _failures(self, *, cancelled: bool) -> list[Exception]:
        found = [error for error, is_always_raised in self._lost if is_always_raised or not cancelled]
        for call in (*self._calls.ended, *self._calls.running):
            [result] = results_of(call, cancelled=cancelled)
            if cancelled and isinstance(result, Err) and self._would_retry(call.key, result.error):
                continue  # a retry might have succeeded
            if isinstance(result, Err):
                self._describe(call.key, result.error)
                found.append(with_earlier(result.error, call.key.errors))
        return found


def with_earlier(error: Exception, earlier: Sequence[Exception]) -> Exception:
    """Return the error of the last attempt, with earlier ones as its context, the latest first, and in a note."""
    chain = list(_contexts(error))
    for previous in reversed(earlier):
        more = list(_contexts(previous, chain))  # none if it is linked already: several attempts may meet one death
        if more:
            set_context(chain[-1], previous)
            set_context(more[-1], None)  # its own contexts may lead back here
            chain += more
    if earlier:
        attempts = "; ".join(f"{type(one).__name__}: {text_of(one)}" for one in earlier)
        add_note(error, f"raised by attempt {len(earlier) + 1}; earlier attempts: {attempts}")
    return error


def _contexts(error: BaseException | None, known: Sequence[BaseException] = ()) -> Iterator[BaseException]:
    """Yield an error and its contexts, up to one that is known or comes again."""
    seen = set(map(id, known))
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = context_of(error)


# ---- verbs with `options(retry=...)`: each attempt is a new call -----------------------------------------------------


async def _wait_for_retry(retry: Retry, failed: int) -> None:
    proc = current_proc()
    proc.metrics.retries += 1
    await trio.sleep(retry.delay(failed, proc.chance()))


async def again_one(
    verb: verbs.VerbRow, mesh: MeshView, spec: EndpointSpec, bound: verbs.Bound, options: Options
) -> Any:
    """Call one member; a further attempt prefers another live member if the verb has a choice."""
    retry = options.retry
    assert retry is not None
    errors: list[Exception] = []
    tried: list[int] = []
    while True:
        try:
            return await verbs.run(verb, mesh, spec, bound, options, tried)
        except Exception as error:
            if not retry.wants(error, len(errors) + 1):
                with_earlier(error, errors)
                raise
            errors.append(error)
        await _wait_for_retry(retry, len(errors))


async def again_all(
    verb: verbs.VerbRow, mesh: MeshView, spec: EndpointSpec, bound: verbs.Bound, options: Options
) -> ValueMesh[Any]:
    """Call all members; only the ranks that failed are called again, or all of them (`Retry.whole`)."""
    retry = options.retry
    assert retry is not None
    if mesh.info.replaces_all if retry.whole is None else retry.whole:
        values: ValueMesh[Any] = await _again_whole(verb, mesh, spec, bound, options)
        return values
    calls = RankCalls(mesh, spec, options, bound)
    async with calls as results:
        async for _ in results:
            pass
    return ValueMesh(mesh.region, tuple(value for _, value in sorted(calls.values.items())))


async def _again_whole(
    verb: verbs.VerbRow, mesh: MeshView, spec: EndpointSpec, bound: verbs.Bound, options: Options
) -> Any:
    retry = options.retry
    assert retry is not None
    errors: list[Exception] = []
    while True:
        try:
            return await verbs.run(verb, mesh, spec, bound, options)
        except MeshErrorGroup as group:
            if not _wants_whole(retry, mesh, group, len(errors) + 1):
                with_earlier(group, errors)
                raise
            errors.append(group)
        await _wait_for_retry(retry, len(errors))


def _wants_whole(retry: Retry, mesh: MeshView, group: MeshErrorGroup, attempt: int) -> bool:
    """Return whether to call all ranks again after the failures of an attempt.

    Beside a failure that the retry names, those of ranks that are restarted because of it count as that one.
    """
    failures = [failure for failure in leaves(group) if isinstance(failure, Exception)]
    wanted = {id(failure) for failure in failures if retry.wants(failure, attempt)}
    all_end = mesh.info.replaces_all and any(isinstance(one, DEATHS) and id(one) in wanted for one in failures)
    return all(id(one) in wanted or (all_end and isinstance(one, _RESTARTED)) for one in failures)


class RankCalls(ItemMap[Any]):
    """A map over the ranks of a view: each is called with the same arguments.

    Attributes:
        values: Results by the index of the rank in the view.
    """

    def __init__(self, mesh: MeshView, spec: EndpointSpec, options: Options, bound: verbs.Bound) -> None:
        ranks = mesh.ranks
        super().__init__(mesh, spec, options, ranks, max(1, len(ranks)))
        self._bound = bound
        self.values: dict[int, Any] = {}

    def _check(self, items: Items) -> None:
        """Accept any ranks, also none."""

    def _showing(self) -> AbstractContextManager[ShownProgress]:
        """Show no progress, as for any call."""
        return nullcontext(ShownProgress(self.what))

    def _pick(self, unit: Unit) -> int:
        rank: int = unit.item
        return rank

    def _arguments(self, unit: Unit) -> tuple[verbs.Args, verbs.Kwargs]:
        return self._bound.of_rank[unit.item] if isinstance(self._bound, Spread) else self._bound

    def _describe(self, unit: Unit, error: Exception) -> None:
        """Add no note: the error has the coordinates of its rank."""

    def _would_retry(self, unit: Unit, error: Exception) -> bool:
        """Retry also when a survivor's error says that a peer died, and the retry is for deaths."""
        if super()._would_retry(unit, error):
            return True
        assert self._retry is not None
        is_for_deaths = any(issubclass(death, self._retry.on) for death in DEATHS)
        return is_for_deaths and len(unit.errors) < self._retry.max and says_peer_is_gone(error)

    def _take_value(self, unit: Unit, value: Any) -> tuple[int, Any] | None:
        self.values[unit.index] = value  # even one that arrives too late to be returned
        return super()._take_value(unit, value)

    def _group(self, failures: Sequence[Exception]) -> MeshErrorGroup:
        ranks = self._mesh.ranks
        missing = [rank for index, rank in enumerate(ranks) if index not in self.values]
        partial = ValueMesh(
            self._mesh.region.exclude_ranks(missing), tuple(value for _, value in sorted(self.values.items()))
        )
        text = f"{self.what} failed on {len(failures)} of {len(ranks)}"
        return MeshErrorGroup(
            text, fold_into_deaths(failures), partial=partial, mesh=self._mesh.name, endpoint=self._spec.name
        )
