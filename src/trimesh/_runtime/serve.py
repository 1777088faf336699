"""Run one endpoint for one call, and turn whatever comes of it into its one terminal frame."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from typing import Any, Final

import trio

from trimesh._runtime import item_sender
from trimesh._runtime import run_in_context as context_runner
from trimesh._runtime.cancelled import split_cancelled
from trimesh._runtime.endpoint_spec import Kind
from trimesh._runtime.incoming import IncomingCall
from trimesh._runtime.item_sender import produce
from trimesh._runtime.run_in_context import run_in_context
from trimesh._runtime.values import Values
from trimesh._wire.not_yet import NotYet
from trimesh.errors import Origin

_OWN_FILES: Final = {__file__, item_sender.__file__, context_runner.__file__}


class LocatedError(Exception):
    """An exception of user code that an endpoint of ours has run, with the coordinates of that code."""

    def __init__(self, error: BaseException, where: Origin) -> None:
        super().__init__(error, where)
        self.error = error
        self.where = where


async def serve(
    call: IncomingCall,
    actor: Any,
    context: contextvars.Context,
    origin: Origin,
    values: Values,
    on_lost_error: Callable[[IncomingCall, Exception], None],
    on_interrupted: Callable[[IncomingCall], None],
) -> None:
    """Run the endpoint of `call` on `actor`.

    Args:
        call: Taken from the mailbox.
        actor: The object.
        context: Where it runs; what it sets there is gone with it.
        origin: Coordinates that its error carries.
        values: Decodes the arguments, encodes the result.
        on_lost_error: Told of an exception that has no caller.
        on_interrupted: Told of a call that is not answered, because the actor itself is ending.

    Raises:
        trio.Cancelled: The actor itself is ending.
    """
    if call.scope.cancel_called or (call.scope.deadline != math.inf and call.is_expired):
        call.cancelled()  # an expired or cancelled call never starts (D04, C11)
        return
    if trio.current_effective_deadline() == -math.inf:
        on_interrupted(call)  # nothing is started any more
        await trio.lowlevel.checkpoint()
    call.start()
    lent: trio.Event | None = None
    try:
        with call.scope:
            lent = await _run(call, actor, context, origin, values, on_lost_error)
        if call.scope.cancelled_caught:
            call.cancelled()
    except BaseException:
        # Cancelled from outside of the call: the actor ends, and then tells its callers why.
        if not call.ended:
            on_interrupted(call)
        raise
    if lent is not None and not lent.is_set():
        # The next message may write into the buffers of this reply, so it waits until they have left.
        with trio.CancelScope(shield=True):
            await lent.wait()


async def _run(
    call: IncomingCall,
    actor: Any,
    context: contextvars.Context,
    origin: Origin,
    values: Values,
    on_lost_error: Callable[[IncomingCall, Exception], None],
) -> trio.Event | None:
    try:
        try:
            arguments = await _arguments(call, values)
        finally:
            call.forget_arguments()
        result = await _invoke(call, actor, context, values, *arguments)
        if call.is_broadcast:
            call.ended = True
            return None
        return call.returned(values.encode_result(result, call.spec))
    except trio.Cancelled:
        raise
    except BaseException as raised:  # noqa: BLE001 - told to the caller, whatever it is
        # In a function of its own: no frame of the traceback holds the error, so all goes when it has been told.
        return _tell(call, raised, origin, values, on_lost_error)


async def _arguments(call: IncomingCall, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode the arguments, when all that they stand for is there."""
    while True:
        try:
            return values.decode_call(call.payload, call.bodies, call.spec, is_owner=call.peer.is_owner)
        except NotYet as early:
            wait = early.wait
        await wait()


def _tell(
    call: IncomingCall,
    raised: BaseException,
    origin: Origin,
    values: Values,
    on_lost_error: Callable[[IncomingCall, Exception], None],
) -> trio.Event | None:
    error = raised
    if isinstance(raised, LocatedError):
        error, origin = raised.error, raised.where
    cancelled, told = split_cancelled(error)
    if told is None:
        raise error from None
    lent = _answer_error(call, told, origin, values, on_lost_error)
    if cancelled is not None and not call.scope.cancel_called:
        raise cancelled from None
    return lent


@trio.lowlevel.disable_ki_protection  # what users write can be interrupted anywhere
async def _invoke(
    call: IncomingCall,
    actor: Any,
    context: contextvars.Context,
    values: Values,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    spec = call.spec
    if spec.kind is Kind.GENERATOR:
        return await produce(call, context.run(spec.fn, actor, *args, **kwargs), context, values)
    if spec.kind is Kind.ASYNC:
        return await run_in_context(context, spec.fn(actor, *args, **kwargs))
    if spec.kind is Kind.INLINE:
        return context.run(spec.fn, actor, *args, **kwargs)
    # The slots of the group bound the threads, not Trio's limiter, which other code of the process uses, too.
    running = trio.to_thread.run_sync(lambda: spec.fn(actor, *args, **kwargs), limiter=trio.CapacityLimiter(1))
    return await run_in_context(context, running)


def _answer_error(
    call: IncomingCall,
    error: BaseException,
    origin: Origin,
    values: Values,
    on_lost_error: Callable[[IncomingCall, Exception], None],
) -> trio.Event | None:
    _forget_own_frames(error)
    if not call.is_broadcast:
        return call.raised(values.encode_error(error, origin))
    call.ended = True
    on_lost_error(call, values.local_error(error, origin))
    return None


def _forget_own_frames(error: BaseException) -> None:
    """Let the traceback begin in the endpoint: how it was reached here says nothing to its author."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OWN_FILES:
        traceback = traceback.tb_next
    if traceback is not None:
        error.__traceback__ = traceback
