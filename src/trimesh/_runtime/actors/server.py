r"""Server of one actor: runs endpoints and turns each outcome into the call's one terminal frame.

An endpoint that never waits, such as a plain `def`, costs no extra coroutine, task switch or scope: the slot that took
the call from the mailbox calls it directly.

Calls answered by a `Reply` after their endpoint has returned:

    unanswered --send, fail--> answered
          \----cancel of the caller, end of the actor, loss of the reply----> over

RP-1 each call is answered once, by exactly one terminal frame, whichever comes first.
RP-2 a lost reply answers with an error, so no caller waits for a reply that cannot arrive.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, cast

import outcome
import trio

from trimesh._runtime.actors.context import ExecutionContext, set_context, set_message
from trimesh._runtime.calls.outgoing import pass_on
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.system.forks import end_child, is_forked_run
from trimesh._runtime.tasks.background import split_cancelled
from trimesh._runtime.tasks.coroutines import go_on_in_context, run_in_context
from trimesh._runtime.tasks.crossing import in_trio
from trimesh._runtime.values.codec import Values
from trimesh._runtime.values.endpoint_spec import ASYNC, GENERATOR, INLINE, EndpointSpec
from trimesh._wire.exceptions.tracebacks import has_user_frame, raised_at, without_own_frames
from trimesh._wire.memory import NotYet
from trimesh._wire.messages import CallerPlace, SentView
from trimesh.errors import MeshError, Origin


class LocatedError(Exception):
    """An exception of user code that a built-in endpoint ran, with that code's coordinates."""

    def __init__(self, error: BaseException, where: Origin) -> None:
        super().__init__(error, where)
        self.error = error
        self.where = where


class Server:
    """Runs the calls of one actor.

    Attributes:
        context: Context variables of `lifespan`; each call runs in its own copy.
        where: Execution context of an endpoint, as `context()` returns it.
        origin: Coordinates for errors of an endpoint.
        values: Decodes arguments and encodes results.
        on_lost_error: Called with an exception that has no caller.
        hold_error: Holds an error for a debugger before it is sent; None if that is off.
        unanswered: Calls whose endpoint has returned and that await a `Reply`.
    """

    __slots__ = (
        "_contexts",
        "_told",
        "actor",
        "context",
        "hold_error",
        "on_lost_error",
        "origin",
        "unanswered",
        "values",
        "where",
    )

    def __init__(
        self,
        actor: Any,
        context: contextvars.Context,
        where: Callable[[str], ExecutionContext],
        origin: Callable[[str], Origin],
        values: Values,
        on_lost_error: Callable[[IncomingCall, Exception], None],
        hold_error: Callable[[BaseException, Origin], None] | None = None,
    ) -> None:
        self.actor = actor
        self.context = context
        self.where = where
        self.origin = origin
        self.values = values
        self.on_lost_error = on_lost_error
        self.hold_error = hold_error
        self.unanswered: dict[IncomingCall, LateAnswer] = {}
        self._contexts: dict[str, contextvars.Context] = {}
        # Per endpoint, view and caller of the last message and a context with them set: the next message mostly has
        # the same, and setting a variable takes three calls.
        self._told: dict[str, tuple[SentView | None, CallerPlace | None, contextvars.Context]] = {}

    def serve(self, call: IncomingCall) -> Awaitable[None] | None:
        """Run the endpoint of `call`, which a slot took from the mailbox, until it has to wait.

        Returns:
            None if the call has ended, else an awaitable that runs the rest. It raises `Cancelled` if the call or the
            actor is cancelled; the call has not ended then.
        """
        if call.cancelled_by is not None or (call.deadline != math.inf and call.is_expired):
            call.cancelled()  # an expired or cancelled call never starts (D04, C11)
            return None
        call.start()
        spec = call.spec
        kind = spec.kind
        if kind is not INLINE and kind is not ASYNC:
            return self._finish(call, self._run_slowly(call))
        try:
            try:
                args, kwargs = self.values.decode_call(call.payload, call.bodies, spec, call.peer)
            except NotYet:
                return self._finish(call, self._run_slowly(call))
            call.forget_arguments()
            if spec.answers_later:
                args = (self._reply_to(call), *args)
            context = self._context_of(call)
            if kind is INLINE:
                result = _call_now(context, spec, self.actor, args, kwargs)
            else:
                coroutine: Coroutine[Any, Any, Any] = spec.fn(self.actor, *args, **kwargs)
                try:
                    trap = _first_step(context, coroutine)
                except StopIteration as stop:
                    result = stop.value
                else:
                    return self._finish(call, _rest(context, coroutine, trap))
            lent = self._answer(call, result)
        except BaseException as raised:  # noqa: BLE001 - reported to the caller
            # In a separate function: no frame of the traceback holds the error, so all is freed once it is sent.
            lent = self._tell(call, raised)
        return None if lent is None or lent.is_set() else _wait_until_left(lent)

    async def _finish(self, call: IncomingCall, result: Awaitable[Any]) -> None:
        """Wait for the endpoint's outcome and end the call with it."""
        try:
            lent = self._answer(call, await result)
        except trio.Cancelled:
            raise
        except BaseException as raised:  # noqa: BLE001 - as above
            lent = self._tell(call, raised)
        if lent is not None and not lent.is_set():
            await _wait_until_left(lent)

    async def _run_slowly(self, call: IncomingCall) -> Any:
        """Run an endpoint that has to be awaited, or whose arguments do."""
        try:
            arguments = await self._arguments(call)
        finally:
            call.forget_arguments()
        args, kwargs = arguments
        if call.spec.answers_later:
            args = (self._reply_to(call), *args)
        return await _invoke(call, self.actor, self._context_of(call), self.values, args, kwargs)

    def _reply_to(self, call: IncomingCall) -> Reply[Any]:
        answer = LateAnswer(call, self.values, self.origin(call.spec.name), self.on_lost_error)
        call.answering = answer
        answer.on_answered = partial(self.unanswered.pop, call, None)
        return Reply(answer)

    def _leave_unanswered(self, call: IncomingCall) -> None:
        """Free the slot of a call that is answered later; the actor may end before the reply."""
        answer = call.answering
        assert isinstance(answer, LateAnswer)
        if call.is_broadcast and not answer.is_used:
            call.ended = True
        if answer.returned():
            self.unanswered[call] = answer

    def _context_of(self, call: IncomingCall) -> contextvars.Context:
        endpoint = call.spec.name
        found = self._contexts.get(endpoint)
        if found is None:
            found = self._contexts[endpoint] = self.context.copy()
            found.run(set_context, self.where(endpoint))
        view, caller = call.view, call.caller
        if view is None and caller is None:
            return found.copy()
        told = self._told.get(endpoint)
        if told is None or told[0] != view or told[1] != caller:
            context = found.copy()
            context.run(set_message, view, caller)
            told = self._told[endpoint] = view, caller, context
        return told[2].copy()

    async def _arguments(self, call: IncomingCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode the arguments once all objects that they refer to are here."""
        while True:
            try:
                return self.values.decode_call(call.payload, call.bodies, call.spec, call.peer)
            except NotYet as early:
                wait = early.wait
            await wait()

    def _answer(self, call: IncomingCall, result: Any) -> trio.Event | None:
        if call.answering is not None:
            self._leave_unanswered(call)
            return None
        if not call.call_id:  # a broadcast
            call.ended = True
            return None
        return call.returned(self.values.encode_result(result, call.spec))

    def _tell(self, call: IncomingCall, raised: BaseException) -> trio.Event | None:
        if is_forked_run():
            end_child(without_own_frames(raised) if has_user_frame(raised) else None)
        error, origin = raised, self.origin(call.spec.name)
        if isinstance(raised, LocatedError):
            error, origin = raised.error, raised.where
        cancelled, told = split_cancelled(error)
        if told is None:
            raise error from None
        if self.hold_error is not None:
            self.hold_error(told, origin)
        lent = self._answer_error(call, told, origin)
        if cancelled is not None and not (call.scope is not None and call.scope.cancel_called):
            raise cancelled from None
        return lent

    def _answer_error(self, call: IncomingCall, error: BaseException, origin: Origin) -> trio.Event | None:
        pass_on(error)
        call.error_text, call.error_line = _text_of(error), raised_at(error)
        from trimesh._wire.exceptions.hints import add_hints  # noqa: PLC0415 - only errors need it

        add_hints(error)
        without_own_frames(error)
        call.forget_arguments()
        if not call.is_broadcast and not call.ended:
            return call.raised(self.values.encode_error(error, origin))
        call.ended = True
        self.on_lost_error(call, self.values.local_error(error, origin))
        return None


# User code can be interrupted anywhere: these frames allow KeyboardInterrupt.


@trio.lowlevel.disable_ki_protection
def _call_now(
    context: contextvars.Context, spec: EndpointSpec, actor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        result = context.run(spec.fn, actor, *args, **kwargs)
    except StopIteration as error:  # a coroutine cannot raise it
        raise RuntimeError(f"an endpoint must not raise StopIteration, got one from {spec.name}()") from error
    if type(result) is types.CoroutineType:
        cast("Coroutine[Any, Any, Any]", result).close()
        raise TypeError(
            f"a plain def endpoint must return a value, got a coroutine from {spec.name}(): "
            f"write `async def {spec.name}`, and await it there"
        )
    return result


@trio.lowlevel.disable_ki_protection
def _first_step(context: contextvars.Context, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return context.run(coroutine.send, None)


@trio.lowlevel.disable_ki_protection
async def _rest(context: contextvars.Context, coroutine: Coroutine[Any, Any, Any], trap: Any) -> Any:
    return await go_on_in_context(context, coroutine, trap)


@trio.lowlevel.disable_ki_protection
async def _invoke(
    call: IncomingCall,
    actor: Any,
    context: contextvars.Context,
    values: Values,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    spec = call.spec
    if spec.kind is GENERATOR:
        return await produce(call, context.run(spec.fn, actor, *args, **kwargs), context, values)
    if spec.kind is ASYNC:
        return await run_in_context(context, spec.fn(actor, *args, **kwargs))
    if spec.kind is INLINE:
        return context.run(spec.fn, actor, *args, **kwargs)
    # The group's slots bound the threads, not Trio's limiter, which other code of the process also uses.
    work = partial(_run_in_thread, call, os.getpid(), partial(spec.fn, actor, *args, **kwargs))
    running = trio.to_thread.run_sync(work, limiter=trio.CapacityLimiter(1))
    return (await run_in_context(context, running)).unwrap()


def _run_in_thread(call: IncomingCall, pid: int, function: Callable[[], Any]) -> outcome.Outcome[Any]:
    """Run an endpoint in this thread; record the thread's id for snapshots of the run.

    Returns an outcome instead of raising: Trio sets attributes on a raised error, which its class may refuse.
    """
    call.thread = threading.get_ident()
    try:
        result: outcome.Outcome[Any] = outcome.capture(function)
    finally:
        call.thread = 0
    if os.getpid() != pid:  # the function has forked: the child must not act as a second worker
        end_child(result.error if isinstance(result, outcome.Error) else None)
    return result


async def _wait_until_left(lent: trio.Event) -> None:
    """Wait until a reply is sent: the next message may write into its buffers."""
    with trio.CancelScope(shield=True):
        await lent.wait()


def _text_of(error: BaseException) -> str:
    """Return class and text of an error of user code, whose `__str__` may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - it is for people only
        return type(error).__name__


# ---- generator endpoints: items are sent to the consumer, as far ahead as its window allows --------------------------

# A `yield` is a checkpoint of the endpoint, as an `await` is. A cancel, or the error of an item that cannot be
# serialised, is raised at the `yield`, so a cancel scope or nursery around it works as around an `await`.


@trio.lowlevel.enable_ki_protection
async def produce(
    call: IncomingCall, generator: AsyncGenerator[Any, None], context: contextvars.Context, values: Values
) -> None:
    """Run a generator endpoint to its end."""
    assert call.items is not None
    transport = call.peer.proc.transport
    steps: list[Any] = [generator.__anext__()]  # no frame of a traceback may hold the error, see `run_in_context`
    while True:
        try:
            item = await _advance(context, steps)
        except StopAsyncIteration:
            return
        try:
            await trio.lowlevel.checkpoint_if_cancelled()  # at each yield (rule T1)
            if not (transport.skips_left and transport.skip_turn()):
                await trio.lowlevel.checkpoint()
            value = values.encode_item(item, call.spec)
            del item
            await call.items.send(call, value)
            del value
            steps.append(generator.__anext__())
        except BaseException as error:  # noqa: BLE001 - raised at the `yield`
            steps.append(generator.athrow(error))


@trio.lowlevel.disable_ki_protection  # user code can be interrupted anywhere
async def _advance(context: contextvars.Context, steps: list[Coroutine[Any, Any, Any]]) -> Any:
    return await run_in_context(context, steps.pop())


# ---- calls that are answered after their endpoint has returned, by a `Reply` -----------------------------------------

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class LateAnswer:
    """State behind the `Reply` to one call, in the actor's process.

    Args:
        origin: Coordinates for errors.
        on_lost_error: Called with the error of a call that has no caller, or whose caller is gone.

    Attributes:
        over: Set once no reply is expected any more.
        is_lost: Whether the `Reply` was dropped unused.
    """

    def __init__(
        self,
        call: IncomingCall,
        values: Values,
        origin: Origin,
        on_lost_error: Callable[[IncomingCall, Exception], None],
    ) -> None:
        self.call = call
        self.over = trio.Event()
        self.is_used = False
        self.has_returned = False
        self.is_lost = False
        self.on_answered: Callable[[], object] | None = None
        self._values = values
        self._origin = origin
        self._on_lost_error = on_lost_error
        self._token = trio.lowlevel.current_trio_token()

    def cut(self) -> None:
        """Note that the caller or the actor no longer waits for the reply."""
        self.over.set()

    def returned(self) -> bool:
        """Note that the endpoint has returned; return whether a reply is still expected."""
        self.has_returned = True
        if self.is_lost:
            self._fail_lost()
        return not self.call.ended

    def send(self, value: object) -> None:
        """Reply with a value; in Trio's thread."""
        self._check_unused()
        call = self.call
        if not call.ended and not call.is_broadcast:
            call.returned(self._values.encode_result(value, call.spec))
        self._answered()

    def fail(self, error: BaseException) -> None:
        """Reply with an error; in Trio's thread."""
        self._check_unused()
        call = self.call
        if call.is_broadcast and isinstance(error, Exception):
            self._on_lost_error(call, self._values.local_error(error, self._origin))
        elif not call.ended:
            call.raised(self._values.encode_error(error, self._origin))
        self._answered()

    def _check_unused(self) -> None:
        if self.is_used:
            raise RuntimeError(f"a Reply answers one call once, got a second answer to {self.call.spec.name}")

    def _answered(self) -> None:
        self.is_used = True
        self.call.ended = True
        self.over.set()
        if self.on_answered is not None:
            self.on_answered()

    def seconds_left(self) -> float:
        """Return how many seconds the caller will still wait."""
        deadline = self.call.deadline
        return math.inf if deadline == math.inf else max(0.0, deadline - trio.current_time())

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of this object in Trio's thread."""
        if trio.lowlevel.in_trio_run():
            return function(*args)
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def drop(self) -> None:
        """Note that the `Reply` was garbage-collected. For any thread, also inside a finalizer."""
        if not self.is_used:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._lost)

    def _lost(self) -> None:
        self.is_lost = True
        if self.has_returned:
            self._fail_lost()

    def _fail_lost(self) -> None:
        """Reply with an error, unless the call has ended or has no caller."""
        if not self.is_used and not self.call.ended:
            name = self.call.spec.name
            self.fail(MeshError(f"{name} was not answered: its Reply was dropped; keep it until `reply.send(...)`"))


class Reply(Generic[T_contra]):
    """Answers one call of an endpoint with `reply="later"`, from any task or thread of the actor's process.

    Use it once: `send` or `fail`. If it is dropped unused, the caller gets a `MeshError`. A reply is ignored once the
    caller has cancelled or the actor has ended. A `Reply` cannot be sent to other processes: send a `Port` to be
    answered from there.
    """

    __slots__ = ("_answer",)

    def __init__(self, answer: LateAnswer) -> None:
        self._answer = answer

    def send(self, value: T_contra) -> None:
        """Reply with the result of the call. Do not write to memory that it shares afterwards.

        Raises:
            TypeError: The value cannot be serialised; the call can still be answered.
            RuntimeError: The call has been answered.
        """
        self._answer.run(self._answer.send, value)

    def fail(self, error: BaseException) -> None:
        """Reply with an error, which the caller gets as if the endpoint had raised it.

        For a broadcast it fails the block that owns the actor, as every error without a caller does.

        Raises:
            RuntimeError: The call has been answered.
        """
        self._answer.run(self._answer.fail, error)

    @property
    def is_over(self) -> bool:
        """True once no reply is expected: the call was answered or cancelled, or the actor has ended."""
        return self._answer.over.is_set()

    @property
    def seconds_left(self) -> float:
        """Seconds that the caller will still wait; `math.inf` without a deadline."""
        return self._answer.run(self._answer.seconds_left)

    async def wait_over(self) -> None:
        """Wait until no reply is expected; a checkpoint."""
        await in_trio(self._answer.over.wait)()

    def __del__(self) -> None:
        self._answer.drop()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Reply must be used in the process of its actor: to answer from elsewhere, send a Port there, and reply "
            "here with the item that its Receiver gets"
        )
